"""Checks a plan against both caches before an engine sees it (safety rule S5).

Engines trust numbers: MoRI asserts on unequal lists and its own bounds check wraps at 2^64, and a
copy trusts them altogether. So every engine of moriiod calls ``check_plan`` first. Arrays are
checked once however many layers share them; bases are added in Python integers, which never wrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from moriiod.core.ids import MAX_OFFSET
from moriiod.core.plan import BlockSpans, Int64Array, LayerSpans, TransferPlan
from moriiod.engines.base import Direction
from moriiod.errors import InvalidArgument, LengthMismatch, OutOfRange

Side = Literal["local", "remote"]


@dataclass(frozen=True, slots=True)
class _Extent:
    """From the first byte that spans touch to the one after the last, relative to the base."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _CheckedSpans:
    local: _Extent
    remote: _Extent
    n_bytes: int


def check_plan(
    plan: TransferPlan,
    direction: Direction,
    local_bytes: Sequence[int],
    remote_bytes: Sequence[int],
) -> None:
    """Make sure that a plan stays inside both caches and writes no byte twice.

    Args:
        plan: What is to be copied.
        direction: ``read`` writes to local memory, ``write`` to remote memory.
        local_bytes: Size of each local region.
        remote_bytes: Size of each remote region.

    Raises:
        LengthMismatch: Offsets and sizes of one set of spans differ in number.
        OutOfRange: A span leaves its region, or the region does not exist.
        InvalidArgument: Sizes that are not positive, arrays that are not int64, totals that do not
            add up, or destinations that overlap.
    """
    if direction not in ("read", "write"):
        raise InvalidArgument("no such direction", field="direction", got=repr(direction)[:40])
    checked: dict[int, _CheckedSpans] = {}
    total = 0
    for index, layer in enumerate(plan.layers):
        key = id(layer.spans)
        facts = checked.get(key)
        if facts is None:
            facts = checked[key] = _check_spans(layer.spans)
        if facts.n_bytes:
            _check_layer(index, layer, facts, "local", local_bytes)
            _check_layer(index, layer, facts, "remote", remote_bytes)
        total += facts.n_bytes
    if total != plan.n_bytes:
        raise InvalidArgument(
            f"the plan says {plan.n_bytes} bytes, its spans have {total}",
            field="n_bytes",
            got=plan.n_bytes,
        )
    _check_destinations(plan, "local" if direction == "read" else "remote", checked)


def _check_spans(spans: BlockSpans) -> _CheckedSpans:
    for name, array in (("local", spans.local), ("remote", spans.remote), ("sizes", spans.sizes)):
        if array.dtype != np.int64 or array.ndim != 1:
            raise InvalidArgument(
                "offsets and sizes are int64 arrays of one dimension",
                field=name,
                got=f"{array.dtype} {array.ndim}-d",
            )
    if not len(spans.local) == len(spans.remote) == len(spans.sizes):
        raise LengthMismatch(
            "offsets and sizes differ in number",
            local=len(spans.local),
            remote=len(spans.remote),
            sizes=len(spans.sizes),
        )
    if not len(spans.sizes):
        empty = _Extent(0, 0)
        return _CheckedSpans(empty, empty, 0)
    if int(spans.sizes.min()) <= 0:
        at = int(np.argmin(spans.sizes))
        raise InvalidArgument(
            "a span has no bytes", field="sizes", span=at, got=int(spans.sizes[at])
        )
    local = _extent_of("local", spans.local, spans.sizes)
    remote = _extent_of("remote", spans.remote, spans.sizes)
    n_bytes = _exact_sum(spans.sizes)
    if n_bytes != spans.n_bytes:
        raise InvalidArgument(
            f"the spans say {spans.n_bytes} bytes, their sizes add up to {n_bytes}",
            field="n_bytes",
            got=spans.n_bytes,
        )
    return _CheckedSpans(local, remote, n_bytes)


