"""Exit statuses of the command line."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit statuses of the command line; 128+n after signal n is added by the shell."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    BUG = 70
    CONFIG = 78
