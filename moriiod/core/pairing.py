"""Block lists of two sides laid against each other by position in the prompt, never by length.

A list covers the positions from ``first`` on, counted in its own blocks. The two sides may have
blocks of different sizes, so the result is counted in *units*: the largest run of tokens that lies
within one kernel block on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moriiod.core.geometry import KvGroup
from moriiod.core.layout import pair_by_position
from moriiod.core.plan import Int64Array
from moriiod.errors import InvalidArgument, LengthMismatch


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Blocks of one group on one side.

    Attributes:
        ids: int64 [n], block ids.
        first: Position of the first one, in blocks of this side.
    """

    ids: Int64Array
    first: int

    @property
    def end(self) -> int:
        """Position behind the last one."""
        return self.first + len(self.ids)


def unit_tokens(one: KvGroup, other: KvGroup) -> int:
    """Return the tokens of one unit of two groups that ``compare_layouts`` passed."""
    return min(one.tile_tokens, other.tile_tokens)


def pair_tables(
    destination: BlockTable, into: KvGroup, source: BlockTable, out_of: KvGroup
) -> tuple[Int64Array, Int64Array]:
    """Lay a source list against a destination list.

    Both must end in the same prompt: there is a length of which both hold exactly the blocks up to
    its end. What only the longer one has room for is not copied. The source must start no later
    than the destination.

    Args:
        destination: Blocks to fill.
        into: Their group.
        source: Blocks to read.
        out_of: Their group at the other side.

    Returns:
        (destination, source), int64 [n] each: ``block id * units per block + unit in the block``.

    Raises:
        LengthMismatch: The lists end at different positions; both lengths are named.
        InvalidArgument: The destination starts before the source.
    """
    unit = unit_tokens(into, out_of)
    check_tables(destination, into, source, out_of.block_tokens)
    per_to, per_of = into.block_tokens // unit, out_of.block_tokens // unit
    start, source_start = destination.first * per_to, source.first * per_of
    end = min(destination.end * per_to, source.end * per_of)
    to = _units(destination.ids, per_to)[: max(0, end - start)]
    return to, _units(source.ids, per_of)[start - source_start :][: len(to)]


def check_tables(
    destination: BlockTable, into: KvGroup, source: BlockTable, source_tokens: int
) -> None:
    """Check that two lists fit together, for blocks of these sizes; see ``pair_tables``.

    Raises:
        LengthMismatch: The lists end at different positions; both lengths are named.
        InvalidArgument: The destination starts before the source.
    """
    tokens = into.block_tokens
    if tokens == source_tokens:
        pair_by_position(destination.ids, source.ids, destination.first, source.first, into.name)
        return
    if not _can_end_together(destination.end, tokens, source.end, source_tokens):
        raise LengthMismatch(
            f"{into.name}: {len(destination.ids)} destination blocks of {tokens} tokens from "
            f"position {destination.first} and {len(source.ids)} source blocks of "
            f"{source_tokens} tokens from position {source.first} do not end in the same prompt",
            destination_blocks=len(destination.ids),
            source_blocks=len(source.ids),
            destination_first=destination.first,
            source_first=source.first,
        )
    start, source_start = destination.first * tokens, source.first * source_tokens
    if start < source_start and len(destination.ids):
        raise InvalidArgument(
            f"{into.name}: the destination starts at token {start}, but the source only at "
            f"{source_start}",
            destination_first=destination.first,
            source_first=source.first,
        )


def _can_end_together(end: int, tokens: int, other_end: int, other_tokens: int) -> bool:
    """Whether some prompt length needs exactly ``end`` blocks here and ``other_end`` there."""
    if not (end and other_end):
        return end == other_end
    return (end - 1) * tokens < other_end * other_tokens and (
        other_end - 1
    ) * other_tokens < end * tokens


def _units(ids: Int64Array, per_block: int) -> Int64Array:
    if per_block == 1:
        return ids
    within = np.arange(per_block, dtype=np.int64)
    return (ids[:, None] * per_block + within[None, :]).ravel()
