"""Which rank talks to which, when two instances have different TP sizes.

The first part is the seed vocabulary: small functions on plain numbers that raise ``ValueError``.
The second part is what the daemon uses: the same maps as sets, with typed errors that name both
sizes. Both sides of a transfer compute these sets on their own and must get the same.

Throughout, ``p`` is a rank of the producer instance (TP size ``producer_tp``) and ``c`` a rank of
the consumer instance (TP size ``consumer_tp``). The sets here are those of state that every rank
holds (MLA) and of ranks that hold the same heads: every consumer rank has exactly one source.
``headplan`` has the sets for heads that are split differently, and agrees where both apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moriiod.core.ids import MAX_RANKS
from moriiod.errors import InvalidTopology

# --- Seed functions ---------------------------------------------------------------------------


def remote_tp_rank(local_tp_rank: int, local_tp_size: int, remote_tp_size: int) -> int:
    """Return the remote rank that holds the same heads as a local rank.

    With the larger TP group on our side several local ranks share one remote rank (floor map,
    4 remote ranks for 8 local ones: 0 0 1 1 2 2 3 3). With the larger group on the remote side it
    is the first of the remote ranks that hold our heads (8 for 4: 0 2 4 6).

    Args:
        local_tp_rank: 0 .. local_tp_size - 1.
        local_tp_size: TP size of our instance.
        remote_tp_size: TP size of the other instance.

    Raises:
        ValueError: A size is no whole number from 1 on, neither size is a multiple of the other,
            or the rank is not one of ours.
    """
    _require_sizes(local_tp_size, remote_tp_size)
    if type(local_tp_rank) is not int or not 0 <= local_tp_rank < local_tp_size:
        raise ValueError(
            f"TP rank {local_tp_rank!r} is not in 0..{local_tp_size - 1} "
            f"(TP size {local_tp_size}, remote {remote_tp_size})"
        )
    return local_tp_rank * remote_tp_size // local_tp_size


def expected_ack_count(producer_tp_size: int, consumer_tp_size: int) -> int:
    """Return how many consumer ranks must acknowledge before one producer rank may free.

    It is the size of ``ack_set``, and never less than 1: also a producer rank that nobody reads
    is released by one consumer rank.

    Raises:
        ValueError: A size is no whole number from 1 on, or neither is a multiple of the other.
    """
    _require_sizes(producer_tp_size, consumer_tp_size)
    return max(1, consumer_tp_size // producer_tp_size)


def validate_kv_heads(
    local_tp_size: int, remote_tp_size: int, total_num_kv_heads: int, is_mla: bool
) -> None:
    """Refuse a pair of TP sizes whose ranks do not hold the same KV heads.

    Equal sizes and MLA always pass. Otherwise both groups must be at least as large as the number
    of KV heads, so that each rank of either holds exactly one (replicated) head.

    Raises:
        ValueError: A size or the number of heads is no whole number from 1 on.
        NotImplementedError: The pair needs heads to be split; says "replicated KV heads".
    """
    for what, value in (
        ("TP size", local_tp_size),
        ("remote TP size", remote_tp_size),
        ("number of KV heads", total_num_kv_heads),
    ):
        _require_positive(what, value)
    if is_mla or local_tp_size == remote_tp_size:
        return
    if min(local_tp_size, remote_tp_size) < total_num_kv_heads:
        raise NotImplementedError(
            f"TP {local_tp_size} with TP {remote_tp_size} needs MLA or replicated KV heads "
            f"(both TP sizes at least the {total_num_kv_heads} KV heads of the model)"
        )


def resolve_remote_tp_size(params: Mapping[str, object], local_tp_size: int) -> int:
    """Return the peer's TP size from a router's ``kv_transfer_params``.

    ``remote_tp_size`` is read before ``tp_size``. A key that is missing, None or 0 says nothing,
    and when neither says anything the peer has our own size.

    Args:
        params: The router's parameters; other keys are ignored.
        local_tp_size: Our own TP size.

    Raises:
        ValueError: A value is negative, above the cap, or no whole number (a bool, float or
            string is none). Wrong values are never taken for "unknown".
    """
    _require_positive("TP size", local_tp_size)
    for key in ("remote_tp_size", "tp_size"):
        value = params.get(key)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value <= MAX_RANKS:
            raise ValueError(f"{key} must be a whole number from 0 to {MAX_RANKS}, not {value!r}")
        if value:
            return value
    return local_tp_size


def _require_positive(what: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{what} must be a whole number from 1 on, not {value!r}")


def _require_sizes(local_tp_size: int, remote_tp_size: int) -> None:
    _require_positive("TP size", local_tp_size)
    _require_positive("remote TP size", remote_tp_size)
    if not _is_multiple(local_tp_size, remote_tp_size):
        raise ValueError(
            f"one TP size must be a multiple of the other, not {local_tp_size} and {remote_tp_size}"
        )


# --- What the daemon uses ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AckTarget:
    """A producer rank that a consumer rank owes an ACK.

    Attributes:
        rank: TP rank in the producer instance.
        reads: Whether the consumer rank reads from it. False: nobody reads it, and this consumer
            rank is the one that tells it so.
    """

    rank: int
    reads: bool


def check_sizes(producer_tp: int, consumer_tp: int, *, allows_uneven: bool = False) -> None:
    """Check that two TP sizes can be mapped onto each other.

    Raises:
        InvalidTopology: A size is outside 1..MAX_RANKS, or neither is a multiple of the other
            and that is not allowed.
    """
    if not (_is_size(producer_tp) and _is_size(consumer_tp)):
        raise _invalid(
            f"TP sizes must be whole numbers from 1 to {MAX_RANKS}", producer_tp, consumer_tp
        )
    if not (allows_uneven or _is_multiple(producer_tp, consumer_tp)):
        raise _invalid(
            "one TP size must be a multiple of the other (unless topology.allow_uneven is set on "
            "both sides)",
            producer_tp,
            consumer_tp,
        )


def are_sizes_valid(producer_tp: int, consumer_tp: int) -> bool:
    """Say whether ``check_sizes`` would pass."""
    return (
        _is_size(producer_tp) and _is_size(consumer_tp) and _is_multiple(producer_tp, consumer_tp)
    )


def check_dp_rank(dp_rank: int, dp_size: int) -> None:
    """Check a DP rank from a request against the size that the peer itself registered.

    A router's own idea of the DP size is not asked: it is often 1 where the peer has 8.

    Raises:
        InvalidTopology: The instance has no such DP rank.
    """
    if not _is_size(dp_size) or type(dp_rank) is not int or not 0 <= dp_rank < dp_size:
        raise InvalidTopology(
            f"DP rank {dp_rank!r} is not a rank of DP size {dp_size!r}",
            dp_rank=repr(dp_rank),
            dp_size=repr(dp_size),
        )


def heads_of_rank(rank: int, tp_size: int, total_kv_heads: int) -> range:
    """Return the KV heads that a rank of a TP group holds.

    Up to ``total_kv_heads`` ranks split the heads into intervals; above that every rank holds one
    head and several ranks hold the same one.

    Raises:
        InvalidTopology: The rank is not in the group, or heads and ranks do not divide.
    """
    if not _is_size(tp_size) or type(rank) is not int or not 0 <= rank < tp_size:
        raise InvalidTopology(
            f"TP rank {rank!r} is not a rank of TP size {tp_size!r}",
            rank=repr(rank),
            tp_size=repr(tp_size),
        )
    _check_heads(tp_size, total_kv_heads)
    first = rank * total_kv_heads // tp_size
    return range(first, first + max(1, total_kv_heads // tp_size))


def sources(consumer_rank: int, consumer_tp: int, producer_tp: int) -> tuple[int, ...]:
    """Return the producer ranks that a consumer rank gets its heads from, ascending.

    Raises:
        InvalidTopology: The sizes do not fit each other, or the rank is not in the group.
    """
    _check_rank("consumer", consumer_rank, producer_tp, consumer_tp)
    return (consumer_rank * producer_tp // consumer_tp,)


def readers(producer_rank: int, producer_tp: int, consumer_tp: int) -> frozenset[int]:
    """Return the consumer ranks that have this producer rank as a source; may be empty.

    Raises:
        InvalidTopology: The sizes do not fit each other, or the rank is not in the group.
    """
    _check_rank("producer", producer_rank, producer_tp, consumer_tp)
    if consumer_tp >= producer_tp:
        share = consumer_tp // producer_tp
        return frozenset(range(producer_rank * share, (producer_rank + 1) * share))
    share = producer_tp // consumer_tp
    return frozenset() if producer_rank % share else frozenset((producer_rank // share,))


def designated_consumer(producer_rank: int, producer_tp: int, consumer_tp: int) -> int:
    """Return the consumer rank that releases this producer rank if nobody reads it.

    Raises:
        InvalidTopology: The sizes do not fit each other, or the rank is not in the group.
    """
    _check_rank("producer", producer_rank, producer_tp, consumer_tp)
    return producer_rank * consumer_tp // producer_tp


def ack_set(producer_rank: int, producer_tp: int, consumer_tp: int) -> frozenset[int]:
    """Return the consumer ranks whose ACKs free a transfer of this producer rank; never empty.

    Raises:
        InvalidTopology: The sizes do not fit each other, or the rank is not in the group.
    """
    return readers(producer_rank, producer_tp, consumer_tp) or frozenset(
        (designated_consumer(producer_rank, producer_tp, consumer_tp),)
    )


def ack_targets(consumer_rank: int, producer_tp: int, consumer_tp: int) -> tuple[AckTarget, ...]:
    """Return every producer rank that waits for this consumer rank's ACK, ascending by rank.

    ``c`` is in ``ack_set(p)`` exactly when ``p`` is in ``ack_targets(c)``.

    Raises:
        InvalidTopology: The sizes do not fit each other, or the rank is not in the group.
    """
    read = sources(consumer_rank, consumer_tp, producer_tp)
    share = max(1, producer_tp // consumer_tp)
    # Only ranks of our own share can have us as their designated consumer.
    unread = (
        p
        for p in range(consumer_rank * share, (consumer_rank + 1) * share)
        if producer_tp > consumer_tp and not readers(p, producer_tp, consumer_tp)
    )
    targets = [AckTarget(p, reads=True) for p in read]
    targets += [AckTarget(p, reads=False) for p in unread]
    return tuple(sorted(targets, key=lambda target: target.rank))


def _is_size(value: int) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANKS


def _is_multiple(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def _invalid(what: str, producer_tp: int, consumer_tp: int) -> InvalidTopology:
    return InvalidTopology(
        f"{what}, not {producer_tp!r} (producer) and {consumer_tp!r} (consumer)",
        producer_tp_size=repr(producer_tp),
        consumer_tp_size=repr(consumer_tp),
    )


def _check_rank(role: str, rank: int, producer_tp: int, consumer_tp: int) -> None:
    check_sizes(producer_tp, consumer_tp)
    size = consumer_tp if role == "consumer" else producer_tp
    if type(rank) is not int or not 0 <= rank < size:
        raise _invalid(
            f"{role} TP rank {rank!r} is outside its group; TP sizes", producer_tp, consumer_tp
        )


def _check_heads(tp_size: int, total_kv_heads: int) -> None:
    if type(total_kv_heads) is not int or total_kv_heads < 1:
        raise InvalidTopology(
            f"a model has at least one KV head, not {total_kv_heads!r}",
            total_kv_heads=repr(total_kv_heads),
        )
    if not _is_multiple(tp_size, total_kv_heads):
        raise InvalidTopology(
            f"{total_kv_heads} KV heads cannot be spread evenly over TP size {tp_size}",
            tp_size=tp_size,
            total_kv_heads=total_kv_heads,
        )
