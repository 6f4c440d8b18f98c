"""Engines to test, memory to test them with, and plans for them.

The contract suite in tests/integration/engines runs against every entry of ``HOSTS``. An engine
joins by adding a factory here.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from moriiod.core.events import Event
from moriiod.core.geometry import CacheLayout, RemoteLayout
from moriiod.core.ids import Epoch, Generation
from moriiod.core.plan import BlockSpans, Int64Array, LayerSpans, TransferPlan
from moriiod.engines.base import Completion, RegionHandle, Session, TransferEngine
from moriiod.engines.factory import make_engine
from moriiod.memory.fdserver import FdServer, FdServerSettings
from moriiod.wire.memfd import create_sealed_memfd
from moriiod.zmqio.hooks import ShellHooks
from tests.support.caches import group, layer

ResultT = TypeVar("ResultT")
Bytes8 = npt.NDArray[np.uint8]

#: Rounds of ``progress`` after which an operation counts as hung.
MAX_ROUNDS: Final = 1_000_000


def new_id() -> str:
    """Return a fresh epoch or generation."""
    return uuid.uuid4().hex


# --- Memory -----------------------------------------------------------------------------------


class WorkerMemory:
    """A sealed memfd as a worker has it: mapped here, to write patterns and look at results."""

    def __init__(self, n_bytes: int, fd: int | None = None) -> None:
        self.fd = create_sealed_memfd("test-kv", n_bytes) if fd is None else fd
        self.n_bytes = n_bytes
        self._mapping = mmap.mmap(self.fd, n_bytes)
        self.bytes: Bytes8 = np.frombuffer(self._mapping, dtype=np.uint8)

    @property
    def handle(self) -> RegionHandle:
        """What an engine registers."""
        return RegionHandle("memfd", self.fd, self.n_bytes)

    def fill(self, seed: int) -> WorkerMemory:
        """Fill with bytes that nothing else has."""
        dice = np.random.default_rng(seed)
        self.bytes[:] = dice.integers(0, 256, self.n_bytes, dtype=np.uint8)
        return self

    def close(self) -> None:
        """Unmap and close. What a failed test still looks at is unmapped when it is forgotten."""
        del self.bytes
        with contextlib.suppress(BufferError):
            self._mapping.close()
        os.close(self.fd)


def layout_of(generation: Generation, region_bytes: Sequence[int]) -> CacheLayout:
    """Return a layout whose regions have these sizes; its one layer is of no interest."""
    return CacheLayout(generation, (group((layer(),), num_blocks=1),), tuple(region_bytes))


# --- Plans ------------------------------------------------------------------------------------


def spans(
    local: Sequence[int] | Int64Array,
    remote: Sequence[int] | Int64Array,
    sizes: Sequence[int] | Int64Array | int,
) -> BlockSpans:
    """Return spans exactly as given; one size for all is allowed."""
    locals_, remotes = np.asarray(local, dtype=np.int64), np.asarray(remote, dtype=np.int64)
    if isinstance(sizes, int):
        sizes = np.full(len(locals_), sizes, dtype=np.int64)
    lengths = np.asarray(sizes, dtype=np.int64)
    total = sum(lengths.tolist())
    return BlockSpans(locals_, remotes, lengths, total)


def plan_of(*layers: LayerSpans) -> TransferPlan:
    """Return a plan of these layers."""
    return TransferPlan(layers, sum(item.spans.n_bytes for item in layers))


def simple_plan(
    local: Sequence[int] | Int64Array,
    remote: Sequence[int] | Int64Array,
    sizes: Sequence[int] | Int64Array | int,
) -> TransferPlan:
    """Return a plan of one layer at offset 0 of region 0 on both sides."""
    return plan_of(LayerSpans(spans(local, remote, sizes), 0, 0, 0, 0))


def scattered_plan(
    dice: np.random.Generator, n_blocks: int, block: int, n_slots: int
) -> TransferPlan:
    """Return a plan that pairs random blocks of both sides, as a planner would: by local offset."""
    local = np.sort(dice.permutation(n_slots)[:n_blocks]) * block
    remote = dice.permutation(n_slots)[:n_blocks] * block
    return simple_plan(local, remote, block)


def copied(plan: TransferPlan, source: Sequence[Bytes8], target: list[Bytes8], read: bool) -> None:
    """Do to arrays what an engine should do: the oracle, one range at a time."""
    for item in plan.layers:
        for local, remote, size in zip(
            item.spans.local, item.spans.remote, item.spans.sizes, strict=True
        ):
            near = item.local_region, item.local_offset + int(local)
            far = item.remote_region, item.remote_offset + int(remote)
            (to, at), (frm, start) = (near, far) if read else (far, near)
            target[to][at : at + int(size)] = source[frm][start : start + int(size)]


# --- Hosts ------------------------------------------------------------------------------------


class LoopThread:
    """An event loop on a thread of its own, for what an engine needs from a daemon."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-loop")
        self._thread.start()

    def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Run a function on the loop and return its result."""
        result: Future[ResultT] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised again by the caller
                result.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return result.result()

    def close(self) -> None:
        """End the loop and the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@dataclass
