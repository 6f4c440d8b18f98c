"""fd socket, shm engine and runner together, as a daemon has them: from offer to last mapping."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from moriiod.core.events import (
    MemoryRegistered,
    MemoryReleased,
    OpEnded,
    PeerFenced,
    RegionOffered,
    SessionOpened,
    WorkerDied,
)
from moriiod.core.geometry import RemoteLayout
from moriiod.engines.base import RegionHandle
from moriiod.engines.factory import make_engine
from moriiod.engines.runner import EngineRunner
from moriiod.memory.fdserver import FdServer, FdServerSettings
from tests.integration.engines.conftest import mapped_memfds
from tests.support.engine_peer import from_json, to_json
from tests.support.engines import (
    WorkerMemory,
    copied,
    layout_of,
    new_id,
    scattered_plan,
    simple_plan,
)
from tests.support.shell import Recorder

ROOT = Path(__file__).parents[3]
MIB = 1 << 20

pytestmark = pytest.mark.xdist_group("processes")

WORKER = """
import mmap, socket, sys
from moriiod.wire.fdsocket import OfferRegion, WorkerHello, receive_packet, send_packet
from moriiod.wire.memfd import create_sealed_memfd
path, generation, n_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
fd = create_sealed_memfd("test-kv", n_bytes)
mmap.mmap(fd, n_bytes)[:] = b"\\x33" * n_bytes
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(path)
send_packet(sock, WorkerHello(generation))
receive_packet(sock, 0)
send_packet(sock, OfferRegion(0, n_bytes), [fd])
receive_packet(sock, 0)
sys.stdin.read()
"""


class Daemon:
    """The memory side of a daemon."""

    def __init__(self, folder: Path, recorder: Recorder, engine: str = "shm") -> None:
        self.epoch = new_id()
        self.path = str(folder / "fd.sock")
        self.recorder = recorder
        self.server = FdServer(FdServerSettings(self.path), self.epoch, recorder.hooks)
        self.runner = EngineRunner(
            make_engine(engine, self.server.exports, self.epoch),
            recorder.hooks,
            self.server.release,
        )

    async def register_held(self, generation: str, n_bytes: int) -> RemoteLayout:
        """Register what a worker has offered."""
        held = [RegionHandle(r.kind, r.fd, r.n_bytes) for r in self.server.hold(generation)]
        return await self.register(generation, n_bytes, held)

    async def register(
        self, generation: str, n_bytes: int, handles: list[RegionHandle]
    ) -> RemoteLayout:
        """Register memory and wait for it."""
        n = len(self.recorder.of(MemoryRegistered)) + 1
        layout = layout_of(generation, [n_bytes])
        self.runner.register(layout, handles)
        event = await self.recorder.first(MemoryRegistered, n)
        return RemoteLayout(layout, "shm", event.descriptors)

    async def open_session(self, session: int, local: str, remote: RemoteLayout) -> None:
        """Open a session within this daemon."""
        n = len(self.recorder.of(SessionOpened)) + 1
        self.runner.open_session(session, self.epoch, local, remote)
        await self.recorder.first(SessionOpened, n)


@asynccontextmanager
async def daemon(folder: Path, recorder: Recorder, engine: str = "shm") -> AsyncIterator[Daemon]:
    made = Daemon(folder, recorder, engine)
    made.server.open()
    made.runner.open()
    try:
        yield made
    finally:
        assert await made.runner.close(10.0)
        made.server.close()
        assert recorder.bugs == []
        assert recorder.kinds == []


@contextmanager
def running(arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python in a process that is gone afterwards, whatever happens."""
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


