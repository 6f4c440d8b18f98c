"""Named timers: the earliest first, moved by setting again, cancelled by name."""

from __future__ import annotations

from moriiod.core.timers import Timers


def fire_until(timers: Timers, now: float) -> int:
    fired = 0
    while (action := timers.pop_due(now)) is not None:
        action()
        fired += 1
    return fired


def test_due_timers_fire_in_order_of_their_times_then_of_being_set():
    timers, fired = Timers(), []
    for name, when in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        timers.set(name, when, lambda name=name: fired.append(name))
    assert timers.next_deadline() == 1.0
    fire_until(timers, 2.0)
    assert fired == ["a", "b", "c"]
    assert timers.next_deadline() is None


def test_timer_is_due_at_its_time_and_not_before():
    timers = Timers()
    timers.set("a", 1.0, lambda: None)
    assert timers.pop_due(0.999999) is None
    assert timers.pop_due(1.0) is not None
    assert timers.pop_due(1.0) is None


def test_setting_a_key_again_moves_it():
    timers, fired = Timers(), []
    timers.set("a", 1.0, lambda: fired.append("early"))
    timers.set("a", 3.0, lambda: fired.append("late"))
    assert len(timers) == 1
    assert timers.next_deadline() == 3.0
    assert fire_until(timers, 2.0) == 0
    fire_until(timers, 3.0)
    assert fired == ["late"]


def test_cancelled_timer_never_fires_and_unknown_keys_are_ignored():
    timers = Timers()
    timers.set("a", 1.0, lambda: None)
    assert "a" in timers
    timers.cancel("a")
    timers.cancel("never set")
    assert "a" not in timers
    assert timers.next_deadline() is None
    assert fire_until(timers, 9.0) == 0


def test_action_can_cancel_the_next_timer_that_is_due():
    timers, fired = Timers(), []
    timers.set("a", 1.0, lambda: timers.cancel("b"))
    timers.set("b", 1.0, lambda: fired.append("b"))
    assert fire_until(timers, 1.0) == 1
    assert fired == []


def test_timer_that_is_moved_thousands_of_times_takes_no_more_room():
    timers = Timers()
    for i in range(2_000):
        timers.set("a", float(i), lambda: None)
        timers.set("b", float(i), lambda: None)
    assert len(timers._heap) <= 2 * len(timers) + 64
    assert timers.next_deadline() == 1_999.0
    assert fire_until(timers, 2_000.0) == 2
