"""Block id lists of a transfer, group by group: packed on the wire, int64 arrays in the core."""

from __future__ import annotations

from collections.abc import Sequence

from moriiod.core.geometry import CacheLayout
from moriiod.core.ids import GroupBlocks, GroupPositions
from moriiod.core.layout import pair_by_position, unpack_blocks
from moriiod.core.plan import Int64Array
from moriiod.core.planner import BlockPairs
from moriiod.errors import LengthMismatch

_BYTES_PER_ID = 4


def count_blocks(blocks: GroupBlocks) -> int:
    """Return the number of ids in all groups together."""
    return sum(len(packed) for packed in blocks) // _BYTES_PER_ID


def pack_blocks(ids: Int64Array) -> bytes:
    """Return checked ids as little-endian u32."""
    return ids.astype("<u4").tobytes()


def unpack_groups(
    blocks: GroupBlocks, layout: CacheLayout, *, distinct: bool
) -> tuple[Int64Array, ...]:
    """Return the ids of every group, each below the group's number of blocks.

    Args:
        blocks: Packed ids by group.
        layout: The cache the ids belong to.
        distinct: Refuse repeated ids (destinations; a source may be read twice).

    Raises:
        LengthMismatch: Not one list for each group.
        OutOfRange: An id is not below the group's ``num_blocks``.
        InvalidArgument: An id is repeated although ``distinct``.
    """
    if len(blocks) != len(layout.groups):
        raise LengthMismatch(
            "one list of block ids is needed for each KV group",
            lists=len(blocks),
            groups=len(layout.groups),
        )
    return tuple(
        unpack_blocks(packed, group.num_blocks, group.name, distinct=distinct)
        for packed, group in zip(blocks, layout.groups, strict=True)
    )


def full_positions(first: GroupPositions, groups: int) -> Sequence[int]:
    """Return the first position of each group; () means all 0.

    Raises:
        LengthMismatch: Neither empty nor one for each group.
    """
    if not first:
        return (0,) * groups
    if len(first) != groups:
        raise LengthMismatch(
            "one first position is needed for each KV group", positions=len(first), groups=groups
        )
    return first


def pair_for_read(
    local: Sequence[Int64Array],
    remote: Sequence[Int64Array],
    local_first: GroupPositions,
    remote_first: GroupPositions,
) -> tuple[BlockPairs, ...]:
    """Lay the blocks to read against the blocks to fill, group by group, by position.

    Raises:
        LengthMismatch: A list or position is missing, or the lists end at different positions.
        InvalidArgument: The local list starts before the remote one.
    """
    pairs = _pair_groups(local, remote, local_first, remote_first)
    return tuple(BlockPairs(local=mine, remote=theirs) for mine, theirs in pairs)


def pair_for_write(
    local: Sequence[Int64Array],
    remote: Sequence[Int64Array],
    local_first: GroupPositions,
    remote_first: GroupPositions,
) -> tuple[BlockPairs, ...]:
    """Lay the blocks to fill at the peer against ours, group by group, by position.

    Raises:
        LengthMismatch: A list or position is missing, or the lists end at different positions.
        InvalidArgument: The remote list starts before ours.
    """
    pairs = _pair_groups(remote, local, remote_first, local_first)
    return tuple(BlockPairs(local=mine, remote=theirs) for theirs, mine in pairs)


def _pair_groups(
    destination: Sequence[Int64Array],
    source: Sequence[Int64Array],
    destination_first: GroupPositions,
    source_first: GroupPositions,
) -> list[tuple[Int64Array, Int64Array]]:
    groups = len(destination)
    if len(source) != groups:
        raise LengthMismatch(
            "the two sides name different numbers of KV groups", ours=groups, theirs=len(source)
        )
    starts = zip(
        full_positions(destination_first, groups), full_positions(source_first, groups), strict=True
    )
    return [
        pair_by_position(into, out_of, into_first, out_first)
        for into, out_of, (into_first, out_first) in zip(destination, source, starts, strict=True)
    ]
