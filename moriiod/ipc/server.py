"""The local socket: requests of workers in, replies and events out.

Does I/O and decides nothing. What cannot be read is answered with a typed error where the request
has a readable number, counted in any case, and never ends the socket.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from dataclasses import dataclass
from typing import Final

import zmq

from moriiod.core.effects import ReplyToClient, SendEvent
from moriiod.core.events import RequestReceived
from moriiod.core.faults import to_refused
from moriiod.core.ids import ClientRoute, Epoch
from moriiod.core.requests import Reply
from moriiod.errors import AddressInUse, ConfigError, MoriiodError
from moriiod.wire.frames import MAX_BODY_BYTES, MAX_FRAMES
from moriiod.wire.ipc import (
    EventFrame,
    ReplyFrame,
    answerable_sequence,
    decode_request,
    encode_reply,
)
from moriiod.zmqio.hooks import ShellHooks
from moriiod.zmqio.loopsocket import LoopSocket, SocketCounters
from moriiod.zmqio.options import SocketLimits, new_router
from moriiod.zmqio.sockpath import prepare_socket_path, publish_socket, remove_socket

#: Kinds of problems this shell counts.
MALFORMED_REQUEST: Final = "ipc_malformed_request"
OVERSIZED_REPLY: Final = "ipc_oversized_reply"

_BACKLOG: Final = 128
#: A body somewhat over the limit is read and answered with TooLarge; beyond this many times the
#: limit libzmq cuts the connection before it takes the bytes in.
_ANSWERED_EXCESS: Final = 4


@dataclass(frozen=True, slots=True)
class IpcSettings:
    """Where the socket is and what it takes.

    Attributes:
        path: File name of the socket.
        mode: Its permission bits, whatever the umask is.
        group: Name of the group that owns it; None = the group of the process.
        max_message_bytes: Largest body, in either direction.
        max_queued_messages: High-water mark for one client, in each direction.
        min_queued_replies: The one towards a client is at least this.
    """

    path: str
    mode: int = 0o660
    group: str | None = None
    max_message_bytes: int = MAX_BODY_BYTES
    max_queued_messages: int = 4096
    min_queued_replies: int = 0


class IpcServer:
    """The ROUTER socket that workers connect to.

    Args:
        context: Of the daemon.
        settings: Where and how large.
        epoch: Of this daemon start; goes into every reply and event.
        hooks: The driver.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: IpcSettings,
        epoch: Epoch,
        hooks: ShellHooks,
    ) -> None:
        self._context = context
        self._settings = settings
        self._epoch = epoch
        self._hooks = hooks
        self._socket: LoopSocket | None = None
        #: (device, inode) of the socket file that is ours.
        self._file: tuple[int, int] | None = None

    def open(self) -> None:
        """Bind the socket and serve it on the running loop.

        Raises:
            ConfigError: The path is too long, its directory cannot be used, or the group is
                unknown.
            AddressInUse: A live process serves the path.
        """
        loop = asyncio.get_running_loop()
        limits = SocketLimits(
            max_frame_bytes=_ANSWERED_EXCESS * self._settings.max_message_bytes,
            send_hwm=max(self._settings.max_queued_messages, self._settings.min_queued_replies),
            recv_hwm=self._settings.max_queued_messages,
        )
        router = new_router(self._context, limits)
        try:
            self._bind(router)
        except BaseException:
            router.close(linger=0)
            raise
        self._socket = LoopSocket(
            router,
            loop,
            self._on_message,
            self._hooks.on_bug,
            1 + MAX_FRAMES,
            self._settings.max_message_bytes,
        )

    @property
    def is_open(self) -> bool:
        """Whether requests are being served."""
        return self._socket is not None and not self._socket.is_closed

    @property
    def counters(self) -> SocketCounters:
        """Messages that went through; all zero before ``open``."""
        return self._socket.counters if self._socket else SocketCounters()

    def is_path_intact(self) -> bool:
        """Say whether a client that connects now gets here: the file is there and is ours."""
        return self._file is not None and self._file == _identity(self._settings.path)

    def send(self, effect: ReplyToClient | SendEvent) -> bool:
        """Send a reply or an event; never waits.

        Returns:
            False: The client is gone, or does not read and its queue is full. Events are kept
            by the core until they are confirmed, so nothing is lost.
        """
        match effect:
            case ReplyToClient(route, sequence, body):
                return self._send(route, ReplyFrame(sequence, self._epoch, body))
            case SendEvent(route, sequence, event):
                return self._send(route, EventFrame(sequence, self._epoch, event))

    def close(self, linger_s: float = 0.0) -> None:
        """Stop serving and remove the socket file, if it is still ours. Idempotent.

        Args:
            linger_s: How long replies and events that are queued may still go out.
        """
        if self.is_path_intact():
            remove_socket(self._settings.path)
        self._file = None
        if self._socket is not None:
            self._socket.close(linger_s)

    def _bind(self, router: zmq.Socket[bytes]) -> None:
        """Make the listening socket ourselves and hand its descriptor to libzmq.

        libzmq would remove whatever lies at the path, also the live socket of another daemon,
        both when it binds and when it closes. And nobody can connect before ``listen``, so there
        is no moment in which the umask decides about the permissions.
        """
        path = self._settings.path
        prepare_socket_path(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(path)
            self._file = _identity(path)
            publish_socket(path, self._settings.mode, self._settings.group)
            listener.listen(_BACKLOG)
            if not self.is_path_intact():  # a daemon that started together with us was faster
                raise AddressInUse(f"socket path {path} is in use", path=path)
            router.setsockopt(zmq.USE_FD, listener.fileno())
            router.bind(f"ipc://{path}")
        except BaseException as error:
            self.close()
            listener.close()
            if isinstance(error, OSError):
                raise _bind_error(path, error) from error
            raise
        listener.detach()

    def _on_message(self, frames: list[bytes]) -> None:
        route, message = frames[0], frames[1:]
        try:
            request = decode_request(message, self._settings.max_message_bytes)
        except MoriiodError as error:
            self._refuse(route, message, error)
            return
        self._hooks.emit(RequestReceived(route, request.sequence, request.body))

    def _refuse(self, route: ClientRoute, message: list[bytes], error: MoriiodError) -> None:
        self._hooks.count_problem(MALFORMED_REQUEST, f"{error.code}: {error.message}")
        sequence = answerable_sequence(message)
        if sequence is not None:
            self._send(route, ReplyFrame(sequence, self._epoch, to_refused(error)))

    def _send(self, route: ClientRoute, frame: ReplyFrame | EventFrame) -> bool:
        if self._socket is None:
            return False
        try:
            frames = encode_reply(frame, self._settings.max_message_bytes)
        except MoriiodError as error:
            self._hooks.count_problem(OVERSIZED_REPLY, f"{error.code}: {error.message}")
            if isinstance(frame, EventFrame):
                return False
            reply: Reply = to_refused(error)
            frames = encode_reply(ReplyFrame(frame.sequence, frame.epoch, reply))
        return self._socket.send_nowait([route, *frames])


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _bind_error(path: str, error: OSError) -> MoriiodError:
    """Say why a path cannot be bound, after ``prepare_socket_path`` found nothing against it."""
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(f"socket path {path} is in use", path=path)
    return ConfigError(f"cannot create the socket {path}: {error.strerror}", path=path)
