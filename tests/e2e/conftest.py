"""Fixtures of the tests with real daemons."""

from tests.support.process_fixtures import (
    folder,
    make_daemon,
    make_pair,
    make_worker,
    nursery,
    usual_faults,
)

__all__ = ["folder", "make_daemon", "make_pair", "make_worker", "nursery", "usual_faults"]
