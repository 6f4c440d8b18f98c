"""The faulty engine misbehaves as told and no further: it still keeps the contract."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from moriiod.engines.base import Completion
from moriiod.engines.faulty import Fault, Faults, FaultyEngine
from moriiod.errors import EngineOpFailed, EngineQueueFull, RegistrationFailed, TransferAborted
from tests.support.engines import HOSTS, Pair, connected, new_id, simple_plan

PLAN = simple_plan([0], [0], 4096)


def faulty(pair: Pair) -> FaultyEngine:
    return cast("FaultyEngine", pair.engine)


def rounds(pair: Pair, n: int = 20) -> list[Completion]:
    """Call progress so often that anything that can end has ended."""
    return [completion for _ in range(n) for completion in pair.engine.progress()]


def has_copied(pair: Pair) -> bool:
    return bool((pair.local[0].bytes == pair.remote[0].bytes).all())


def post(pair: Pair, fault: Fault, op: int = 1) -> None:
    faulty(pair).script(fault)
    pair.engine.post(op, pair.session, "read", PLAN)


def test_failed_operation_copies_nothing(tmp_path: Path) -> None:
    with connected(HOSTS["faulty"], tmp_path, [4096], [4096]) as pair:
        post(pair, Fault.FAIL)
        (completion,) = rounds(pair)
        assert isinstance(completion.error, EngineOpFailed)
        assert not has_copied(pair)


@pytest.mark.parametrize("k", [1, 50])
def test_T1_full_queue_k_times_then_success(tmp_path: Path, k: int) -> None:
    with connected(HOSTS["faulty"], tmp_path, [4096], [4096]) as pair:
        faulty(pair).script(*[Fault.FULL] * k, Fault.FAIL_POST)
        for _ in range(k):
            with pytest.raises(EngineQueueFull):
                pair.engine.post(1, pair.session, "read", PLAN)
        with pytest.raises(EngineOpFailed):
            pair.engine.post(2, pair.session, "read", PLAN)
        assert pair.engine.in_flight == 0
        pair.engine.post(1, pair.session, "read", PLAN)
        assert rounds(pair) == [Completion(1, 4096, None)]


@pytest.mark.parametrize(("fault", "copies"), [(Fault.LOSE, True), (Fault.STALL, False)])
def test_T3_operation_that_never_ends_ends_by_cancel(
    tmp_path: Path, fault: Fault, copies: bool
) -> None:
    with connected(HOSTS["faulty"], tmp_path, [4096], [4096]) as pair:
        post(pair, fault)
        post(pair, Fault.NONE, op=2)
        pair.initiator.run()
        assert rounds(pair) == []
        assert pair.engine.in_flight == 1
        if not copies:
            pair.local[0].fill(9)
            assert rounds(pair) == []
            assert not has_copied(pair)
        pair.engine.cancel(1)
        (completion,) = rounds(pair)
        assert isinstance(completion.error, TransferAborted)
        assert pair.engine.in_flight == 0


def test_held_operation_is_told_when_the_gate_opens_and_not_by_cancel(tmp_path: Path) -> None:
    with connected(HOSTS["faulty"], tmp_path, [4096], [4096]) as pair:
        post(pair, Fault.HOLD)
        pair.engine.cancel(1)
        assert rounds(pair) == []
        assert has_copied(pair)
        faulty(pair).open_gate()
        assert rounds(pair) == [Completion(1, 4096, None)]


def test_late_operation_lands_after_its_cancel(tmp_path: Path) -> None:
    with connected(HOSTS["faulty"], tmp_path, [4096], [4096]) as pair:
        post(pair, Fault.LATE)
        pair.engine.cancel(1)
        assert rounds(pair) == []
        assert not has_copied(pair)
        assert pair.engine.in_flight == 1
        faulty(pair).open_gate()
        assert rounds(pair) == [Completion(1, 4096, None)]
        assert has_copied(pair)
        faulty(pair).close_gate()
        post(pair, Fault.LATE)
        assert rounds(pair) == []
        faulty(pair).open_gate()
        pair.initiator.run()


def test_corrupted_byte_is_reported_as_success(tmp_path: Path) -> None:
    with connected(HOSTS["faulty"], tmp_path, [4096], [4096]) as pair:
        post(pair, Fault.CORRUPT)
        assert rounds(pair) == [Completion(1, 4096, None)]
        differs = pair.local[0].bytes != pair.remote[0].bytes
        assert int(differs.sum()) == 1


@pytest.mark.parametrize("number", [22, 12])
def test_M4_registration_fails_with_size_and_errno(tmp_path: Path, number: int) -> None:
    with connected(HOSTS["faulty"], tmp_path, [8192], [4096]) as pair:
        faulty(pair).fail_register(number)
        with pytest.raises(RegistrationFailed) as caught:
            pair.initiator.register(*pair.local)
        assert caught.value.fields == {"n_bytes": 8192, "errno": number}
        pair.initiator.register(*pair.local)


def test_chances_are_drawn_by_seed_and_every_operation_ends(tmp_path: Path) -> None:
    faults = Faults(seed=5, fail=0.2, lose=0.1, stall=0.1, hold=0.2, late=0.2, rounds=20, reorder=1)
    stories = []
    for _ in range(2):
        with connected(HOSTS["shm"], tmp_path, [256 * 64], [256 * 64]) as pair:
            engine = FaultyEngine(pair.engine, faults)
            for op in range(64):
                engine.post(op, pair.session, "read", simple_plan([op * 256], [op * 256], 256))
            story = []
            for _ in range(60):
                story += [(c.op, c.error is None) for c in engine.progress()]
            left = [op for op in range(64) if op not in {op for op, _ in story}]
            assert left, "some are lost or stalled"
            for op in left:
                engine.cancel(op)
            story += [(c.op, c.error is None) for c in engine.progress()]
            assert engine.in_flight == 0
            assert sorted(op for op, _ in story) == list(range(64))
            for op, copied in story:
                part = slice(op * 256, op * 256 + 256)
                if copied:
                    assert (pair.local[0].bytes[part] == pair.remote[0].bytes[part]).all()
            stories.append(story)
    assert stories[0] == stories[1]
    assert [op for op, _ in stories[0]] != sorted(op for op, _ in stories[0])


def test_every_registration_can_be_made_to_fail(tmp_path: Path) -> None:
    with connected(HOSTS["shm"], tmp_path, [4096], [4096]) as pair:
        engine = FaultyEngine(pair.engine, Faults(register_errno=12))
        with pytest.raises(RegistrationFailed):
            engine.register(new_id(), [pair.local[0].handle])
