"""How close the shm engine comes to one plain memcpy of the same bytes, in the same run.

    .venv/bin/python tests/bench/engine_copy.py [--mib 256] [--rounds 7]

Blocks are paired at random, and both sides are scattered. ``full``: every block of both caches
takes part, in random order. ``half``: a random half of the blocks of each cache does, so that
there are gaps on both sides. ``engine`` is post, progress until the completion, and everything
between; ``copier`` is its innermost part alone. Every round times memcpy, copier and engine one
after the other; the ratio is the median of the rounds' own ratios, so that a machine that slows
down for a while does not tilt it. Bars: 0.8 at 64 KiB and 0.5 at 16 KiB.

At the end: how late callbacks of an event loop are while the engine's threads copy.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))

from moriiod.core.events import MemoryRegistered, OpEnded, SessionOpened
from moriiod.core.geometry import RemoteLayout
from moriiod.core.plan import TransferPlan
from moriiod.engines.base import Direction
from moriiod.engines.copier import Copier, compile_program
from moriiod.engines.mapping import MappedRegion
from moriiod.engines.runner import EngineRunner
from moriiod.engines.shm import ShmEngine
from moriiod.memory.fdserver import FdServer, FdServerSettings
from tests.support.engines import (
    HOSTS,
    Pair,
    WorkerMemory,
    connected,
    layout_of,
    new_id,
    simple_plan,
)
from tests.support.shell import Recorder

KIB, MIB = 1 << 10, 1 << 20
BARS = {16 * KIB: 0.5, 64 * KIB: 0.8}


@dataclass(frozen=True)
class Row:
    """One line of the table; a list has one entry a round, in seconds."""

    block: int
    shape: str
    direction: str
    memcpy: list[float]
    copier: list[float]
    engine: list[float]

    def ratio(self, way: list[float]) -> float:
        """How fast a way is, memcpy being 1."""
        return statistics.median(m / w for m, w in zip(self.memcpy, way, strict=True))


def make_plan(dice: np.random.Generator, shape: str, n_blocks: int, block: int) -> TransferPlan:
    """Return a plan as the planner makes them: by local offset."""
    n_slots = n_blocks if shape == "full" else 2 * n_blocks
    local = np.sort(dice.permutation(n_slots)[:n_blocks]) * block
    remote = dice.permutation(n_slots)[:n_blocks] * block
    return simple_plan(local, remote, block)


def seconds(function: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(pair: Pair, plan: TransferPlan, direction: Direction, rounds: int) -> list[list[float]]:
    """Return the seconds of memcpy, copier and engine, round by round."""
    n_bytes = plan.n_bytes
    reading = direction == "read"
    source, target = (pair.remote[0], pair.local[0])[:: 1 if reading else -1]
    spans = plan.layers[0].spans
    near = MappedRegion(pair.local[0].fd, pair.local[0].n_bytes)
    far = MappedRegion(pair.remote[0].fd, pair.remote[0].n_bytes)
    copier = Copier()

    def copy_alone() -> None:
        offsets = (spans.remote, spans.local) if reading else (spans.local, spans.remote)
        program = compile_program(*offsets, spans.sizes)
        ends = ((far, 0), (near, 0)) if reading else ((near, 0), (far, 0))
        for step in range(program.n_steps):
            copier.run_step(program, step, *ends)

    ways: list[Callable[[], object]] = [
        lambda: np.copyto(target.bytes[:n_bytes], source.bytes[:n_bytes]),
        copy_alone,
        lambda: pair.initiator.transfer(pair.session, direction, plan),
    ]
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for way, taken in zip(ways, times, strict=True):
            one = seconds(way)
            if turn:  # the first round pays for page faults
                taken.append(one)
    near.close()
    far.close()
    return times


def run_table(folder: Path, mib: int, rounds: int) -> list[Row]:
    """Measure every block size, shape and direction."""
    rows: list[Row] = []
    dice = np.random.default_rng(1)
    size = 2 * mib * MIB
    with connected(HOSTS["shm"], folder, [size], [size]) as pair:
        for block in (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 2 * MIB):
            for shape in ("full", "half"):
                for direction in ("read", "write"):
                    plan = make_plan(dice, shape, mib * MIB // block, block)
                    memcpy, copier, engine = measure(pair, plan, direction, rounds)
                    rows.append(Row(block, shape, direction, memcpy, copier, engine))
    return rows


def print_table(rows: list[Row], mib: int) -> bool:
    """Print the rows; return whether every bar is met."""
    print(f"{mib} MiB a transfer; GB/s, and the ratio to memcpy")
    print(f"{'block':>8} {'shape':>5} {'way':>6} {'memcpy':>8} {'copier':>14} {'engine':>14}  bar")
    passed = True
    for row in rows:
        speeds = [
            mib * MIB / 1e9 / statistics.median(way) for way in (row.memcpy, row.copier, row.engine)
        ]
        ratio = row.ratio(row.engine)
        bar = BARS.get(row.block)
        verdict = "" if bar is None else f"{bar} {'met' if ratio >= bar else 'MISSED'}"
        passed &= bar is None or ratio >= bar
        print(
            f"{row.block // KIB:>6} K {row.shape:>5} {row.direction:>6} {speeds[0]:>8.2f}"
            f" {speeds[1]:>8.2f} {row.ratio(row.copier):>4.2f}x"
            f" {speeds[2]:>8.2f} {ratio:>4.2f}x  {verdict}"
        )
    return passed


async def measure_lag(folder: Path, block: int, n_bytes: int) -> tuple[list[float], float]:
    """Return how late 1 ms timers of the loop are while two transfers run, and their seconds."""
    recorder, epoch, loop = Recorder(), new_id(), asyncio.get_running_loop()
    server = FdServer(FdServerSettings(str(folder / "lag.sock")), epoch, recorder.hooks)
    server.open()
    runner = EngineRunner(ShmEngine(server.exports, epoch), recorder.hooks, lambda _: None)
    runner.open()
    memories = [WorkerMemory(n_bytes).fill(1), WorkerMemory(n_bytes).fill(2)]
    layouts = [layout_of(new_id(), [n_bytes]) for _ in memories]
    for layout, memory in zip(layouts, memories, strict=True):
        runner.register(layout, [memory.handle])
    await recorder.first(MemoryRegistered, 2)
    descriptors = {event.generation: event.descriptors for event in recorder.of(MemoryRegistered)}
    remote = RemoteLayout(layouts[1], "shm", descriptors[layouts[1].generation])
    runner.open_session(1, epoch, layouts[0].generation, remote)
    await recorder.first(SessionOpened)

    late: list[float] = []
    dice = np.random.default_rng(2)
    plans = [make_plan(dice, "half", n_bytes // block // 2, block) for _ in range(2)]

    def tick(due: float) -> None:
        now = time.perf_counter()
        late.append(now - due)
        if len(recorder.of(OpEnded)) < 2:
            loop.call_later(0.001, tick, now + 0.001)

    for op in (1, 3):  # the first pays for page faults
        recorder.events.clear()
        late.clear()
        started = time.perf_counter()
        tick(started)
        runner.post(op, 1, "read", plans[0])
        runner.post(op + 1, 1, "read", plans[1])
        await recorder.first(OpEnded, 2)
        taken = time.perf_counter() - started
    await runner.close(10.0)
    server.close()
    for memory in memories:
        memory.close()
    return late, taken


def main() -> int:
    """Print everything; the exit status says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="MiB of one transfer")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds; medians are shown")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = run_table(Path(name), options.mib, options.rounds)
        passed = print_table(rows, options.mib)
        for block in (4 * KIB, 16 * KIB, 64 * KIB):
            lag = measure_lag(Path(name), block, 4 * options.mib * MIB)
            late, taken = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(lag)
            late.sort()
            print(
                f"loop lag while {options.mib * 4} MiB of {block // KIB} K blocks are copied in"
                f" {taken * 1e3:.0f} ms: p50 {statistics.median(late) * 1e3:.2f} ms,"
                f" p99 {late[int(len(late) * 0.99)] * 1e3:.2f} ms, worst {late[-1] * 1e3:.2f} ms"
                f" (timers of 1 ms, {len(late)} of them)"
            )
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
