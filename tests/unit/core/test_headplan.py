"""Head plans of real models, and what is refused. Cases R5 R7."""

from __future__ import annotations

import pytest

from moriiod.core.headplan import REPLICATED, HeadPlan, HeadRule, HeadShape, possible_sources
from moriiod.errors import InvalidTopology


def plan(heads: int, producer: int, consumer: int, *, uneven: bool = False) -> HeadPlan:
    return HeadRule((HeadShape(heads),), uneven).plan(producer, consumer)


def rows(one: HeadPlan, consumer_rank: int) -> list[tuple[int, int, int, int]]:
    return [
        (s.producer_rank, s.producer_head, s.consumer_head, s.count)
        for s in one.slices(0, consumer_rank)
    ]


def test_more_decode_ranks_take_parts_of_one_prefill_rank():
    llama = plan(8, 4, 8)
    assert [rows(llama, c) for c in range(4)] == [
        [(0, 0, 0, 1)],
        [(0, 1, 0, 1)],
        [(1, 0, 0, 1)],
        [(1, 1, 0, 1)],
    ]
    assert [llama.ack_set(p) for p in range(4)] == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]


def test_fewer_decode_ranks_gather_from_several_prefill_ranks():
    llama = plan(8, 8, 4)
    assert rows(llama, 1) == [(2, 0, 0, 1), (3, 0, 1, 1)]
    assert [llama.ack_set(p) for p in range(8)] == [{p // 2} for p in range(8)]


def test_replicated_on_the_decode_side_only():
    llama = plan(8, 8, 16)
    assert [rows(llama, c) for c in (0, 1, 15)] == [[(0, 0, 0, 1)], [(0, 0, 0, 1)], [(7, 0, 0, 1)]]
    qwen = plan(4, 2, 8)
    assert [rows(qwen, c) for c in range(4)] == [
        [(0, 0, 0, 1)],
        [(0, 0, 0, 1)],
        [(0, 1, 0, 1)],
        [(0, 1, 0, 1)],
    ]


def test_replicated_on_the_prefill_side_only_leaves_replicas_to_a_designated_consumer():
    qwen = plan(4, 8, 2)
    assert rows(qwen, 0) == [(0, 0, 0, 1), (2, 0, 1, 1)]
    assert [(t.rank, t.reads) for t in qwen.ack_targets(0)] == [
        (0, True),
        (1, False),
        (2, True),
        (3, False),
    ]
    assert [qwen.ack_set(p) for p in range(8)] == [{0}] * 4 + [{1}] * 4


def test_R5_two_heads_on_four_decode_ranks_are_two_slices():
    gqa = plan(2, 1, 4)
    assert [rows(gqa, c) for c in range(4)] == [
        [(0, 0, 0, 1)],
        [(0, 0, 0, 1)],
        [(0, 1, 0, 1)],
        [(0, 1, 0, 1)],
    ]


def test_uneven_sizes_intersect_intervals_where_allowed():
    uneven = plan(12, 4, 6, uneven=True)
    assert [rows(uneven, c) for c in range(3)] == [
        [(0, 0, 0, 2)],
        [(0, 2, 0, 1), (1, 0, 1, 1)],
        [(1, 1, 0, 2)],
    ]
    assert [uneven.ack_set(p) for p in range(4)] == [{0, 1}, {1, 2}, {3, 4}, {4, 5}]
    back = plan(12, 6, 4, uneven=True)
    assert rows(back, 0) == [(0, 0, 0, 2), (1, 0, 2, 1)]


@pytest.mark.parametrize(("producer", "consumer"), [(4, 6), (6, 4)])
def test_uneven_sizes_are_refused_by_default_naming_both(producer, consumer):
    with pytest.raises(InvalidTopology, match=f"allow_uneven.*{producer}.*{consumer}"):
        plan(12, producer, consumer)


def test_groups_of_different_shape_have_one_set_of_sources():
    hybrid = HeadRule((REPLICATED, HeadShape(32))).plan(8, 2)
    assert hybrid.sources(0) == (0, 1, 2, 3)
    assert [s.producer_rank for s in hybrid.slices(0, 1)] == [4]
    assert hybrid.slices_between(0, 5, 1) == ()
    assert [s.count for s in hybrid.slices_between(1, 5, 1)] == [4]


def test_ranks_outside_their_group_are_refused():
    one = plan(8, 4, 8)
    for call in (
        lambda: one.sources(8),
        lambda: one.slices(0, -1),
        lambda: one.ack_set(4),
        lambda: one.ack_targets(True),
        lambda: possible_sources(8, 8, 4),
    ):
        with pytest.raises(InvalidTopology):
            call()
