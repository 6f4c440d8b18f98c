"""Checks of what a worker says about its KV cache and its blocks.

Everything is exact: Python's integers do not wrap, and after these checks no offset of a block
inside its region can leave it or exceed 62 bits (safety rule S5). ``planner`` builds on them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moriiod.core.geometry import CacheLayout, KvGroup, KvLayer
from moriiod.core.ids import MAX_LAYERS
from moriiod.core.overlap import Run, first_overlap
from moriiod.core.plan import Int64Array
from moriiod.errors import (
    InvalidArgument,
    InvalidGeometry,
    LengthMismatch,
    OutOfRange,
)

# --- One side ---------------------------------------------------------------------------------


def check_layout(layout: CacheLayout) -> None:
    """Check that every piece of every block lies inside its region and apart from all others.

    Layers of one group may interleave but not share a byte. Layers of different groups may: an
    engine lends one storage to several groups and keeps their block tables apart.

    Raises:
        InvalidGeometry: Names the group and layer, what is needed and what there is.
    """
    _check_names(layout)
    for group in layout.groups:
        _check_group(group)
        runs: dict[int, list[Run]] = {}
        for layer in group.layers:
            _check_layer(group, layer, layout.region_bytes)
            runs.setdefault(layer.region, []).extend(_runs(group, layer))
        for region, in_region in runs.items():
            _check_apart(group, region, in_region)


def needed_bytes(group: KvGroup, layer: KvLayer) -> int:
    """Return how large the layer's region must at least be: one past its last byte."""
    return (
        layer.offset
        + (layer.pieces - 1) * layer.kv_stride
        + (group.num_blocks * group.tiles_per_block - 1) * layer.block_stride
        + layer.piece_bytes
    )


def _check_names(layout: CacheLayout) -> None:
    groups = [group.name for group in layout.groups]
    layers = [layer.name for group in layout.groups for layer in group.layers]
    for what, names in (("group", groups), ("layer", layers)):
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise InvalidGeometry(f"two {what}s are named {name!r}", what=what, name=name)
            seen.add(name)
    if len(layers) > MAX_LAYERS:
        raise InvalidGeometry(
            f"{len(layers)} layers are more than {MAX_LAYERS}", value=len(layers), limit=MAX_LAYERS
        )


def _check_group(group: KvGroup) -> None:
    if group.block_tokens % group.tile_tokens:
        raise InvalidGeometry(
            f"group {group.name!r}: kernel blocks of {group.tile_tokens} tokens do not fill blocks "
            f"of {group.block_tokens}",
            group=group.name,
            kernel_tokens=group.tile_tokens,
            block_tokens=group.block_tokens,
        )
    if group.layout == "state" and (group.block_tokens != 1 or group.head_order != "HND"):
        raise InvalidGeometry(
            f"group {group.name!r}: a state has no tokens (block_tokens 1) and heads outermost "
            "(HND)",
            group=group.name,
            block_tokens=group.block_tokens,
            head_order=group.head_order,
        )


def _check_layer(group: KvGroup, layer: KvLayer, region_bytes: tuple[int, ...]) -> None:
    place = {"group": group.name, "layer": layer.name}
    if layer.region >= len(region_bytes):
        raise InvalidGeometry(
            f"layer {layer.name!r} lies in region {layer.region}, but there are only "
            f"{len(region_bytes)}",
            **place,
            region=layer.region,
            regions=len(region_bytes),
        )
    if sum(layer.parts) not in (0, layer.piece_bytes) or (layer.parts and group.layout != "state"):
        raise InvalidGeometry(
            f"layer {layer.name!r}: parts of {sum(layer.parts)} bytes in a {group.layout} piece of "
            f"{layer.piece_bytes}; only a state has parts, and they are all of it",
            **place,
            parts_bytes=sum(layer.parts),
            piece_bytes=layer.piece_bytes,
            layout=group.layout,
        )
    if layer.pieces != 1 and group.layout in ("fused", "mla", "state"):
        raise InvalidGeometry(
            f"layer {layer.name!r} has a kv_stride, but its layout {group.layout!r} knows no "
            "V piece",
            **place,
            kv_stride=layer.kv_stride,
            layout=group.layout,
        )
    needed, there = needed_bytes(group, layer), region_bytes[layer.region]
    if needed > there:
        raise InvalidGeometry(
            f"layer {layer.name!r} needs {needed} bytes of region {layer.region}, "
            f"which has {there}",
            **place,
            region=layer.region,
            needed_bytes=needed,
            region_bytes=there,
        )


