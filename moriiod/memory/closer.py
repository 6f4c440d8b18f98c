"""Closing file descriptors of memory without holding up the loop.

Whoever closes the last descriptor of a memfd gives all of its pages back, which takes a seventh of
a second for each GiB. After the death of a worker that is us.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Final

#: What takes about a millisecond is closed at once.
INLINE_BYTES: Final = 8 << 20
_BLOCK_BYTES: Final = 512
_JOIN_S: Final = 5.0


class FdCloser:
    """Closes what is large on a thread of its own, which is not started before it is needed."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[int, ...] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Each changed on one thread only.
        self._n_given = 0
        self._n_closed = 0

    @property
    def n_open(self) -> int:
        """Number of descriptors that are still to be closed."""
        return self._n_given - self._n_closed

    def close_all(self, fds: Iterable[int]) -> None:
        """Close these descriptors, now or soon. They are nobody else's any more."""
        fds = tuple(fds)
        if sum(os.fstat(fd).st_blocks for fd in fds) * _BLOCK_BYTES <= INLINE_BYTES:
            _close(fds)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="moriiod-closer", daemon=True)
            self._thread.start()
        self._n_given += len(fds)
        self._queue.put(fds)

    def stop(self) -> None:
        """End the thread when it has closed everything. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(_JOIN_S)

    def _run(self) -> None:
        while (fds := self._queue.get()) is not None:
            _close(fds)
            self._n_closed += len(fds)


def _close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
