"""One connection of the fd socket: packets in, answers out, nothing queued.

The protocol is one question, one answer. Whoever does not read his answers until the socket is
full is cut off, so there is no list that could grow.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Final

from moriiod.core.ids import Generation
from moriiod.wire.fdsocket import FdMessage, Packet, receive_packet, send_packet
from moriiod.wire.peercred import open_pidfd, read_credentials

#: Packets taken in one turn of the loop, so that one sender cannot keep it.
_MAX_PACKETS_PER_TURN: Final = 16
#: A worker sends one fd with an offer; nobody sends more.
_MAX_FDS: Final = 1


class Connection:
    """One accepted socket.

    Args:
        sock: Non-blocking; the connection owns it.
        loop: Serves it.
        on_packet: Takes each packet, and owns its fds.
        on_end: Called when the other side has closed or broken the connection.

    Attributes:
        credentials: Of the process that connected.
        generation: Of the worker that introduced itself here.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_packet: Callable[[Connection, Packet], None],
        on_end: Callable[[Connection], None],
    ) -> None:
        self.credentials: Final = read_credentials(sock)
        self.generation: Generation | None = None
        self._sock = sock
        self._loop = loop
        self._on_packet = on_packet
        self._on_end = on_end
        self._pidfd: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        loop.add_reader(sock, self._on_readable)

    @property
    def is_closed(self) -> bool:
        """Whether the connection is over."""
        return self._is_closed

    def open_pidfd(self) -> int:
        """Return a new pidfd of the process that connected; the caller owns it.

        Raises:
            OSError: The process has ended, or there is no room for another fd.
        """
        return open_pidfd(self._sock)

    def watch_process(self) -> None:
        """End the connection when the process ends, even if a child of it keeps the socket open.

        Raises:
            OSError: The process has ended, or there is no room for another fd.
        """
        self._pidfd = self.open_pidfd()
        self._loop.add_reader(self._pidfd, self._end)

    def close_when_idle(self, timeout_s: float) -> None:
        """End the connection if nothing comes for so long, counted from now."""
        self.stay_open()
        self._timer = self._loop.call_later(timeout_s, self._end)

    def stay_open(self) -> None:
        """Undo ``close_when_idle``."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send(self, message: FdMessage, fds: Sequence[int] = ()) -> bool:
        """Send an answer; False if the other side is gone or does not read."""
        if self._is_closed:
            return False
        try:
            send_packet(self._sock, message, fds)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the socket and what belongs to it. Idempotent; ``on_end`` is not called."""
        if self._is_closed:
            return
        self._is_closed = True
        self.stay_open()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def _on_readable(self) -> None:
        for _ in range(_MAX_PACKETS_PER_TURN):
            if self._is_closed:
                return
            try:
                packet = receive_packet(self._sock, _MAX_FDS)
            except BlockingIOError:
                return
            except OSError:
                self._end()
                return
            if not packet.data:
                packet.close_fds()
                self._end()
                return
            self._on_packet(self, packet)

    def _end(self) -> None:
        if not self._is_closed:
            self._on_end(self)
