"""The driver: one step at a time, one timer, and what a bug does."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import requests as req
from moriiod.core.machine import Machine
from moriiod.core.messages import Goodbye
from moriiod.daemon.dispatch import Dispatcher
from moriiod.daemon.driver import Driver
from tests.support.daemon_parts import (
    GENERATION,
    ROUTE,
    Assembly,
    assemble,
    attach,
    counted,
    make_machine,
)


class Reentrant:
    """In front of the dispatcher: raises an event from inside of a dispatch, once."""

    def __init__(self, inner: Dispatcher) -> None:
        self.inner = inner
        self.assembly: Assembly | None = None
        self.depth = 0
        self.deepest = 0

    def dispatch(self, effect: ef.Effect) -> None:
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)
        assembly, self.assembly = self.assembly, None
        if assembly is not None:
            assembly.request(2, req.Ping())
            assert assembly.shells.replies() == [], "the second request was served inside the first"
        self.inner.dispatch(effect)
        self.depth -= 1


def test_event_raised_while_dispatching_waits_its_turn() -> None:
    reentrant: list[Reentrant] = []

    def wrap(inner: Dispatcher) -> Any:
        reentrant.append(Reentrant(inner))
        return reentrant[0]

    assembly = assemble(wrap=wrap)
    reentrant[0].assembly = assembly
    assembly.request(1, req.Ping())
    assert assembly.shells.replies() == [req.Done(), req.Done()]
    assert reentrant[0].deepest == 1


def test_events_before_the_start_are_served_in_order() -> None:
    def speak_early(driver: Driver) -> None:
        for n in (1, 2, 3):
            driver.handle(ev.RequestReceived(ROUTE, n, req.Ping()))

    assembly = assemble(prepare=speak_early)
    sent = [call.sequence for _, call in assembly.shells.calls]
    assert sent == [1, 2, 3]


def test_one_timer_stands_at_the_cores_next_deadline() -> None:
    assembly = assemble()
    assert assembly.clock.armed == []
    attach(assembly)
    assembly.request(3, req.Publish("t1", (b"\0" * 4,), 30.0))
    assert [timer.when for timer in assembly.clock.armed] == [130.0]
    n_set = len(assembly.clock.timers)
    assembly.request(4, req.Ping())
    assert len(assembly.clock.timers) == n_set, "a timer was set anew without need"
    assembly.request(5, req.Publish("t2", (b"\1\0\0\0",), 10.0))
    assert [timer.when for timer in assembly.clock.armed] == [110.0]


def test_timer_that_fires_early_does_not_spin() -> None:
    assembly = assemble()
    attach(assembly)
    assembly.request(3, req.Publish("t1", (b"\0" * 4,), 30.0))
    assembly.clock.fire(early_s=0.0007)
    (event,) = assembly.shells.events()
    assert (event.body.outcome, event.body.reason) == ("failed", "LEASE_EXPIRED")
    assert assembly.clock.armed == []


def test_status_is_answered_without_an_attach_and_without_the_core() -> None:
    assembly = assemble(render_status=lambda: '{"state":"ready"}')
    assembly.request(7, req.GetStatus())
    (reply,) = assembly.shells.replies()
    assert isinstance(reply, req.StatusDocument)
    assert json.loads(reply.json) == {"state": "ready"}
    assert counted(assembly.metrics, "moriiod_requests_total") == {("GetStatus", "accepted"): 1}


def test_status_that_cannot_be_shown_is_refused_and_ends_nothing() -> None:
    def broken() -> str:
        raise ZeroDivisionError

    assembly = assemble(render_status=broken)
    assembly.request(1, req.GetStatus())
    assembly.request(2, req.Ping())
    refused, done = assembly.shells.replies()
    assert isinstance(refused, req.Refused)
    assert refused.code == "INVARIANT_VIOLATION"
    assert done == req.Done()
    assert assembly.broken == []


class Broken(Machine):
    """A core with a bug in how it takes Goodbye."""

    def _handle(self, event: ev.Event) -> None:
        if isinstance(event, ev.PeerMessageReceived):
            raise KeyError("planted")
        super()._handle(event)


def broken_machine() -> Machine:
    fresh = make_machine()
    return Broken(fresh.ctx.identity, fresh.ctx.settings, "shm")


def test_exception_in_the_core_is_told_once_with_its_story(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("moriiod"), "propagate", True)
    assembly = assemble(broken_machine())
    attach(assembly)
    assembly.request(3, req.Publish("t1", (b"\0" * 4,), 30.0))
    for _ in range(2):
        assembly.driver.handle(ev.PeerMessageReceived("a:1", "f" * 32, Goodbye()))
    assert [type(error) for error in assembly.broken] == [KeyError]
    assert assembly.driver.bug is assembly.broken[0]
    (record,) = [r for r in caplog.records if r.levelno == logging.CRITICAL]
    text = record.getMessage()
    assert "RequestReceived(Publish) t1 -> Transition, ReplyToClient" in text
    assert "PeerMessageReceived(Goodbye) a:1 -> -" in text


def test_nothing_but_the_status_is_served_after_a_bug() -> None:
    assembly = assemble(broken_machine())
    attach(assembly)
    assembly.request(3, req.Publish("t1", (b"\0" * 4,), 30.0))
    assembly.driver.handle(ev.PeerMessageReceived("a:1", "f" * 32, Goodbye()))
    assert assembly.clock.armed == []
    n_calls = len(assembly.shells.calls)
    assembly.request(4, req.Ping())
    assembly.driver.handle(ev.WorkerDied(GENERATION))
    assert len(assembly.shells.calls) == n_calls
    assembly.request(5, req.GetStatus())
    assert assembly.shells.replies()[-1] == req.StatusDocument("{}")


def test_exception_while_an_order_is_carried_out_is_a_bug_too() -> None:
    class Failing:
        def dispatch(self, effect: ef.Effect) -> None:
            raise ValueError("planted")

    assembly = assemble(wrap=lambda _inner: Failing())
    assembly.request(1, req.Ping())
    assert [type(error) for error in assembly.broken] == [ValueError]


def test_bug_of_a_shell_before_the_start_is_told_at_the_start() -> None:
    first, second = RuntimeError("planted"), RuntimeError("another")

    def break_early(driver: Driver) -> None:
        driver.hooks.on_bug(first)

    assembly = assemble(prepare=break_early)
    assert assembly.broken == [first]
    assembly.driver.hooks.on_bug(second)
    assert assembly.broken == [first]


def test_retired_driver_takes_only_ends_of_operations() -> None:
    assembly = assemble()
    attach(assembly)
    assembly.driver.retire()
    n_calls = len(assembly.shells.calls)
    assembly.request(3, req.Ping())
    assembly.driver.handle(ev.MemoryReleased(GENERATION))
    assert len(assembly.shells.calls) == n_calls
    assembly.driver.handle(ev.OpEnded(99, 0))
    problems = counted(assembly.metrics, "moriiod_protocol_problems_total")
    assert problems == {("engine_event_unexpected",): 1}


def test_retired_driver_lets_no_timer_decide_anything() -> None:
    """The engine is being closed: a retry or a timeout must not post anything to it."""
    assembly = assemble()
    attach(assembly)
    assembly.request(3, req.Publish("t1", (b"\0" * 4,), 30.0))
    n_steps = len(assembly.driver.story)
    assembly.driver.retire()
    assembly.clock.fire()
    assert len(assembly.driver.story) == n_steps
    assembly.driver.handle(ev.OpEnded(99, 0))
    assert len(assembly.driver.story) == n_steps + 1


def test_stopped_driver_takes_nothing() -> None:
    assembly = assemble()
    attach(assembly)
    assembly.request(3, req.Publish("t1", (b"\0" * 4,), 30.0))
    assembly.driver.stop()
    assembly.driver.stop()
    assert assembly.clock.armed == []
    n_calls = len(assembly.shells.calls)
    assembly.request(4, req.GetStatus())
    assert len(assembly.shells.calls) == n_calls


def test_story_keeps_the_last_steps_and_no_bodies() -> None:
    assembly = assemble()
    for sequence in range(200):
        assembly.request(sequence, req.Ping())
    story = assembly.driver.story
    assert len(story) == 64
    assert story[-1].event == "RequestReceived(Ping)"
    assert story[-1].effects == ("ReplyToClient",)
