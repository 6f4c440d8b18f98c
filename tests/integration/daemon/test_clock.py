"""The daemon's clock and the loops' timers count the same time."""

from __future__ import annotations

import asyncio

import pytest

from moriiod.daemon.clock import Every, LoopClock


async def test_clock_and_loop_count_from_the_same_moment() -> None:
    loop = asyncio.get_running_loop()
    # The loop's own time may be as old as its present turn.
    assert LoopClock(loop).now() == pytest.approx(loop.time(), abs=0.5)


async def test_call_comes_when_it_is_due_and_not_before() -> None:
    loop = asyncio.get_running_loop()
    clock, fired = LoopClock(loop), loop.create_future()
    due = clock.now() + 0.02
    clock.call_at(due, lambda: fired.set_result(clock.now()))
    # Timers have a resolution of a millisecond.
    assert await fired >= due - 0.0015


async def test_cancelled_call_does_not_come() -> None:
    loop = asyncio.get_running_loop()
    clock, later = LoopClock(loop), loop.create_future()
    clock.call_at(clock.now() + 0.001, lambda: pytest.fail("called")).cancel()
    clock.call_at(clock.now() + 0.005, lambda: later.set_result(None))
    await later


async def test_every_goes_on_until_it_is_stopped() -> None:
    loop = asyncio.get_running_loop()
    calls, third = list[float](), loop.create_future()

    def call(late_s: float) -> None:
        calls.append(late_s)
        if len(calls) == 3:
            every.stop()
            third.set_result(None)

    every = Every(LoopClock(loop), 0.001, call)
    every.start()
    await third
    assert min(calls) >= 0
