"""Ties a child process to its parent, so that none outlives a coordinator that was killed."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Let the kernel end this process when its parent ends.

    Args:
        parent: Pid of the parent; if it has ended already, so does this process.

    Raises:
        OSError: The kernel refused.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)
