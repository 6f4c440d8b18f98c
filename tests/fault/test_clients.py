"""Workers that are slow, stopped, doubled or talk nonsense, on the real sockets."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import time
import uuid
from collections.abc import Iterator

import msgpack
import zmq

from moriiod.client import Client
from moriiod.core.requests import Attach, Attached, Done, Ping, Refused, Reply, Request
from moriiod.wire.fdsocket import WorkerHello, WorkerWelcome, decode_packet, send_packet
from moriiod.wire.ipc import ReplyFrame, RequestFrame, decode_reply, encode_request
from tests.support.children import HOST, until
from tests.support.kv_cache import CacheShape, new_cache
from tests.support.process_fixtures import DaemonMaker, PairMaker, WorkerMaker
from tests.support.processes import Daemon

#: How soon a good request is answered, whatever else is going on; the machine may be busy.
SOON_S = 5.0
N_COMPLETIONS = 20_000
#: What a transfer and its event may cost the daemon until they are taken.
BYTES_EACH = 4096


class Dealer:
    """A ZMQ client with an identity of its own that sends any frames.

    Args:
        daemon: To connect to.
        identity: Routing id; b"" lets libzmq choose.
    """

    def __init__(self, daemon: Daemon, identity: bytes = b"") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if identity:
            self._socket.setsockopt(zmq.ROUTING_ID, identity)
        self._socket.connect(f"ipc://{daemon.socket_path}")
        self._numbers = 0

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def take(self, timeout_s: float = SOON_S) -> list[bytes] | None:
        """Return the next message; None if there is none in time."""
        ready = self._socket.poll(timeout_s * 1000)
        return self._socket.recv_multipart() if ready else None

    def ask(self, body: Request) -> Reply:
        """Return the answer to a request; what else arrives is skipped."""
        self._numbers += 1
        self.send(*encode_request(RequestFrame(self._numbers, body)))
        give_up = time.monotonic() + SOON_S
        while time.monotonic() < give_up:
            frames = self.take()
            reply = None if frames is None else decode_reply(frames)
            if isinstance(reply, ReplyFrame) and reply.sequence == self._numbers:
                return reply.body
        raise AssertionError("no answer")

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@contextlib.contextmanager
def dealer(daemon: Daemon, identity: bytes = b"") -> Iterator[Dealer]:
    made = Dealer(daemon, identity)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def introduced(daemon: Daemon) -> Iterator[str]:
    """Give the generation of a worker that has said hello on the fd socket."""
    generation = uuid.uuid4().hex
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as unix:
        unix.connect(daemon.socket_path.removesuffix(".sock") + ".fd.sock")
        send_packet(unix, WorkerHello(generation), ())
        answer = decode_raw(unix.recv(65536))
        assert isinstance(answer, WorkerWelcome)
        yield generation


def decode_raw(data: bytes) -> object:
    from moriiod.wire.fdsocket import Packet

    return decode_packet(Packet(data, (), is_cut=False))


# --- Z4: the same identity ------------------------------------------------------------------------


def test_Z4_replacement_of_a_stopped_worker_is_served_and_the_stopped_one_is_not_disturbed(
    make_daemon: DaemonMaker, make_worker: WorkerMaker
) -> None:
    daemon = make_daemon().start()
    stopped = make_worker(daemon, name="w0")
    stopped.process.pause()
    started_at = time.monotonic()
    replacement = make_worker(daemon, name="w0")
    replacement.order("publish", transfer_id="t1", blocks=[1])
    replacement.ask("abort", transfer_id="t1", role="publish")
    assert replacement.wait_end("publish", "t1").reason == "aborted"
    assert time.monotonic() - started_at < SOON_S
    stopped.process.resume()
    assert stopped.ask("look")["state"] == "connected"
    assert stopped.take() == []
    assert sorted(row["name"] for row in daemon.status()["clients"]) == ["w0", "w0"]


def test_Z4_second_socket_with_the_same_identity_gets_the_replies_and_cannot_attach_again(
    make_daemon: DaemonMaker,
) -> None:
    daemon = make_daemon().start()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(dealer(daemon, b"w0"))
        generation = stack.enter_context(introduced(daemon))
        assert isinstance(first.ask(Attach(generation, "w0")), Attached)
        second = stack.enter_context(dealer(daemon, b"w0"))
        assert isinstance(second.ask(Ping()), Done)
        assert first.take(0.2) is None, "a reply went to the one that was replaced"
        other = stack.enter_context(introduced(daemon))
        refused = second.ask(Attach(other, "w0"))
        assert isinstance(refused, Refused)
        assert refused.code == "DUPLICATE_CLIENT"
        assert isinstance(second.ask(Ping()), Done)


# --- Z5: a slow reader ----------------------------------------------------------------------------


def test_Z5_20000_completions_wait_for_a_worker_that_does_not_read(
    make_daemon: DaemonMaker, make_worker: WorkerMaker
) -> None:
    settings = {
        "limits.max_transfers": str(2 * N_COMPLETIONS),
        "transfer.lease_s": "0.5",
        "control.heartbeat_interval_s": "0.2",
    }
    daemon = make_daemon("p", settings).start()
    other = make_worker(daemon)
    shape = CacheShape(heads=1)
    with new_cache("slow", shape) as cache, Client(daemon.socket_path, "slow") as slow:
        slow.register_regions((shape.group(),), cache.regions)
        before = daemon.process.rss_bytes()
        for number in range(N_COMPLETIONS):
            slow.publish(f"t{number}", [[number % shape.blocks]])
            if number % 1000 == 999:
                slow.ping()  # takes the replies in; the events stay where they are
        # Nobody reads from here on. All leases end, and so there are 20,000 completions.
        until(lambda: daemon.status()["leases"]["open"] == 0, "all leases have ended")
        assert daemon.process.rss_bytes() - before < N_COMPLETIONS * BYTES_EACH
        other.order("publish", transfer_id="t1", blocks=[1])
        other.ask("abort", transfer_id="t1", role="publish")
        assert other.wait_end("publish", "t1", SOON_S).reason == "aborted"
        ended: list[str] = []
        while len(ended) < N_COMPLETIONS:
            events = slow.wait(SOON_S)
            assert events, f"{len(ended)} came"
            assert {event.reason for event in events} == {"LEASE_EXPIRED"}
            ended += [event.transfer_id for event in events]
        assert sorted(ended) == sorted(f"t{number}" for number in range(N_COMPLETIONS))
        assert slow.in_flight == 0
        assert slow.take_problems() == []


def test_Z5_burst_of_refused_requests_is_answered_to_the_last_however_short_the_queues(
    make_daemon: DaemonMaker,
) -> None:
    n = 5000
    daemon = make_daemon("p", {"limits.max_queued_messages": "16"}).start()
    with Client(daemon.socket_path, "burst") as client:
        for number in range(n):  # nothing is registered
            client.publish(f"t{number}", [[1]])
        ended: list[str] = []
        while len(ended) < n:
            events = client.wait(SOON_S)
            assert events, f"{len(ended)} were told"
            assert {event.reason for event in events} == {"NOT_REGISTERED"}
            ended += [event.transfer_id for event in events]
        assert client.in_flight == 0
        client.ping()


# --- Z6: nonsense ---------------------------------------------------------------------------------


def nonsense(dice: random.Random) -> Iterator[list[bytes]]:
    """Yield messages that are none."""
    header, number = b"\x01Q", (1).to_bytes(8, "big")
    yield [b""]
    yield [b"", b""]
    yield [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"]
    yield [b"x"] * 9
    good_name = b"Publish"
    bodies = [
        b"",
        b"\xc1",
        b"\x82\xa1a",
        msgpack.packb({}) + b"\x00",
        b"\x81\xa1a\xd9\x02\xff\xfe",
        msgpack.packb({1: 2}),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 2000,
        msgpack.packb(msgpack.ExtType(5, b"x")),
        b"\xd7\xff" + b"\xff" * 8,
        msgpack.packb({"transfer_id": float("nan"), "blocks": []}),
        msgpack.packb({"transfer_id": "t" * 300, "blocks": []}),
        msgpack.packb({"transfer_id": "a\nb", "blocks": []}),
        msgpack.packb({"transfer_id": "t", "blocks": [b"123"]}),
        msgpack.packb({"transfer_id": "t", "blocks": [], "extra": 1}),
    ]
    for body in bodies:
        yield [header, good_name, number, body]
    yield [b"\x00Q", good_name, number, b"\x80"]
    yield [b"\x02Q", good_name, number, b"\x80"]
    yield [b"\x01P", good_name, number, b"\x80"]
    yield [header, b"NoSuchRequest", number, b"\x80"]
    yield [header, good_name, b"\xff" * 8, b"\x80"]
    for _ in range(2000):
        yield [dice.randbytes(dice.randint(0, 40)) for _ in range(dice.randint(1, 6))]
    frames = encode_request(RequestFrame(7, Attach(uuid.uuid4().hex, "x")))
    for _ in range(2000):
        broken = [bytearray(frame) for frame in frames]
        frame = dice.choice([frame for frame in broken if frame])
        frame[dice.randrange(len(frame))] ^= 1 << dice.randrange(8)
        yield [bytes(frame) for frame in broken]


def test_Z6_nonsense_is_counted_and_every_good_request_is_answered(
    make_daemon: DaemonMaker, make_worker: WorkerMaker, seed: int
) -> None:
    daemon = make_daemon().start()
    worker = make_worker(daemon)
    with dealer(daemon) as bad, dealer(daemon) as good:
        for index, frames in enumerate(nonsense(random.Random(seed))):
            bad.send(*frames)
            if index < 40 or index % 100 == 0:
                assert isinstance(good.ask(Ping()), Done)
        assert isinstance(bad.ask(Ping()), Done)
    counters = daemon.status()["counters"]["protocol_problems"]
    assert sum(row["count"] for row in counters) > 1000
    assert daemon.status()["state"] == "ready"
    assert worker.ask("look")["state"] == "connected"
    assert daemon.stop() == 0


RAW = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
    b"\x00" * 5,
    b"\xff" * 64,
    b"",
]


def test_Z6_strangers_on_every_socket_disturb_nobody(make_pair: PairMaker) -> None:
    pair = make_pair()
    pair.check_works("before")
    n_fds = pair.prefill.process.n_fds()
    with contextlib.ExitStack() as stack:
        for data, where in itertools.product(RAW * 5, ("control", "ipc", "fd")):
            stranger = stack.enter_context(connect(pair.prefill, where))
            with contextlib.suppress(OSError):
                stranger.sendall(data)
        # They are all still connected, and say nothing more.
        pair.check_works("meanwhile")
    pair.check_works("after")
    assert pair.prefill.status()["state"] == "ready"
    until(lambda: pair.prefill.process.n_fds() <= n_fds, "the strangers' connections are closed")


def connect(daemon: Daemon, where: str) -> socket.socket:
    if where == "control":
        return socket.create_connection((HOST, int(daemon.settings["control.base_port"])))
    if where == "ipc":
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.connect(daemon.socket_path)
        return made
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.connect(os.fspath(daemon.folder / "rank0.fd.sock"))
    return made
