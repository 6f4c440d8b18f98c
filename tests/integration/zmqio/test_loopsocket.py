"""A ZMQ socket on a loop: nothing is lost, nobody is starved, nothing ends it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import zmq

from moriiod.zmqio.loopsocket import LoopSocket
from moriiod.zmqio.options import SocketLimits, new_dealer, new_router

LIMITS = SocketLimits(max_frame_bytes=1 << 20, send_hwm=100_000, recv_hwm=100_000)
Context = zmq.Context[zmq.Socket[bytes]]


@dataclass
class End:
    """One end of a connection, with what it received."""

    socket: LoopSocket | None = None
    received: list[list[bytes]] = field(default_factory=list)
    bugs: list[Exception] = field(default_factory=list)
    on_message: Callable[[list[bytes]], None] = lambda _frames: None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, frames: list[bytes]) -> None:
        self.received.append(frames)
        self.changed.set()
        self.on_message(frames)

    def bug(self, error: Exception) -> None:
        self.bugs.append(error)
        self.changed.set()

    def send(self, *frames: bytes) -> bool:
        assert self.socket is not None
        return self.socket.send_nowait(list(frames))

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    def open(self, socket: zmq.Socket[bytes], **bounds: int) -> End:
        loop = asyncio.get_running_loop()
        limits = {"max_frames": 6, "max_frame_bytes": 1 << 20} | bounds
        self.socket = LoopSocket(socket, loop, self.take, self.bug, **limits)
        return self


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    server, client = End(), End()
    yield server, client
    for end in (server, client):
        if end.socket is not None:
            end.socket.close()


def open_pair(context: Context, ends: tuple[End, End], **bounds: int) -> tuple[End, End]:
    server, client = ends
    router = new_router(context, LIMITS)
    router.bind("tcp://127.0.0.1:*")
    server.open(router, **bounds)
    dealer = new_dealer(context, LIMITS, b"client")
    dealer.setsockopt(zmq.IMMEDIATE, 0)
    dealer.connect(str(bytes(router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0"), "ascii"))
    client.open(dealer)
    return server, client


async def test_message_arrives_with_its_sender_and_the_answer_comes_back(
    context: Context, ends: tuple[End, End]
) -> None:
    server, client = open_pair(context, ends)
    assert client.send(b"one", b"", b"two")
    await server.until(lambda: bool(server.received))
    assert server.received == [[b"client", b"one", b"", b"two"]]
    assert server.send(b"client", b"answer")
    await client.until(lambda: bool(client.received))
    assert client.received == [[b"answer"]]


async def test_flood_arrives_complete_and_in_order(context: Context, ends: tuple[End, End]) -> None:
    server, client = open_pair(context, ends)
    n = 5000
    for i in range(n):
        assert client.send(b"%d" % i)
    await server.until(lambda: len(server.received) == n)
    assert [int(frames[1]) for frames in server.received] == list(range(n))
    assert server.socket is not None
    assert server.socket.counters.received == n


async def test_both_sides_send_at_once_and_nothing_waits_for_another_edge(
    context: Context, ends: tuple[End, End]
) -> None:
    """Each send may swallow the wake-up of what came in meanwhile."""
    server, client = open_pair(context, ends)
    rounds = 300
    server.on_message = lambda frames: [server.send(frames[0], b"a"), server.send(frames[0], b"b")]
    client.on_message = lambda frames: (
        client.send(b"next") if frames[0] == b"b" and len(client.received) < 2 * rounds else None
    )
    client.send(b"first")
    await client.until(lambda: len(client.received) >= 2 * rounds)
    assert not server.bugs
    assert not client.bugs


async def test_flooding_peer_does_not_starve_other_callbacks(
    context: Context, ends: tuple[End, End]
) -> None:
    """Between two turns of the loop at most one budget of messages is delivered."""
    server, client = open_pair(context, ends)
    n = 3000
    seen: list[int] = []
    loop = asyncio.get_running_loop()

    def look() -> None:
        seen.append(len(server.received))
        if len(server.received) < n:
            loop.call_soon(look)

    for _ in range(n):
        client.send(b"x")
    loop.call_soon(look)
    await server.until(lambda: len(server.received) == n)
    steps = [after - before for before, after in pairwise(seen)]
    assert max(steps) <= 2 * 128  # 256 frames of two, from the reader and from call_soon


async def test_exception_in_a_callback_is_reported_and_the_socket_lives_on(
    context: Context, ends: tuple[End, End]
) -> None:
    server, client = open_pair(context, ends)

    def fail(frames: list[bytes]) -> None:
        if frames[1] == b"bad":
            raise ZeroDivisionError

    server.on_message = fail
    for text in (b"bad", b"good", b"bad", b"good"):
        client.send(text)
    await server.until(lambda: len(server.received) == 4)
    assert [type(error) for error in server.bugs] == [ZeroDivisionError] * 2


async def test_message_of_too_many_frames_is_cut_and_the_next_one_is_whole(
    context: Context, ends: tuple[End, End]
) -> None:
    server, client = open_pair(context, ends)
    client.send(*[b"x"] * 2000)
    client.send(b"good")
    await server.until(lambda: len(server.received) == 2)
    assert [len(frames) for frames in server.received] == [7, 2]
    assert server.socket is not None
    assert server.socket.counters.cut == 1


async def test_frame_over_the_limit_arrives_cut(context: Context, ends: tuple[End, End]) -> None:
    server, client = open_pair(context, ends, max_frame_bytes=100)
    client.send(b"x" * 1000)
    client.send(b"y" * 100)
    await server.until(lambda: len(server.received) == 2)
    assert [len(frames[1]) for frames in server.received] == [101, 100]


async def test_send_to_nobody_is_refused_and_counted(
    context: Context, ends: tuple[End, End]
) -> None:
    server, _ = open_pair(context, ends)
    assert server.send(b"nobody", b"x") is False
    assert server.socket is not None
    assert server.socket.counters.unroutable == 1


async def test_Z5_send_to_a_full_queue_is_refused_and_counted(
    context: Context, ends: tuple[End, End]
) -> None:
    _, client = ends
    dealer = new_dealer(context, SocketLimits(max_frame_bytes=100, send_hwm=3), b"c")
    dealer.setsockopt(zmq.IMMEDIATE, 0)
    dealer.connect("tcp://127.0.0.1:1")  # nobody reads
    client.open(dealer)
    assert [client.send(b"x") for _ in range(5)] == [True] * 3 + [False] * 2
    assert client.socket is not None
    assert client.socket.counters.refused == 2


async def test_dealer_without_connection_queues_nothing(
    context: Context, ends: tuple[End, End]
) -> None:
    _, client = ends
    dealer = new_dealer(context, LIMITS, b"c")
    dealer.connect("tcp://127.0.0.1:1")
    client.open(dealer)
    assert client.send(b"x") is False


async def test_writable_is_told_once_as_soon_as_the_connection_is_up(
    context: Context, ends: tuple[End, End]
) -> None:
    server, client = ends
    router = new_router(context, LIMITS)
    router.bind("tcp://127.0.0.1:*")
    server.open(router)
    dealer = new_dealer(context, LIMITS, b"c")
    dealer.connect(str(bytes(router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0"), "ascii"))
    client.open(dealer)
    told: list[bool] = []
    assert client.socket is not None
    client.socket.when_writable(lambda: told.append(client.send(b"now")))
    await server.until(lambda: bool(server.received))
    assert told == [True]


async def test_exception_when_writable_is_reported(context: Context, ends: tuple[End, End]) -> None:
    _, client = open_pair(context, ends)

    def fail() -> None:
        raise ZeroDivisionError

    assert client.socket is not None
    client.socket.when_writable(fail)
    await client.until(lambda: bool(client.bugs))
    assert isinstance(client.bugs[0], ZeroDivisionError)


async def test_socket_closed_by_its_own_callback_delivers_nothing_more(
    context: Context, ends: tuple[End, End]
) -> None:
    server, client = open_pair(context, ends)
    closed = asyncio.Event()

    def close(_frames: list[bytes]) -> None:
        assert server.socket is not None
        server.socket.close()
        closed.set()

    server.on_message = close
    for _ in range(10):
        client.send(b"x")
    await closed.wait()
    assert len(server.received) == 1
    assert server.send(b"client", b"x") is False
    assert server.socket is not None
    server.socket.close()  # a second time
    assert server.socket.is_closed


def close_behind_its_back(loop_socket: LoopSocket) -> None:
    """Close the ZMQ socket under a loop socket, as only a bug elsewhere could.

    The loop stops watching the descriptor first: libuv aborts the process when one that it
    watches is closed and its number is soon used again.
    """
    loop_socket._loop.remove_reader(loop_socket._fd)
    loop_socket._socket.close(linger=0)


async def test_error_of_the_socket_itself_is_reported_and_closes_it(
    context: Context, ends: tuple[End, End]
) -> None:
    server, _ = open_pair(context, ends)
    assert server.socket is not None
    close_behind_its_back(server.socket)
    server.socket.when_writable(lambda: None)
    await server.until(lambda: bool(server.bugs))
    assert isinstance(server.bugs[0], zmq.ZMQError)
    assert server.bugs[0].errno in (errno.ENOTSOCK, errno.ENOTSUP)
    assert server.socket.is_closed


async def test_unexpected_error_of_a_send_is_raised(
    context: Context, ends: tuple[End, End]
) -> None:
    server, _ = open_pair(context, ends)
    assert server.socket is not None
    close_behind_its_back(server.socket)
    with pytest.raises(zmq.ZMQError):
        server.send(b"client", b"x")
