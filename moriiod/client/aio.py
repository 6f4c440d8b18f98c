"""``AsyncClient``: the same client for asyncio and uvloop. No task, no thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from moriiod.client.base import (
    DEFAULT_TIMEOUT_S,
    GET_STATUS,
    PING,
    UNREGISTER,
    ClientBase,
    status_text,
)
from moriiod.client.types import ClientSettings, MemoryRegion
from moriiod.core.geometry import KvGroup
from moriiod.core.requests import Reply, Request, TransferEnded

if TYPE_CHECKING:
    import torch

    from moriiod.client.spec import GroupSpec


class AsyncClient(ClientBase):
    """A worker's connection to its daemon, driven by the running event loop.

    Transfer calls are plain functions, as those of ``Client``: they send one message and return.
    Only what waits is a coroutine. Reconnecting goes on in the background of the loop.

    Cancelling a coroutine of this class loses nothing: events stay until ``wait`` or ``poll``
    returns them.

    Args:
        socket_path: Of the daemon: ``/run/moriiod/rank3.sock``, also with ``ipc://`` before it.
        name: For the daemon's logs and status; None = ``worker-<pid>``.
        settings: Limits and times; None = the defaults.

    Raises:
        InvalidAddress: The path cannot be a socket.
    """

    def __init__(
        self,
        socket_path: str,
        name: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        super().__init__(socket_path, name or f"worker-{os.getpid()}", settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.close(0.0)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def connect(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Attach to the daemon; as ``Client.connect``."""
        self._check_usable()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._driver.poll_fd, self._work)
        self._protocol.start()
        await self._until(self._is_settled, timeout_s)
        self._check_connected(timeout_s)

    async def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Sequence[GroupSpec],
        timeout_s: float = 120.0,
    ) -> None:
        """Share the KV cache with the daemon, and describe it; as ``Client.register_kv_caches``.

        Moving tensors into shared memory copies them, and the loop waits for that.
        """
        described, regions = self._share(kv_caches, groups)
        await self.register_regions(described, regions, timeout_s)

    async def register_regions(
        self,
        groups: Sequence[KvGroup],
        regions: Sequence[MemoryRegion],
        timeout_s: float = 120.0,
    ) -> None:
        """Register memory without torch; as ``Client.register_regions``."""
        self._begin_registration(groups, regions)
        try:
            await self._until(self._is_registered, timeout_s)
        except BaseException:
            self._abandon_registration()
            raise
        self._end_registration(timeout_s)

    async def unregister_kv_caches(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Drop one reference; as ``Client.unregister_kv_caches``."""
        await self._ask_and_wait(UNREGISTER, timeout_s)
        self._end_unregistration()

    async def wait(self, timeout_s: float | None = None) -> list[TransferEnded]:
        """Return what has ended; wait for the first one, at most ``timeout_s``, then []."""
        self._check_usable()
        ledger = self._protocol.ledger
        await self._until(lambda: ledger.untaken > 0, timeout_s)
        return self._take()

    async def ping(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """Return the daemon's epoch, having heard from it; as ``Client.ping``."""
        await self._ask_and_wait(PING, timeout_s)
        return self._protocol.epoch

    async def status(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """Return the daemon's state as JSON text; as ``Client.status``."""
        return status_text(await self._ask_and_wait(GET_STATUS, timeout_s))

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Leave the daemon; as ``Client.close``."""
        if os.getpid() != self._pid or self._has_left():
            return True
        self._protocol.leave(self._driver.now())
        try:
            await self._until(self._has_left, timeout_s)
        finally:
            self._stop()
            has_let_go = self._end_close()
        return has_let_go

    # --- Inside -------------------------------------------------------------------------------

    async def _ask_and_wait(self, body: Request, timeout_s: float) -> Reply:
        sequence = self._ask(body)
        try:
            await self._until(self._answer(sequence), timeout_s)
        except BaseException:
            self._protocol.ledger.stop_waiting(sequence)
            raise
        return self._take_answer(sequence, timeout_s)

    async def _until(self, is_done: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait until the condition holds or the time is over."""
        self._work()
        give_up = None if timeout_s is None else self._driver.now() + timeout_s
        while not is_done():
            left = None if give_up is None else give_up - self._driver.now()
            if left is not None and left <= 0:
                return
            await self._something_happened(left)

    async def _something_happened(self, timeout_s: float | None) -> None:
        """Sleep until the client did some work, at most so long."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        self._waiting.add(woken)
        alarm = None if timeout_s is None else loop.call_later(timeout_s, _set, woken)
        try:
            await woken
        finally:
            self._waiting.discard(woken)
            if alarm is not None:
                alarm.cancel()

    def _work(self) -> None:
        """The loop saw that something happened, or a deadline has come."""
        self._driver.service()
        self._noticed()

    def _noticed(self) -> None:
        """A plain call may have taken in what a coroutine waits for."""
        for woken in self._waiting:
            _set(woken)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._protocol.deadline
        if deadline is not None and self._loop is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - self._driver.now()), self._work)

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._driver.poll_fd)
        if self._timer is not None:
            self._timer.cancel()
        for woken in self._waiting:
            _set(woken)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
