"""Checks and packs what callers pass, before anything is sent. Errors name the value."""

from __future__ import annotations

import math
import numbers
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moriiod.core.ids import (
    MAX_BLOCK_ID,
    MAX_BLOCK_TOKENS,
    MAX_BLOCKS_PER_GROUP,
    MAX_DURATION_S,
    MAX_GROUPS,
    MAX_LAYERS,
    MAX_RANKS,
    MAX_TRANSFER_ID_BYTES,
    GroupBlocks,
    Role,
)
from moriiod.core.requests import PeerAddress
from moriiod.errors import InvalidArgument, MoriiodError, TooLarge

#: Block ids of one KV group.
BlockIds = Sequence[int] | npt.NDArray[Any]

_U32: Final = next(code for code in "IL" if array(code).itemsize == 4)
_ROLES: Final = ("publish", "pull", "push", "reserve")


def check_transfer_id(transfer_id: str) -> str:
    """Return a usable transfer id.

    Raises:
        InvalidArgument: Not text, empty, over 256 bytes, or not printable.
    """
    is_good = isinstance(transfer_id, str) and transfer_id.isprintable() and bool(transfer_id)
    if not is_good or len(transfer_id.encode("utf-8", "replace")) > MAX_TRANSFER_ID_BYTES:
        raise invalid(
            "transfer_id", transfer_id, f"printable text of 1 to {MAX_TRANSFER_ID_BYTES} bytes"
        )
    return transfer_id


def check_role(role: Role) -> Role:
    """Return a role.

    Raises:
        InvalidArgument: It is none.
    """
    if role not in _ROLES:
        raise invalid("role", role, "one of " + ", ".join(_ROLES))
    return role


def check_peer(peer: PeerAddress) -> PeerAddress:
    """Return a peer address.

    Raises:
        InvalidArgument: It is something else.
    """
    if not isinstance(peer, PeerAddress):
        raise invalid("peer", peer, "a PeerAddress")
    return peer


def check_seconds(name: str, value: float | None) -> float | None:
    """Return a duration in seconds; None stays None.

    Raises:
        InvalidArgument: Not a number, not finite, not positive, or over a week.
    """
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 < value <= MAX_DURATION_S:
        raise invalid(name, value, f"a number of seconds above 0, up to {MAX_DURATION_S:.0f}")
    return float(value)


def check_tp_size(name: str, value: int) -> int:
    """Return a peer's TP size; 0 = unknown.

    Raises:
        InvalidArgument: Not a whole number from 0 to the cap.
    """
    if type(value) is not int or not 0 <= value <= MAX_RANKS:
        raise invalid(name, value, f"a whole number from 0 to {MAX_RANKS}")
    return value


def check_layers(layers: int | Iterable[int]) -> tuple[int, ...]:
    """Return layer indexes.

    Raises:
        InvalidArgument: None at all, or one is no whole number from 0 to the cap.
    """
    indexes = (layers,) if isinstance(layers, int) else tuple(layers)
    for index in indexes:
        if type(index) is not int or not 0 <= index < MAX_LAYERS:
            raise invalid("layers", index, f"a whole number from 0 to {MAX_LAYERS - 1}")
    if not 1 <= len(indexes) <= MAX_LAYERS:
        raise invalid("layers", len(indexes), f"1 to {MAX_LAYERS} layers")
    return indexes


def check_layer_count(n_layers: int) -> int:
    """Return a number of layers.

    Raises:
        InvalidArgument: No whole number from 0 to the cap.
    """
    if type(n_layers) is not int or not 0 <= n_layers <= MAX_LAYERS:
        raise invalid("n_layers", n_layers, f"a whole number from 0 to {MAX_LAYERS}")
    return n_layers


