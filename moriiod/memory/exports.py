"""Regions that peers on this host may fetch by token, and which process fetched as which epoch.

Implements ``engines.base.RegionExporter``. Setup threads of the engine call it while the loop
serves fetches, without locks: every table is changed by single operations on dicts and sets, and
file descriptors that the loop may be using are closed on the loop.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moriiod.core.ids import Epoch
from moriiod.errors import Busy, SharedMemoryUnavailable
from moriiod.wire.fdsocket import FetchRegions

#: Most fenced epochs that are remembered; beyond it the oldest is forgotten.
MAX_REFUSED: Final = 65536


@dataclass(frozen=True, slots=True)
class _Export:
    fd: int
    n_bytes: int


@dataclass(slots=True, eq=False)
class _Fetcher:
    """The process that fetched under an epoch."""

    pid: int
    pidfd: int
    #: A fence watches the pidfd, so it stays open.
    is_watched: bool = False


class Exports:
    """What peers may fetch.

    Args:
        address: Path of the socket where they do.
        max_fetchers: Most epochs that are remembered as having fetched.
    """

    def __init__(self, address: str, max_fetchers: int) -> None:
        self._address = address
        self._max_fetchers = max_fetchers
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exports: dict[str, _Export] = {}
        self._fetchers: dict[Epoch, _Fetcher] = {}
        self._refused: OrderedDict[Epoch, None] = OrderedDict()

    # --- Setup threads (RegionExporter) -------------------------------------------------------

    @property
    def address(self) -> str:
        """See ``RegionExporter``."""
        return self._address

    def export(self, token: str, fd: int, n_bytes: int) -> None:
        """See ``RegionExporter``.

        Raises:
            OSError: The process has no room for another fd.
        """
        self._exports[token] = _Export(os.dup(fd), n_bytes)

    def withdraw(self, token: str) -> None:
        """See ``RegionExporter``."""
        export = self._exports.pop(token, None)
        if export is not None:
            self._close_on_loop(export.fd)

    def refuse(self, peer: Epoch) -> int | None:
        """See ``RegionExporter``."""
        # Refuse first, look second; ``fetch`` does it the other way round, so that one of the
        # two always sees the other.
        self._refused[peer] = None
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        fetcher = self._fetchers.get(peer)
        if fetcher is None:
            return None
        fetcher.is_watched = True
        if self._fetchers.get(peer) is not fetcher:
            # The loop has just found that the process ended, and may be closing the pidfd.
            fetcher.is_watched = False
            return None
        return fetcher.pidfd

    def readmit(self, peer: Epoch) -> None:
        """See ``RegionExporter``."""
        self._refused.pop(peer, None)
        fetcher = self._fetchers.get(peer)
        if fetcher is not None:
            fetcher.is_watched = False

    def forget(self, peer: Epoch) -> None:
        """See ``RegionExporter``. As long as the process that fetched lives, nothing is forgotten:
        without its pidfd a later fence would be confirmed too early."""
        fetcher = self._fetchers.get(peer)
        if fetcher is not None:
            if not _has_ended(fetcher.pidfd):
                return
            del self._fetchers[peer]
            self._close_on_loop(fetcher.pidfd)
        self._refused.pop(peer, None)

    # --- Loop thread --------------------------------------------------------------------------

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close descriptors on this loop from now on."""
        self._loop = loop

    def fetch(
        self, request: FetchRegions, pid: int, open_pidfd: Callable[[], int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (fds, sizes in bytes) for the tokens; the fds stay ours and open until the next
        turn of the loop.

        Args:
            request: Of the peer.
            pid: Of the peer's process.
            open_pidfd: Returns a new pidfd of that process.

        Raises:
            SharedMemoryUnavailable: The epoch is fenced or belongs to another process, or a token
                is not known (any more).
            Busy: Too many peers fetched.
            OSError: The process is gone, or there is no room for another fd.
        """
        found = [self._exports.get(token) for token in request.tokens]
        exports = [export for export in found if export is not None]
        if len(exports) != len(found):
            raise SharedMemoryUnavailable(
                "a region is not exported (any more)", missing=len(found) - len(exports)
            )
        self._remember(request.epoch, pid, open_pidfd)
        if request.epoch in self._refused:
            raise SharedMemoryUnavailable("this epoch is fenced", epoch=request.epoch)
        return (
            tuple(export.fd for export in exports),
            tuple(export.n_bytes for export in exports),
        )

    @property
    def n_exports(self) -> int:
        """Number of regions on offer."""
        return len(self._exports)

    @property
    def n_fetchers(self) -> int:
        """Number of epochs that fetched and whose process may still be there."""
        return len(self._fetchers)

    def close(self) -> None:
        """Close everything. No setup thread uses the exports any more."""
        for export in self._exports.values():
            os.close(export.fd)
        self._exports.clear()
        for fetcher in self._fetchers.values():
            os.close(fetcher.pidfd)
        self._fetchers.clear()
        self._loop = None

    def _remember(self, epoch: Epoch, pid: int, open_pidfd: Callable[[], int]) -> None:
        known = self._fetchers.get(epoch)
        if known is not None:
            if known.pid != pid or _has_ended(known.pidfd):
                raise SharedMemoryUnavailable(
                    "another process fetched under this epoch", epoch=epoch, pid=known.pid
                )
            return
        if epoch in self._refused:
            raise SharedMemoryUnavailable("this epoch is fenced", epoch=epoch)
        self._forget_ended()
        if len(self._fetchers) >= self._max_fetchers:
            raise Busy(
                "too many peers have fetched memory", limit="max_fetchers", value=self._max_fetchers
            )
        self._fetchers[epoch] = _Fetcher(pid, open_pidfd())

    def _forget_ended(self) -> None:
        """A process that ended reaches nothing; peers that restart must not add up."""
        for epoch, fetcher in list(self._fetchers.items()):
            if fetcher.is_watched or not _has_ended(fetcher.pidfd):
                continue
            # Take it out first, look again second; ``refuse`` does it the other way round.
            self._fetchers.pop(epoch, None)
            if fetcher.is_watched:
                self._fetchers[epoch] = fetcher
            else:
                os.close(fetcher.pidfd)

    def _close_on_loop(self, fd: int) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            os.close(fd)
        else:
            loop.call_soon_threadsafe(os.close, fd)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
