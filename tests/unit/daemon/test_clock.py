"""Something that is to happen again and again."""

from __future__ import annotations

import pytest

from moriiod.daemon.clock import Every
from tests.support.clock import FakeClock


def test_every_call_says_how_late_it_is() -> None:
    clock, late = FakeClock(), list[float]()
    every = Every(clock, 2.0, late.append)
    every.start()
    clock.fire()
    clock.time = clock.armed[0].when + 0.3
    clock.fire()
    assert late == pytest.approx([0.0, 0.3])
    assert [timer.when for timer in clock.armed] == pytest.approx([clock.time + 2.0])


def test_call_that_comes_early_is_not_late() -> None:
    clock, late = FakeClock(), list[float]()
    every = Every(clock, 2.0, late.append)
    every.start()
    clock.fire(early_s=0.5)
    assert late == [0.0]


def test_nothing_is_called_after_the_stop() -> None:
    clock = FakeClock()
    every = Every(clock, 2.0, lambda _late: pytest.fail("called"))
    every.stop()
    every.start()
    every.stop()
    every.stop()
    assert clock.armed == []
