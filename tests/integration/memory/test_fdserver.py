"""The fd socket: workers and their memory, peers and what they may fetch, hostile packets."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from moriiod.core.events import RegionOffered, WorkerConnected, WorkerDied
from moriiod.errors import AddressInUse, ConfigError
from moriiod.memory.fdserver import FdServer, FdServerSettings
from moriiod.memory.limits import FdLimits
from moriiod.wire.fdsocket import (
    MAX_PACKET_BYTES,
    FdRefused,
    FetchRegions,
    OfferRegion,
    Regions,
    RegionTaken,
    WorkerHello,
    WorkerWelcome,
    decode_packet,
    encode_packet,
)
from moriiod.wire.memfd import create_sealed_memfd
from tests.support.engines import new_id
from tests.support.fdclient import FdClient
from tests.support.samples import EPOCH
from tests.support.shell import Recorder

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def serving(
    recorder: Recorder, folder: Path, limits: FdLimits | None = None
) -> AsyncIterator[FdServer]:
    settings = FdServerSettings(str(folder / "fd.sock"), limits=limits or FdLimits())
    server = FdServer(settings, EPOCH, recorder.hooks)
    server.open()
    try:
        yield server
    finally:
        server.close()
        assert recorder.bugs == []


def path_of(folder: Path) -> str:
    return str(folder / "fd.sock")


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


async def attached(folder: Path, generation: str) -> FdClient:
    client = FdClient(path_of(folder))
    assert await client.ask(WorkerHello(generation)) == WorkerWelcome(EPOCH)
    return client


async def offered(client: FdClient, region: int = 0, n_bytes: int = 4096) -> None:
    fd = create_sealed_memfd("t", n_bytes)
    assert await client.ask(OfferRegion(region, n_bytes), [fd]) == RegionTaken(region)
    os.close(fd)


# --- Workers ----------------------------------------------------------------------------------


async def test_worker_is_known_by_what_the_kernel_says(recorder: Recorder, tmp_path: Path) -> None:
    async with serving(recorder, tmp_path):
        generation = new_id()
        client = await attached(tmp_path, generation)
        connected = WorkerConnected(generation, os.getpid(), os.geteuid())
        assert recorder.events == [connected]
        await offered(client, 0, 8192)
        await offered(client, 1, 4096)
        assert recorder.events[1:] == [
            RegionOffered(generation, 0, 8192),
            RegionOffered(generation, 1, 4096),
        ]
        client.close()
        await recorder.first(WorkerDied)
        assert recorder.of(WorkerDied) == [WorkerDied(generation)]


async def test_held_regions_stay_open_after_the_worker_until_they_are_released(
    recorder: Recorder, tmp_path: Path
) -> None:
    async with serving(recorder, tmp_path) as server:
        before, generation = open_fds(), new_id()
        client = await attached(tmp_path, generation)
        await offered(client, 0, 4096)
        await offered(client, 1, 8192)
        held = server.hold(generation)
        assert [(region.kind, region.n_bytes) for region in held] == [
            ("memfd", 4096),
            ("memfd", 8192),
        ]
        client.close()
        await recorder.first(WorkerDied)
        assert server.n_region_fds == 2
        assert os.fstat(held[1].fd).st_size == 8192
        server.release(generation)
        server.release(generation)
        assert server.n_region_fds == 0
        assert open_fds() == before


async def test_regions_only_offered_are_closed_with_the_worker(
    recorder: Recorder, tmp_path: Path
) -> None:
    async with serving(recorder, tmp_path) as server:
        before, generation = open_fds(), new_id()
        client = await attached(tmp_path, generation)
        await offered(client)
        client.close()
        await recorder.first(WorkerDied)
        assert (server.n_region_fds, open_fds()) == (0, before)
        assert server.hold(generation) == ()


async def test_hold_returns_regions_in_order_up_to_the_first_gap(
    recorder: Recorder, tmp_path: Path
) -> None:
    async with serving(recorder, tmp_path) as server:
        generation = new_id()
        client = await attached(tmp_path, generation)
        for region, n_bytes in [(1, 8192), (3, 16384), (0, 4096)]:
            await offered(client, region, n_bytes)
        assert [region.n_bytes for region in server.hold(generation)] == [4096, 8192]
        assert server.hold(generation) == server.hold(generation)
        assert server.n_region_fds == 2
        client.close()


async def test_region_offered_again_replaces_the_first(recorder: Recorder, tmp_path: Path) -> None:
    async with serving(recorder, tmp_path) as server:
        generation = new_id()
        client = await attached(tmp_path, generation)
        await offered(client, 0, 4096)
        await offered(client, 0, 8192)
        assert server.n_region_fds == 1
        assert server.hold(generation)[0].n_bytes == 8192
        server.release(generation)
        await offered(client, 0, 4096)
        assert server.n_region_fds == 1
        client.close()


async def test_disconnect_closes_without_a_further_event(
    recorder: Recorder, tmp_path: Path
) -> None:
    async with serving(recorder, tmp_path) as server:
        generation = new_id()
        client = await attached(tmp_path, generation)
        server.disconnect(generation)
        server.disconnect(generation)
        assert await client.is_closed()
        assert server.n_connections == 0
        assert recorder.of(WorkerDied) == []
        client.close()


async def test_worker_that_the_driver_refuses_at_once_gets_no_welcome(
    recorder: Recorder, tmp_path: Path
) -> None:
    async with serving(recorder, tmp_path) as server:
        generation = new_id()
        recorder.on_event = lambda _event: server.disconnect(generation)
        client = FdClient(path_of(tmp_path))
        client.send(WorkerHello(generation))
        assert await client.is_closed()
        assert recorder.problems == []
        client.close()


WORKER = """
import os, socket, sys
from moriiod.wire.fdsocket import OfferRegion, WorkerHello, receive_packet, send_packet
from moriiod.wire.memfd import create_sealed_memfd
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
send_packet(sock, WorkerHello(sys.argv[2]))
receive_packet(sock, 0)
send_packet(sock, OfferRegion(0, 1 << 20), [create_sealed_memfd("t", 1 << 20)])
receive_packet(sock, 0)
if os.fork() == 0:  # a child that keeps the socket open beyond the worker's death
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


