"""Engine operations: limits, order, refusals, cancels, and exactly one end for each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core.context import Context
from moriiod.core.effects import CancelOp, CountProblem, PostOp
from moriiod.core.messages import Identity
from moriiod.core.ops import Ops
from moriiod.core.plan import TransferPlan
from moriiod.errors import EngineOpFailed, MoriiodError
from tests.support.lone import SETTINGS, new_id

EPOCH = new_id()


class Use:
    """A session, and how often it is in use."""

    def __init__(self, peer: str = EPOCH) -> None:
        self.session = 1
        self.peer = peer
        self.uses = 0

    def acquire(self) -> None:
        self.uses += 1

    def release(self) -> None:
        self.uses -= 1


class Engine:
    """The table of operations, with the effects and ends it caused."""

    def __init__(self, **limits: float) -> None:
        settings = replace(SETTINGS, **limits)
        self.ctx = Context(Identity("P", 0, 1, 0, 1, new_id()), settings)
        self.ops = Ops(self.ctx)
        self.use = Use()
        self.ends: list[tuple[int, int, str]] = []

    def op_ended(self, op: int, n_bytes: int, error: MoriiodError | None) -> None:
        self.ends.append((op, n_bytes, error.code if error else ""))

    def post(self, n_bytes: int = 10, use: Use | None = None) -> int:
        return self.ops.post(self, use or self.use, "read", TransferPlan((), n_bytes))

    def effects(self) -> list[object]:
        self.ctx.run_deferred()
        return list(self.ctx.take_effects())

    def posted(self) -> list[int]:
        return [effect.op for effect in self.effects() if isinstance(effect, PostOp)]

    def wait(self, seconds: float) -> list[object]:
        self.ctx.now += seconds
        while (action := self.ctx.timers.pop_due(self.ctx.now)) is not None:
            action()
        return self.effects()


def test_operations_over_the_limit_wait_and_follow_in_order():
    engine = Engine(max_ops_in_flight=2)
    ops = [engine.post() for _ in range(4)]
    assert engine.posted() == ops[:2]
    assert (engine.ops.in_flight, len(engine.ops)) == (2, 4)
    engine.ops.ended(ops[1], 10, None)
    assert engine.posted() == [ops[2]]
    engine.ops.ended(ops[0], 10, None)
    assert engine.posted() == [ops[3]]
    assert engine.ends == [(ops[1], 10, ""), (ops[0], 10, "")]


def test_bytes_in_flight_are_limited_and_one_operation_is_always_let_through():
    engine = Engine(max_bytes_in_flight=100)
    huge, small, other = engine.post(1000), engine.post(60), engine.post(60)
    assert engine.posted() == [huge]
    engine.ops.ended(huge, 1000, None)
    assert engine.posted() == [small]
    assert engine.ops.in_flight_bytes == 60
    engine.ops.ended(small, 60, None)
    assert engine.posted() == [other]


def test_end_of_an_operation_is_told_once_with_its_bytes_and_error():
    engine = Engine()
    op = engine.post()
    engine.effects()
    engine.ops.ended(op, 3, EngineOpFailed("no"))
    engine.effects()
    engine.ops.ended(op, 3, EngineOpFailed("no"))
    assert engine.effects() == [
        CountProblem("engine_event_unexpected", f"end of operation {op}"),
    ]
    assert engine.ends == [(op, 3, "ENGINE_OP_FAILED")]
    assert engine.use.uses == 0
    assert (engine.ops.in_flight, engine.ops.in_flight_bytes, len(engine.ops)) == (0, 0, 0)


def test_T1_refused_operation_is_posted_again_and_never_twice_at_once():
    engine = Engine(op_retry_s=0.25)
    op = engine.post()
    assert engine.posted() == [op]
    for pause_s in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, *[8.0] * 44):
        engine.ops.refused(op)
        assert engine.ops.has_no_room(op)
        assert engine.posted() == []
        assert engine.ops.in_flight == 1
        assert engine.wait(pause_s - 0.125) == []
        assert [e.op for e in engine.wait(0.125) if isinstance(e, PostOp)] == [op]
        assert not engine.ops.has_no_room(op)
    engine.ops.ended(op, 10, None)
    engine.effects()
    assert engine.ends == [(op, 10, "")]
    assert not engine.ops.has_no_room(op)


def test_end_or_refusal_of_an_operation_that_is_not_posted_is_counted_and_ignored():
    engine = Engine(max_ops_in_flight=1)
    first, waiting = engine.post(), engine.post()
    engine.effects()
    engine.ops.ended(waiting, 0, None)
    engine.ops.refused(waiting)
    engine.ops.refused(99)
    engine.ops.ended(99, 0, None)
    assert [effect.kind for effect in engine.effects()] == ["engine_event_unexpected"] * 4
    assert engine.ends == []
    engine.ops.refused(first)
    engine.effects()
    engine.ops.ended(first, 0, None)  # refused: it is not with the engine
    assert [effect.kind for effect in engine.effects()] == ["engine_event_unexpected"]


def test_posted_operation_is_cancelled_once_and_ends_when_the_engine_says_so():
    engine = Engine()
    op = engine.post()
    engine.effects()
    engine.ops.cancel(op)
    engine.ops.cancel(op)
    assert engine.effects() == [CancelOp(op)]
    assert engine.ends == []
    engine.ops.ended(op, 4, EngineOpFailed("cancelled"))
    engine.effects()
    assert engine.ends == [(op, 4, "ENGINE_OP_FAILED")]
    engine.ops.cancel(op)
    assert engine.effects() == []


def test_operation_that_waits_ends_at_once_when_it_is_cancelled():
    engine = Engine(max_ops_in_flight=1)
    first, waiting, last = engine.post(), engine.post(), engine.post()
    engine.effects()
    engine.ops.cancel(waiting)
    assert engine.effects() == []
    assert engine.ends == [(waiting, 0, "ABORTED")]
    engine.ops.ended(first, 10, None)
    assert engine.posted() == [last]
    assert engine.ops.in_flight == 1


@pytest.mark.parametrize("waits_s", [0.0, 60.0])
def test_refused_operation_that_is_cancelled_is_never_posted_again(waits_s):
    engine = Engine()
    op = engine.post()
    engine.effects()
    engine.ops.refused(op)
    engine.ops.cancel(op)
    assert engine.effects() == []
    assert engine.wait(waits_s) == []
    assert engine.ends == [(op, 0, "ABORTED")]
    assert (engine.ops.in_flight, engine.use.uses) == (0, 0)


def test_operation_that_is_refused_after_its_cancel_is_over():
    engine = Engine()
    op = engine.post()
    engine.effects()
    engine.ops.cancel(op)
    engine.ops.refused(op)
    assert engine.effects() == [CancelOp(op)]
    assert engine.ends == [(op, 0, "ABORTED")]
    assert len(engine.ctx.timers) == 0


def test_operations_are_counted_by_peer():
    engine = Engine(max_ops_in_flight=1)
    other = Use(new_id())
    engine.post()
    engine.post(use=other)
    engine.post(use=other)
    assert engine.ops.count_with(EPOCH) == 1
    assert engine.ops.count_with(other.peer) == 2
