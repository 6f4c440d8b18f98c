"""Transfers against the byte-level oracle: any legal TP sizes, layouts, block sizes, tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from moriiod.core import blocks, headplan, planner
from moriiod.core.geometry import KvGroup, KvLayer
from moriiod.core.headplan import GroupHeads, HeadPlan, HeadShape, HeadSlice
from moriiod.core.pairing import BlockTable
from moriiod.core.spans import SideSpacing, UnitRuns, UnitShape
from moriiod.errors import MoriiodError
from tests.support.kvmodel import Case, GroupModel, Side, SideGroup, capacity

KINDS = ("kv_first", "block_first", "fused", "mla", "state")
HEADS = (1, 2, 3, 4, 6, 8, 12)
SIZES = (1, 2, 3, 4, 6, 8)
BLOCKS = (1, 2, 4, 8)


def legal_sizes(heads: int) -> list[int]:
    return [tp for tp in SIZES if heads % tp == 0 or tp % heads == 0]


@st.composite
def group_models(draw: st.DrawFn, heads: int) -> GroupModel:
    layout = draw(st.sampled_from(KINDS))
    order = "HND" if layout == "state" else draw(st.sampled_from(("NHD", "HND")))
    n_parts = draw(st.integers(1, 3)) if layout == "state" else 1
    parts = tuple(draw(st.integers(1, 3)) for _ in range(n_parts))
    return GroupModel(
        layout,
        order,
        1 if layout == "mla" else heads,
        parts,
        draw(st.integers(1, 2)),
        draw(st.integers(0, 1)),
    )


@st.composite
def tables(draw: st.DrawFn, blocks: int, n: int) -> tuple[int, ...]:
    return tuple(draw(st.permutations(range(blocks)))[:n])


@st.composite
def side_groups(
    draw: st.DrawFn, group: GroupModel, n_tokens: int, block_tokens: int, skip: int
) -> SideGroup:
    if group.layout == "state":
        n_tokens, block_tokens, skip = min(n_tokens, 1), 1, 0
    n = -(-n_tokens // block_tokens)
    skip = min(skip, n)
    blocks = n - skip + draw(st.integers(1, 3))
    kernel = draw(st.sampled_from([0] + [b for b in BLOCKS if block_tokens % b == 0]))
    return SideGroup(
        block_tokens,
        kernel,
        blocks,
        draw(tables(blocks, n - skip)),
        skip,
        draw(st.sampled_from((0, 0, 3))),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    heads = draw(st.sampled_from(HEADS))
    model = tuple(draw(group_models(heads)) for _ in range(draw(st.integers(1, 2))))
    sizes = st.sampled_from(legal_sizes(heads))
    producer, consumer = [], []
    for group in model:
        n_tokens = draw(st.integers(0, 24))
        sizes_of_blocks = draw(st.sampled_from(BLOCKS)), draw(st.sampled_from(BLOCKS))
        there = draw(side_groups(group, n_tokens, sizes_of_blocks[0], 0))
        here = draw(side_groups(group, n_tokens, sizes_of_blocks[1], draw(st.integers(0, 3))))
        # The producer may have given up what the consumer holds already (a sliding window).
        spare = here.first * here.block_tokens // there.block_tokens
        drop = draw(st.integers(0, min(spare, len(there.table)))) if here.table else 0
        producer.append(replace(there, table=there.table[drop:], first=drop))
        consumer.append(here)
    shares = st.booleans()
    return Case(
        model,
        Side(draw(sizes), tuple(producer), draw(shares), draw(st.sampled_from((0, 5)))),
        Side(draw(sizes), tuple(consumer), draw(shares), draw(st.sampled_from((0, 7)))),
        draw(st.sampled_from((0, 0, 1, 5))),
    )


@pytest.mark.timeout(240)
@given(cases(), st.booleans())
@settings(max_examples=2000)
def test_every_rank_gets_exactly_its_bytes_and_nothing_else_changes(
    case: Case, reads: bool
) -> None:
    moved = case.run(reads=reads)
    has_blocks = any(capacity(held) and held.table for held in case.consumer.groups)
    assert bool(moved) is bool(has_blocks)


# --- The oracle notices -----------------------------------------------------------------------


def _first_replica_head_for_all(patch: pytest.MonkeyPatch) -> None:
    """Take local head 0 of the source, wherever the wanted head is."""

    def slices_of(self: HeadPlan, shape: HeadShape, rank: int) -> tuple[HeadSlice, ...]:
        found = original(self, shape, rank)
        return tuple(replace(one, producer_head=0) for one in found)

    original = HeadPlan._slices_of
    patch.setattr(HeadPlan, "_slices_of", slices_of)
    headplan._plan.cache_clear()


def _heads_by_count(patch: pytest.MonkeyPatch) -> None:
    """Count tp/tp groups instead of heads (case R5)."""

    def local_heads(self: HeadShape, tp_size: int) -> int:
        return 1 if self.is_replicated else -(-self.total_kv_heads // tp_size)

    patch.setattr(HeadShape, "local_heads", local_heads)
    patch.setattr(GroupHeads, "is_whole", property(lambda self: True))


def _one_stride_for_both(patch: pytest.MonkeyPatch) -> None:
    """Use our own block stride for the peer's blocks."""
    original = planner.runs_of

    def runs_of(shape: UnitShape, mine: KvLayer, theirs: KvLayer) -> UnitRuns:
        return original(shape, mine, replace(theirs, block_stride=mine.block_stride))

    patch.setattr(planner, "runs_of", runs_of)


def _pair_by_length(patch: pytest.MonkeyPatch) -> None:
    """Lay the lists against each other from their starts."""

    def pair(to: BlockTable, into: KvGroup, of: BlockTable, out_of: KvGroup) -> tuple[object, ...]:
        n = min(len(to.ids), len(of.ids))
        return to.ids[:n], of.ids[:n]

    patch.setattr(blocks, "pair_tables", pair)


def _ignore_kernel_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SideSpacing, "starts", lambda self, units: units * self.block_stride)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "plant",
    [
        _first_replica_head_for_all,
        _heads_by_count,
        _one_stride_for_both,
        _pair_by_length,
        _ignore_kernel_blocks,
    ],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    @given(cases(), st.booleans())
    @settings(max_examples=300, phases=[Phase.generate], report_multiple_bugs=False)
    def look(case: Case, reads: bool) -> None:
        case.run(reads=reads)

    try:
        with pytest.raises((AssertionError, MoriiodError, ValueError, IndexError)):
            look()
    finally:
        headplan._plan.cache_clear()
