"""Fences that are under way: from the order to the proof, or to the peer's return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from moriiod.core.events import Event, PeerFenced
from moriiod.core.ids import Epoch
from moriiod.engines.base import Fence, TransferEngine
from moriiod.engines.threads import SetupThreads


@dataclass(slots=True, eq=False)
class _Pending:
    """A fence that is not confirmed, and the fd that will tell."""

    watch_fd: int | None = None


class PeerFences:
    """Asks the engine for fences, on its setup threads, and waits for the proof on the loop.

    Args:
        engine: Asked to fence, readmit and forget.
        setup: Its threads; the calls for one peer run in order.
        emit: Takes PeerFenced.
        report: Takes (what, why) of a call that failed.
    """

    def __init__(
        self,
        engine: TransferEngine,
        setup: SetupThreads,
        emit: Callable[[Event], None],
        report: Callable[[str, Exception | None], None],
    ) -> None:
        self._engine = engine
        self._setup = setup
        self._emit = emit
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._pending: dict[Epoch, _Pending] = {}

    def fence(self, peer: Epoch) -> None:
        """Refuse a peer, and say so once it can reach nothing any more."""
        if peer in self._pending:
            return
        pending = self._pending[peer] = _Pending()
        self._setup.submit(
            ("peer", peer),
            partial(self._engine.fence, peer),
            partial(self._on_fence, peer, pending),
        )

    def readmit(self, peer: Epoch) -> None:
        """Undo a fence, confirmed or not; unknown peers are ignored.

        A peer that never fetched anything is fenced at once, and may live and come back.
        """
        pending = self._pending.pop(peer, None)
        if pending is not None:
            self._unwatch(pending)
        self._submit(peer, self._engine.readmit)

    def close(self) -> None:
        """Wait for no proof any more."""
        for pending in self._pending.values():
            self._unwatch(pending)
        self._pending.clear()

    def _on_fence(
        self, peer: Epoch, pending: _Pending, found: Fence | None, failure: Exception | None
    ) -> None:
        if self._pending.get(peer) is not pending:
            return  # readmitted meanwhile
        if failure is not None or found is None:
            self._report(f"peer {peer} is not fenced", failure)
        elif found.confirmed:
            del self._pending[peer]
            self._emit(PeerFenced(peer))
        elif found.watch_fd is not None:
            pending.watch_fd = found.watch_fd
            self._loop.add_reader(found.watch_fd, self._on_proof, peer, pending)

    def _on_proof(self, peer: Epoch, pending: _Pending) -> None:
        self._unwatch(pending)
        del self._pending[peer]
        self._submit(peer, self._engine.forget)
        self._emit(PeerFenced(peer))

    def _unwatch(self, pending: _Pending) -> None:
        if pending.watch_fd is not None:
            self._loop.remove_reader(pending.watch_fd)
            pending.watch_fd = None

    def _submit(self, peer: Epoch, call: Callable[[Epoch], None]) -> None:
        self._setup.submit(("peer", peer), partial(call, peer), partial(self._on_done, peer))

    def _on_done(self, peer: Epoch, _result: Any, failure: Exception | None) -> None:
        if failure is not None:
            self._report(f"peer {peer}: an engine call failed", failure)
