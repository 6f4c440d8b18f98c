"""A ZMQ socket on an asyncio loop, without a task and without futures.

libzmq tells through one file descriptor that *something* happened, once: it is edge-triggered. So
every wake-up reads until nothing is left, and every send is followed by a look for what came in
meanwhile. No receive can be cancelled, so no message can be lost to a cancellation.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

#: Work per wake-up, in frames, with one more for each 64 KiB; then other callbacks get a turn.
_BUDGET: Final = 256
_BYTES_PER_UNIT_SHIFT: Final = 16


@dataclass(slots=True)
class SocketCounters:
    """What went through a socket, in messages (one message is several frames).

    Attributes:
        received: Read, cut ones included.
        cut: Had more frames than allowed; the rest of their frames was dropped.
        sent: Taken by libzmq.
        refused: Not sent: the peer's queue is full, or there is no connection.
        unroutable: Not sent: nobody has this routing id.
    """

    received: int = 0
    cut: int = 0
    sent: int = 0
    refused: int = 0
    unroutable: int = 0


class LoopSocket:
    """Owns a bound or connected ZMQ socket and calls back for every message.

    Args:
        socket: Is closed with this object.
        loop: The running loop, asyncio's or uvloop's.
        on_message: Takes the frames of one message. An exception in it goes to ``on_bug``; the
            socket lives on.
        on_bug: Takes exceptions that should not have been.
        max_frames: A message with more frames arrives with ``max_frames + 1`` of them.
        max_frame_bytes: A longer frame arrives cut to ``max_frame_bytes + 1`` bytes, so that what
            will be refused is not copied.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[list[bytes]], None],
        on_bug: Callable[[Exception], None],
        max_frames: int,
        max_frame_bytes: int,
    ) -> None:
        self._socket = socket
        self._loop = loop
        self._on_message = on_message
        self._on_bug = on_bug
        self._max_frames = max_frames
        self._max_frame_bytes = max_frame_bytes
        self._fd = int(socket.getsockopt(zmq.FD))
        #: Frames of a message that is not complete yet.
        self._parts: list[bytes] = []
        self._is_closed = False
        self._is_draining = False
        self._is_scheduled = False
        self._on_writable: Callable[[], None] | None = None
        self.counters: Final = SocketCounters()
        loop.add_reader(self._fd, self._drain)
        self._schedule()

    @property
    def is_closed(self) -> bool:
        """Whether nothing is read any more."""
        return self._is_closed

    def send_nowait(self, frames: list[bytes]) -> bool:
        """Send one message, or say that it cannot be sent now; never waits.

        Returns:
            False: the peer's queue is full, it has no connection, or nobody has this routing id.
        """
        if self._is_closed:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.counters.refused += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.counters.unroutable += 1
            return False
        finally:
            self._check_after_send()
        self.counters.sent += 1
        return True

    def when_writable(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop, as soon as a message can be sent."""
        self._on_writable = callback
        self._schedule()

    def close(self, linger_s: float = 0.0) -> None:
        """Stop reading and close the socket. Idempotent.

        Args:
            linger_s: How long libzmq's own thread goes on sending what is queued, and the end of
                the context waits for it; what is left then is dropped.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._on_writable = None
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=round(linger_s * 1000))

    def _check_after_send(self) -> None:
        """A send, refused or not, may use up the edge that says that a message came in."""
        if not (self._is_draining or self._is_scheduled) and self._events() & zmq.POLLIN:
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Read until nothing is left or the budget is used up."""
        self._is_scheduled = False
        if self._is_closed:
            return
        self._is_draining = True
        try:
            self._read_some()
            self._tell_writable()
        except zmq.ZMQError as error:
            self.close()
            self._on_bug(error)
        finally:
            self._is_draining = False

    def _read_some(self) -> None:
        budget = _BUDGET
        while not self._is_closed:
            if budget <= 0:
                self._schedule()
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            budget -= 1 + (len(frame) >> _BYTES_PER_UNIT_SHIFT)
            if len(self._parts) <= self._max_frames:
                self._parts.append(self._bytes_of(frame))
            if not frame.more:
                self._deliver()

    def _bytes_of(self, frame: zmq.Frame) -> bytes:
        if len(frame) > self._max_frame_bytes:
            return bytes(frame.buffer[: self._max_frame_bytes + 1])
        return frame.bytes

    def _deliver(self) -> None:
        frames, self._parts = self._parts, []
        self.counters.received += 1
        if len(frames) > self._max_frames:
            self.counters.cut += 1
        try:
            self._on_message(frames)
        except Exception as error:  # noqa: BLE001 - reported; the daemon ends with exit status 70
            self._on_bug(error)

    def _tell_writable(self) -> None:
        callback = self._on_writable
        if callback is None or self._is_closed:
            return
        events = self._events()
        if events & zmq.POLLIN:
            self._schedule()
        if events & zmq.POLLOUT:
            self._on_writable = None
            self._schedule()
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - as above
                self._on_bug(error)

    def _events(self) -> int:
        return int(self._socket.getsockopt(zmq.EVENTS))
