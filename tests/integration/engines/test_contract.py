"""The contract every engine keeps: registration, sessions, exact copies, checks, cancel, fence.

Runs against each entry of ``tests.support.engines.HOSTS``. Whole memories are compared with what
a plain loop makes of them, so bytes around, between and behind the blocks are canaries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moriiod.core.plan import LayerSpans, TransferPlan
from moriiod.engines.base import Completion
from moriiod.errors import (
    InvalidArgument,
    LengthMismatch,
    MoriiodError,
    OutOfRange,
    RegistrationFailed,
    SessionFailed,
)
from tests.integration.engines.conftest import MakeHost
from tests.support.engines import (
    Pair,
    WorkerMemory,
    connected,
    copied,
    layout_of,
    new_id,
    plan_of,
    scattered_plan,
    simple_plan,
    spans,
)

KIB, MIB = 1 << 10, 1 << 20
DIRECTIONS = ["read", "write"]


def expected(pair: Pair, direction: Any, *plans: TransferPlan) -> list[list[bytes]]:
    """What both memories must hold after these plans."""
    reading = direction == "read"
    local = [m.bytes.copy() for m in pair.local]
    remote = [m.bytes.copy() for m in pair.remote]
    for plan in plans:
        source, target = (remote, local) if reading else (local, remote)
        copied(plan, source, target, reading)
    return [[array.tobytes() for array in side] for side in (local, remote)]


def contents(pair: Pair) -> list[list[bytes]]:
    return [[m.bytes.tobytes() for m in side] for side in (pair.local, pair.remote)]


def check(pair: Pair, direction: Any, plan: TransferPlan) -> None:
    """Run one plan and compare every byte of both sides."""
    want = expected(pair, direction, plan)
    completion = pair.initiator.transfer(pair.session, direction, plan)
    assert completion == Completion(1, plan.n_bytes, None)
    assert contents(pair) == want
    assert pair.engine.in_flight == 0


# --- Exact copies -------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("n_blocks", [1, 2, 7, 8, 500, 16384])
def test_scattered_blocks_arrive_and_nothing_else_changes(
    make_host: MakeHost, tmp_path: Path, direction: str, n_blocks: int
) -> None:
    block = 256
    size = 2 * n_blocks * block
    with connected(make_host, tmp_path, [size], [size]) as pair:
        check(
            pair, direction, scattered_plan(np.random.default_rng(1), n_blocks, block, 2 * n_blocks)
        )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("block", [1, 63, 4096, 16 * KIB, 65536, 1 * MIB])
def test_full_permutation_of_blocks_arrives(
    make_host: MakeHost, tmp_path: Path, direction: str, block: int
) -> None:
    n = 64
    dice = np.random.default_rng(2)
    plan = simple_plan(np.arange(n) * block, dice.permutation(n) * block, block)
    with connected(make_host, tmp_path, [n * block], [n * block]) as pair:
        check(pair, direction, plan)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_spans_of_all_sizes_and_alignments_arrive(
    make_host: MakeHost, tmp_path: Path, direction: str
) -> None:
    dice = np.random.default_rng(3)
    sizes = dice.integers(1, 9000, 300)
    gaps = dice.integers(0, 100, (2, 300))
    local = np.cumsum(sizes + gaps[0]) - sizes
    order = dice.permutation(300)
    remote = np.empty(300, dtype=np.int64)
    remote[order] = np.cumsum(sizes[order] + gaps[1][order]) - sizes[order]
    with connected(make_host, tmp_path, [3 * MIB], [3 * MIB]) as pair:
        check(pair, direction, simple_plan(local, remote, sizes))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_merged_blocks_of_one_unit_arrive(
    make_host: MakeHost, tmp_path: Path, direction: str
) -> None:
    """Runs of 1 to 6 blocks, as a planner merges them."""
    dice = np.random.default_rng(4)
    runs = dice.integers(1, 7, 200) * 512
    local = np.cumsum(runs) - runs
    order = dice.permutation(200)
    remote = np.empty(200, dtype=np.int64)
    remote[order] = np.cumsum(runs[order]) - runs[order]
    with connected(make_host, tmp_path, [MIB], [MIB]) as pair:
        check(pair, direction, simple_plan(local, remote, runs))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_spans_larger_than_a_slice_arrive(
    make_host: MakeHost, tmp_path: Path, direction: str
) -> None:
    size = 9 * MIB + 77
    plan = simple_plan([5, size + 9], [size + 100, 11], [size, 3])
    with connected(make_host, tmp_path, [2 * size], [2 * size + 200]) as pair:
        check(pair, direction, plan)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_G5_padding_between_blocks_keeps_its_bytes_on_both_sides(
    make_host: MakeHost, tmp_path: Path, direction: str
) -> None:
    payload, stride, blocks = 4096, 4160, [0, 28299, 28300, 28734, 28735, 28738, 28742]
    size = (28743 - 1) * stride + payload
    assert size == 119_570_816
    offsets = np.asarray(blocks) * stride
    assert int(offsets[5]) == 119_550_080
    with connected(make_host, tmp_path, [size], [size], fill=False) as pair:
        for memory in (*pair.local, *pair.remote):
            dice = np.random.default_rng(memory.fd)
            for offset in offsets:
                end = min(offset + stride, size)
                memory.bytes[offset:end] = dice.integers(1, 256, end - offset, dtype=np.uint8)
        check(pair, direction, simple_plan(offsets, offsets[::-1].copy(), payload))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_layers_of_many_regions_arrive(make_host: MakeHost, tmp_path: Path, direction: str) -> None:
    n = 150  # more than one packet of the fd socket can carry
    shared = spans([0, 4096, 12288], [8192, 0, 4096], 1024)
    layers = [LayerSpans(shared, i, 64, n - 1 - i, 128) for i in range(n)]
    with connected(make_host, tmp_path, [20 * KIB] * n, [20 * KIB] * n) as pair:
        check(pair, direction, plan_of(*layers))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_layers_that_interleave_in_one_region_arrive(
    make_host: MakeHost, tmp_path: Path, direction: str
) -> None:
    """One allocation for all layers, block by block: extents overlap, bytes do not."""
    shared = spans(np.arange(16) * 4096, np.arange(16)[::-1].copy() * 4096, 1024)
    layers = [LayerSpans(shared, 0, 1024 * i, 0, 1024 * (3 - i)) for i in range(4)]
    with connected(make_host, tmp_path, [64 * KIB], [64 * KIB]) as pair:
        check(pair, direction, plan_of(*layers))


def test_offsets_above_4_gib_arrive(make_host: MakeHost, tmp_path: Path) -> None:
    size = (9 << 30) + 4096
    near, far = [(5 << 30) + 8, 16], [0, (9 << 30) - 4096]
    with connected(make_host, tmp_path, [size], [size], fill=False) as pair:
        for start in far:
            pair.remote[0].bytes[start : start + 4096] = start % 251 + 1
        plan = plan_of(LayerSpans(spans(near, far, 4096), 0, 0, 0, 0))
        assert pair.initiator.transfer(pair.session, "read", plan).error is None
        for to, start in zip(near, far, strict=True):
            assert (pair.local[0].bytes[to : to + 4096] == start % 251 + 1).all()
            assert not pair.local[0].bytes[to - 8 : to].any()
            assert not pair.local[0].bytes[to + 4096 : to + 4104].any()


def test_plan_without_bytes_ends_at_once(make_host: MakeHost, tmp_path: Path) -> None:
    with connected(make_host, tmp_path, [4096], [4096]) as pair:
        assert pair.initiator.transfer(pair.session, "read", plan_of()).error is None
        empty = plan_of(LayerSpans(spans([], [], []), 0, 0, 0, 0))
        assert pair.initiator.transfer(pair.session, "write", empty).n_bytes == 0


# --- Several at once ----------------------------------------------------------------------------


def test_concurrent_operations_all_end_exactly_once(make_host: MakeHost, tmp_path: Path) -> None:
    n, block = 64, 4096
    with connected(make_host, tmp_path, [n * 8 * block], [n * 8 * block]) as pair:
        plans = []
        dice = np.random.default_rng(5)
        sources = dice.permutation(8 * n)
        for i in range(n):
            local = (np.arange(8) + 8 * i) * block
            plans.append(simple_plan(local, sources[8 * i : 8 * i + 8] * block, block))
        want = expected(pair, "read", *plans)
        for op, plan in enumerate(plans, start=1):
            pair.engine.post(op, pair.session, "read", plan)
        assert pair.engine.in_flight == n
        ended = pair.initiator.run(n)
        assert sorted(c.op for c in ended) == list(range(1, n + 1))
        assert all(c.error is None and c.n_bytes == 8 * block for c in ended)
        assert contents(pair) == want
        assert pair.engine.progress() == []


def test_large_operation_does_not_hold_up_a_small_one(make_host: MakeHost, tmp_path: Path) -> None:
    with connected(make_host, tmp_path, [65 * MIB], [65 * MIB], fill=False) as pair:
        pair.engine.post(1, pair.session, "read", simple_plan([0], [0], 64 * MIB))
        pair.engine.post(2, pair.session, "read", simple_plan([64 * MIB], [0], 4096))
        assert [c.op for c in pair.initiator.run(2)] == [2, 1]


def test_two_sessions_with_the_same_peer_work_side_by_side(
    make_host: MakeHost, tmp_path: Path
) -> None:
    with connected(make_host, tmp_path, [4096], [4096]) as pair:
        peer, near = pair.target.epoch, pair.local_layout.layout.generation
        other = pair.engine.open_session(peer, near, pair.remote_layout)
        assert pair.initiator.transfer(other, "read", simple_plan([0], [0], 4096)).error is None
        pair.engine.close_session(other)
        check(pair, "write", simple_plan([0], [64], 1024))


# --- Cancel -------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_cancelled_operation_writes_nothing_after_its_end(
    make_host: MakeHost, tmp_path: Path, direction: Any
) -> None:
    size = 64 * MIB
    with connected(make_host, tmp_path, [size], [size], fill=False) as pair:
        source, target = pair.remote[0], pair.local[0]
        if direction == "write":
            source, target = target, source
        source.bytes[:] = 1
        pair.engine.post(1, pair.session, direction, simple_plan([0], [0], size))
        assert pair.engine.progress() == []
        pair.engine.cancel(1)
        (completion,) = pair.initiator.run()
        assert completion.op == 1
        assert isinstance(completion.error, MoriiodError)
        assert pair.engine.in_flight == 0
        target.bytes[:] = 7
        for _ in range(50):
            assert pair.engine.progress() == []
        assert (target.bytes == 7).all()


def test_cancel_before_the_first_step_copies_nothing(make_host: MakeHost, tmp_path: Path) -> None:
    with connected(make_host, tmp_path, [4096], [4096]) as pair:
        want = contents(pair)
        pair.engine.post(1, pair.session, "read", simple_plan([0], [0], 4096))
        pair.engine.cancel(1)
        pair.engine.cancel(1)
        (completion,) = pair.initiator.run()
        assert isinstance(completion.error, MoriiodError)
        assert contents(pair) == want


def test_cancel_of_unknown_or_ended_operations_is_ignored(
    make_host: MakeHost, tmp_path: Path
) -> None:
    with connected(make_host, tmp_path, [4096], [4096]) as pair:
        pair.engine.cancel(99)
        check(pair, "read", simple_plan([0], [0], 4096))
        pair.engine.cancel(1)
        assert pair.engine.progress() == []


# --- Checks before anything is touched ------------------------------------------------------------


BIG = 1 << 62
REFUSED_PLANS = {
    "local_end": (simple_plan([4096 - 63], [0], 64), OutOfRange),
    "remote_end": (simple_plan([0], [8192 - 63], 64), OutOfRange),
    "second_span_leaves": (simple_plan([0, 64], [0, 8192], 64), OutOfRange),
    "negative_local": (simple_plan([-1], [0], 64), OutOfRange),
    "negative_remote": (simple_plan([0], [-64], 64), OutOfRange),
    "offset_at_2_62": (simple_plan([BIG], [0], 64), OutOfRange),
    "offset_at_2_63": (simple_plan([(1 << 63) - 1], [0], 64), OutOfRange),
    "size_at_2_63": (simple_plan([0], [0], [(1 << 63) - 1]), OutOfRange),
    "sum_wraps_to_64": (simple_plan([(1 << 63) - 64], [0], [(1 << 63) - 1]), OutOfRange),
    "sizes_wrap_to_0": (simple_plan([0, 0, 0, 0], [0, 0, 0, 0], [BIG] * 4), OutOfRange),
    "base_wraps": (plan_of(LayerSpans(spans([0], [0], 64), 0, (1 << 64) - 32, 0, 0)), OutOfRange),
    "base_negative": (plan_of(LayerSpans(spans([64], [0], 64), 0, -64, 0, 0)), OutOfRange),
    "region_unknown": (plan_of(LayerSpans(spans([0], [0], 64), 0, 0, 1, 0)), OutOfRange),
    "region_negative": (plan_of(LayerSpans(spans([0], [0], 64), -1, 0, 0, 0)), OutOfRange),
    "zero_size": (simple_plan([0, 64], [0, 64], [64, 0]), InvalidArgument),
    "negative_size": (simple_plan([0], [0], [-64]), InvalidArgument),
    "too_few_remote": (simple_plan([0, 64], [0], [64, 64]), LengthMismatch),
    "too_few_sizes": (simple_plan([0, 64], [0, 64], [64]), LengthMismatch),
    "total_too_small": (TransferPlan(simple_plan([0], [0], 64).layers, 63), InvalidArgument),
    "unsigned_array": (
        simple_plan(np.zeros(1, dtype=np.int64), [0], 64),  # replaced in the test
        InvalidArgument,
    ),
}


@pytest.mark.parametrize("name", REFUSED_PLANS)
def test_bad_plan_is_refused_and_nothing_is_touched(
    make_host: MakeHost, tmp_path: Path, name: str
) -> None:
    plan, error = REFUSED_PLANS[name]
    if name == "unsigned_array":
        bad = spans([0], [0], 64)
        object.__setattr__(bad, "local", np.asarray([(1 << 64) - 32], dtype=np.uint64))
        plan = plan_of(LayerSpans(bad, 0, 0, 0, 0))
    with connected(make_host, tmp_path, [4096], [8192]) as pair:
        want = contents(pair)
        for direction in DIRECTIONS:
            with pytest.raises(error) as caught:
                pair.engine.post(1, pair.session, direction, plan)
            assert caught.value.fields
        assert pair.engine.in_flight == 0
        assert pair.engine.progress() == []
        assert contents(pair) == want
        check(pair, "read", simple_plan([0], [0], 64))


def test_G4_refusal_names_the_span_and_the_limit(make_host: MakeHost, tmp_path: Path) -> None:
    """Rank 1 has 111,488 blocks, rank 0 has more: the ids of one do not fit the other."""
    block, n_blocks = 64, 111_488
    with connected(make_host, tmp_path, [MIB], [n_blocks * block], fill=False) as pair:
        last = simple_plan([0], [(n_blocks - 1) * block], block)
        assert pair.initiator.transfer(pair.session, "read", last).error is None
        for block_id in (n_blocks, 111_500, 111_679, 1 << 31):
            plan = simple_plan([0], [block_id * block], block)
            with pytest.raises(OutOfRange) as caught:
                pair.engine.post(1, pair.session, "read", plan)
            assert caught.value.fields["offset"] == block_id * block
            assert caught.value.fields["limit"] == n_blocks * block


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_overlapping_destinations_are_refused_and_sources_may_overlap(
    make_host: MakeHost, tmp_path: Path, direction: Any
) -> None:
    twice = [0, 4096, 4095]
    apart = [0, 4096, 8192]
    to, of = (twice, apart) if direction == "read" else (apart, twice)
    to_ok, of_ok = (apart, twice) if direction == "read" else (twice, apart)
    with connected(make_host, tmp_path, [16 * KIB], [16 * KIB]) as pair:
        with pytest.raises(InvalidArgument, match="same bytes"):
            pair.engine.post(1, pair.session, direction, simple_plan(to, of, 64))
        check(pair, direction, simple_plan(to_ok, of_ok, 64))


def test_layers_that_write_the_same_bytes_are_refused(make_host: MakeHost, tmp_path: Path) -> None:
    shared = spans([0, 4096], [0, 4096], 64)
    plan = plan_of(LayerSpans(shared, 0, 0, 0, 0), LayerSpans(shared, 0, 4096 - 63, 0, 8192))
    with (
        connected(make_host, tmp_path, [16 * KIB], [16 * KIB]) as pair,
        pytest.raises(InvalidArgument, match="same bytes"),
    ):
        pair.engine.post(1, pair.session, "read", plan)


def test_unknown_direction_is_refused(make_host: MakeHost, tmp_path: Path) -> None:
    with (
        connected(make_host, tmp_path, [4096], [4096]) as pair,
        pytest.raises(InvalidArgument),
    ):
        pair.engine.post(1, pair.session, "sideways", simple_plan([0], [0], 64))  # type: ignore[arg-type]


# --- Registration and sessions ------------------------------------------------------------------


def test_register_gives_one_descriptor_for_each_region(make_host: MakeHost, tmp_path: Path) -> None:
    with connected(make_host, tmp_path, [4096, 8192, 1], [4096]) as pair:
        descriptors = pair.local_layout.descriptors
        assert len(descriptors) == len(set(descriptors)) == 3


def test_M1_same_memory_registered_twice_survives_one_deregistration(
    make_host: MakeHost, tmp_path: Path
) -> None:
    with connected(make_host, tmp_path, [MIB], [MIB]) as pair:
        again = pair.initiator.register(*pair.local)
        session = pair.engine.open_session(
            pair.target.epoch, again.layout.generation, pair.remote_layout
        )
        pair.engine.close_session(session)
        pair.engine.deregister(again.layout.generation)
        check(pair, "read", simple_plan([0], [4096], 4096))
        with pytest.raises(SessionFailed):
            pair.engine.open_session(pair.target.epoch, again.layout.generation, pair.remote_layout)


@pytest.mark.parametrize("n_bytes", [0, -1, 1 << 63, (1 << 62) + 1])
def test_M3_impossible_sizes_are_refused_and_earlier_memory_works_on(
    make_host: MakeHost, tmp_path: Path, n_bytes: int
) -> None:
    with connected(make_host, tmp_path, [4096], [4096]) as pair:
        memory = pair.local[0]
        bad = type(memory.handle)("memfd", memory.fd, n_bytes)
        with pytest.raises(InvalidArgument):
            pair.engine.register(new_id(), [bad])
        check(pair, "read", simple_plan([0], [0], 4096))


def test_region_smaller_than_announced_is_refused_with_size_and_errno(
    make_host: MakeHost, tmp_path: Path
) -> None:
    with connected(make_host, tmp_path, [4096], [4096]) as pair:
        memory = pair.local[0]
        bad = type(memory.handle)("memfd", memory.fd, 4097)
        with pytest.raises(RegistrationFailed) as caught:
            pair.engine.register(new_id(), [memory.handle, bad])
        assert caught.value.fields["n_bytes"] == 4097
        assert caught.value.fields["errno"]


def test_M8_offsets_travel_and_a_new_allocation_is_a_new_region(
    make_host: MakeHost, tmp_path: Path
) -> None:
    half = 524_288
    with connected(make_host, tmp_path, [2 * half], [2 * half]) as pair:
        first = LayerSpans(spans([0], [0], 4096), 0, 0, 0, 0)
        second = LayerSpans(spans([0], [0], 4096), 0, half, 0, half)
        check(pair, "read", plan_of(first, second))
        fresh = WorkerMemory(4 * half).fill(77)
        try:
            layout = pair.target.register(fresh)
            near = pair.local_layout.layout.generation
            session = pair.engine.open_session(pair.target.epoch, near, layout)
            at = 3 * half  # beyond the end of the old allocation
            plan = simple_plan([0], [at], 4096)
            assert pair.initiator.transfer(session, "read", plan).error is None
            assert (pair.local[0].bytes[:4096] == fresh.bytes[at : at + 4096]).all()
            with pytest.raises(OutOfRange):
                pair.engine.post(1, pair.session, "read", plan)
            pair.engine.close_session(session)
            pair.target.engine.deregister(layout.layout.generation)
        finally:
            fresh.close()


def test_session_outlives_the_registration_of_the_peer(make_host: MakeHost, tmp_path: Path) -> None:
    """The core closes it then; until it does, nothing may crash or touch other memory."""
    with connected(make_host, tmp_path, [4096], [4096]) as pair:
        pair.target.engine.deregister(pair.remote_layout.layout.generation)
        completion = pair.initiator.transfer(pair.session, "read", simple_plan([0], [0], 64))
        assert completion.error is None or isinstance(completion.error, MoriiodError)
        with pytest.raises(SessionFailed):
            pair.engine.open_session(
                pair.target.epoch, pair.local_layout.layout.generation, pair.remote_layout
            )


def test_session_with_an_unregistered_generation_is_refused(
    make_host: MakeHost, tmp_path: Path
) -> None:
    with (
        connected(make_host, tmp_path, [4096], [4096]) as pair,
        pytest.raises(SessionFailed),
    ):
        pair.engine.open_session(pair.target.epoch, new_id(), pair.remote_layout)


def test_session_within_one_daemon_works(make_host: MakeHost, tmp_path: Path) -> None:
    host = make_host(tmp_path)
    memories = [WorkerMemory(8192).fill(1), WorkerMemory(8192).fill(2)]
    try:
        near, far = (host.register(memory) for memory in memories)
        session = host.engine.open_session(host.epoch, near.layout.generation, far)
        plan = simple_plan([0], [4096], 4096)
        assert host.transfer(session, "read", plan).error is None
        assert (memories[0].bytes[:4096] == memories[1].bytes[4096:]).all()
        host.engine.close_session(session)
    finally:
        host.close()
        for memory in memories:
            memory.close()


def test_descriptors_that_disagree_with_the_layout_are_refused(
    make_host: MakeHost, tmp_path: Path
) -> None:
    with connected(make_host, tmp_path, [4096], [4096]) as pair:
        good = pair.remote_layout
        near = pair.local_layout.layout.generation
        larger = layout_of(good.layout.generation, [8192])
        for layout, descriptors in [
            (larger, good.descriptors),
            (good.layout, ()),
            (good.layout, good.descriptors * 2),
        ]:
            with pytest.raises(SessionFailed):
                pair.engine.open_session(
                    pair.target.epoch, near, type(good)(layout, good.engine, descriptors)
                )


@pytest.mark.parametrize("junk", [b"", b"\x80", b"\x00" * 100, b"\xff" * 4097, b"\xc1"])
def test_junk_descriptor_is_a_typed_error(make_host: MakeHost, tmp_path: Path, junk: bytes) -> None:
    with connected(make_host, tmp_path, [4096], [4096]) as pair:
        good, near = pair.remote_layout, pair.local_layout.layout.generation
        bad = type(good)(good.layout, good.engine, (junk,))
        with pytest.raises(MoriiodError):
            pair.engine.open_session(pair.target.epoch, near, bad)


def test_deregister_of_unknown_generation_is_ignored(make_host: MakeHost, tmp_path: Path) -> None:
    with connected(make_host, tmp_path, [4096], [4096]) as pair:
        pair.engine.deregister(new_id())
        check(pair, "read", simple_plan([0], [0], 64))


# --- Fence --------------------------------------------------------------------------------------


def test_fence_of_a_peer_that_reached_nothing_is_confirmed_and_keeps_it_out(
    make_host: MakeHost, tmp_path: Path
) -> None:
    with connected(make_host, tmp_path, [4096], [4096]) as pair:
        # Nobody but the initiator fetched, so its target can be fenced at once.
        assert pair.engine.fence(pair.target.epoch).confirmed
        with pytest.raises(SessionFailed):
            pair.target.engine.open_session(
                pair.initiator.epoch, pair.remote_layout.layout.generation, pair.local_layout
            )
        pair.engine.readmit(pair.target.epoch)
        session = pair.target.engine.open_session(
            pair.initiator.epoch, pair.remote_layout.layout.generation, pair.local_layout
        )
        assert not pair.engine.fence(pair.target.epoch).confirmed
        pair.target.engine.close_session(session)


def test_fence_of_unknown_epochs_and_forget_are_harmless(
    make_host: MakeHost, tmp_path: Path
) -> None:
    with connected(make_host, tmp_path, [4096], [4096]) as pair:
        assert pair.engine.fence(new_id()).confirmed
        pair.engine.forget(new_id())
        pair.engine.readmit(new_id())
        check(pair, "read", simple_plan([0], [0], 64))
