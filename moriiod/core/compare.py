"""Do the caches of two ranks hold the same model's KV, and can the differences be bridged?

What may differ: TP sizes and so heads, block and kernel block sizes by a whole factor, numbers of
blocks, strides, offsets, regions, group names. Everything else must be equal, and is named if not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from moriiod.core.geometry import CacheLayout, KvGroup, KvLayer
from moriiod.core.headplan import HeadShape
from moriiod.errors import GeometryMismatch

#: Changes whenever a field joins or leaves the comparison, so that old and new never agree.
_DIGEST_VERSION = "moriiod-geometry-2"


@dataclass(frozen=True, slots=True)
class _Aspect:
    """One value that must be equal on both sides, with where it stands and what it is called."""

    where: str
    field: str
    value: str | int


def compare_layouts(
    local: CacheLayout, remote: CacheLayout, local_tp: int = 1, remote_tp: int = 1
) -> None:
    """Check that blocks of two caches hold the same model's bytes for the same tokens and heads.

    Groups are compared in order.

    Args:
        local: Our cache.
        remote: The peer's.
        local_tp: TP size of our instance.
        remote_tp: TP size of the peer's.

    Raises:
        GeometryMismatch: Names the first field that differs, its place and both values.
    """
    for error in find_mismatches(local, remote, local_tp, remote_tp).values():
        raise error


def find_mismatches(
    local: CacheLayout, remote: CacheLayout, local_tp: int = 1, remote_tp: int = 1
) -> dict[int, GeometryMismatch]:
    """Return for each group that cannot be bridged what differs first; see ``compare_layouts``.

    Raises:
        GeometryMismatch: The caches have different numbers of groups.
    """
    if len(local.groups) != len(remote.groups):
        raise _mismatch("the cache", "groups", len(local.groups), len(remote.groups))
    found: dict[int, GeometryMismatch] = {}
    for index, (here, there) in enumerate(zip(local.groups, remote.groups, strict=True)):
        try:
            _compare_groups(index, (here, local_tp), (there, remote_tp))
        except GeometryMismatch as error:
            found[index] = error
    return found


def _compare_groups(index: int, ours: tuple[KvGroup, int], theirs: tuple[KvGroup, int]) -> None:
    (here, local_tp), (there, remote_tp) = ours, theirs
    for one, other in zip(_aspects(index, here), _aspects(index, there), strict=False):
        # Counts come before what they count, so the two sequences stay in step up to the
        # first difference, and neither ends before the other.
        if one.value != other.value:
            raise _mismatch(one.where, one.field, one.value, other.value)
    _compare_blocks(f"group {index} ({here.name})", here, there)
    shape = HeadShape.of_group(here)
    n_local = here.tile_tokens * shape.local_heads(local_tp)
    n_remote = there.tile_tokens * shape.local_heads(remote_tp)
    for mine, yours in zip(here.layers, there.layers, strict=True):
        _compare_bytes(f"layer {mine.name}", (mine, n_local), (yours, n_remote))


def geometry_digest(layout: CacheLayout) -> str:
    """Return a sha256 hex digest of all that must be equal on both sides.

    Layouts that ``compare_layouts`` passes have one digest, whatever their TP sizes.
    """
    values = [
        [aspect.value for aspect in _aspects(index, group)]
        for index, group in enumerate(layout.groups)
    ]
    text = json.dumps([_DIGEST_VERSION, values], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _aspects(index: int, group: KvGroup) -> Iterator[_Aspect]:
    where = f"group {index} ({group.name})"
    for field, value in (
        ("dtype", group.dtype),
        ("layout", group.layout),
        ("head_order", group.head_order),
        ("total_kv_heads", group.total_kv_heads),
        ("head_size", group.head_size),
        ("content", group.content),
        ("layers", len(group.layers)),
    ):
        yield _Aspect(where, field, value)
    for layer in group.layers:
        yield _Aspect(where, "layer name", layer.name)
        yield _Aspect(f"layer {layer.name}", "pieces", layer.pieces)
        yield _Aspect(f"layer {layer.name}", "parts", len(layer.parts))


def _compare_blocks(where: str, here: KvGroup, there: KvGroup) -> None:
    for field, mine, theirs in (
        ("block_tokens", here.block_tokens, there.block_tokens),
        ("kernel_tokens", here.tile_tokens, there.tile_tokens),
    ):
        if max(mine, theirs) % min(mine, theirs):
            raise _mismatch(where, field, mine, theirs, "neither is a multiple of the other")
    is_opaque = bool(here.content) and here.layout in ("kv_first", "block_first")
    if is_opaque and here.tile_tokens != there.tile_tokens:
        # Packed K may interleave the tokens of a head: only whole heads of a block can be moved.
        mine, theirs = here.tile_tokens, there.tile_tokens
        raise _mismatch(where, "kernel_tokens", mine, theirs, f"content is {here.content!r}")


def _compare_bytes(where: str, mine: tuple[KvLayer, int], theirs: tuple[KvLayer, int]) -> None:
    """Compare two layers, each with its number of (token, head) pairs in a piece."""
    (one, n), (other, m) = mine, theirs
    for a, b in zip(
        one.parts or (one.piece_bytes,), other.parts or (other.piece_bytes,), strict=True
    ):
        if n == m:
            if a != b:
                raise _mismatch(where, "piece_bytes", a, b)
        elif a % n or b % m:
            why = f"not whole bytes for each of {n} and {m} tokens and heads"
            raise _mismatch(where, "piece_bytes", a, b, why)
        elif a // n != b // m:
            raise _mismatch(where, "bytes of a token and head", a // n, b // m)


def _mismatch(
    where: str, field: str, local: str | int, remote: str | int, why: str = ""
) -> GeometryMismatch:
    return GeometryMismatch(
        f"{field} of {where} is {local!r} here and {remote!r} at the peer"
        + (f": {why}" if why else ""),
        field=field,
        where=where,
        local=local,
        remote=remote,
    )
