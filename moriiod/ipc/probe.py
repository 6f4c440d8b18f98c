"""Does a client that connects to the local socket now get an answer, and from this daemon?"""

from __future__ import annotations

import asyncio
import uuid
from functools import partial
from typing import Final

import zmq

from moriiod.core.ids import Epoch
from moriiod.core.requests import Done, Ping
from moriiod.errors import DaemonLost, MoriiodError
from moriiod.wire.frames import MAX_BODY_BYTES, MAX_FRAMES
from moriiod.wire.ipc import ReplyFrame, RequestFrame, decode_reply, encode_request
from moriiod.zmqio.loopsocket import LoopSocket
from moriiod.zmqio.options import SocketLimits, new_dealer

_SEQUENCE: Final = 1


async def ping(
    context: zmq.Context[zmq.Socket[bytes]], path: str, epoch: Epoch, timeout_s: float
) -> None:
    """Ask the daemon behind a socket whether it is there.

    Args:
        context: For a socket of its own, like any client's.
        path: File name of the socket.
        epoch: Of the daemon that should answer.
        timeout_s: How long to wait.

    Raises:
        DaemonLost: Nobody answers in time, or another daemon does.
    """
    loop = asyncio.get_running_loop()
    dealer = new_dealer(context, SocketLimits(MAX_BODY_BYTES), b"p" + uuid.uuid4().bytes)
    answer: asyncio.Future[str] = loop.create_future()
    dealer.connect(f"ipc://{path}")
    client = LoopSocket(
        dealer,
        loop,
        partial(_take, answer),
        partial(_fail, answer),
        MAX_FRAMES,
        MAX_BODY_BYTES,
    )
    request = encode_request(RequestFrame(_SEQUENCE, Ping()))
    client.when_writable(partial(_send, client, request))
    too_late = DaemonLost(f"no answer at {path} within {timeout_s:g} s", path=path)
    timer = loop.call_later(timeout_s, _fail, answer, too_late)
    try:
        found = await answer
    finally:
        timer.cancel()
        client.close()
    if found != epoch:
        raise DaemonLost(f"another daemon answers at {path}", path=path, got=found)


def _send(client: LoopSocket, frames: list[bytes]) -> None:
    client.send_nowait(frames)


def _take(answer: asyncio.Future[str], frames: list[bytes]) -> None:
    try:
        reply = decode_reply(frames)
    except MoriiodError as error:
        _fail(answer, error)
        return
    if answer.done():
        return
    if isinstance(reply, ReplyFrame) and isinstance(reply.body, Done):
        answer.set_result(reply.epoch)
    else:
        _fail(answer, DaemonLost("the answer to a ping is another message"))


def _fail(answer: asyncio.Future[str], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