async def turn() -> None:
    """Let the loop go round once."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    loop.call_soon(done.set_result, None)
    await done


async def turns_until(condition: Callable[[], bool]) -> None:
    """Let the loop go round until something has come true, and twice more."""
    while not condition():
        await turn()
    await turn()
    await turn()


async def test_transfers_through_the_runner_are_exact(recorder: Recorder, tmp_path: Path) -> None:
    memories = [WorkerMemory(2 * MIB).fill(1), WorkerMemory(2 * MIB).fill(2)]
    async with daemon(tmp_path, recorder) as d:
        near, far = [await d.register(new_id(), 2 * MIB, [memory.handle]) for memory in memories]
        await d.open_session(1, near.layout.generation, far)
        dice = np.random.default_rng(1)
        want = [memories[0].bytes.copy()]
        for op in range(1, 9):
            plan = scattered_plan(dice, 40, 4096, 512)
            copied(plan, [memories[1].bytes], want, read=True)
            d.runner.post(op, 1, "read", plan)
            await recorder.first(OpEnded, op)
        assert [event.error for event in recorder.of(OpEnded)] == [None] * 8
        assert (memories[0].bytes == want[0]).all()
    for memory in memories:
        memory.close()


@pytest.mark.parametrize("when", ["registered", "in_flight"])
async def test_M6_killed_worker_leaves_no_mapping_and_no_fd(
    recorder: Recorder, tmp_path: Path, when: str
) -> None:
    size, cycles = 64 * MIB, 3
    own = WorkerMemory(size)
    async with daemon(tmp_path, recorder) as d:
        near = await d.register(new_id(), size, [own.handle])
        base, counts = mapped_memfds(), []
        for cycle in range(1, cycles + 1):
            generation = new_id()
            with running(["-c", WORKER, d.path, generation, str(size)]) as worker:
                await recorder.first(RegionOffered, cycle)
                far = await d.register_held(generation, size)
                assert mapped_memfds() == base + 1
                if when == "in_flight":
                    await d.open_session(cycle, near.layout.generation, far)
                    d.runner.post(cycle, cycle, "read", simple_plan([0], [0], size))
                worker.send_signal(signal.SIGKILL)
                assert (await recorder.first(WorkerDied, cycle)).generation == generation
            if when == "in_flight":
                d.runner.cancel(cycle)  # the engine is drained first
                await recorder.first(OpEnded, cycle)
                d.runner.close_session(cycle)
            d.runner.release(generation)
            await recorder.first(MemoryReleased, cycle)
            await turns_until(lambda: not d.runner.n_sessions and not d.server.n_connections)
            await turns_until(lambda: not d.server.n_region_fds)  # large ones go a little later
            assert mapped_memfds() == base
            counts.append(len(os.listdir("/proc/self/fd")))
        assert len(set(counts)) == 1
        d.runner.release(near.layout.generation)
    own.close()


async def test_peer_fence_is_reported_when_its_process_ends(
    recorder: Recorder, tmp_path: Path
) -> None:
    own = WorkerMemory(4096)
    async with daemon(tmp_path, recorder) as d:
        near = await d.register(new_id(), 4096, [own.handle])
        loop = asyncio.get_running_loop()
        with running(["-m", "tests.support.engine_peer", str(tmp_path), "4096"]) as peer:
            assert peer.stdout is not None
            assert peer.stdin is not None
            hello = await loop.run_in_executor(None, peer.stdout.readline)
            epoch, _ = from_json(hello.decode())
            peer.stdin.write(f"open {to_json(d.epoch, near)}\n".encode())
            peer.stdin.flush()
            assert await loop.run_in_executor(None, peer.stdout.readline) == b"done\n"
            d.runner.fence(epoch)
            other = new_id()
            d.runner.fence(other)
            assert (await recorder.first(PeerFenced)).epoch == other
            peer.kill()
            assert (await recorder.first(PeerFenced, 2)).epoch == epoch
        await loop.shutdown_default_executor()
    own.close()


async def test_close_with_work_in_flight_ends_it_and_unmaps_everything(
    recorder: Recorder, tmp_path: Path
) -> None:
    memories = [WorkerMemory(64 * MIB), WorkerMemory(64 * MIB)]
    before = mapped_memfds()
    async with daemon(tmp_path, recorder) as d:
        near, far = [await d.register(new_id(), 64 * MIB, [memory.handle]) for memory in memories]
        await d.open_session(1, near.layout.generation, far)
        for op in range(20):
            d.runner.post(op, 1, "read", simple_plan([0], [0], 64 * MIB))
        assert await d.runner.close(10.0)
        assert len(recorder.of(OpEnded)) == 20
        assert mapped_memfds() == before
        assert d.server.exports.n_exports == 0
        d.runner.open()  # for the closing at the end
    for memory in memories:
        memory.close()


async def test_loop_stays_responsive_while_the_engine_copies(
    recorder: Recorder, tmp_path: Path
) -> None:
    """Callbacks run between slices, not after the copy; tests/bench prints the exact figures."""
    size = 128 * MIB
    memories = [WorkerMemory(size), WorkerMemory(size)]
    async with daemon(tmp_path, recorder) as d:
        near, far = [await d.register(new_id(), size, [memory.handle]) for memory in memories]
        await d.open_session(1, near.layout.generation, far)
        dice = np.random.default_rng(1)
        plans = [scattered_plan(dice, size // 16384 // 2, 16384, size // 16384) for _ in range(4)]
        late: list[float] = []
        for op, plan in enumerate(plans):
            d.runner.post(op, 1, "read", plan)
        loop = asyncio.get_running_loop()

        def tick(due: float) -> None:
            late.append(time.perf_counter() - due)
            loop.call_later(0.001, tick, time.perf_counter() + 0.001)

        tick(time.perf_counter())
        await recorder.first(OpEnded, len(plans))
        assert len(late) >= 5
        assert sorted(late)[len(late) // 2] < 0.005
    for memory in memories:
        memory.close()
