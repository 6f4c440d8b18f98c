"""``moriiod serve``: run the daemon of one rank."""

from __future__ import annotations

from moriiod.cli.options import GivenSettings, settings_options
from moriiod.daemon.lifecycle import serve as run_daemon


@settings_options
def serve(given: GivenSettings) -> int:
    """Run the daemon of one rank until SIGTERM or SIGINT.

    The first signal drains: no new transfers, the others end, at most --drain-timeout-s. The second
    one does not wait. Exit status: 0 stopped, 1 could not start (an address is in use), 2 bad
    arguments, 70 a bug, 78 bad configuration.
    """
    return run_daemon(given.load())