def _extent_of(side: Side, offsets: Int64Array, sizes: Int64Array) -> _Extent:
    """Return where the spans lie; neither term is above 2^62, so the sum cannot wrap."""
    for name, array in (("offset", offsets), ("size", sizes)):
        bad = (array < 0) | (array > MAX_OFFSET)
        if bad.any():
            at = int(np.argmax(bad))
            raise OutOfRange(
                f"the {side} {name} of a span lies outside any region",
                side=side,
                span=at,
                offset=int(offsets[at]),
                size=int(sizes[at]),
            )
    return _Extent(int(offsets.min()), int((offsets + sizes).max()))


def _exact_sum(sizes: Int64Array) -> int:
    """Sum without wrapping: many sizes near 2^62 do not fit into int64."""
    if int(sizes.max()) <= MAX_OFFSET // len(sizes):
        return int(sizes.sum())
    return sum(sizes.tolist())


def _check_layer(
    index: int, layer: LayerSpans, facts: _CheckedSpans, side: Side, region_bytes: Sequence[int]
) -> None:
    region = layer.local_region if side == "local" else layer.remote_region
    base = layer.local_offset if side == "local" else layer.remote_offset
    extent = facts.local if side == "local" else facts.remote
    if not 0 <= region < len(region_bytes):
        raise OutOfRange(
            f"layer {index} names a {side} region that does not exist",
            side=side,
            layer=index,
            region=region,
            limit=len(region_bytes),
        )
    if base < 0 or base + extent.end > region_bytes[region]:
        offsets = layer.spans.local if side == "local" else layer.spans.remote
        at = int(np.argmax(offsets + layer.spans.sizes))
        raise OutOfRange(
            f"layer {index} leaves its {side} region of {region_bytes[region]} bytes",
            side=side,
            layer=index,
            region=region,
            span=at,
            offset=base + int(offsets[at]),
            size=int(layer.spans.sizes[at]),
            limit=region_bytes[region],
        )


def _check_destinations(plan: TransferPlan, side: Side, checked: dict[int, _CheckedSpans]) -> None:
    by_region: dict[int, list[tuple[int, int, LayerSpans]]] = {}
    seen: set[int] = set()
    for layer in plan.layers:
        facts = checked[id(layer.spans)]
        if not facts.n_bytes:
            continue
        if id(layer.spans) not in seen:
            seen.add(id(layer.spans))
            offsets = layer.spans.local if side == "local" else layer.spans.remote
            _refuse_overlap(offsets, layer.spans.sizes, side)
        base = layer.local_offset if side == "local" else layer.remote_offset
        region = layer.local_region if side == "local" else layer.remote_region
        extent = facts.local if side == "local" else facts.remote
        item = (base + extent.first, base + extent.end, layer)
        by_region.setdefault(region, []).append(item)
    for items in by_region.values():
        _check_layers_apart(items, side)


def _check_layers_apart(items: list[tuple[int, int, LayerSpans]], side: Side) -> None:
    """Layers that interleave in one region are compared span by span, others by their extents."""
    items.sort(key=lambda item: item[:2])
    if all(a[1] <= b[0] for a, b in pairwise(items)):
        return
    offsets = np.concatenate(
        [
            layer.spans.local + layer.local_offset
            if side == "local"
            else layer.spans.remote + layer.remote_offset
            for _, _, layer in items
        ]
    )
    sizes = np.concatenate([layer.spans.sizes for _, _, layer in items])
    _refuse_overlap(offsets, sizes, side)


def _refuse_overlap(offsets: Int64Array, sizes: Int64Array, side: Side) -> None:
    if len(offsets) > 1 and not (offsets[1:] >= offsets[:-1]).all():
        order = np.argsort(offsets, kind="stable")
        offsets, sizes = offsets[order], sizes[order]
    overlaps = offsets[:-1] + sizes[:-1] > offsets[1:]
    if overlaps.any():
        at = int(np.argmax(overlaps))
        raise InvalidArgument(
            "two spans write the same bytes",
            field=side,
            offset=int(offsets[at]),
            size=int(sizes[at]),
            next_offset=int(offsets[at + 1]),
        )
