"""What a worker says about its KV cache: groups, layers, pieces and where they lie.

A *piece* is the part of one block of one layer that is contiguous and has one meaning: K, V, or
both together. Piece ``j`` of block ``b`` of a layer lies at byte

    layer.offset + j * layer.kv_stride + b * layer.block_stride

of its region and has ``layer.piece_bytes`` bytes. ``kv_stride == 0`` means one piece a block.

Where an attention kernel works on smaller blocks than the block table (``group.kernel_tokens``),
``b`` counts *kernel blocks* in these two formulas: block ``i`` of the table is the kernel blocks
``i * n`` to ``(i + 1) * n - 1``, with ``n = block_tokens / kernel_tokens``.

| layout      | tensor of one layer              | pieces | block_stride | kv_stride |
|-------------|----------------------------------|--------|--------------|-----------|
| kv_first    | [2, blocks, ...]                 | 2      | stride[1]    | stride[0] |
| block_first | [blocks, 2, ...]                 | 2      | stride[0]    | stride[1] |
| fused       | [blocks, heads, tokens, content] | 1      | stride[0]    | 0         |
| mla         | [blocks, tokens, latent]         | 1      | stride[0]    | 0         |
| state       | [slots, ...], no tokens          | 1      | stride[0]    | 0         |

Inside a piece lie, outermost first, tokens and heads (NHD) or heads and tokens (HND), each pair
with the same number of bytes. A piece of a ``state`` has no tokens; it may have several *parts*
(the projections of a convolution), each of them split by heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from annotated_types import Ge, Le, Len, MaxLen

from moriiod.core.ids import (
    MAX_GROUPS,
    MAX_LAYERS,
    MAX_REGIONS,
    Bytes,
    Generation,
    MessageText,
    PositiveBytes,
    ShortText,
)
from moriiod.core.strict import Strict

#: Most parts of a piece.
MAX_PARTS: Final = 16

Layout = Literal["kv_first", "block_first", "fused", "mla", "state"]
#: Order inside a piece: NHD = tokens outermost, HND = heads outermost.
HeadOrder = Literal["NHD", "HND"]


@dataclass(frozen=True, slots=True)
class KvLayer(Strict):
    """One model layer's cache inside one registered region. All numbers are bytes."""

    name: ShortText
    #: Index into the layout's regions.
    region: Annotated[int, Ge(0), Le(MAX_REGIONS - 1)]
    #: Byte of the region where block 0, piece 0 starts.
    offset: Bytes
    #: Bytes from one block to the next (at least ``piece_bytes``; more where blocks are padded).
    block_stride: PositiveBytes
    #: Bytes from the K piece to the V piece of a block; 0 = one piece.
    kv_stride: Bytes
    #: Payload of one piece of one block.
    piece_bytes: PositiveBytes
    #: Bytes of the parts of a piece that are split by heads one by one; () = one part.
    parts: Annotated[tuple[PositiveBytes, ...], MaxLen(MAX_PARTS)] = ()

    @property
    def pieces(self) -> int:
        """Number of pieces a block has: 1 or 2."""
        return 2 if self.kv_stride else 1


@dataclass(frozen=True, slots=True)
class KvGroup(Strict):
    """Layers that share one block table, and what their bytes mean."""

    name: ShortText
    layout: Layout
    head_order: HeadOrder
    #: Element type by its torch name without the prefix: ``bfloat16``, ``float8_e4m3fnuz``.
    dtype: ShortText
    #: Tokens in one block of the block table; 1 where a block is a slot of recurrent state.
    block_tokens: Annotated[int, Ge(1), Le(1 << 20)]
    num_blocks: Annotated[int, Ge(1), Le(1 << 32)]
    #: KV heads of the whole model, over all TP ranks (1 for MLA). Of a state: the number of equal
    #: shares that TP ranks split it into.
    total_kv_heads: Annotated[int, Ge(1), Le(1 << 16)]
    #: Elements of one head of K (MLA: of the latent; state: 1).
    head_size: Annotated[int, Ge(1), Le(1 << 20)]
    layers: Annotated[tuple[KvLayer, ...], Len(1, MAX_LAYERS)]
    #: Free text that must be equal on both sides: packing, ISA, quantisation scheme.
    content: MessageText = ""
    #: Tokens in one kernel block; 0 = as many as in a block of the block table.
    kernel_tokens: Annotated[int, Ge(0), Le(1 << 20)] = 0

    @property
    def tile_tokens(self) -> int:
        """Tokens in one kernel block."""
        return self.kernel_tokens or self.block_tokens

    @property
    def tiles_per_block(self) -> int:
        """Kernel blocks in one block of the block table."""
        return self.block_tokens // self.tile_tokens

    @property
    def is_replicated(self) -> bool:
        """Whether every TP rank holds all of it (MLA latent)."""
        return self.layout == "mla"


@dataclass(frozen=True, slots=True)
class CacheLayout(Strict):
    """Everything one worker registered: its groups and the sizes of its regions in bytes."""

    generation: Generation
    groups: Annotated[tuple[KvGroup, ...], Len(1, MAX_GROUPS)]
    region_bytes: Annotated[tuple[PositiveBytes, ...], Len(1, MAX_REGIONS)]


@dataclass(frozen=True, slots=True)
class RemoteLayout(Strict):
    """A peer's layout, with what its engine says about each region (opaque bytes)."""

    layout: CacheLayout
    engine: ShortText
    descriptors: Annotated[tuple[Annotated[bytes, MaxLen(65536)], ...], MaxLen(MAX_REGIONS)]
