"""ACK fan-in: when has everybody who reads a producer rank's blocks said that it is done?

Safety rule S4: an ACK is a member of a set, never one more on a counter. What makes two ACKs the
same one is the consumer rank, or, where an old peer sends no rank, the connection it came in on.
So a repeated, duplicated or late ACK can never stand in for a rank that is still reading.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from moriiod.core.headplan import HeadRule
from moriiod.core.ids import MAX_RANKS, MAX_TRANSFER_ID_BYTES
from moriiod.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class TransferAck:
    """One consumer rank is done with a transfer.

    Three forms exist on the wire:

    * moriiod: size and rank are known.
    * structured ``release`` of upstream: it states a size, but no rank (``release``).
    * a plain string, the transfer id: no size and no rank; ``TransferAck(transfer_id)``.

    Attributes:
        transfer_id: As the router chose it.
        consumer_tp_size: TP size of the consumer instance; 1 where nothing is stated.
        consumer_tp_rank: Rank in that instance; None where the sender states none.
        source: For ACKs without a rank: the connection it came in on, the only thing that tells
            two ranks of an old peer apart. ACKs without a rank and with the same source are one.
        states_size: The sender did state a size. Needs setting only for a ``release`` without
            rank that states 1; any other size or a rank says so by itself.
    """

    transfer_id: str
    consumer_tp_size: int = 1
    consumer_tp_rank: int | None = None
    source: str = ""
    states_size: bool = False

    @classmethod
    def plain(cls, transfer_id: str, source: str = "") -> TransferAck:
        """Return the ACK that an old peer's plain string means."""
        return cls(transfer_id, source=source)

    @classmethod
    def release(cls, transfer_id: str, consumer_tp_size: int, source: str = "") -> TransferAck:
        """Return the ACK that upstream's structured ``release`` (no rank) means."""
        return cls(transfer_id, consumer_tp_size, source=source, states_size=True)

    @property
    def is_plain(self) -> bool:
        """Whether it states neither size nor rank."""
        return not self.states_size and self.consumer_tp_rank is None and self.consumer_tp_size == 1

    @property
    def is_well_formed(self) -> bool:
        """Whether id, size and rank are possible at all, whatever the topology."""
        size, rank, name = self.consumer_tp_size, self.consumer_tp_rank, self.transfer_id
        if type(size) is not int or not 1 <= size <= MAX_RANKS:
            return False
        if rank is not None and (type(rank) is not int or not 0 <= rank < size):
            return False
        return (
            type(name) is str
            and 0 < len(name) <= MAX_TRANSFER_ID_BYTES
            and name.isprintable()
            and len(name.encode("utf-8")) <= MAX_TRANSFER_ID_BYTES
        )


class AckVerdict(enum.Enum):
    """What became of an ACK. All but the first three are worth a protocol-problem counter."""

    #: A new member of the set; more are missing.
    COUNTED = "counted"
    #: The last missing member: the transfer may be freed. Returned exactly once.
    COMPLETE = "complete"
    #: Known already, or nothing is missing any more. Changes nothing.
    DUPLICATE = "duplicate"
    #: From a rank that does not read this producer rank. Changes nothing.
    UNEXPECTED = "unexpected"
    #: States another consumer TP size than is known. Never completes the set.
    DISAGREES = "disagrees"
    #: Impossible size or rank. Changes nothing.
    INVALID = "invalid"

    @property
    def is_problem(self) -> bool:
        """Whether the sender broke the protocol."""
        return self in _PROBLEMS


_PROBLEMS: Final = frozenset((AckVerdict.UNEXPECTED, AckVerdict.DISAGREES, AckVerdict.INVALID))


