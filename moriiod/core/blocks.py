"""Block id lists of a transfer, group by group: packed on the wire, int64 arrays in the core."""

from __future__ import annotations

from collections.abc import Sequence

from moriiod.core.geometry import CacheLayout
from moriiod.core.ids import GroupBlocks, GroupPositions
from moriiod.core.layout import unpack_blocks
from moriiod.core.plan import Int64Array
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
