"""Both sides of a transfer derive the same sets, for every pair of TP sizes up to 64."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moriiod.core import topology
from moriiod.errors import InvalidTopology

SIZES = range(1, 65)
PAIRS = [(p, d) for p, d in product(SIZES, SIZES) if p % d == 0 or d % p == 0]


def test_both_sides_derive_the_same_readers_and_sources():
    for producer, consumer in PAIRS:
        seen_by_consumers = {
            (p, c) for c in range(consumer) for p in topology.sources(c, consumer, producer)
        }
        seen_by_producers = {
            (p, c) for p in range(producer) for c in topology.readers(p, producer, consumer)
        }
        assert seen_by_consumers == seen_by_producers


def test_both_sides_derive_the_same_ack_sets():
    for producer, consumer in PAIRS:
        owed = {
            (target.rank, c)
            for c in range(consumer)
            for target in topology.ack_targets(c, producer, consumer)
        }
        awaited = {(p, c) for p in range(producer) for c in topology.ack_set(p, producer, consumer)}
        assert owed == awaited


def test_every_producer_rank_waits_for_exactly_the_expected_number_of_acks():
    for producer, consumer in PAIRS:
        expected = topology.expected_ack_count(producer, consumer)
        acks = Counter(
            target.rank
            for c in range(consumer)
            for target in topology.ack_targets(c, producer, consumer)
        )
        assert acks == dict.fromkeys(range(producer), expected)


def test_ack_targets_say_rightly_who_reads_and_name_each_rank_once():
    for producer, consumer in PAIRS:
        for c in range(consumer):
            targets = topology.ack_targets(c, producer, consumer)
            ranks = [target.rank for target in targets]
            assert ranks == sorted(set(ranks))
            reads = tuple(target.rank for target in targets if target.reads)
            assert reads == topology.sources(c, consumer, producer)
            for target in targets:
                readers = topology.readers(target.rank, producer, consumer)
                assert readers if target.reads else not readers


def test_every_consumer_rank_has_a_source_and_it_is_the_seed_map():
    for producer, consumer in PAIRS:
        for c in range(consumer):
            (source,) = topology.sources(c, consumer, producer)
            assert source == topology.remote_tp_rank(c, consumer, producer)


def test_heads_of_all_ranks_cover_every_head_equally_often():
    for tp, heads in product(SIZES, SIZES):
        if tp % heads and heads % tp:
            continue
        held = Counter(h for r in range(tp) for h in topology.heads_of_rank(r, tp, heads))
        assert held == dict.fromkeys(range(heads), max(1, tp // heads))


@given(st.integers(1, 1024), st.integers(1, 1024))
def test_pairs_that_do_not_divide_are_refused_by_both_vocabularies(producer, consumer):
    is_multiple = producer % consumer == 0 or consumer % producer == 0
    assert topology.are_sizes_valid(producer, consumer) is is_multiple
    if not is_multiple:
        with pytest.raises(InvalidTopology):
            topology.check_sizes(producer, consumer)
        with pytest.raises(ValueError, match="multiple"):
            topology.expected_ack_count(producer, consumer)