class FanIn:
    """The ACKs of one transfer at one producer rank.

    The consumer TP size comes from, in order of weight: an announcement (the publish request or
    the peer's handshake), else the structured ACKs themselves, else it is unknown and means the
    same size as ours. What is known only ever makes the set larger: where two statements
    disagree, the one that needs more ACKs holds. A set that can then not be completed is left to
    the lease: it drains, it does not free.

    Args:
        producer_tp_rank: This rank.
        producer_tp_size: TP size of this instance.
        announced_consumer_tp_size: As published; 0 = unknown.
        rule: What the cache's KV groups say about who reads whom.

    Raises:
        InvalidTopology: The rank is not in the group, or the sizes do not fit each other.
    """

    __slots__ = (
        *("_connections", "_is_announced", "_is_complete", "_rank", "_ranks", "_rule"),
        *("_size", "_tp"),
    )

    def __init__(
        self,
        producer_tp_rank: int,
        producer_tp_size: int,
        announced_consumer_tp_size: int = 0,
        rule: HeadRule | None = None,
    ) -> None:
        self._rule: Final = rule or HeadRule()
        assumed = announced_consumer_tp_size or producer_tp_size
        self._rule.plan(producer_tp_size, assumed).ack_set(producer_tp_rank)
        self._rank: Final = producer_tp_rank
        self._tp: Final = producer_tp_size
        #: Consumer TP size that holds now; 0 = nobody has stated one.
        self._size = announced_consumer_tp_size
        #: Whether ``_size`` is an announcement rather than learned from ACKs.
        self._is_announced = announced_consumer_tp_size != 0
        #: Members with a rank, all of them in the ack set.
        self._ranks: set[int] = set()
        #: Members without a rank, by connection; True: it stated a size.
        self._connections: dict[str, bool] = {}
        self._is_complete = False

    @property
    def consumer_tp_size(self) -> int:
        """The consumer TP size that holds now (ours, as long as nobody stated one)."""
        return self._size or self._tp

    @property
    def expected(self) -> frozenset[int]:
        """The consumer ranks whose ACKs free the transfer."""
        return self._ack_set(self.consumer_tp_size)

    @property
    def is_complete(self) -> bool:
        """Whether every member of the set has acknowledged. Never becomes false again."""
        return self._is_complete

    @property
    def n_missing(self) -> int:
        """How many ACKs are still missing."""
        if self._is_complete:
            return 0
        return self._needed() - len(self._ranks) - len(self._connections)

    def pending(self) -> frozenset[int]:
        """Return the ranks that have not acknowledged by name; empty when complete.

        ACKs without a rank are not in it: with some of those it is larger than ``n_missing``.
        """
        return frozenset() if self._is_complete else self.expected - self._ranks

    def announce(self, consumer_tp_size: int) -> AckVerdict:
        """Take the consumer TP size from a handshake or a request.

        It never shrinks what is needed, and never completes the set by itself.

        Returns:
            COUNTED: taken; DUPLICATE: known, or too late to matter; DISAGREES: another size was
            stated before (the one that needs more ACKs holds); INVALID: the sizes do not fit.
        """
        if not self._rule.fits(self._tp, consumer_tp_size):
            return AckVerdict.INVALID
        if self._is_complete or (self._is_announced and consumer_tp_size == self._size):
            return AckVerdict.DUPLICATE
        is_clash = self._size not in (0, consumer_tp_size)
        gain = self._count(consumer_tp_size) - self._needed()
        if not is_clash or gain > 0 or (gain == 0 and not self._is_announced):
            self._settle_on(consumer_tp_size)
            self._is_announced = True
        return AckVerdict.DISAGREES if is_clash else AckVerdict.COUNTED

    def add(self, ack: TransferAck) -> AckVerdict:
        """Take one ACK; see ``AckVerdict`` for what may become of it."""
        if not ack.is_well_formed:
            return AckVerdict.INVALID
        if not self._rule.fits(self._tp, ack.consumer_tp_size):
            return AckVerdict.INVALID
        if self._is_complete:
            return self._add_late(ack)
        if not ack.is_plain:
            if self._size == 0:
                self._size = ack.consumer_tp_size
            elif self._size != ack.consumer_tp_size:
                return self._add_clashing(ack)
        return self._add_member(ack)

    def _needed(self) -> int:
        return self._count(self.consumer_tp_size)

    def _count(self, consumer_tp_size: int) -> int:
        return len(self._ack_set(consumer_tp_size))

    def _ack_set(self, consumer_tp_size: int) -> frozenset[int]:
        return self._rule.plan(self._tp, consumer_tp_size).ack_set(self._rank)

    def _add_member(self, ack: TransferAck) -> AckVerdict:
        rank = ack.consumer_tp_rank
        if rank is None:
            if ack.source in self._connections:
                return AckVerdict.DUPLICATE
            self._connections[ack.source] = not ack.is_plain
        elif rank in self._ranks:
            return AckVerdict.DUPLICATE
        elif rank not in self.expected:
            return AckVerdict.UNEXPECTED
        else:
            self._ranks.add(rank)
        if len(self._ranks) + len(self._connections) < self._needed():
            return AckVerdict.COUNTED
        self._is_complete = True
        return AckVerdict.COMPLETE

    def _add_late(self, ack: TransferAck) -> AckVerdict:
        """Nothing can change any more; only say whether the sender is right to speak."""
        if not ack.is_plain and self._size not in (0, ack.consumer_tp_size):
            return AckVerdict.DISAGREES
        if ack.consumer_tp_rank is not None and ack.consumer_tp_rank not in self.expected:
            return AckVerdict.UNEXPECTED
        return AckVerdict.DUPLICATE

    def _add_clashing(self, ack: TransferAck) -> AckVerdict:
        """An ACK of another size: only learned sizes give way, and only to a larger need.

        The larger need exceeds what is there by more than this one ACK, so it cannot complete.
        """
        if not self._is_announced and self._count(ack.consumer_tp_size) > self._needed():
            self._settle_on(ack.consumer_tp_size)
            self._add_member(ack)
        return AckVerdict.DISAGREES

    def _settle_on(self, consumer_tp_size: int) -> None:
        """Let another size hold. Ranks of the old size mean nothing in the new one."""
        if self._size not in (0, consumer_tp_size):
            self._ranks.clear()
            self._connections = {
                source: states for source, states in self._connections.items() if not states
            }
        self._size = consumer_tp_size


