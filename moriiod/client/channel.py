"""The two sockets between a worker and its daemon. Moves bytes, decides nothing, never blocks."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from moriiod.errors import DaemonLost, InvalidAddress
from moriiod.wire.fdsocket import FdMessage, decode_packet, receive_packet, send_packet
from moriiod.wire.peercred import open_pidfd, read_credentials

#: Longest path the kernel takes for a Unix socket, in bytes.
MAX_PATH_BYTES: Final = 107
#: Requests that may wait for a daemon that does not read.
SEND_QUEUE: Final = 32768
#: Larger messages of a daemon end the connection (a status document can be long).
MAX_MESSAGE_BYTES: Final = 64 << 20

_SCHEME: Final = "ipc://"


def check_socket_path(socket_path: str) -> str:
    """Return the path of a daemon's ZMQ socket; ``ipc://`` before it is allowed.

    Raises:
        InvalidAddress: Empty, or too long for the kernel.
    """
    path = socket_path.removeprefix(_SCHEME)
    n_bytes = len(os.fsencode(fd_socket_path(path)))
    if not path or "\0" in path or n_bytes > MAX_PATH_BYTES:
        raise InvalidAddress(
            f"{path[:200]!r} cannot be a daemon's socket: its fd socket needs 1 to "
            f"{MAX_PATH_BYTES} bytes, not {n_bytes}",
            path=path[:200],
            n_bytes=n_bytes,
        )
    return path


def fd_socket_path(path: str) -> str:
    """Return the path of the fd socket beside a ZMQ socket."""
    return path.removesuffix(".sock") + ".fd.sock"


def open_dealer(context: zmq.Context[zmq.Socket[bytes]], path: str) -> zmq.Socket[bytes]:
    """Return a DEALER that connects to a daemon; nothing is queued before it is connected."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.SNDHWM, SEND_QUEUE)
    # What can arrive is bounded by what was asked and by the daemon's event window.
    dealer.setsockopt(zmq.RCVHWM, 0)
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    dealer.setsockopt(zmq.RECONNECT_IVL, 20)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    dealer.connect(_SCHEME + path)
    return dealer


class Channel:
    """One connection to one daemon process: the fd socket and the ZMQ socket.

    Args:
        context: Where the ZMQ socket lives.
        path: Path of the daemon's ZMQ socket.
        poller: Wakes its owner when ``fds`` are readable.

    Raises:
        DaemonLost: Nobody listens there now.
        OSError: This process has no room for more descriptors.
        ZMQError: The same.
        InvalidAddress: This process may not connect, or the path is no socket.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], path: str, poller: select.epoll
    ) -> None:
        self._poller = poller
        with ExitStack() as undo:
            self._unix = _connect(fd_socket_path(path))
            undo.callback(self._unix.close)
            #: Readable when the daemon's process has ended; None if that cannot be watched.
            self.pidfd = _watch_peer(self._unix)
            if self.pidfd is not None:
                undo.callback(os.close, self.pidfd)
            self._zmq = undo.enter_context(open_dealer(context, path))
            self._monitor = undo.enter_context(self._zmq.get_monitor_socket(zmq.EVENT_DISCONNECTED))
            undo.pop_all()
        self.unix_fd = self._unix.fileno()
        self.zmq_fd = self._zmq.fileno()
        self.monitor_fd = self._monitor.fileno()
        for fd in (self.unix_fd, self.zmq_fd, self.monitor_fd):
            poller.register(fd, select.EPOLLIN)
        # The ZMQ descriptors signal changes only, so take note of the state they start from.
        _events(self._zmq)
        _events(self._monitor)

    def close(self) -> None:
        """Close both sockets. ``pidfd`` stays with whoever took it."""
        self.close_unix()
        for fd in (self.zmq_fd, self.monitor_fd):
            self._poller.unregister(fd)
        self._zmq.disable_monitor()
        self._monitor.close(0)
        self._zmq.close(0)

    def close_unix(self) -> None:
        """Close the fd socket only; nothing if that was done."""
        if self.unix_fd >= 0:
            self._poller.unregister(self.unix_fd)
            self._unix.close()
            self.unix_fd = -1

    def send_packet(self, message: FdMessage, fd: int | None) -> None:
        """Send on the fd socket, with a descriptor if there is one.

        Raises:
            DaemonLost: The connection is over, or the daemon does not read.
        """
        try:
            send_packet(self._unix, message, () if fd is None else (fd,))
        except OSError as error:
            raise DaemonLost(
                "cannot send on the fd socket", errno=error.errno, reason=str(error)
            ) from error

    def receive_packet(self) -> FdMessage | None:
        """Return the next packet of the fd socket, None if there is none now.

        Raises:
            DaemonLost: The connection is over.
            ProtocolError: The packet is none of this protocol.
        """
        try:
            packet = receive_packet(self._unix, max_fds=1)
        except BlockingIOError:
            return None
        except OSError as error:
            raise DaemonLost(
                "the fd socket failed", errno=error.errno, reason=str(error)
            ) from error
        packet.close_fds()
        if not packet.data:
            raise DaemonLost("the daemon closed the connection")
        return decode_packet(packet)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send on the ZMQ socket; False if that is not possible now."""
        try:
            self._zmq.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    @property
    def has_frames(self) -> bool:
        """Whether ``receive`` would return a message."""
        return bool(_events(self._zmq) & zmq.POLLIN)

    def receive(self) -> list[bytes] | None:
        """Return the next message of the ZMQ socket, None if there is none now."""
        return self._zmq.recv_multipart(zmq.NOBLOCK) if self.has_frames else None

    def was_disconnected(self) -> bool:
        """Say whether the ZMQ connection has ended since it was opened; asks once."""
        ended = False
        while _events(self._monitor) & zmq.POLLIN:
            ended |= recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED
        return ended


def _events(sock: zmq.Socket[bytes]) -> int:
    """Process what libzmq has queued for the socket, and return what can be done with it."""
    events = sock.getsockopt(zmq.EVENTS)
    return events if isinstance(events, int) else 0


def _connect(path: str) -> socket.socket:
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    unix.setblocking(False)
    try:
        unix.connect(path)
    except OSError as error:
        unix.close()
        text = f"cannot connect to {path}: {error.strerror}"
        # Full backlog, no file or nobody behind it: all of that passes when a daemon starts.
        if error.errno in (errno.EAGAIN, errno.ENOENT, errno.ECONNREFUSED, errno.EINTR):
            raise DaemonLost(text, path=path, errno=error.errno) from error
        raise InvalidAddress(text, path=path, errno=error.errno) from error
    return unix


def _watch_peer(unix: socket.socket) -> int | None:
    """Open a pidfd of the process that listens on the other side.

    None if it is this process itself, or (before Linux 6.5) in a pid namespace that is not visible
    from here; then the end of the connection is all there is to see.
    """
    if read_credentials(unix).pid == os.getpid():
        return None
    try:
        return open_pidfd(unix)
    except OSError:
        # It ended since we connected; the end of the connection tells the same.
        return None
