"""Who gets which KV heads from whom, for any two TP sizes that are legal for the model.

Heads of rank r of T with K KV heads: the interval ``[r*K/T, (r+1)*K/T)`` if T <= K, else the one
head ``r*K//T``, which K/T ranks hold alike. A consumer rank takes every head it holds from exactly
one producer rank that holds it too. Where several do, the consumer ranks that want the head are
spread over them, the i-th of n on the ``i*holders//n``-th. What every rank holds (an MLA latent)
is one head that all ranks hold.

Both sides compute the plan on their own, from the two TP sizes and the shapes of the KV groups,
and get the same. A cache with several groups has one set of sources: the union over its groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from moriiod.core import topology
from moriiod.core.geometry import CacheLayout, KvGroup
from moriiod.core.topology import AckTarget
from moriiod.errors import InvalidTopology

#: Plans that are kept: pairs of sizes and shapes of the peers a daemon has.
_KEPT_PLANS: Final = 1024


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How one KV group is spread over the ranks of a TP group.

    Attributes:
        total_kv_heads: KV heads of the whole model.
        is_replicated: Every rank holds all of it.
    """

    total_kv_heads: int = 1
    is_replicated: bool = False

    @classmethod
    def of_group(cls, group: KvGroup) -> HeadShape:
        """Return the shape of a described group."""
        if group.is_replicated:
            return REPLICATED
        return cls(group.total_kv_heads)

    def heads_of_rank(self, rank: int, tp_size: int) -> range:
        """Return the heads that a rank holds.

        Raises:
            InvalidTopology: The rank is not in the group, or heads and ranks do not divide.
        """
        if self.is_replicated:
            return range(1)
        return topology.heads_of_rank(rank, tp_size, self.total_kv_heads)

    def local_heads(self, tp_size: int) -> int:
        """Return how many heads each rank holds."""
        return 1 if self.is_replicated else max(1, self.total_kv_heads // tp_size)

    def holders(self, head: int, tp_size: int) -> range:
        """Return the ranks that hold a head."""
        if self.is_replicated:
            return range(tp_size)
        if tp_size <= self.total_kv_heads:
            rank = head * tp_size // self.total_kv_heads
            return range(rank, rank + 1)
        share = tp_size // self.total_kv_heads
        return range(head * share, (head + 1) * share)


#: A group that every rank holds all of.
REPLICATED: Final = HeadShape(1, is_replicated=True)


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """A run of heads that one consumer rank takes from one producer rank.

    Attributes:
        producer_rank: Where they come from.
        producer_head: First of them, counted among the heads of the producer rank.
        consumer_head: First of them, counted among the heads of the consumer rank.
        count: Number of heads.
    """

    producer_rank: int
    producer_head: int
    consumer_head: int
    count: int


@dataclass(frozen=True, slots=True)
class HeadRun:
    """A run of heads to copy, counted among the heads of each rank of the pair."""

    local_head: int
    remote_head: int
    count: int


@dataclass(frozen=True, slots=True)
class GroupHeads:
    """What one rank pair shares of one KV group.

    Attributes:
        local: Heads our rank holds.
        remote: Heads the peer rank holds.
        runs: What to copy, in the order of our heads; empty = nothing of this group.
    """

    local: int
    remote: int
    runs: tuple[HeadRun, ...]

    @classmethod
    def all_of(cls, heads: int) -> GroupHeads:
        """Return the share of two ranks that hold the same heads."""
        return cls(heads, heads, (HeadRun(0, 0, heads),))

    @property
    def is_whole(self) -> bool:
        """Whether both ranks hold the same heads, and all of them are copied."""
        return self.local == self.remote and self.runs == (HeadRun(0, 0, self.local),)


@dataclass(frozen=True)
class HeadPlan:
    """The plan of one pair of instances; made by ``HeadRule.plan``.

    Attributes:
        producer_tp: TP size of the producer instance.
        consumer_tp: TP size of the consumer instance.
        shapes: One for each KV group.
    """

    producer_tp: int
    consumer_tp: int
    shapes: tuple[HeadShape, ...]

    def slices(self, group: int, consumer_rank: int) -> tuple[HeadSlice, ...]:
        """Return what a consumer rank takes of one group, in the order of its own heads.

        Raises:
            InvalidTopology: The rank is not in the consumer instance.
        """
        self._check_rank("consumer", consumer_rank)
        return self._slices[self.shapes[group]][consumer_rank]

    def slices_between(
        self, group: int, producer_rank: int, consumer_rank: int
    ) -> tuple[HeadSlice, ...]:
        """Return what a consumer rank takes of one group from one producer rank."""
        return tuple(
            one for one in self.slices(group, consumer_rank) if one.producer_rank == producer_rank
        )

    def heads_for_read(self, producer_rank: int, consumer_rank: int) -> tuple[GroupHeads, ...]:
        """Return what a pair shares of each group, seen from the consumer."""
        return tuple(
            GroupHeads(
                shape.local_heads(self.consumer_tp),
                shape.local_heads(self.producer_tp),
                tuple(
                    HeadRun(one.consumer_head, one.producer_head, one.count)
                    for one in self.slices_between(group, producer_rank, consumer_rank)
                ),
            )
            for group, shape in enumerate(self.shapes)
        )

    def heads_for_write(self, producer_rank: int, consumer_rank: int) -> tuple[GroupHeads, ...]:
        """Return what a pair shares of each group, seen from the producer."""
        return tuple(
            GroupHeads(
                heads.remote,
                heads.local,
                tuple(HeadRun(run.remote_head, run.local_head, run.count) for run in heads.runs),
            )
            for heads in self.heads_for_read(producer_rank, consumer_rank)
        )

    def sources(self, consumer_rank: int) -> tuple[int, ...]:
        """Return the producer ranks that a consumer rank reads from, ascending.

        Raises:
            InvalidTopology: The rank is not in the consumer instance.
        """
        self._check_rank("consumer", consumer_rank)
        return self._sources[consumer_rank]

    def readers(self, producer_rank: int) -> frozenset[int]:
        """Return the consumer ranks that have a producer rank as a source; may be empty.

        Raises:
            InvalidTopology: The rank is not in the producer instance.
        """
        self._check_rank("producer", producer_rank)
        return self._readers[producer_rank]

    def designated_consumer(self, producer_rank: int) -> int:
        """Return the consumer rank that releases a producer rank that nobody reads."""
        self._check_rank("producer", producer_rank)
        return producer_rank * self.consumer_tp // self.producer_tp

    def ack_set(self, producer_rank: int) -> frozenset[int]:
        """Return the consumer ranks whose ACKs free a producer rank's blocks; never empty.

        Raises:
            InvalidTopology: The rank is not in the producer instance.
        """
        return self.readers(producer_rank) or frozenset((self.designated_consumer(producer_rank),))

    def ack_targets(self, consumer_rank: int) -> tuple[AckTarget, ...]:
        """Return the producer ranks that wait for a consumer rank's ACK, ascending.

        ``c`` is in ``ack_set(p)`` exactly when ``p`` is in ``ack_targets(c)``.

        Raises:
            InvalidTopology: The rank is not in the consumer instance.
        """
        targets = [AckTarget(p, reads=True) for p in self.sources(consumer_rank)]
        targets += [AckTarget(p, reads=False) for p in self._unread[consumer_rank]]
        return tuple(sorted(targets, key=lambda target: target.rank))

    def _check_rank(self, role: str, rank: int) -> None:
        size = self.consumer_tp if role == "consumer" else self.producer_tp
        if type(rank) is not int or not 0 <= rank < size:
            raise InvalidTopology(
                f"{role} TP rank {rank!r} is not in 0..{size - 1}; TP sizes "
                f"{self.producer_tp} (producer) and {self.consumer_tp} (consumer)",
                rank=repr(rank),
                producer_tp_size=self.producer_tp,
                consumer_tp_size=self.consumer_tp,
            )

    @cached_property
    def _slices(self) -> dict[HeadShape, list[tuple[HeadSlice, ...]]]:
        return {
            shape: [self._slices_of(shape, c) for c in range(self.consumer_tp)]
            for shape in self.shapes
        }

    def _slices_of(self, shape: HeadShape, consumer_rank: int) -> tuple[HeadSlice, ...]:
        if self.producer_tp == self.consumer_tp:
            # Rank for rank: works whatever the heads are, so they need not divide.
            return (HeadSlice(consumer_rank, 0, 0, shape.local_heads(self.consumer_tp)),)
        mine = shape.heads_of_rank(consumer_rank, self.consumer_tp)
        slices = []
        head = mine.start
        while head < mine.stop:
            wanted_by = shape.holders(head, self.consumer_tp)
            held_by = shape.holders(head, self.producer_tp)
            place = (consumer_rank - wanted_by.start) * len(held_by) // len(wanted_by)
            theirs = shape.heads_of_rank(held_by[place], self.producer_tp)
            end = min(mine.stop, theirs.stop)
            there, here = head - theirs.start, head - mine.start
            slices.append(HeadSlice(held_by[place], there, here, end - head))
            head = end
        return tuple(slices)

    @cached_property
    def _sources(self) -> list[tuple[int, ...]]:
        per_shape = self._slices.values()
        return [
            tuple(sorted({one.producer_rank for slices in per_shape for one in slices[c]}))
            for c in range(self.consumer_tp)
        ]

    @cached_property
    def _readers(self) -> list[frozenset[int]]:
        readers: list[set[int]] = [set() for _ in range(self.producer_tp)]
        for consumer_rank, ranks in enumerate(self._sources):
            for rank in ranks:
                readers[rank].add(consumer_rank)
        return [frozenset(ranks) for ranks in readers]

    @cached_property
    def _unread(self) -> list[list[int]]:
        """Producer ranks that each consumer rank releases without having read them."""
        unread: list[list[int]] = [[] for _ in range(self.consumer_tp)]
        for rank, readers in enumerate(self._readers):
            if not readers:
                unread[self.designated_consumer(rank)].append(rank)
        return unread


@dataclass(frozen=True, slots=True)
class HeadRule:
    """What a plan depends on besides the TP sizes. Both sides of a transfer must have the same.

    Attributes:
        shapes: One for each KV group; by default one group that every rank holds all of.
        allows_uneven: Also plan for sizes of which neither is a multiple of the other.
    """

    shapes: tuple[HeadShape, ...] = (REPLICATED,)
    allows_uneven: bool = False

    @classmethod
    def of_layout(cls, layout: CacheLayout, *, allows_uneven: bool) -> HeadRule:
        """Return the rule for a registered cache."""
        return cls(tuple(HeadShape.of_group(group) for group in layout.groups), allows_uneven)

    def check(self, producer_tp: int, consumer_tp: int) -> None:
        """Check that a pair of TP sizes can be planned for.

        Raises:
            InvalidTopology: Names both sizes, or the size and the heads that do not divide.
        """
        topology.check_sizes(producer_tp, consumer_tp, allows_uneven=self.allows_uneven)
        if producer_tp == consumer_tp:
            return
        for shape in self.shapes:
            shape.heads_of_rank(0, producer_tp)
            shape.heads_of_rank(0, consumer_tp)

    def fits(self, producer_tp: int, consumer_tp: int) -> bool:
        """Say whether ``check`` would pass."""
        try:
            self.check(producer_tp, consumer_tp)
        except InvalidTopology:
            return False
        return True

    def plan(self, producer_tp: int, consumer_tp: int) -> HeadPlan:
        """Return the plan for a pair of TP sizes.

        Raises:
            InvalidTopology: See ``check``.
        """
        self.check(producer_tp, consumer_tp)
        return _plan(producer_tp, consumer_tp, self.shapes)


@lru_cache(maxsize=_KEPT_PLANS)
def _plan(producer_tp: int, consumer_tp: int, shapes: tuple[HeadShape, ...]) -> HeadPlan:
    return HeadPlan(producer_tp, consumer_tp, shapes)


def possible_sources(consumer_rank: int, consumer_tp: int, producer_tp: int) -> range:
    """Return every producer rank that could be a source, whatever the model's number of heads.

    Rank c of D holds a part of the share [c/D, (c+1)/D) of the model's heads; so do these ranks.

    Raises:
        InvalidTopology: A size is out of bounds, or the rank is not in the group.
    """
    topology.check_sizes(producer_tp, consumer_tp, allows_uneven=True)
    if not 0 <= consumer_rank < consumer_tp:
        raise InvalidTopology(
            f"consumer TP rank {consumer_rank} is not in 0..{consumer_tp - 1}",
            rank=consumer_rank,
            consumer_tp_size=consumer_tp,
        )
    first = consumer_rank * producer_tp // consumer_tp
    return range(first, -(-(consumer_rank + 1) * producer_tp // consumer_tp))
