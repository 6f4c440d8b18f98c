"""The coordinator's one place to wait: what workers say, daemons report, and children's ends."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from moriiod.cli.demo.messages import Channel, Message
from moriiod.cli.demo.plan import Rank

_DATAGRAM_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Said:
    """A worker said something."""

    rank: Rank
    message: Message


@dataclass(frozen=True, slots=True)
class HungUp:
    """A worker closed its channel."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class DaemonReady:
    """A daemon has sent READY=1."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """The process behind this pidfd has ended."""

    pidfd: int


HubEvent = Said | HungUp | DaemonReady | ChildEnded


class Hub:
    """Waits for everything at once, always with a deadline."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._queue: deque[HubEvent] = deque()
        self._channels: dict[Rank, Channel] = {}
        self._notify_sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._selector.close()
        for channel in self._channels.values():
            channel.close()
        for notify_socket in self._notify_sockets:
            notify_socket.close()

    # --- What to wait for ---------------------------------------------------------------------

    def watch_worker(self, rank: Rank, channel: Channel) -> None:
        """Report what a worker says; from here on the channel is the hub's."""
        self._channels[rank] = channel
        self._selector.register(channel, selectors.EVENT_READ, rank)

    def open_notify_socket(self, rank: Rank, path: Path) -> None:
        """Bind the socket where a daemon says that it is ready."""
        notify_socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        self._notify_sockets.append(notify_socket)
        notify_socket.bind(str(path))
        self._selector.register(notify_socket, selectors.EVENT_READ, rank)

    def forget_daemons(self, pidfds: Iterable[int]) -> None:
        """Stop to wait for daemons that are to be started again, and what they have said."""
        for notify_socket in self._notify_sockets:
            self._selector.unregister(notify_socket)
            os.unlink(notify_socket.getsockname())
            notify_socket.close()
        self._notify_sockets.clear()
        for pidfd in pidfds:
            # Its end may have been reported already.
            if pidfd in self._selector.get_map():
                self._selector.unregister(pidfd)
        self._queue = deque(
            event for event in self._queue if not isinstance(event, DaemonReady | ChildEnded)
        )

    def watch_child(self, pidfd: int) -> None:
        """Report the end of a process; the descriptor stays its owner's."""
        self._selector.register(pidfd, selectors.EVENT_READ)

    # --- Talking ------------------------------------------------------------------------------

    def send(self, rank: Rank, message: Message) -> None:
        """Tell a worker something; never waits."""
        channel = self._channels[rank]
        channel.send(message)
        self._watch_writing(channel, rank)

    def hang_up(self) -> None:
        """Close every channel; workers that are still there leave."""
        for channel in self._channels.values():
            if channel.fileno() in self._selector.get_map():
                self._selector.unregister(channel)
            channel.close()
        self._channels.clear()

    def next(self, deadline: float) -> HubEvent | None:
        """Return the next event; None if none came by then.

        Args:
            deadline: As ``time.monotonic()`` counts.
        """
        while not self._queue:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            for key, ready in self._selector.select(left):
                self._handle(key, ready)
        return self._queue.popleft()

    # --- Inside -------------------------------------------------------------------------------

    def _handle(self, key: selectors.SelectorKey, ready: int) -> None:
        match key.fileobj:
            case Channel() as channel:
                self._handle_channel(channel, key.data, ready)
            case socket.socket() as notify_socket:
                if b"READY=1" in notify_socket.recv(_DATAGRAM_BYTES).split(b"\n"):
                    self._queue.append(DaemonReady(key.data))
            case _:
                self._selector.unregister(key.fileobj)
                self._queue.append(ChildEnded(key.fd))

    def _handle_channel(self, channel: Channel, rank: Rank, ready: int) -> None:
        if ready & selectors.EVENT_WRITE:
            channel.flush()
            self._watch_writing(channel, rank)
        if not ready & selectors.EVENT_READ:
            return
        self._queue.extend(Said(rank, message) for message in channel.receive())
        if channel.is_closed:
            self._selector.unregister(channel)
            self._queue.append(HungUp(rank))

    def _watch_writing(self, channel: Channel, rank: Rank) -> None:
        if channel.fileno() not in self._selector.get_map():
            return
        wanted = selectors.EVENT_READ
        if channel.has_unsent:
            wanted |= selectors.EVENT_WRITE
        self._selector.modify(channel, wanted, rank)