def _runs(group: KvGroup, layer: KvLayer) -> Iterator[Run]:
    for piece in range(layer.pieces):
        yield Run(
            label=layer.name if layer.pieces == 1 else f"{layer.name} ({'KV'[piece]})",
            start=layer.offset + piece * layer.kv_stride,
            stride=layer.block_stride,
            count=group.num_blocks * group.tiles_per_block,
            size=layer.piece_bytes,
        )


def _check_apart(group: KvGroup, region: int, runs: list[Run]) -> None:
    clash = first_overlap(runs)
    if clash is None:
        return
    one, other = clash
    what = (
        f"blocks of {one.label} overlap each other"
        if one is other
        else f"blocks of {one.label} and {other.label} overlap"
    )
    raise InvalidGeometry(
        f"{what} in region {region}",
        group=group.name,
        region=region,
        one=one.label,
        other=other.label,
        block_stride=one.stride,
        piece_bytes=one.size,
    )


# --- Blocks of one transfer -------------------------------------------------------------------


def unpack_blocks(
    packed: bytes, num_blocks: int, what: str, *, distinct: bool = False
) -> Int64Array:
    """Return the block ids of one group as an array.

    A block may be named twice where it is only read from. Where it is written to, two different
    blocks would land in it, so a list of destinations must be distinct.

    Args:
        packed: Little-endian u32 ids.
        num_blocks: Blocks the cache of that very rank has.
        what: What the list is, for the error.
        distinct: Refuse an id that is named twice.

    Returns:
        int64 [n] in the given order, each in 0 .. num_blocks - 1.

    Raises:
        OutOfRange: An id that the cache does not have; fields ``id`` and ``limit``.
        InvalidArgument: Broken packing, or an id twice although ``distinct``; field ``id``.
    """
    if len(packed) % 4:
        raise InvalidArgument(
            f"{what}: {len(packed)} bytes are no whole number of u32 ids", n_bytes=len(packed)
        )
    ids = np.frombuffer(packed, dtype="<u4").astype(np.int64)
    if ids.size and int(ids.max()) >= num_blocks:
        bad = int(ids[np.argmax(ids >= num_blocks)])
        raise OutOfRange(
            f"{what}: block {bad} is not below {num_blocks}", what=what, id=bad, limit=num_blocks
        )
    if distinct and ids.size > 1:
        in_order = np.sort(ids)
        is_repeat = in_order[1:] == in_order[:-1]
        if is_repeat.any():
            bad = int(in_order[np.argmax(is_repeat)])
            raise InvalidArgument(f"{what}: block {bad} is named twice", what=what, id=bad)
    return ids


def pair_by_position(
    destination: Int64Array,
    source: Int64Array,
    destination_first: int = 0,
    source_first: int = 0,
    what: str = "blocks",
) -> tuple[Int64Array, Int64Array]:
    """Lay a source list against a destination list by position in the prompt, never by length.

    Entry ``i`` of a list is position ``first + i``. Both lists must end at the same position, and
    the source must start no later than the destination: what the destination holds already (a
    prefix hit) is skipped in the source, what it lacks must be there. READ has the local blocks
    as destination, WRITE the remote ones.

    Returns:
        (destination, source), equally long; empty if the destination is.

    Raises:
        LengthMismatch: The lists end at different positions; both lengths are named.
        InvalidArgument: The destination starts before the source.
    """
    if destination_first + len(destination) != source_first + len(source):
        raise LengthMismatch(
            f"{what}: {len(destination)} destination blocks from position {destination_first} "
            f"and {len(source)} source blocks from position {source_first} do not end at the "
            "same position",
            destination_blocks=len(destination),
            source_blocks=len(source),
            destination_first=destination_first,
            source_first=source_first,
        )
    if destination_first < source_first:
        raise InvalidArgument(
            f"{what}: the destination starts at position {destination_first}, but the source "
            f"only at {source_first}",
            destination_first=destination_first,
            source_first=source_first,
        )
    return destination, source[destination_first - source_first :]