@contextmanager
def running_worker(folder: Path, generation: str) -> Iterator[subprocess.Popen[bytes]]:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, path_of(folder), generation],
        stdin=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()
        assert worker.stdin is not None
        worker.stdin.close()  # ends its child


@pytest.mark.xdist_group("processes")
async def test_M6_killed_worker_is_seen_at_once_even_if_a_child_keeps_its_socket(
    recorder: Recorder, tmp_path: Path
) -> None:
    async with serving(recorder, tmp_path) as server:
        before = open_fds()
        for cycle in range(1, 4):
            generation = new_id()
            with running_worker(tmp_path, generation) as worker:
                await recorder.first(RegionOffered, cycle)
                connected = recorder.of(WorkerConnected)[-1]
                assert (connected.generation, connected.pid) == (generation, worker.pid)
                server.hold(generation)
                worker.send_signal(signal.SIGKILL)
                assert (await recorder.first(WorkerDied, cycle)).generation == generation
            server.release(generation)
            assert (server.n_region_fds, open_fds()) == (0, before)
        assert len(recorder.of(WorkerDied)) == 3


# --- Peers --------------------------------------------------------------------------------------


async def test_peer_fetches_what_is_exported_and_nothing_else(
    recorder: Recorder, tmp_path: Path
) -> None:
    async with serving(recorder, tmp_path) as server:
        fds = [create_sealed_memfd("t", 4096 * (i + 1)) for i in range(128)]
        tokens = tuple(new_id() for _ in fds)
        for i, (token, fd) in enumerate(zip(tokens, fds, strict=True)):
            server.exports.export(token, fd, 4096 * (i + 1))
        inodes = [os.fstat(fd).st_ino for fd in fds]
        for fd in fds:
            os.close(fd)
        peer = FdClient(path_of(tmp_path))
        peer.send(FetchRegions(new_id(), tokens))
        packet = await peer.packet()
        assert decode_packet(packet) == Regions(tuple(4096 * (i + 1) for i in range(128)))
        assert [os.fstat(fd).st_ino for fd in packet.fds] == inodes
        packet.close_fds()
        server.exports.withdraw(tokens[0])
        server.exports.withdraw(tokens[0])
        refused = await peer.ask(FetchRegions(new_id(), tokens[:2]))
        assert isinstance(refused, FdRefused)
        assert refused.code == "SHARED_MEMORY_UNAVAILABLE"
        assert await peer.is_closed()
        peer.close()