class EngineHost:
    """One engine as in a daemon of its own."""

    engine: TransferEngine
    epoch: Epoch
    server: FdServer
    loop: LoopThread
    events: list[Event] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def register(self, *memories: WorkerMemory) -> RemoteLayout:
        """Register memory under a new generation; return what a peer is told of it."""
        generation = new_id()
        descriptors = self.engine.register(generation, [m.handle for m in memories])
        layout = layout_of(generation, [m.n_bytes for m in memories])
        return RemoteLayout(layout, self.engine.capabilities.name, descriptors)

    def run(self, n_operations: int = 1) -> list[Completion]:
        """Make progress until so many operations have ended."""
        ended: list[Completion] = []
        for _ in range(MAX_ROUNDS):
            ended += self.engine.progress()
            if len(ended) >= n_operations:
                return ended
        raise AssertionError(f"{n_operations - len(ended)} operations never ended")

    def transfer(self, session: Session, direction: Any, plan: TransferPlan) -> Completion:
        """Post one operation and run it to its end."""
        self.engine.post(1, session, direction, plan)
        (completion,) = self.run()
        return completion

    def close(self) -> None:
        """Close the engine and what it needs."""
        self.engine.close()
        self.loop.call(self.server.close)
        self.loop.close()


def _host(name: str, folder: Path) -> EngineHost:
    loop, epoch = LoopThread(), new_id()
    events: list[Event] = []
    problems: list[tuple[str, str]] = []

    def on_bug(error: Exception) -> None:
        problems.append(("bug", repr(error)))

    hooks = ShellHooks(events.append, lambda kind, text: problems.append((kind, text)), on_bug)
    server = FdServer(FdServerSettings(str(folder / f"{epoch[:8]}.sock")), epoch, hooks)
    async_open: Future[None] = asyncio.run_coroutine_threadsafe(_open(server), loop.loop)
    async_open.result()
    return EngineHost(
        make_engine(name, server.exports, epoch), epoch, server, loop, events, problems
    )


async def _open(server: FdServer) -> None:
    server.open()


HOSTS: Final[Mapping[str, Callable[[Path], EngineHost]]] = {
    "shm": lambda folder: _host("shm", folder),
    "faulty": lambda folder: _host("faulty:shm", folder),
}


@dataclass
class Pair:
    """Two hosts with registered memory, and a session from the first to the second."""

    initiator: EngineHost
    target: EngineHost
    local: list[WorkerMemory]
    remote: list[WorkerMemory]
    local_layout: RemoteLayout
    remote_layout: RemoteLayout
    session: Session

    @property
    def engine(self) -> TransferEngine:
        """The initiator's engine."""
        return self.initiator.engine


@contextmanager
def connected(
    make_host: Callable[[Path], EngineHost],
    folder: Path,
    local_bytes: Sequence[int],
    remote_bytes: Sequence[int],
    fill: bool = True,
) -> Iterator[Pair]:
    """Give two connected hosts whose memory is filled with different bytes."""
    local = [WorkerMemory(n) for n in local_bytes]
    remote = [WorkerMemory(n) for n in remote_bytes]
    if fill:
        for seed, memory in enumerate([*local, *remote], start=1):
            memory.fill(seed)
    initiator, target = make_host(folder), make_host(folder)
    try:
        near, far = initiator.register(*local), target.register(*remote)
        session = initiator.engine.open_session(target.epoch, near.layout.generation, far)
        yield Pair(initiator, target, local, remote, near, far, session)
        initiator.engine.close_session(session)
    finally:
        initiator.close()
        target.close()
        for memory in [*local, *remote]:
            memory.close()
