"""Rank maps: the seed functions, and the sets the daemon uses. Cases R1 R2 R3 R5 R6 R7 A1."""

from __future__ import annotations

import math

import pytest

from moriiod.core.headplan import REPLICATED, HeadRule, HeadShape
from moriiod.core.topology import (
    AckTarget,
    ack_set,
    ack_targets,
    are_sizes_valid,
    check_dp_rank,
    check_sizes,
    designated_consumer,
    expected_ack_count,
    heads_of_rank,
    readers,
    remote_tp_rank,
    resolve_remote_tp_size,
    sources,
    validate_kv_heads,
)
from moriiod.errors import InvalidTopology

#: (producer TP, consumer TP) -> source of every consumer rank; from case R2.
R2_MAPS = {
    (4, 8): [0, 0, 1, 1, 2, 2, 3, 3],
    (8, 4): [0, 2, 4, 6],
    (2, 8): [0, 0, 0, 0, 1, 1, 1, 1],
    (8, 1): [0],
    (3, 6): [0, 0, 1, 1, 2, 2],
    (6, 3): [0, 2, 4],
    (4, 4): [0, 1, 2, 3],
}
R2_BAD_PAIRS = [(4, 6), (6, 4), (3, 8), (8, 3), (5, 2), (8, 6)]
#: Case R3: everything that is no TP size, although Python or a lax parser would take it.
R3_NO_SIZES = [True, False, -1, "8", "8 ", "0x8", 8.0, 8.5, math.nan, 2**63, 2**64, [8], b"8"]


# --- Seed functions ---------------------------------------------------------------------------


@pytest.mark.parametrize(("pair", "expected"), R2_MAPS.items())
def test_R2_rank_map_is_the_listed_vector(pair, expected):
    producer, consumer = pair
    assert [remote_tp_rank(c, consumer, producer) for c in range(consumer)] == expected


@pytest.mark.parametrize(("local", "remote"), R2_BAD_PAIRS)
def test_R2_non_multiple_sizes_raise_naming_multiple_and_both(local, remote):
    with pytest.raises(ValueError, match="multiple") as caught:
        remote_tp_rank(0, local, remote)
    assert f"{local} and {remote}" in str(caught.value)
    with pytest.raises(ValueError, match="multiple"):
        expected_ack_count(local, remote)


@pytest.mark.parametrize("rank", [-1, 4, True, 0.0, "0", None])
def test_R2_rank_outside_the_group_raises(rank):
    with pytest.raises(ValueError, match="TP rank"):
        remote_tp_rank(rank, 4, 8)


@pytest.mark.parametrize("size", [0, -8, True, 8.0, "8", None])
def test_impossible_sizes_raise(size):
    with pytest.raises(ValueError, match="whole number"):
        remote_tp_rank(0, size, 8)
    with pytest.raises(ValueError, match="whole number"):
        remote_tp_rank(0, 8, size)
    with pytest.raises(ValueError, match="whole number"):
        expected_ack_count(size, 8)
    with pytest.raises(ValueError, match="whole number"):
        validate_kv_heads(size, 8, 4, is_mla=False)


@pytest.mark.parametrize(
    ("producer", "consumer", "expected"),
    [(4, 8, 2), (2, 8, 4), (1, 8, 8), (8, 8, 1), (8, 4, 1), (8, 1, 1)],
)
def test_A1_expected_acks(producer, consumer, expected):
    assert expected_ack_count(producer, consumer) == expected


@pytest.mark.parametrize(
    ("local", "remote", "heads", "is_mla"),
    [(4, 4, 8, False), (8, 4, 4, False), (4, 8, 4, False), (2, 4, 4, True)],
)
def test_R5_pairs_with_the_same_heads_pass(local, remote, heads, is_mla):
    validate_kv_heads(local, remote, heads, is_mla)
    rule = HeadRule((REPLICATED if is_mla else HeadShape(heads),))
    plan = rule.plan(remote, local)
    assert [plan.sources(r) for r in range(local)] == [
        sources(r, local, remote) for r in range(local)
    ]


@pytest.mark.parametrize(("local", "remote", "heads"), [(4, 2, 4), (2, 4, 4), (1, 4, 2)])
def test_R5_seed_check_refuses_pairs_that_split_heads_the_head_plan_serves_them(
    local, remote, heads
):
    with pytest.raises(NotImplementedError, match="replicated KV heads"):
        validate_kv_heads(local, remote, heads, is_mla=False)
    HeadRule((HeadShape(heads),)).check(remote, local)


@pytest.mark.parametrize(
    "params",
    [{}, {"remote_tp_size": 0}, {"remote_tp_size": None}, {"tp_size": None}, {"tp_size": 0}],
)
def test_R1_unknown_peer_size_means_the_same_as_ours(params):
    assert resolve_remote_tp_size(params, 8) == 8
    assert [remote_tp_rank(r, 8, resolve_remote_tp_size(params, 8)) for r in range(8)] == list(
        range(8)
    )


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"remote_tp_size": 4}, 4),
        ({"tp_size": 2}, 2),
        ({"remote_tp_size": 4, "tp_size": 2}, 4),
        ({"remote_tp_size": None, "tp_size": 2}, 2),
        ({"remote_tp_size": 0, "tp_size": 2}, 2),
        ({"remote_tp_size": 1024, "other": object()}, 1024),
    ],
)
def test_R1_peer_size_is_read_from_remote_tp_size_first(params, expected):
    assert resolve_remote_tp_size(params, 8) == expected


@pytest.mark.parametrize("value", [*R3_NO_SIZES, 1025])
@pytest.mark.parametrize("key", ["remote_tp_size", "tp_size"])
def test_R3_values_that_are_no_size_are_never_taken_for_unknown(key, value):
    with pytest.raises(ValueError, match=f"^{key} must be"):
        resolve_remote_tp_size({key: value}, 8)


