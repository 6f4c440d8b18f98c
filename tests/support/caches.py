"""Builders of cache layouts for tests: sensible values for whatever a test does not speak of."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from moriiod.core.geometry import CacheLayout, KvGroup, KvLayer

GENERATION = "0" * 32


def layer(
    name: str = "layer.0",
    *,
    region: int = 0,
    offset: int = 0,
    block_stride: int = 4096,
    kv_stride: int = 0,
    piece_bytes: int = 4096,
    parts: tuple[int, ...] = (),
) -> KvLayer:
    """Return one layer; by default one unpadded piece a block."""
    return KvLayer(name, region, offset, block_stride, kv_stride, piece_bytes, parts)


def group(
    layers: Sequence[KvLayer] = (),
    *,
    name: str = "full",
    layout: str = "fused",
    head_order: str = "HND",
    dtype: str = "bfloat16",
    block_tokens: int = 16,
    num_blocks: int = 8,
    total_kv_heads: int = 1,
    head_size: int = 128,
    content: str = "",
    kernel_tokens: int = 0,
) -> KvGroup:
    """Return one group; by default with one default layer."""
    return KvGroup(
        name=name,
        layout=layout,  # type: ignore[arg-type]
        head_order=head_order,  # type: ignore[arg-type]
        dtype=dtype,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        total_kv_heads=total_kv_heads,
        head_size=head_size,
        layers=tuple(layers) or (layer(),),
        content=content,
        kernel_tokens=kernel_tokens,
    )


def cache(*groups: KvGroup, region_bytes: Sequence[int] = (1 << 30,)) -> CacheLayout:
    """Return a layout; by default of one default group in one region of 1 GiB."""
    return CacheLayout(GENERATION, groups or (group(),), tuple(region_bytes))


def pack(ids: Iterable[int]) -> bytes:
    """Return block ids as they travel: little-endian u32."""
    values = list(ids)
    return struct.pack(f"<{len(values)}I", *values)
