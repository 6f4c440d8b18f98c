"""The head plan against the definition of who holds what, for every legal triple up to 16."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moriiod.core import topology
from moriiod.core.headplan import REPLICATED, HeadRule, HeadShape, possible_sources
from moriiod.errors import InvalidTopology

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16)
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
UNEVEN = True


def legal(heads: int, tp: int) -> bool:
    return heads % tp == 0 or tp % heads == 0


TRIPLES = [(k, p, d) for k, p, d in product(HEADS, SIZES, SIZES) if legal(k, p) and legal(k, d)]
legal_triples = st.sampled_from(TRIPLES)


def held(rank: int, tp: int, heads: int) -> list[int]:
    """Heads of a rank, straight from the definition."""
    if tp <= heads:
        return list(range(rank * heads // tp, (rank + 1) * heads // tp))
    return [rank * heads // tp]


def test_every_local_head_is_taken_once_from_a_rank_that_holds_it():
    for k, p, d in TRIPLES:
        plan = HeadRule((HeadShape(k),), UNEVEN).plan(p, d)
        for c in range(d):
            mine, got = held(c, d, k), []
            for one in plan.slices(0, c):
                theirs = held(one.producer_rank, p, k)
                got += range(one.consumer_head, one.consumer_head + one.count)
                for i in range(one.count):
                    assert mine[one.consumer_head + i] == theirs[one.producer_head + i]
            assert got == list(range(len(mine)))


def test_slices_are_as_long_as_they_can_be():
    for k, p, d in TRIPLES:
        plan = HeadRule((HeadShape(k),), UNEVEN).plan(p, d)
        for c in range(d):
            ranks = [one.producer_rank for one in plan.slices(0, c)]
            assert len(ranks) == len(set(ranks))


def test_both_sides_derive_the_same_sets_and_nobody_is_forgotten():
    shape_sets = [(HeadShape(8),), (REPLICATED, HeadShape(4)), (HeadShape(2), HeadShape(16))]
    for shapes, p, d in product(shape_sets, SIZES, SIZES):
        rule = HeadRule(shapes, UNEVEN)
        if not rule.fits(p, d):
            continue
        plan = rule.plan(p, d)
        owed = {(t.rank, c) for c in range(d) for t in plan.ack_targets(c)}
        assert owed == {(r, c) for r in range(p) for c in plan.ack_set(r)}
        assert {r for r, _ in owed} == set(range(p))
        for c in range(d):
            reading = {t.rank for t in plan.ack_targets(c) if t.reads}
            taken = {one.producer_rank for g in range(len(shapes)) for one in plan.slices(g, c)}
            assert reading == taken == set(plan.sources(c))
            assert all(c in plan.readers(r) for r in reading)


def test_replicas_are_spread_as_evenly_as_their_number_allows():
    for k, p, d in TRIPLES:
        plan = HeadRule((HeadShape(k),), UNEVEN).plan(p, d)
        for head in range(k):
            holders = HeadShape(k).holders(head, p)
            if len(holders) == 1:
                continue
            readers = [len(plan.readers(rank)) for rank in holders]
            assert max(readers) - min(readers) <= 1


def test_the_seed_map_and_sets_hold_wherever_ranks_hold_the_same_heads():
    for k, p, d in TRIPLES:
        if (p % d and d % p) or min(p, d) < k:
            continue
        for shape in (HeadShape(k), REPLICATED):
            plan = HeadRule((shape,)).plan(p, d)
            for c in range(d):
                assert plan.sources(c) == topology.sources(c, d, p)
                assert plan.sources(c) == (topology.remote_tp_rank(c, d, p),)
                assert plan.ack_targets(c) == topology.ack_targets(c, p, d)
            for r in range(p):
                assert plan.readers(r) == topology.readers(r, p, d)
                assert plan.ack_set(r) == topology.ack_set(r, p, d)
                assert len(plan.ack_set(r)) == topology.expected_ack_count(p, d)


@given(legal_triples)
def test_sources_are_among_the_possible_ones_whatever_the_heads(triple):
    k, p, d = triple
    for shape in (HeadShape(k), REPLICATED):
        plan = HeadRule((shape,), UNEVEN).plan(p, d)
        for c in range(d):
            assert set(plan.sources(c)) <= set(possible_sources(c, d, p))


@given(st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_uneven_sizes_are_refused_naming_both_unless_allowed(p, d, allowed):
    rule = HeadRule((REPLICATED,), allowed)
    is_even = p % d == 0 or d % p == 0
    assert rule.fits(p, d) is (is_even or allowed)
    if not rule.fits(p, d):
        with pytest.raises(InvalidTopology, match="multiple") as caught:
            rule.plan(p, d)
        assert caught.value.fields["producer_tp_size"] == str(p)
        assert caught.value.fields["consumer_tp_size"] == str(d)
