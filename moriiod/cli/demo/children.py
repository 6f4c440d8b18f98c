"""Processes that the demo started: watched and ended by pidfd, so never by a number reused."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TAIL_BYTES: Final = 16384


@dataclass(frozen=True, slots=True)
class Child:
    """A process and what it writes.

    Attributes:
        name: For people: ``daemon P0/3``.
        pid: Its number, for messages.
        pidfd: Readable when it has ended; closed by ``close``.
        log: File with its stdout and stderr.
        process: If it is a child of this process, to reap it; None if another one does.
    """

    name: str
    pid: int
    pidfd: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Reap an ended process and forget it."""
        if self.process is not None:
            self.process.wait()
        os.close(self.pidfd)

    def tail(self, lines: int) -> str:
        """Return the end of its log."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
            return "\n".join(text.splitlines()[-lines:])
        return ""


def wait_ended(children: Iterable[Child], deadline: float) -> list[Child]:
    """Wait until processes have ended; return those that have not by the deadline.

    Args:
        children: Any number of them.
        deadline: As ``time.monotonic()`` counts.
    """
    waiting = {child.pidfd: child for child in children}
    poller = select.poll()
    for pidfd in waiting:
        poller.register(pidfd, select.POLLIN)
    while waiting:
        left = deadline - time.monotonic()
        ended = poller.poll(max(0.0, left) * 1000)
        for pidfd, _ in ended:
            poller.unregister(pidfd)
            del waiting[pidfd]
        if not ended and left <= 0:
            break
    return list(waiting.values())


def end(children: Sequence[Child], patience_s: float) -> list[Child]:
    """Ask processes to end, and kill those that do not in time.

    Returns:
        Those that had to be killed.
    """
    for child in children:
        child.signal(signal.SIGTERM)
    stubborn = wait_ended(children, time.monotonic() + patience_s)
    for child in stubborn:
        child.signal(signal.SIGKILL)
    wait_ended(stubborn, time.monotonic() + patience_s)
    return stubborn
