"""A driver that only remembers, and a client that only sends: what the shells are tested with."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import TypeVar

import zmq

from moriiod.core.events import Event
from moriiod.wire.frames import MAX_FRAMES
from moriiod.zmqio.hooks import ShellHooks
from moriiod.zmqio.loopsocket import LoopSocket
from moriiod.zmqio.options import SocketLimits, new_dealer

EventT = TypeVar("EventT")

#: Larger than any limit of the sockets under test.
_FRAME_LIMIT = 1 << 31


class Recorder:
    """Stands in for the driver: keeps what it is told and lets a test wait for it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.problems: list[tuple[str, str]] = []
        self.bugs: list[Exception] = []
        #: Called with every event, after it is kept.
        self.on_event: Callable[[Event], None] = lambda _event: None
        self._changed = asyncio.Event()

    @property
    def hooks(self) -> ShellHooks:
        """What to give to the shell."""
        return ShellHooks(self._emit, self._count_problem, self._on_bug)

    @property
    def kinds(self) -> list[str]:
        """Kinds of the problems so far, in order."""
        return [kind for kind, _ in self.problems]

    def of(self, cls: type[EventT]) -> list[EventT]:
        """Return the events of one type so far."""
        return [event for event in self.events if isinstance(event, cls)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something the shell told makes this true."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def first(self, cls: type[EventT], n: int = 1) -> EventT:
        """Wait for the n-th event of a type and return it."""
        await self.until(lambda: len(self.of(cls)) >= n)
        return self.of(cls)[n - 1]

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()
        self.on_event(event)

    def _count_problem(self, kind: str, detail: str) -> None:
        self.problems.append((kind, detail))
        self._changed.set()

    def _on_bug(self, error: Exception) -> None:
        self.bugs.append(error)
        self._changed.set()


class RawClient:
    """A DEALER that sends any frames and keeps what comes back."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        routing_id: bytes | None = None,
        hwm: int = 100_000,
    ) -> None:
        limits = SocketLimits(max_frame_bytes=-1, send_hwm=hwm, recv_hwm=hwm)
        dealer = new_dealer(context, limits, routing_id or b"t" + uuid.uuid4().bytes)
        dealer.setsockopt(zmq.IMMEDIATE, 0)  # what is sent before the connection is up must wait
        dealer.setsockopt(zmq.IPV6, int("[" in endpoint))
        dealer.connect(endpoint)
        self.received: list[list[bytes]] = []
        self._changed = asyncio.Event()
        self._dealer = dealer
        self._socket = self._listen()

    def send(self, frames: list[bytes]) -> bool:
        """Send one message as it is."""
        return self._socket.send_nowait(frames)

    async def reply(self, n: int = 1) -> list[bytes]:
        """Wait for the n-th message (from 1) and return its frames."""
        while len(self.received) < n:
            self._changed.clear()
            await self._changed.wait()
        return self.received[n - 1]

    async def progress(self) -> None:
        """Wait until another message has come in."""
        self._changed.clear()
        await self._changed.wait()

    def pause(self) -> None:
        """Stop reading; what comes in piles up in libzmq and then on the other side."""
        asyncio.get_running_loop().remove_reader(int(self._dealer.getsockopt(zmq.FD)))

    def resume(self) -> None:
        """Read on."""
        self._socket = self._listen()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _listen(self) -> LoopSocket:
        return LoopSocket(
            self._dealer,
            asyncio.get_running_loop(),
            self._on_message,
            self._on_bug,
            MAX_FRAMES,
            _FRAME_LIMIT,
        )

    def _on_message(self, frames: list[bytes]) -> None:
        self.received.append(frames)
        self._changed.set()

    def _on_bug(self, error: Exception) -> None:
        raise error