def test_R3_own_size_must_be_one():
    with pytest.raises(ValueError, match="TP size"):
        resolve_remote_tp_size({}, 0)


# --- What the daemon uses ---------------------------------------------------------------------


@pytest.mark.parametrize(("pair", "expected"), R2_MAPS.items())
def test_R2_sources_follow_the_same_map(pair, expected):
    producer, consumer = pair
    assert [sources(c, consumer, producer) for c in range(consumer)] == [(p,) for p in expected]


@pytest.mark.parametrize(("producer", "consumer"), R2_BAD_PAIRS)
def test_R2_typed_errors_name_both_sizes(producer, consumer):
    for call in (
        lambda: check_sizes(producer, consumer),
        lambda: sources(0, consumer, producer),
        lambda: readers(0, producer, consumer),
        lambda: ack_set(0, producer, consumer),
        lambda: ack_targets(0, producer, consumer),
        lambda: HeadRule().check(producer, consumer),
    ):
        with pytest.raises(InvalidTopology, match="multiple") as caught:
            call()
        assert caught.value.fields == {
            "producer_tp_size": str(producer),
            "consumer_tp_size": str(consumer),
        }
    assert not are_sizes_valid(producer, consumer)


@pytest.mark.parametrize("rank", [-1, 8, True, None])
def test_R2_typed_functions_refuse_a_rank_outside_its_group(rank):
    with pytest.raises(InvalidTopology, match="consumer TP rank"):
        sources(rank, 8, 4)
    with pytest.raises(InvalidTopology, match="consumer TP rank"):
        ack_targets(rank, 4, 8)
    with pytest.raises(InvalidTopology, match="producer TP rank"):
        readers(rank, 8, 4)
    with pytest.raises(InvalidTopology, match="producer TP rank"):
        designated_consumer(rank, 8, 4)


@pytest.mark.parametrize("size", [*R3_NO_SIZES, 0, 1025, None])
def test_R3_typed_functions_take_only_whole_numbers_up_to_the_cap(size):
    assert not are_sizes_valid(4, size)
    assert not are_sizes_valid(size, 4)
    with pytest.raises(InvalidTopology, match="whole numbers"):
        check_sizes(4, size)
    with pytest.raises(InvalidTopology, match="not a rank"):
        heads_of_rank(0, size, 8)


def test_R7_every_decode_rank_has_a_prefill_rank_that_fills_it():
    assert [readers(p, 4, 8) for p in range(4)] == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]


def test_unread_producer_ranks_are_released_by_their_designated_consumer():
    assert [readers(p, 8, 4) for p in range(8)] == [{0}, set(), {1}, set(), {2}, set(), {3}, set()]
    assert [ack_set(p, 8, 4) for p in range(8)] == [{0}, {0}, {1}, {1}, {2}, {2}, {3}, {3}]
    assert [designated_consumer(p, 8, 1) for p in range(8)] == [0] * 8
    assert ack_targets(1, 8, 4) == (AckTarget(2, reads=True), AckTarget(3, reads=False))
    assert ack_targets(0, 4, 1) == (
        AckTarget(0, reads=True),
        AckTarget(1, reads=False),
        AckTarget(2, reads=False),
        AckTarget(3, reads=False),
    )


def test_ack_targets_of_a_shared_producer_rank_is_that_rank_alone():
    assert ack_targets(5, 4, 8) == (AckTarget(2, reads=True),)
    assert ack_targets(3, 4, 4) == (AckTarget(3, reads=True),)


def test_A1_ack_set_sizes():
    assert len(ack_set(0, 2, 8)) == 4
    assert len(ack_set(0, 1, 8)) == 8
    assert ack_set(5, 8, 8) == {5}


def test_R5_two_heads_over_four_ranks_are_two_slices():
    assert [list(heads_of_rank(r, 4, 2)) for r in range(4)] == [[0], [0], [1], [1]]
    assert [heads_of_rank(r, 2, 8) for r in range(2)] == [range(4), range(4, 8)]
    assert heads_of_rank(0, 1, 1) == range(1)


@pytest.mark.parametrize(("rank", "tp", "heads"), [(4, 4, 8), (-1, 4, 8), (True, 4, 8)])
def test_heads_of_a_rank_outside_the_group_raise(rank, tp, heads):
    with pytest.raises(InvalidTopology, match="not a rank"):
        heads_of_rank(rank, tp, heads)


@pytest.mark.parametrize("heads", [0, -1, 2.0, True])
def test_heads_that_are_no_number_raise(heads):
    with pytest.raises(InvalidTopology, match="at least one KV head"):
        heads_of_rank(0, 4, heads)


def test_heads_that_do_not_divide_raise_because_replicas_would_not_match():
    with pytest.raises(InvalidTopology, match="evenly"):
        heads_of_rank(0, 4, 3)
    # 3 heads on TP 4 and TP 8: consumer rank 3 would hold another head than its source.
    with pytest.raises(InvalidTopology, match=r"3 KV heads .* TP size 4"):
        HeadRule((HeadShape(3),)).check(4, 8)


def test_equal_sizes_pass_whatever_the_heads():
    assert HeadRule((HeadShape(3),)).plan(4, 4).sources(2) == (2,)
    HeadRule().check(8, 2)


def test_R6_dp_rank_is_checked_against_the_registered_size():
    check_dp_rank(5, 8)
    for rank, size in ((8, 8), (-1, 8), (True, 8), (0, 0)):
        with pytest.raises(InvalidTopology, match="DP rank"):
            check_dp_rank(rank, size)
