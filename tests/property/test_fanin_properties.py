"""Whatever comes in whatever order: no release before every rank of the ack set has spoken."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from moriiod.core import topology
from moriiod.core.fanin import AckVerdict, EarlyAcks, FanIn, TransferAck

SIZES = [1, 2, 4, 8, 16]
NAMED_SOURCES = ["", "a", "b", "c"]


@st.composite
def places(draw: st.DrawFn) -> tuple[int, int]:
    """A producer rank and its TP size."""
    size = draw(st.sampled_from(SIZES))
    return draw(st.integers(0, size - 1)), size


def build_ack(size: int, rank: int | None, source: str, states_size: bool) -> TransferAck:
    """An ACK that is possible by itself: the rank is folded into the size."""
    return TransferAck("t1", size, None if rank is None else rank % size, source, states_size)


good_acks = st.builds(
    build_ack,
    st.sampled_from(SIZES),
    st.one_of(st.none(), st.integers(0, 15)),
    st.sampled_from(NAMED_SOURCES),
    st.booleans(),
)
bad_acks = st.builds(
    TransferAck,
    st.just("t1"),
    st.sampled_from([0, -1, 3, True, 4]),
    st.sampled_from([None, -1, 4, True]),
)
acks = st.one_of(good_acks, good_acks, good_acks, bad_acks)


@given(places(), st.sampled_from(SIZES), st.lists(st.integers(0, 15), max_size=60))
def test_with_ranks_it_completes_exactly_when_the_ack_set_is_covered(place, consumer, ranks):
    rank, size = place
    fan_in = FanIn(rank, size, consumer)
    needed = topology.ack_set(rank, size, consumer)
    seen: set[int] = set()
    completions = 0
    for c in ranks:
        verdict = fan_in.add(TransferAck("t1", consumer, c))
        seen.add(c)
        completions += verdict is AckVerdict.COMPLETE
        assert fan_in.is_complete is (needed <= seen)
        assert fan_in.pending() == (needed - seen if not needed <= seen else frozenset())
        assert fan_in.n_missing == len(needed - seen)
    assert completions == (needed <= seen)


@given(places(), st.sampled_from([0, *SIZES]), st.lists(acks, max_size=40))
@settings(max_examples=400)
def test_it_never_completes_on_fewer_distinct_acks_of_the_size_that_holds(
    place, announced, incoming
):
    rank, size = place
    fan_in = FanIn(rank, size, announced)
    largest = topology.expected_ack_count(size, announced or size)
    for n, ack in enumerate(incoming):
        was_complete = fan_in.is_complete
        verdict = fan_in.add(ack)
        if not (verdict is AckVerdict.INVALID or announced or ack.is_plain or was_complete):
            stated = topology.expected_ack_count(size, ack.consumer_tp_size)
            largest = max(largest, stated)
        if verdict is AckVerdict.COMPLETE:
            assert not was_complete
            assert len(fan_in.expected) == largest
            assert len(members(fan_in, incoming[: n + 1])) >= largest
        assert fan_in.is_complete is (was_complete or verdict is AckVerdict.COMPLETE)
        assert (fan_in.n_missing == 0) is fan_in.is_complete


def members(fan_in: FanIn, incoming: list[TransferAck]) -> set[object]:
    """What may count for the size that holds: ranks of the ack set, and connections."""
    holds = [
        ack
        for ack in incoming
        if ack.is_well_formed and (ack.is_plain or ack.consumer_tp_size == fan_in.consumer_tp_size)
    ]
    ranks = {ack.consumer_tp_rank for ack in holds} & fan_in.expected
    return ranks | {ack.source for ack in holds if ack.consumer_tp_rank is None}


@given(places(), st.lists(st.one_of(acks, st.sampled_from(SIZES)), max_size=40))
def test_what_is_needed_never_shrinks_and_announcing_never_completes(place, inputs):
    rank, size = place
    fan_in = FanIn(rank, size)
    needed = len(fan_in.expected)
    for item in inputs:
        if isinstance(item, TransferAck):
            fan_in.add(item)
        else:
            was_complete = fan_in.is_complete
            fan_in.announce(item)
            assert fan_in.is_complete is was_complete
        assert len(fan_in.expected) >= needed
        needed = len(fan_in.expected)


@given(
    st.integers(1, 5),
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 3), st.integers(0, 2)),
            st.tuples(st.just("take"), st.integers(0, 3), st.just(0)),
            st.tuples(st.just("expire"), st.just(0), st.just(0)),
        ),
        max_size=60,
    ),
)
def test_early_acks_behave_like_a_plain_ordered_list(capacity, steps):
    buffer = EarlyAcks(capacity, ttl_s=7.0)
    model: OrderedDict[TransferAck, float] = OrderedDict()
    dropped = 0
    for now, (what, name, rank) in enumerate(steps):
        if what == "add":
            ack = TransferAck(f"t{name}", 4, rank)
            buffer.add(ack, float(now))
            if ack not in model:
                if len(model) == capacity:
                    model.popitem(last=False)
                    dropped += 1
                model[ack] = now + 7.0
        elif what == "take":
            expected = [ack for ack in model if ack.transfer_id == f"t{name}"]
            assert buffer.take(f"t{name}") == expected
            for ack in expected:
                del model[ack]
        else:
            gone = [ack for ack, deadline in model.items() if deadline <= now]
            assert buffer.expire(float(now)) == len(gone)
            for ack in gone:
                del model[ack]
        assert len(buffer) == len(model) <= capacity
        assert buffer.dropped == dropped
        assert buffer.next_deadline() == next(iter(model.values()), None)