class EarlyAcks:
    """ACKs of transfers that are not known here (yet), bounded in number and in time.

    Every operation is O(1) in the number of ACKs kept (``take`` and ``expire``: in those they
    return or drop).

    Args:
        capacity: Most ACKs kept; beyond it the oldest one is dropped and counted.
        ttl_s: How long an ACK waits for its transfer. A repeated ACK does not wait longer.

    Raises:
        InvalidArgument: A limit is not positive.
    """

    __slots__ = ("_acks", "_by_id", "_capacity", "_dropped", "_ttl_s")

    def __init__(self, capacity: int, ttl_s: float) -> None:
        if capacity < 1 or not ttl_s > 0:
            raise InvalidArgument(
                f"early ACK limits must be positive, not {capacity} and {ttl_s}",
                capacity=capacity,
                ttl_s=ttl_s,
            )
        self._capacity: Final = capacity
        self._ttl_s: Final = ttl_s
        #: Deadline of each ACK, oldest first.
        self._acks: OrderedDict[TransferAck, float] = OrderedDict()
        #: The same ACKs by transfer, each a set in order of arrival.
        self._by_id: dict[str, dict[TransferAck, None]] = {}
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._acks)

    @property
    def dropped(self) -> int:
        """ACKs dropped for want of room since the start (expired ones are not in it)."""
        return self._dropped

    def add(self, ack: TransferAck, now: float) -> AckVerdict:
        """Keep an ACK until its transfer is known, room runs out or its time is over.

        Returns:
            COUNTED: kept; DUPLICATE: kept already; INVALID: impossible, not kept.
        """
        if not ack.is_well_formed:
            return AckVerdict.INVALID
        if ack in self._acks:
            return AckVerdict.DUPLICATE
        if len(self._acks) == self._capacity:
            self._drop_oldest()
            self._dropped += 1
        self._acks[ack] = now + self._ttl_s
        self._by_id.setdefault(ack.transfer_id, {})[ack] = None
        return AckVerdict.COUNTED

    def take(self, transfer_id: str) -> list[TransferAck]:
        """Remove and return what was kept for a transfer, oldest first."""
        acks = list(self._by_id.pop(transfer_id, ()))
        for ack in acks:
            del self._acks[ack]
        return acks

    def expire(self, now: float) -> int:
        """Drop every ACK whose time is over; return how many."""
        before = len(self._acks)
        while self._acks and next(iter(self._acks.values())) <= now:
            self._drop_oldest()
        return before - len(self._acks)

    def next_deadline(self) -> float | None:
        """Return when ``expire`` will next have something to do; None if nothing is kept."""
        return next(iter(self._acks.values()), None)

    def _drop_oldest(self) -> None:
        ack, _ = self._acks.popitem(last=False)
        same_transfer = self._by_id[ack.transfer_id]
        del same_transfer[ack]
        if not same_transfer:
            del self._by_id[ack.transfer_id]
