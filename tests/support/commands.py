"""A command with all settings that only loads them: what `serve` does before anything opens."""

from __future__ import annotations

import os

import typer

from moriiod.cli.options import GivenSettings, settings_options
from moriiod.errors import AddressInUse, InvariantViolation

#: Set by a test to make the command fail in another way.
FAIL_WITH = "MORIIOD_TEST_FAILURE"
_FAILURES: dict[str, Exception] = {
    "outside": AddressInUse("port 6301 is held"),
    "invariant": InvariantViolation("two owners"),
    "bug": KeyError("boom\nsecond line"),
    "interrupt": KeyboardInterrupt(),  # type: ignore[dict-item]
}


@settings_options
def serve(given: GivenSettings) -> int:
    """Load the settings and print them on one line."""
    failure = os.environ.pop(FAIL_WITH, None)
    if failure is not None:
        raise _FAILURES[failure]
    typer.echo(given.load().effective_line())
    return 0
