"""Block id lists of a transfer, group by group: packed on the wire, int64 arrays in the core."""

from __future__ import annotations

from collections.abc import Sequence

from moriiod.core.geometry import CacheLayout
from moriiod.core.ids import GroupBlocks, GroupPositions
from moriiod.core.layout import unpack_blocks
from moriiod.core.pairing import BlockTable, check_tables, pair_tables
from moriiod.core.plan import Int64Array
from moriiod.core.planner import BlockPairs
from moriiod.errors import LengthMismatch

_BYTES_PER_ID = 4


def count_blocks(blocks: GroupBlocks) -> int:
    """Return the number of ids in all groups together."""
    return sum(len(packed) for packed in blocks) // _BYTES_PER_ID


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


def tables_of(blocks: Sequence[Int64Array], first: GroupPositions) -> tuple[BlockTable, ...]:
    """Return block lists with their positions.

    Raises:
        LengthMismatch: Positions are given, but not one for each group.
    """
    positions = full_positions(first, len(blocks))
    return tuple(BlockTable(ids, at) for ids, at in zip(blocks, positions, strict=True))


def check_groups(
    local: Sequence[BlockTable],
    remote: Sequence[BlockTable],
    layout: CacheLayout,
    remote_tokens: Sequence[int] = (),
) -> None:
    """Refuse lists to read that do not fit together.

    Args:
        local: Blocks to fill.
        remote: Blocks to read.
        layout: Our cache.
        remote_tokens: Tokens in a block of the peer's groups, as the request says; () = as ours.

    Raises:
        LengthMismatch: A list or size is missing, or two lists end at different positions.
        InvalidArgument: A local list starts before the remote one.
    """
    _check_count(local, remote)
    sizes = remote_tokens or [group.block_tokens for group in layout.groups]
    if len(sizes) != len(layout.groups):
        raise LengthMismatch(
            "one block size is needed for each KV group",
            sizes=len(sizes),
            groups=len(layout.groups),
        )
    for mine, theirs, group, tokens in zip(local, remote, layout.groups, sizes, strict=True):
        check_tables(mine, group, theirs, tokens)


def pair_for_read(
    here: CacheLayout,
    local: Sequence[BlockTable],
    there: CacheLayout,
    remote: Sequence[BlockTable],
) -> tuple[BlockPairs, ...]:
    """Lay the blocks to read against the blocks to fill, group by group, by position.

    Raises:
        LengthMismatch: A list is missing, or two lists end at different positions.
        InvalidArgument: A local list starts before the remote one.
    """
    _check_count(local, remote)
    pairs = []
    for mine, ours, theirs, group in zip(local, here.groups, remote, there.groups, strict=True):
        to, of = pair_tables(mine, ours, theirs, group)
        pairs.append(BlockPairs(local=to, remote=of))
    return tuple(pairs)


def pair_for_write(
    here: CacheLayout,
    local: Sequence[BlockTable],
    there: CacheLayout,
    remote: Sequence[BlockTable],
) -> tuple[BlockPairs, ...]:
    """Lay the blocks to fill at the peer against ours, group by group, by position.

    Raises:
        LengthMismatch: A list is missing, or two lists end at different positions.
        InvalidArgument: A remote list starts before ours.
    """
    swapped = pair_for_read(there, remote, here, local)
    return tuple(BlockPairs(local=pair.remote, remote=pair.local) for pair in swapped)


def _check_count(local: Sequence[BlockTable], remote: Sequence[BlockTable]) -> None:
    if len(local) != len(remote):
        raise LengthMismatch(
            "the two sides name different numbers of KV groups",
            ours=len(local),
            theirs=len(remote),
        )
