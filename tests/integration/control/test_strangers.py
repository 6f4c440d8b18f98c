"""T8: whatever connects to the control port, real peers are served meanwhile."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import zmq

from moriiod.control.endpoint import ControlEndpoint, ControlSettings
from moriiod.control.monitor import HANDSHAKE_FAILED
from moriiod.core.effects import OpenRoute, SendToPeer
from moriiod.core.events import PeerMessageReceived
from moriiod.core.messages import Hello
from tests.support.samples import ATTEMPT, EPOCH, IDENTITY, OLD_EPOCH
from tests.support.shell import Recorder

Context = zmq.Context[zmq.Socket[bytes]]
HELLO = Hello(ATTEMPT, (1,), IDENTITY, ("shm",))
PATIENT = ControlSettings("127.0.0.1", 0)
IMPATIENT = replace(PATIENT, handshake_s=0.2, heartbeat_s=0.1)

#: ZMTP 3.1, NULL mechanism; then the READY command of a DEALER.
GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" * 32
READY = b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"

GARBAGE = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10,
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x55" * 505,
    "five zero bytes": b"\0" * 5,
    "length 0xFFFFFFFF": b"\xff\xff\xff\xff" + b"\0" * 60,
    "huge frame": GREETING + READY + b"\x02" + struct.pack(">Q", 2**63 - 1),
    "huge frame of ZMTP 1": b"\xff" + struct.pack(">Q", 2**62) + b"\x01" * 100,
}
STALLED = {
    "nothing at all": b"",
    "half a greeting": GREETING[:20],
    "greeting only": GREETING,
    "half a frame": GREETING + READY + b"\x00\x40half",
}


@asynccontextmanager
async def endpoint(
    context: Context, settings: ControlSettings, epoch: str
) -> AsyncIterator[tuple[ControlEndpoint, Recorder]]:
    recorder = Recorder()
    made = ControlEndpoint(context, settings, epoch, recorder.hooks)
    made.open()
    try:
        yield made, recorder
    finally:
        made.close()


async def end_of(reader: asyncio.StreamReader) -> None:
    """Wait until the other side has closed the connection."""
    try:
        while await reader.read(65536):
            pass
    except ConnectionError:
        pass


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except ConnectionError:
        pass


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_T8_real_peer_is_served_while_a_stranger_sends_garbage(
    context: Context, garbage: bytes
) -> None:
    async with (
        endpoint(context, PATIENT, EPOCH) as (listener, heard),
        endpoint(context, PATIENT, OLD_EPOCH) as (peer, _),
    ):
        port = listener.address.port
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        await writer.drain()
        peer.open_route(OpenRoute("d:1", "127.0.0.1", port))
        peer.send(SendToPeer("d:1", HELLO))
        came = await heard.first(PeerMessageReceived)
        assert came.body == HELLO
        await close(writer)
        assert listener.is_open
        assert not heard.bugs


@pytest.mark.parametrize("sent", STALLED.values(), ids=STALLED)
async def test_T8_stranger_that_stalls_is_cut_after_a_deadline(
    context: Context, sent: bytes
) -> None:
    async with endpoint(context, IMPATIENT, EPOCH) as (listener, heard):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.address.port)
        writer.write(sent)
        await end_of(reader)
        await close(writer)
        assert not heard.bugs
        if sent != STALLED["half a frame"]:  # the others never became a ZMQ connection
            await heard.until(lambda: HANDSHAKE_FAILED in heard.kinds)


async def test_T8_stranger_that_sends_a_byte_now_and_then_is_cut_as_well(
    context: Context,
) -> None:
    async with endpoint(context, IMPATIENT, EPOCH) as (listener, heard):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.address.port)
        drip = dripper(writer, GREETING)
        drip()
        await end_of(reader)
        await close(writer)
        await heard.until(lambda: HANDSHAKE_FAILED in heard.kinds)


def dripper(writer: asyncio.StreamWriter, data: bytes) -> Callable[[], None]:
    """Return a function that sends the data a byte at a time, twenty a second."""
    loop = asyncio.get_running_loop()
    rest = list(data)

    def drip() -> None:
        if rest and not writer.is_closing():
            writer.write(bytes([rest.pop(0)]))
            loop.call_later(0.05, drip)

    return drip


async def test_T8_refused_handshake_is_counted(context: Context) -> None:
    async with endpoint(context, PATIENT, EPOCH) as (listener, heard):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.address.port)
        writer.write(GREETING.replace(b"NULL", b"NULX"))
        await heard.until(lambda: bool(heard.problems))
        assert heard.kinds[0] == HANDSHAKE_FAILED
        await end_of(reader)
        await close(writer)


async def test_T8_many_strangers_at_once_hold_up_nobody(context: Context) -> None:
    async with (
        endpoint(context, PATIENT, EPOCH) as (listener, heard),
        endpoint(context, PATIENT, OLD_EPOCH) as (peer, _),
    ):
        port = listener.address.port
        writers = []
        for n in range(60):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(list(GARBAGE.values())[n % len(GARBAGE)])
            writers.append(writer)
        peer.open_route(OpenRoute("d:1", "127.0.0.1", port))
        peer.send(SendToPeer("d:1", HELLO))
        await heard.first(PeerMessageReceived)
        for writer in writers:
            await close(writer)
