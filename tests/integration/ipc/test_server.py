"""The local socket: every request is answered or refused, whoever else misbehaves."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import zmq

from moriiod.core.effects import ReplyToClient, SendEvent
from moriiod.core.events import Event, RequestReceived
from moriiod.core.requests import (
    Done,
    GetStatus,
    Ping,
    Publish,
    Refused,
    Reply,
    Request,
    StatusDocument,
    TransferEnded,
)
from moriiod.errors import InvariantViolation
from moriiod.ipc.server import MALFORMED_REQUEST, OVERSIZED_REPLY, IpcServer, IpcSettings
from moriiod.wire.frames import Kind, header
from moriiod.wire.ipc import (
    EventFrame,
    ReplyFrame,
    RequestFrame,
    decode_reply,
    encode_request,
)
from tests.support.samples import EPOCH, packed
from tests.support.shell import RawClient, Recorder

Context = zmq.Context[zmq.Socket[bytes]]
PING = encode_request(RequestFrame(9, Ping()))
ENDED = TransferEnded("t", "pull", "received", "done")


class Rig:
    """A server whose driver answers every request with Done, and its clients."""

    def __init__(self, context: Context, recorder: Recorder, settings: IpcSettings) -> None:
        self.context = context
        self.recorder = recorder
        self.settings = settings
        self.server = IpcServer(context, settings, EPOCH, recorder.hooks)
        self.clients: list[RawClient] = []
        self.answer: Reply = Done()
        recorder.on_event = self.answer_request

    def answer_request(self, event: Event) -> None:
        assert isinstance(event, RequestReceived)
        self.server.send(ReplyToClient(event.route, event.sequence, self.answer))

    def client(self, routing_id: bytes | None = None, hwm: int = 100_000) -> RawClient:
        made = RawClient(self.context, f"ipc://{self.settings.path}", routing_id, hwm)
        self.clients.append(made)
        return made

    async def ask(self, client: RawClient, body: Request, sequence: int = 1) -> Reply:
        client.send(encode_request(RequestFrame(sequence, body)))
        return await self.reply(client, sequence)

    async def reply(self, client: RawClient, sequence: int) -> Reply:
        """Wait for the reply to this request and return its body."""
        n = 0
        while True:
            n += 1
            frame = decode_reply(await client.reply(n))
            if isinstance(frame, ReplyFrame) and frame.sequence == sequence:
                assert frame.epoch == EPOCH
                return frame.body

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()


@pytest_asyncio.fixture
async def rig(context: Context, recorder: Recorder, tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(context, recorder, IpcSettings(str(tmp_path / "run" / "rank0.sock")))
    made.server.open()
    yield made
    made.close()


@pytest_asyncio.fixture
async def small(context: Context, recorder: Recorder, tmp_path: Path) -> AsyncIterator[Rig]:
    """Return a rig whose limits are small: 64 KiB a body, 16 messages a queue."""
    settings = IpcSettings(
        str(tmp_path / "rank0.sock"), max_message_bytes=65536, max_queued_messages=16
    )
    made = Rig(context, recorder, settings)
    made.server.open()
    yield made
    made.close()


async def test_request_becomes_an_event_and_its_reply_carries_number_and_epoch(rig: Rig) -> None:
    client = rig.client()
    assert await rig.ask(client, Publish("t", (packed(1, 2),)), sequence=77) == Done()
    (event,) = rig.recorder.of(RequestReceived)
    assert event.sequence == 77
    assert event.body == Publish("t", (packed(1, 2),))
    assert decode_reply(client.received[0]) == ReplyFrame(77, EPOCH, Done())


async def test_event_reaches_its_client_only(rig: Rig) -> None:
    first, second = rig.client(), rig.client()
    await rig.ask(first, Ping())
    await rig.ask(second, Ping())
    routes = [event.route for event in rig.recorder.of(RequestReceived)]
    assert routes[0] != routes[1]
    assert rig.server.send(SendEvent(routes[0], 5, ENDED))
    assert decode_reply(await first.reply(2)) == EventFrame(5, EPOCH, ENDED)
    await rig.ask(second, Ping(), sequence=2)
    assert len(second.received) == 2


async def test_send_to_a_client_that_left_is_refused(rig: Rig) -> None:
    assert rig.server.send(SendEvent(b"\0gone", 1, ENDED)) is False
    assert rig.server.counters.unroutable == 1


async def test_send_before_open_and_after_close_is_refused(
    context: Context, recorder: Recorder, tmp_path: Path
) -> None:
    server = IpcServer(context, IpcSettings(str(tmp_path / "s.sock")), EPOCH, recorder.hooks)
    assert server.send(SendEvent(b"r", 1, ENDED)) is False
    assert not server.is_open
    assert server.counters.received == 0
    server.open()
    assert server.is_open
    server.close()
    server.close()
    assert not server.is_open
    assert server.send(SendEvent(b"r", 1, ENDED)) is False


NESTED = b"\x81\xa1a" + b"\x91" * 2000 + b"\x00"
MALFORMED: list[list[bytes]] = [
    [b""],
    [b"", b""],
    PING + PING + [b""],
    [b"GET / HTTP/1.1\r\n\r\n"],
    [b"\xc1"],
    [b"", *PING],  # an old REQ socket's empty delimiter
    [header(0, Kind.REQUEST), *PING[1:]],
    [header(2, Kind.REQUEST), *PING[1:]],
    [b"1", *PING[1:]],
    [*PING[:1], b"Explode", *PING[2:]],
    [*PING[:1], b"\xff\xfe", *PING[2:]],
    [*PING[:2], b"?", PING[3]],
    *[
        [*PING[:3], body]
        for body in (
            b"",
            b"\xc1",
            b"\x81",
            b"\x80\x00",
            b"\x81\xa1\xff\x00",
            b"\x81\x01\x02",
            b"\xdd\xff\xff\xff\xff",
            NESTED,
            b"\x81\xa1a\xd4\x05\x00",
            b"\x81\xa1a\xc7\x03\xff\x01\x02\x03",
            b"\x81\xa1a\xcb\x7f\xf8\0\0\0\0\0\0",  # NaN
            b"\x81\xa5color\x01",
        )
    ],
]


async def test_Z6_after_every_malformed_message_a_good_request_is_answered(rig: Rig) -> None:
    client = rig.client()
    loop = asyncio.get_running_loop()
    times: list[float] = []
    for n, frames in enumerate(MALFORMED, start=1):
        client.send(frames)
        started = loop.time()
        assert await rig.ask(client, Ping(), sequence=1000 + n) == Done()
        times.append(loop.time() - started)
        assert rig.recorder.kinds == [MALFORMED_REQUEST] * n
    assert statistics.median(times) < 0.1
    assert rig.server.is_open
    assert not rig.recorder.bugs


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([header(2, Kind.REQUEST), *PING[1:]], "VERSION_MISMATCH"),
        ([*PING[:1], b"Explode", *PING[2:]], "UNKNOWN_MESSAGE"),
        ([*PING[:3], b"\xc1"], "MALFORMED_FRAME"),
        ([*PING[:3], b"\x81\xa5color\x01"], "INVALID_ARGUMENT"),
        ([PING[0], b"Publish", PING[2], b"\x80"], "INVALID_ARGUMENT"),
    ],
)
async def test_Z8_bad_request_with_a_number_is_refused_under_it(
    rig: Rig, frames: list[bytes], code: str
) -> None:
    client = rig.client()
    client.send(frames)
    reply = await rig.reply(client, 9)
    assert isinstance(reply, Refused)
    assert reply.code == code
    assert not reply.retryable


async def test_Z8_refused_version_names_both(rig: Rig) -> None:
    client = rig.client()
    client.send([header(2, Kind.REQUEST), *PING[1:]])
    reply = await rig.reply(client, 9)
    assert isinstance(reply, Refused)
    assert (reply.fields["got"], reply.fields["ours"]) == (2, "1")


async def test_Z6_ten_thousand_random_messages_leave_the_socket_serving(
    rig: Rig, seed: int
) -> None:
    client = rig.client()
    dice = random.Random(seed)
    n = 10_000
    for _ in range(n):
        frames = [dice.randbytes(dice.randrange(12)) for _ in range(dice.randrange(1, 6))]
        if dice.random() < 0.5:
            frames = [*PING[:3], dice.randbytes(dice.randrange(40))]
        client.send(frames)
    assert await rig.ask(client, GetStatus(), sequence=2**40) == Done()
    # A random body is now and then a valid empty map.
    assert len(rig.recorder.problems) + len(rig.recorder.events) == n + 1
    assert not rig.recorder.bugs


async def test_Z7_body_over_the_limit_is_answered_too_large(small: Rig) -> None:
    client = small.client()
    client.send([*PING[:3], b"\x80" * 200_000])
    reply = await small.reply(client, 9)
    assert isinstance(reply, Refused)
    assert (reply.code, reply.fields["value"]) == ("TOO_LARGE", 65536)
    assert await small.ask(client, Ping(), sequence=10) == Done()


async def test_Z7_message_far_over_the_limit_is_cut_off_and_others_are_served(small: Rig) -> None:
    flooder, other = small.client(), small.client()
    assert await small.ask(flooder, Ping(), sequence=1) == Done()
    flooder.send([*PING[:3], b"\x80" * 2_000_000])
    assert await small.ask(other, Ping(), sequence=1) == Done()
    # libzmq connects the flooder anew, and its next message gets through.
    assert await small.ask(flooder, Ping(), sequence=2) == Done()
    assert len(small.recorder.of(RequestReceived)) == 3


async def test_Z7_message_of_64_mib_takes_less_than_twice_its_size(rig: Rig) -> None:
    size = 64 << 20
    client = rig.client()
    assert await rig.ask(client, Ping(), sequence=1) == Done()
    body = bytes(size)
    before = _memory_bytes_with_peak_forgotten()
    client.send([*PING[:3], body])
    reply = await rig.reply(client, 9)
    assert isinstance(reply, Refused)
    assert reply.code == "TOO_LARGE"
    grown = _memory_bytes("VmHWM") - before
    # This process is the sender too, and libzmq holds a copy of what is being sent.
    assert grown - size < 2 * size


async def test_Z7_request_with_a_hundred_thousand_block_ids_works(rig: Rig) -> None:
    blocks = (packed(*range(100_000)),)
    assert await rig.ask(rig.client(), Publish("t", blocks)) == Done()
    (event,) = rig.recorder.of(RequestReceived)
    assert event.body == Publish("t", blocks)


async def test_Z5_reader_that_stops_loses_nothing_and_holds_up_nobody(small: Rig) -> None:
    """The driver is told which events were not taken, and sends exactly those again."""
    n = 20_000
    slow, other = small.client(hwm=4), small.client()
    assert await small.ask(slow, Ping()) == Done()
    route = small.recorder.of(RequestReceived)[0].route
    slow.pause()
    sent = 0
    while small.server.send(SendEvent(route, sent, ENDED)):
        sent += 1
    assert sent < n
    assert small.server.counters.refused == 1
    assert await small.ask(other, Ping()) == Done()
    slow.resume()
    while sent < n:
        if small.server.send(SendEvent(route, sent, ENDED)):
            sent += 1
        else:
            await slow.progress()
    await slow.reply(n + 1)
    numbers = [decode_reply(frames).sequence for frames in slow.received[1:]]
    assert numbers == list(range(n))


async def test_oversized_reply_becomes_a_refusal(small: Rig) -> None:
    small.answer = StatusDocument("x" * 100_000)
    reply = await small.ask(small.client(), GetStatus())
    assert isinstance(reply, Refused)
    assert reply.code == "TOO_LARGE"
    assert small.recorder.kinds == [OVERSIZED_REPLY]


async def test_event_that_cannot_be_encoded_is_counted_and_not_sent(rig: Rig) -> None:
    client = rig.client()
    await rig.ask(client, Ping())
    route = rig.recorder.of(RequestReceived)[0].route
    bad = TransferEnded("\ud800", "pull", "received", "done")
    assert rig.server.send(SendEvent(route, 1, bad)) is False
    assert rig.recorder.kinds == [OVERSIZED_REPLY]


async def test_bug_in_the_driver_is_reported_and_the_socket_lives_on(rig: Rig) -> None:
    def explode(_event: Event) -> None:
        rig.recorder.on_event = rig.answer_request
        raise InvariantViolation("planted")

    rig.recorder.on_event = explode
    client = rig.client()
    client.send(encode_request(RequestFrame(1, Ping())))
    assert await rig.ask(client, Ping(), sequence=2) == Done()
    assert [type(error) for error in rig.recorder.bugs] == [InvariantViolation]


def _memory_bytes_with_peak_forgotten() -> int:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        pytest.skip(f"cannot measure a peak here: {error}")
    return _memory_bytes("VmRSS")


def _memory_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise AssertionError(name)
