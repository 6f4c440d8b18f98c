"""Who is at the other end of a Unix socket, as the kernel says."""

from __future__ import annotations

import errno
import os
import socket
import struct
from dataclasses import dataclass
from typing import Final

#: Linux 6.5; the socket module of Python 3.11 does not name it.
_SO_PEERPIDFD: Final = 77
_UCRED: Final = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Credentials:
    """The process that connected, or that listens.

    Attributes:
        pid: 0 if it cannot be seen from our pid namespace.
        uid: Its effective user, as our user namespace counts.
    """

    pid: int
    uid: int


def read_credentials(sock: socket.socket) -> Credentials:
    """Return who connected to, or listens at, the other end."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _gid = _UCRED.unpack(raw)
    return Credentials(pid, uid)


def open_pidfd(sock: socket.socket) -> int:
    """Return a new pidfd of the process at the other end; the caller owns it.

    Raises:
        OSError: The process has ended, there is no room for another fd, or (before Linux 6.5) the
            process cannot be seen from our pid namespace.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    # Before Linux 6.5 nothing rules out that the pid has become another process's.
    return os.pidfd_open(read_credentials(sock).pid)
