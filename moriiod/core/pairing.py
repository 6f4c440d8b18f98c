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
    if into.block_tokens == out_of.block_tokens:
        to, of = pair_by_position(
            destination.ids, source.ids, destination.first, source.first, into.name
        )
        n = into.block_tokens // unit
        return _units(to, n), _units(of, n)
    if not _can_end_together(destination.end, into.block_tokens, source.end, out_of.block_tokens):
        raise LengthMismatch(
            f"{into.name}: {len(destination.ids)} destination blocks of {into.block_tokens} tokens "
            f"from position {destination.first} and {len(source.ids)} source blocks of "
            f"{out_of.block_tokens} tokens from position {source.first} do not end in the same "
            "prompt",
            destination_blocks=len(destination.ids),
            source_blocks=len(source.ids),
            destination_first=destination.first,
            source_first=source.first,
        )
    per_to, per_of = into.block_tokens // unit, out_of.block_tokens // unit
    start, source_start = destination.first * per_to, source.first * per_of
    if start < source_start and len(destination.ids):
        raise InvalidArgument(
            f"{into.name}: the destination starts at token {start * unit}, but the source only at "
            f"{source_start * unit}",
            destination_first=destination.first,
            source_first=source.first,
        )
    end = min(destination.end * per_to, source.end * per_of)
    to = _units(destination.ids, per_to)[: max(0, end - start)]
    return to, _units(source.ids, per_of)[start - source_start :][: len(to)]


def check_ends(destination: BlockTable, source: BlockTable, what: str) -> None:
    """Refuse lists that fit together for no ratio of block sizes (the peer's is not known yet).

    Raises:
        LengthMismatch: As ``pair_by_position`` for equal block sizes.
        InvalidArgument: As ``pair_by_position`` for equal block sizes.
    """
    if _fits_with_larger_source(destination, source):
        return
    if _fits_with_larger_destination(destination, source):
        return
    pair_by_position(destination.ids, source.ids, destination.first, source.first, what)


def _fits_with_larger_source(destination: BlockTable, source: BlockTable) -> bool:
    if not (destination.end and source.end):
        return False
    # The smallest ratio that explains the ends asks least of the source's start.
    ratio = max(2, -(-destination.end // source.end))
    return -(-destination.end // ratio) == source.end and destination.first >= source.first * ratio


def _fits_with_larger_destination(destination: BlockTable, source: BlockTable) -> bool:
    if not (destination.end and source.end):
        return False
    if destination.end == 1:
        return source.end > 1 and not (source.first and not destination.first)
    ratio = -(-source.end // (destination.end - 1)) - 1
    return (
        ratio >= 2
        and -(-source.end // ratio) == destination.end
        and destination.first * ratio >= source.first
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
