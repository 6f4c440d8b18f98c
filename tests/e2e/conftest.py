"""Fixtures of the tests with real daemons."""

from tests.support.process_fixtures import folder, make_daemon, make_pair, make_worker

__all__ = ["folder", "make_daemon", "make_pair", "make_worker"]