def check_positions(name: str, first: Sequence[int]) -> tuple[int, ...]:
    """Return the first position of each group's list.

    Raises:
        InvalidArgument: One is no whole number from 0 to the cap.
    """
    for position in first:
        if type(position) is not int or not 0 <= position <= MAX_BLOCKS_PER_GROUP:
            raise invalid(name, position, f"a whole number from 0 to {MAX_BLOCKS_PER_GROUP}")
    if len(first) > MAX_GROUPS:
        raise invalid(name, len(first), f"at most {MAX_GROUPS} positions")
    return tuple(first)


def check_block_tokens(name: str, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens in a block of each group.

    Raises:
        InvalidArgument: One is no whole number from 1 to the cap.
    """
    for n in tokens:
        if type(n) is not int or not 1 <= n <= MAX_BLOCK_TOKENS:
            raise invalid(name, n, f"a whole number from 1 to {MAX_BLOCK_TOKENS}")
    if len(tokens) > MAX_GROUPS:
        raise invalid(name, len(tokens), f"at most {MAX_GROUPS} sizes")
    return tuple(tokens)


def pack_groups(name: str, groups: Sequence[BlockIds]) -> GroupBlocks:
    """Return the block ids of every KV group, packed as little-endian u32.

    Args:
        name: Of the argument, for errors.
        groups: For each KV group a list of ints or a one-dimensional integer array.

    Raises:
        InvalidArgument: An id is negative, above 2^32 - 1, a bool or a float; or this is no list
            of lists. The error names the value.
        TooLarge: More groups or more ids in a group than the protocol takes.
    """
    if isinstance(groups, str | bytes) or not isinstance(groups, Sequence | np.ndarray):
        raise invalid(name, groups, "one list of block ids for each KV group")
    if len(groups) > MAX_GROUPS:
        raise _too_large(name, "max_groups", MAX_GROUPS, len(groups))
    return tuple(_pack(f"{name}[{index}]", ids) for index, ids in enumerate(groups))


def _pack(name: str, ids: BlockIds) -> bytes:
    if isinstance(ids, np.ndarray):
        return _pack_array(name, ids)
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise invalid(name, ids, "a list of block ids")
    if len(ids) > MAX_BLOCKS_PER_GROUP:
        raise _too_large(name, "max_blocks_per_group", MAX_BLOCKS_PER_GROUP, len(ids))
    if set(map(type, ids)) - {int}:
        ids = [_plain_id(name, block) for block in ids]
    try:
        packed = array(_U32, ids)
    except OverflowError:
        raise _bad_id(name, next(b for b in ids if not 0 <= b < MAX_BLOCK_ID)) from None
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def _plain_id(name: str, block: object) -> int:
    """Accept other whole numbers too (numpy scalars), but never a bool."""
    if isinstance(block, bool | np.bool_) or not isinstance(block, numbers.Integral):
        raise _bad_id(name, block)
    return int(block)


def _pack_array(name: str, ids: npt.NDArray[Any]) -> bytes:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        shown = f"an array of {ids.dtype} with {ids.ndim} dimensions"
        raise invalid(name, shown, "a one-dimensional array of whole numbers")
    if len(ids) > MAX_BLOCKS_PER_GROUP:
        raise _too_large(name, "max_blocks_per_group", MAX_BLOCKS_PER_GROUP, len(ids))
    if len(ids):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= MAX_BLOCK_ID:
            raise _bad_id(name, low if low < 0 else high)
    return ids.astype("<u4").tobytes()


def invalid(name: str, value: object, wanted: str) -> InvalidArgument:
    """Return the error for a value that is none of what is wanted."""
    shown = repr(value)[:100]
    return InvalidArgument(f"{name} must be {wanted}, not {shown}", field=name, got=shown)


def _bad_id(name: str, block: object) -> InvalidArgument:
    return invalid(name, block, f"block ids, whole numbers from 0 to {MAX_BLOCK_ID - 1}")


def _too_large(name: str, limit: str, value: int, got: int) -> MoriiodError:
    return TooLarge(
        f"{name} has {got} entries, the limit is {value}", limit=limit, value=value, got=got
    )
