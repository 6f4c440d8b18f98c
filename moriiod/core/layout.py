"""Checks of what a worker says about its KV cache, alone and against a peer's.

Everything is exact: Python's integers do not wrap, and after these checks no offset of a block
inside its region can leave it or exceed 62 bits (safety rule S5).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from moriiod.core.geometry import CacheLayout, KvGroup, KvLayer
from moriiod.core.ids import MAX_LAYERS
from moriiod.core.overlap import Run, first_overlap
from moriiod.errors import GeometryMismatch, InvalidGeometry

#: Changes whenever a field joins or leaves the comparison, so that old and new never agree.
_DIGEST_VERSION = "moriiod-geometry-1"


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
        + (group.num_blocks - 1) * layer.block_stride
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
    if layer.pieces != 1 and group.layout in ("fused", "mla"):
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
            f"layer {layer.name!r} needs {needed} bytes of region {layer.region}, which has {there}",
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
            count=group.num_blocks,
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


# --- Two sides --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Aspect:
    """One value that must be equal on both sides, with where it stands and what it is called."""

    where: str
    field: str
    value: str | int


def compare_layouts(local: CacheLayout, remote: CacheLayout) -> None:
    """Check that blocks of two caches hold the same bytes for the same tokens.

    Groups are compared in order. What need not be equal: block counts, strides, offsets, regions
    and group names.

    Raises:
        GeometryMismatch: Names the first field that differs, its place and both values.
    """
    for mine, theirs in zip(_aspects(local), _aspects(remote), strict=False):
        # Counts come before what they count, so the two sequences stay in step up to the
        # first difference, and neither ends before the other.
        if mine.value != theirs.value:
            raise GeometryMismatch(
                f"{mine.field} of {mine.where} is {mine.value!r} here and {theirs.value!r} at "
                "the peer",
                field=mine.field,
                where=mine.where,
                local=mine.value,
                remote=theirs.value,
            )


def geometry_digest(layout: CacheLayout) -> str:
    """Return a sha256 hex digest that is equal exactly where ``compare_layouts`` passes."""
    values = [aspect.value for aspect in _aspects(layout)]
    text = json.dumps([_DIGEST_VERSION, *values], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _aspects(layout: CacheLayout) -> Iterator[_Aspect]:
    yield _Aspect("the cache", "groups", len(layout.groups))
    for index, group in enumerate(layout.groups):
        where = f"group {index} ({group.name})"
        for field, value in (
            ("dtype", group.dtype),
            ("layout", group.layout),
            ("head_order", group.head_order),
            ("block_tokens", group.block_tokens),
            ("total_kv_heads", group.total_kv_heads),
            ("head_size", group.head_size),
            ("content", group.content),
            ("layers", len(group.layers)),
        ):
            yield _Aspect(where, field, value)
        for layer in group.layers:
            yield _Aspect(where, "layer name", layer.name)
            yield _Aspect(f"layer {layer.name}", "pieces", layer.pieces)
            yield _Aspect(f"layer {layer.name}", "piece_bytes", layer.piece_bytes)
