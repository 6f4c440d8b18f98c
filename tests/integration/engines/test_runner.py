"""The runner: every call on its thread, every result one event, nothing lost, nothing too early."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from moriiod.core.events import (
    Event,
    MemoryRefused,
    MemoryRegistered,
    MemoryReleased,
    OpEnded,
    OpRefused,
    PeerFenced,
    SessionOpened,
    SessionRefused,
)
from moriiod.core.geometry import RemoteLayout
from moriiod.engines.base import Fence, RegionHandle
from moriiod.engines.runner import EngineRunner
from moriiod.errors import (
    EngineOpFailed,
    EngineQueueFull,
    OutOfRange,
    RegistrationFailed,
    SessionFailed,
    TransferAborted,
)
from tests.support.engines import layout_of, new_id, plan_of
from tests.support.fake_engine import FakeEngine
from tests.support.shell import Recorder

PLAN = plan_of()
HANDLES = [RegionHandle("memfd", 0, 4096)]


class Bench:
    """A runner with a fake engine, and what came of it."""

    def __init__(self, engine: FakeEngine, recorder: Recorder, max_ops: int) -> None:
        self.engine = engine
        self.recorder = recorder
        self.released: list[str] = []
        self.runner = EngineRunner(engine, recorder.hooks, self.released.append, max_ops)

    async def registered(self) -> str:
        """Register a generation and wait for it."""
        generation, n = new_id(), len(self.recorder.of(MemoryRegistered)) + 1
        self.runner.register(layout_of(generation, [4096]), HANDLES)
        assert (await self.recorder.first(MemoryRegistered, n)).generation == generation
        return generation

    async def opened(self, session: int, generation: str) -> None:
        """Open a session and wait for it."""
        n = len(self.recorder.of(SessionOpened)) + 1
        self.open(session, generation)
        assert (await self.recorder.first(SessionOpened, n)).session == session

    def open(self, session: int, generation: str, peer: str | None = None) -> None:
        """Start opening a session."""
        remote = RemoteLayout(layout_of(new_id(), [4096]), "fake", (b"x",))
        self.runner.open_session(session, peer or new_id(), generation, remote)

    def names(self) -> list[str]:
        """Names of the engine calls so far."""
        return [name for name, _ in self.engine.calls]


@asynccontextmanager
async def bench(
    recorder: Recorder, engine: FakeEngine | None = None, max_ops: int = 8
) -> AsyncIterator[Bench]:
    """Open a runner; afterwards close it and check that the engine's contract was kept."""
    made = Bench(engine or FakeEngine(), recorder, max_ops)
    made.runner.open()
    yield made
    assert await made.runner.close(5.0)
    assert made.engine.broken == []
    assert recorder.bugs == []


# --- Memory -----------------------------------------------------------------------------------


