"""One question to a running daemon, without attaching: for the command line and for probes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import zmq

from moriiod.client.base import status_text
from moriiod.client.channel import check_socket_path, open_dealer
from moriiod.core.faults import to_error
from moriiod.core.requests import GetStatus, Ping, Refused, Request
from moriiod.errors import DaemonLost
from moriiod.wire.ipc import ReplyFrame, RequestFrame, decode_reply, encode_request

_SEQUENCE: Final = 1


def fetch_status(socket_path: str, timeout_s: float = 5.0) -> str:
    """Return a daemon's state as JSON text.

    Args:
        socket_path: Of the daemon's ZMQ socket; ``ipc://`` before it is allowed.
        timeout_s: How long to wait, for the connection and for the answer together.

    Raises:
        InvalidAddress: The path cannot be a socket.
        DaemonLost: Nobody answered in time.
        MoriiodError: The daemon refused, or speaks another protocol version.
    """
    return status_text(_ask(socket_path, GetStatus(), timeout_s).body)


def ping(socket_path: str, timeout_s: float = 5.0) -> str:
    """Return the epoch of the daemon that answers at a socket.

    Raises:
        InvalidAddress: The path cannot be a socket.
        DaemonLost: Nobody answered in time.
        MoriiodError: The daemon refused, or speaks another protocol version.
    """
    return _ask(socket_path, Ping(), timeout_s).epoch


def _ask(socket_path: str, body: Request, timeout_s: float) -> ReplyFrame:
    path = check_socket_path(socket_path)
    give_up = time.monotonic() + timeout_s
    frames = encode_request(RequestFrame(_SEQUENCE, body))
    with _dealer(path) as dealer:
        _wait(dealer, zmq.POLLOUT, give_up, path)
        dealer.send_multipart(frames, zmq.NOBLOCK)
        while True:
            _wait(dealer, zmq.POLLIN, give_up, path)
            reply = decode_reply(dealer.recv_multipart(zmq.NOBLOCK))
            if isinstance(reply, ReplyFrame) and reply.sequence == _SEQUENCE:
                break
    if isinstance(reply.body, Refused):
        raise to_error(reply.body)
    return reply


@contextmanager
def _dealer(path: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, open_dealer(context, path) as dealer:
        yield dealer


def _wait(dealer: zmq.Socket[bytes], event: int, give_up: float, path: str) -> None:
    left = give_up - time.monotonic()
    if left <= 0 or not dealer.poll(math.ceil(left * 1000), event):
        raise DaemonLost(f"no daemon answers at {path}", path=path)