async def test_fenced_epoch_fetches_nothing(recorder: Recorder, tmp_path: Path) -> None:
    async with serving(recorder, tmp_path) as server:
        fd, token, epoch = create_sealed_memfd("t", 4096), new_id(), new_id()
        server.exports.export(token, fd, 4096)
        assert server.exports.refuse(epoch) is None
        peer = FdClient(path_of(tmp_path))
        answer = await peer.ask(FetchRegions(epoch, (token,)))
        assert isinstance(answer, FdRefused)
        assert "fenced" in answer.message
        assert server.exports.n_fetchers == 0
        peer.close()
        os.close(fd)


async def test_peer_of_another_user_is_refused(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(recorder, tmp_path) as server:
        fd, token = create_sealed_memfd("t", 4096), new_id()
        server.exports.export(token, fd, 4096)
        peer = FdClient(path_of(tmp_path))
        peer.send(FetchRegions(new_id(), (token,)))
        (connection,) = await _connections(server)
        object.__setattr__(connection, "credentials", type(connection.credentials)(1, 4321))
        answer = await peer.answer()
        assert isinstance(answer, FdRefused)
        assert answer.code == "SHARED_MEMORY_UNAVAILABLE"
        assert "4321" in answer.message
        peer.close()
        os.close(fd)


async def _connections(server: FdServer) -> list[object]:
    server._on_acceptable()
    return list(server._connections)


async def test_too_many_fetching_epochs_are_busy(recorder: Recorder, tmp_path: Path) -> None:
    async with serving(recorder, tmp_path, FdLimits(max_fetchers=2)) as server:
        fd, token = create_sealed_memfd("t", 4096), new_id()
        server.exports.export(token, fd, 4096)
        peer = FdClient(path_of(tmp_path))
        for _ in range(2):
            peer.send(FetchRegions(new_id(), (token,)))
            (await peer.packet()).close_fds()
        answer = await peer.ask(FetchRegions(new_id(), (token,)))
        assert isinstance(answer, FdRefused)
        assert answer.code == "BUSY"
        peer.close()
        os.close(fd)


# --- Bad input ----------------------------------------------------------------------------------


def memfd(n_bytes: int = 4096) -> int:
    return create_sealed_memfd("t", n_bytes)


def unsealed() -> int:
    fd = os.memfd_create("t", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    return fd


OFFER = encode_packet(OfferRegion(0, 4096))
#: name -> (says hello first, bytes, makers of fds, code of the refusal)
BAD_PACKETS: dict[str, tuple[bool, bytes, list[Callable[[], int]], str]] = {
    "garbage": (False, b"\xc1\xff\x00", [], "MALFORMED_FRAME"),
    "not_a_pair": (False, b"\x93\xa1a\xc4\x00\xc0", [], "MALFORMED_FRAME"),
    "nested": (False, b"\x91" * 5000, [], "MALFORMED_FRAME"),
    "unknown_type": (False, b"\x92\xa5Hello\xc4\x01\x80", [], "UNKNOWN_MESSAGE"),
    "too_large": (False, b"x" * (MAX_PACKET_BYTES + 1), [], "TOO_LARGE"),
    "generation_in_capitals": (False, encode_packet(WorkerHello("A" * 32)), [], "INVALID_ARGUMENT"),
    "daemons_message": (False, encode_packet(WorkerWelcome(EPOCH)), [], "UNEXPECTED_MESSAGE"),
    "offer_before_hello": (False, OFFER, [memfd], "UNEXPECTED_MESSAGE"),
    "second_hello": (True, encode_packet(WorkerHello("a" * 32)), [], "UNEXPECTED_MESSAGE"),
    "hello_with_fd": (False, encode_packet(WorkerHello("a" * 32)), [memfd], "MALFORMED_FRAME"),
    "offer_without_fd": (True, OFFER, [], "MALFORMED_FRAME"),
    "offer_with_two_fds": (True, OFFER, [memfd, memfd], "MALFORMED_FRAME"),
    "offer_with_many_fds": (True, OFFER, [memfd] * 9, "TOO_LARGE"),
    "unsealed": (True, OFFER, [unsealed], "REGISTRATION_FAILED"),
    "too_small": (True, OFFER, [lambda: memfd(4095)], "REGISTRATION_FAILED"),
    "not_a_memfd": (True, OFFER, [lambda: os.open("/dev/null", os.O_RDWR)], "REGISTRATION_FAILED"),
    "region_out_of_range": (True, encode_packet(OfferRegion(4096, 1)), [memfd], "INVALID_ARGUMENT"),
    "no_bytes": (True, encode_packet(OfferRegion(0, 0)), [memfd], "INVALID_ARGUMENT"),
    "worker_fetches": (
        True,
        encode_packet(FetchRegions(EPOCH, ("0" * 32,))),
        [],
        "UNEXPECTED_MESSAGE",
    ),
}


@pytest.mark.parametrize("name", BAD_PACKETS)
async def test_bad_packet_is_answered_counted_and_leaves_nothing(
    recorder: Recorder, tmp_path: Path, name: str
) -> None:
    with_hello, data, makers, code = BAD_PACKETS[name]
    async with serving(recorder, tmp_path) as server:
        before, generation = open_fds(), new_id()
        client = await attached(tmp_path, generation) if with_hello else FdClient(path_of(tmp_path))
        fds = [make() for make in makers]
        client.send_raw(data, fds)
        for fd in fds:
            os.close(fd)
        answer = await client.answer()
        assert isinstance(answer, FdRefused)
        assert answer.code == code
        assert await client.is_closed()
        client.close()
        assert recorder.kinds == ["fd_packet_refused"]
        assert recorder.of(WorkerDied) == ([WorkerDied(generation)] if with_hello else [])
        assert (server.n_connections, server.n_region_fds, open_fds()) == (0, 0, before)
        good = await attached(tmp_path, new_id())  # the next one is served
        await offered(good)
        good.close()


async def test_generation_in_use_is_refused_and_the_first_goes_on(
    recorder: Recorder, tmp_path: Path
) -> None:
    async with serving(recorder, tmp_path) as server:
        generation = new_id()
        first = await attached(tmp_path, generation)
        await offered(first)
        second = FdClient(path_of(tmp_path))
        answer = await second.ask(WorkerHello(generation))
        assert isinstance(answer, FdRefused)
        assert answer.code == "DUPLICATE_CLIENT"
        await offered(first, 1)
        server.hold(generation)
        first.close()
        await recorder.first(WorkerDied)
        third = FdClient(path_of(tmp_path))  # its memory is still in use
        assert isinstance(await third.ask(WorkerHello(generation)), FdRefused)
        server.release(generation)
        for client in (second, third):
            client.close()


async def test_regions_and_bytes_of_one_worker_are_bounded(
    recorder: Recorder, tmp_path: Path
) -> None:
    limits = FdLimits(max_regions=2, max_region_bytes=20000)
    async with serving(recorder, tmp_path, limits) as server:
        for last in [(2, 4096), (1, 16384)]:
            client = await attached(tmp_path, new_id())
            await offered(client, 0)
            await offered(client, 1)
            fd = create_sealed_memfd("t", last[1])
            answer = await client.ask(OfferRegion(*last), [fd])
            os.close(fd)
            assert isinstance(answer, FdRefused)
            assert answer.code == "TOO_LARGE"
            client.close()
        assert server.n_region_fds == 0


async def test_connections_are_bounded(recorder: Recorder, tmp_path: Path) -> None:
    async with serving(recorder, tmp_path, FdLimits(max_connections=2)) as server:
        clients = [await attached(tmp_path, new_id()) for _ in range(2)]
        third = FdClient(path_of(tmp_path))
        assert await third.is_closed()
        assert recorder.kinds == ["fd_connection_refused"]
        clients.pop().close()
        await recorder.first(WorkerDied)
        clients.append(await attached(tmp_path, new_id()))
        for client in (*clients, third):
            client.close()
        assert server.n_connections == 2


async def test_connection_that_says_nothing_is_closed(recorder: Recorder, tmp_path: Path) -> None:
    async with serving(recorder, tmp_path, FdLimits(idle_timeout_s=0.05)) as server:
        silent = FdClient(path_of(tmp_path))
        worker = await attached(tmp_path, new_id())
        assert await silent.is_closed()
        await offered(worker)  # a worker may be silent for as long as it likes
        assert server.n_connections == 1
        for client in (silent, worker):
            client.close()


async def test_client_that_does_not_read_its_answers_is_cut_off(
    recorder: Recorder, tmp_path: Path
) -> None:
    async with serving(recorder, tmp_path) as server:
        generation = new_id()
        client = await attached(tmp_path, generation)
        fd = memfd()
        while not recorder.of(WorkerDied):
            try:
                client.send(OfferRegion(0, 4096), [fd])
            except BlockingIOError:
                await recorder.first(RegionOffered, len(recorder.of(RegionOffered)) + 1)
            except BrokenPipeError:
                await recorder.first(WorkerDied)
        assert "fd_answer_undelivered" in recorder.kinds
        assert server.n_connections == 0
        os.close(fd)
        client.close()


async def test_no_room_for_fds_is_survived(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EMFILE at accept: the listener pauses instead of spinning, and goes on."""
    monkeypatch.setattr("moriiod.memory.fdserver._ACCEPT_PAUSE_S", 0.01)
    async with serving(recorder, tmp_path):
        before = await attached(tmp_path, new_id())
        client = FdClient(path_of(tmp_path))
        fillers = []
        soft, hard = _limit_fds()
        try:
            while True:
                try:
                    fillers.append(fcntl.fcntl(before.sock, fcntl.F_DUPFD_CLOEXEC, 0))
                except OSError:
                    break
            await recorder.until(lambda: recorder.kinds.count("fd_connection_refused") >= 2)
        finally:
            for fd in fillers:
                os.close(fd)
            _limit_fds(soft, hard)
        generation = new_id()
        assert await client.ask(WorkerHello(generation)) == WorkerWelcome(EPOCH)
        for one in (before, client):
            one.close()


def _limit_fds(soft: int | None = None, hard: int | None = None) -> tuple[int, int]:
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = max(int(name) for name in os.listdir("/proc/self/fd")) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft or room, hard or old[1]))
    return old


# --- The socket file ------------------------------------------------------------------------------


async def test_socket_file_has_its_mode_and_goes_with_the_server(
    recorder: Recorder, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    async with serving(recorder, folder) as server:
        path = folder / "fd.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert stat.S_IMODE(folder.stat().st_mode) == 0o750
        assert server.is_path_intact()
    assert not path.exists()


async def test_live_socket_is_not_taken_over(recorder: Recorder, tmp_path: Path) -> None:
    async with serving(recorder, tmp_path):
        second = FdServer(FdServerSettings(path_of(tmp_path)), new_id(), recorder.hooks)
        with pytest.raises(AddressInUse):
            second.open()
        second.close()
        client = await attached(tmp_path, new_id())
        client.close()


async def test_group_that_does_not_exist_is_a_config_error(
    recorder: Recorder, tmp_path: Path
) -> None:
    settings = FdServerSettings(path_of(tmp_path), group="no-such-group")
    with pytest.raises(ConfigError, match="no-such-group"):
        FdServer(settings, EPOCH, recorder.hooks).open()
    assert os.listdir(tmp_path) == []


async def test_close_leaves_no_fd(recorder: Recorder, tmp_path: Path) -> None:
    before = open_fds()
    server = FdServer(FdServerSettings(path_of(tmp_path)), EPOCH, recorder.hooks)
    server.open()
    clients = []
    for _ in range(3):
        client = await attached(tmp_path, new_id())
        await offered(client)
        clients.append(client)
    fd, token = memfd(), new_id()
    server.exports.export(token, fd, 4096)
    clients[0].close()
    peer = FdClient(path_of(tmp_path))
    peer.send(FetchRegions(new_id(), (token,)))
    (await peer.packet()).close_fds()
    server.close()
    server.close()
    os.close(fd)
    for client in (*clients[1:], peer):
        client.close()
    assert open_fds() == before
    assert not recorder.of(WorkerDied)[1:]