async def test_memory_is_registered_and_released_with_its_handles(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        generation = await b.registered()
        assert recorder.of(MemoryRegistered) == [MemoryRegistered(generation, (b"descriptor",))]
        b.runner.release(generation)
        await recorder.first(MemoryReleased)
        assert b.released == [generation]
        assert b.names() == ["register", "deregister"]


@pytest.mark.parametrize(("n_bytes", "number"), [(3_607_764_992, 22), (943_718_400, 12)])
async def test_M4_refused_registration_is_typed_and_gives_the_handles_back(
    recorder: Recorder, n_bytes: int, number: int
) -> None:
    async with bench(recorder) as b:
        b.engine.fail("register", RegistrationFailed("no", n_bytes=n_bytes, errno=number))
        generation = new_id()
        b.runner.register(layout_of(generation, [n_bytes]), HANDLES)
        refused = await recorder.first(MemoryRefused)
        assert refused.error.code == "REGISTRATION_FAILED"
        assert refused.error.fields == {"n_bytes": n_bytes, "errno": number}
        assert b.released == [generation]
        b.open(1, generation)
        assert isinstance((await recorder.first(SessionRefused)).error, SessionFailed)
        await b.registered()  # alive


async def test_M4_library_that_raises_anything_is_a_typed_refusal(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        b.engine.fail("register", RuntimeError("ibv_reg_mr: Cannot allocate memory"))
        b.runner.register(layout_of(new_id(), [4096]), HANDLES)
        error = (await recorder.first(MemoryRefused)).error
        assert isinstance(error, RegistrationFailed)
        assert "ibv_reg_mr" in error.message


async def test_missing_handles_are_a_refusal_and_the_engine_is_not_asked(
    recorder: Recorder,
) -> None:
    async with bench(recorder) as b:
        b.runner.register(layout_of(new_id(), [4096, 4096]), HANDLES)
        assert isinstance((await recorder.first(MemoryRefused)).error, RegistrationFailed)
        assert b.names() == []


async def test_release_of_memory_never_registered_closes_its_handles(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        generation = new_id()
        b.runner.release(generation)
        assert recorder.events == [MemoryReleased(generation)]
        assert b.released == [generation]


async def test_release_while_registering_waits_for_the_registration(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        generation = new_id()
        gate = b.engine.gate("register", generation)
        b.runner.register(layout_of(generation, [4096]), HANDLES)
        b.runner.release(generation)
        await gate.entered.wait()
        assert b.released == []
        gate.open()
        await recorder.first(MemoryReleased)
        assert b.names() == ["register", "deregister"]
        assert recorder.of(MemoryRegistered) == []


async def test_M7_deregistration_that_hangs_delays_nobody_else(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        stuck = await b.registered()
        gate = b.engine.gate("deregister", stuck)
        b.runner.release(stuck)
        await gate.entered.wait()
        started = time.monotonic()
        other = await b.registered()
        await b.opened(1, other)
        b.runner.post(1, 1, "read", PLAN)
        b.engine.end(1, 10)
        assert await recorder.first(OpEnded) == OpEnded(1, 10, None)
        b.runner.close_session(1)
        b.runner.release(other)
        assert (await recorder.first(MemoryReleased)).generation == other
        assert time.monotonic() - started < 5  # the case says 200 ms of an idle machine
        assert b.released == [other]
        gate.open()
        assert (await recorder.first(MemoryReleased, 2)).generation == stuck


async def test_deregistration_that_fails_is_never_reported_as_released(
    recorder: Recorder,
) -> None:
    async with bench(recorder) as b:
        generation = await b.registered()
        b.engine.fail("deregister", RuntimeError("busy"))
        b.runner.release(generation)
        await recorder.until(lambda: recorder.kinds == ["engine_call_failed"])
        assert recorder.of(MemoryReleased) == []
        assert b.released == []
        b.engine._registered.clear()


# --- Sessions ---------------------------------------------------------------------------------


async def test_session_closed_while_it_opens_is_closed_when_it_has_opened(
    recorder: Recorder,
) -> None:
    async with bench(recorder) as b:
        generation, peer = await b.registered(), new_id()
        gate = b.engine.gate("open_session", peer)
        b.open(1, generation, peer)
        await gate.entered.wait()
        b.runner.close_session(1)
        b.runner.release(generation)
        gate.open()
        await recorder.first(MemoryReleased)
        assert b.names() == ["register", "open_session", "close_session", "deregister"]
        assert recorder.of(SessionOpened) == recorder.of(SessionRefused) == []


async def test_session_that_fails_after_it_was_closed_is_not_reported(
    recorder: Recorder,
) -> None:
    async with bench(recorder) as b:
        generation, peer = await b.registered(), new_id()
        gate = b.engine.gate("open_session", peer)
        b.engine.fail("open_session", SessionFailed("no"))
        b.open(1, generation, peer)
        await gate.entered.wait()
        b.runner.close_session(1)
        gate.open()
        b.runner.release(generation)
        await recorder.first(MemoryReleased)
        assert recorder.of(SessionRefused) == []


async def test_session_with_a_slow_peer_does_not_delay_another(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        generation, slow = await b.registered(), new_id()
        gate = b.engine.gate("open_session", slow)
        b.open(1, generation, slow)
        await gate.entered.wait()
        await b.opened(2, generation)
        gate.open()
        assert (await recorder.first(SessionOpened, 2)).session == 1


async def test_release_closes_sessions_that_are_still_open(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        generation = await b.registered()
        await b.opened(1, generation)
        await b.opened(2, generation)
        b.runner.release(generation)
        await recorder.first(MemoryReleased)
        assert b.names()[-3:] == ["close_session", "close_session", "deregister"]
        assert b.runner.n_sessions == 0


@pytest.mark.parametrize("error", [SessionFailed("no"), ValueError("library bug")])
async def test_session_that_cannot_be_opened_is_refused(
    recorder: Recorder, error: Exception
) -> None:
    async with bench(recorder) as b:
        generation = await b.registered()
        b.engine.fail("open_session", error)
        b.open(1, generation)
        assert isinstance((await recorder.first(SessionRefused)).error, SessionFailed)
        b.open(2, new_id())
        assert (await recorder.first(SessionRefused, 2)).session == 2
        await b.opened(1, generation)


async def test_close_of_unknown_session_is_ignored(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        b.runner.close_session(7)
        assert recorder.events == []


# --- Operations -------------------------------------------------------------------------------


async def test_post_on_a_session_that_is_not_open_ends_at_once(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        b.runner.post(1, 9, "read", PLAN)
        (ended,) = recorder.of(OpEnded)
        assert isinstance(ended.error, SessionFailed)
        assert b.runner.in_flight == 0


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(OutOfRange("no"), OutOfRange), (RuntimeError("x"), EngineOpFailed)],
)
async def test_post_that_raises_ends_that_operation_and_the_engine_goes_on(
    recorder: Recorder, raised: Exception, expected: type[Exception]
) -> None:
    async with bench(recorder) as b:
        await b.opened(1, await b.registered())
        b.engine.fail("post", raised)
        b.runner.post(1, 1, "read", PLAN)
        assert isinstance((await recorder.first(OpEnded)).error, expected)
        b.runner.post(2, 1, "read", PLAN)
        b.engine.end(2)
        assert await recorder.first(OpEnded, 2) == OpEnded(2, 0, None)


@pytest.mark.parametrize("k", [1, 50])
async def test_T1_full_queue_is_a_refusal_that_may_be_posted_again(
    recorder: Recorder, k: int
) -> None:
    async with bench(recorder) as b:
        await b.opened(1, await b.registered())
        b.engine.fail("post", *[EngineQueueFull("SQ full")] * k, OutOfRange("true error"))
        for turn in range(1, k + 1):
            b.runner.post(1, 1, "read", PLAN)
            assert await recorder.first(OpRefused, turn) == OpRefused(1)
        b.runner.post(2, 1, "read", PLAN)
        assert (await recorder.first(OpEnded)).op == 2
        b.runner.post(1, 1, "read", PLAN)
        b.engine.end(1, 5)
        assert await recorder.first(OpEnded, 2) == OpEnded(1, 5, None)
        assert b.engine.calls.count(("post", 1)) == k + 1


async def test_operations_over_the_limit_are_refused(recorder: Recorder) -> None:
    async with bench(recorder, max_ops=2) as b:
        await b.opened(1, await b.registered())
        for op in (1, 2, 3):
            b.runner.post(op, 1, "read", PLAN)
        assert recorder.of(OpRefused) == [OpRefused(3)]
        b.engine.end(1)
        await recorder.first(OpEnded)
        b.runner.post(3, 1, "read", PLAN)
        b.engine.end(2)
        b.engine.end(3)
        await recorder.first(OpEnded, 3)


async def test_T3_operations_that_never_end_hold_up_no_others_and_end_by_cancel(
    recorder: Recorder,
) -> None:
    async with bench(recorder, max_ops=16) as b:
        await b.opened(1, await b.registered())
        for op in range(12):
            b.runner.post(op, 1, "read", PLAN)
        for op in range(4, 12):
            b.engine.end(op, 1)
        await recorder.first(OpEnded, 8)
        assert {event.op for event in recorder.of(OpEnded)} == set(range(4, 12))
        assert b.runner.in_flight == 4
        for op in range(4):
            b.runner.cancel(op)
            b.runner.cancel(op)
        await recorder.first(OpEnded, 12)
        assert all(isinstance(e.error, TransferAborted) for e in recorder.of(OpEnded)[8:])
        assert b.names().count("cancel") == 4


async def test_cancel_of_unknown_operation_is_ignored(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        b.runner.cancel(5)
        await b.registered()
        assert "cancel" not in b.names()


async def test_engine_whose_progress_raises_is_a_bug_that_surfaces(recorder: Recorder) -> None:
    engine = FakeEngine()
    runner = EngineRunner(engine, recorder.hooks, lambda _: None)
    runner.open()
    engine.fail("progress", RuntimeError("CQE of an unknown QP"))
    generation = new_id()
    runner.register(layout_of(generation, [4096]), HANDLES)
    await recorder.first(MemoryRegistered)
    remote = RemoteLayout(layout_of(new_id(), [4096]), "fake", (b"x",))
    runner.open_session(1, new_id(), generation, remote)
    await recorder.first(SessionOpened)
    runner.post(1, 1, "read", PLAN)
    await recorder.until(lambda: bool(recorder.bugs))
    assert "unknown QP" in str(recorder.bugs[0])
    assert recorder.of(OpEnded) == []  # nobody knows what it touches: it stays quarantined
    assert not await runner.close(0.01)
    assert engine.calls[-1][0] != "deregister"
    runner._setup.stop()


# --- Fence ------------------------------------------------------------------------------------


async def test_fence_that_is_confirmed_at_once_is_reported(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        b.runner.fence("p")
        assert await recorder.first(PeerFenced) == PeerFenced("p")
        b.runner.fence("p")
        await recorder.first(PeerFenced, 2)


async def test_fence_is_reported_when_its_fd_becomes_readable(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        watch, other = os.pipe()
        b.engine.fences["p"] = Fence(False, watch)
        b.runner.fence("p")
        b.runner.fence("p")
        b.runner.fence("q")
        await recorder.first(PeerFenced)
        assert recorder.of(PeerFenced) == [PeerFenced("q")]
        os.write(other, b"x")
        assert await recorder.first(PeerFenced, 2) == PeerFenced("p")
        b.runner.fence("r")
        await recorder.first(PeerFenced, 3)
        assert ("forget", "p") in b.engine.calls
        os.close(watch)
        os.close(other)


async def test_readmitted_peer_is_not_watched_any_more(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        watch, other = os.pipe()
        b.engine.fences["p"] = Fence(False, watch)
        gate = b.engine.gate("fence", "p")
        b.runner.fence("p")
        await gate.entered.wait()
        b.runner.readmit("p")
        gate.open()
        os.write(other, b"x")
        b.engine.fences.clear()
        b.runner.fence("p")
        assert await recorder.first(PeerFenced) == PeerFenced("p")
        assert b.names() == ["fence", "readmit", "fence"]
        b.runner.readmit("nobody")
        os.close(watch)
        os.close(other)


async def test_peer_fenced_at_once_is_readmitted_when_it_comes_back(recorder: Recorder) -> None:
    """A peer that never fetched is fenced without delay, but it lives: it must be let in again."""
    async with bench(recorder) as b:
        b.runner.fence("p")
        assert await recorder.first(PeerFenced) == PeerFenced("p")
        b.runner.readmit("p")
        b.runner.fence("p")
        await recorder.first(PeerFenced, 2)
        assert b.engine.calls == [("fence", "p"), ("readmit", "p"), ("fence", "p")]


async def test_fence_that_cannot_be_confirmed_is_never_reported(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        b.engine.fences["p"] = Fence(False, None)
        b.engine.fail("fence", RuntimeError("broken"))
        b.runner.fence("broken")
        await recorder.until(lambda: recorder.kinds == ["engine_call_failed"])
        b.runner.fence("p")
        b.runner.fence("q")
        assert await recorder.first(PeerFenced) == PeerFenced("q")


# --- End --------------------------------------------------------------------------------------


async def test_close_with_work_in_flight_cancels_and_releases_in_order(
    recorder: Recorder,
) -> None:
    async with bench(recorder) as b:
        generation = await b.registered()
        await b.opened(1, generation)
        for op in (1, 2, 3):
            b.runner.post(op, 1, "write", PLAN)
        assert await b.runner.close(5.0)
        assert len(recorder.of(OpEnded)) == 3
        assert b.names()[-3:] == ["close_session", "deregister", "close"]
        assert recorder.of(MemoryReleased) == [MemoryReleased(generation)]
        b.runner.open()  # for the closing at the end of the test


async def test_operation_posted_while_closing_is_not_started(recorder: Recorder) -> None:
    """The core posts what has waited as soon as a cancelled operation makes room for it."""
    async with bench(recorder) as b:
        await b.opened(1, await b.registered())
        b.runner.post(1, 1, "write", PLAN)

        def post_next(event: Event) -> None:
            if isinstance(event, OpEnded) and event.op < 5:
                b.runner.post(event.op + 1, 1, "write", PLAN)

        recorder.on_event = post_next
        assert await b.runner.close(5.0)
        ended = recorder.of(OpEnded)
        assert sorted(one.op for one in ended) == [1, 2, 3, 4, 5]
        assert all(isinstance(one.error, TransferAborted) for one in ended)
        assert [call for call in b.engine.calls if call[0] == "post"] == [("post", 1)]
        b.runner.open()  # for the closing at the end of the test


async def test_close_gives_up_on_a_call_that_hangs(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        generation = await b.registered()
        gate = b.engine.gate("deregister", generation)
        assert not await b.runner.close(0.01)
        gate.open()
        await recorder.first(MemoryReleased)


async def test_idle_runner_does_not_poll_the_engine(recorder: Recorder) -> None:
    async with bench(recorder) as b:
        await b.opened(1, await b.registered())
        assert b.engine.n_progress == 0
        b.runner.post(1, 1, "read", PLAN)
        b.engine.end(1)
        await recorder.first(OpEnded)
        polled = b.engine.n_progress
        for _ in range(20):
            await b.registered()
        assert b.engine.n_progress == polled
