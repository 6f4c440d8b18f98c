"""What a worker says about its KV cache, and where its tensors are found to lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moriiod.core.geometry import HeadOrder, Layout
from moriiod.errors import InvalidGeometry


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What a worker says about one KV group: layers that share one block table.

    | layout      | tensor of a layer                                                         |
    |-------------|---------------------------------------------------------------------------|
    | kv_first    | ``[2, blocks, tokens, heads, head_size]``, or heads before tokens         |
    | block_first | ``[blocks, 2, tokens, heads, head_size]``, or heads before tokens         |
    | fused       | ``[blocks, heads, tokens, content]``, K and V together in ``content``     |
    | mla         | ``[blocks, tokens, latent]``; also key-only side caches                   |
    | state       | ``[slots, ...]``, recurrent state: a block is a slot, there are no tokens |

    In ``kv_first`` and ``block_first`` the last three dimensions may also be one. Blocks may be
    spaced apart (padding, other layers between them); inside a block nothing may.

    Attributes:
        name: For messages.
        layout: See the table.
        head_order: How a block lies in memory (strides count, not the order of the dimensions):
            NHD = tokens outermost, HND = heads outermost. Where there are as many heads as
            tokens in a block, the tensor cannot contradict it, and it is taken as said.
        block_tokens: Tokens in a block of the block table; 1 for state.
        total_kv_heads: KV heads of the whole model, over all TP ranks; 1 for mla. For state, the
            number of equal shares that TP ranks split it into (its heads).
        head_size: Elements of one head of K; for mla, of the latent; 1 for state.
        layers: Names of the group's tensors, in the order that both sides use.
        content: What both sides must agree on beyond this: packing, quantisation, ISA. With it,
            the ``content`` dimension of a fused layout may be other than ``2 * head_size``.
        kernel_tokens: Tokens in a block of the tensors, where the attention kernel works on
            smaller blocks than the block table; 0 = the same. Block i of the table is then the
            blocks ``i * n`` and following of the tensor.
        head_sizes: Head sizes of layers that have another one than ``head_size``.
        parts: For state, by layer: sizes along the dimension that is split by heads, where it
            holds several projections one behind the other, each split by itself.
    """

    name: str
    layout: Layout
    head_order: HeadOrder
    block_tokens: int
    total_kv_heads: int
    head_size: int
    layers: tuple[str, ...]
    content: str = ""
    kernel_tokens: int = 0
    head_sizes: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def tile_tokens(self) -> int:
        """Tokens in a block of the tensors."""
        return self.kernel_tokens or self.block_tokens

    def head_size_of(self, layer: str) -> int:
        """Return the head size of a layer."""
        return self.head_sizes.get(layer, self.head_size)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Where a tensor lies. ``shape``, ``stride`` and ``offset`` count elements.

    Attributes:
        region: Index of the region that holds its storage.
        region_bytes: Size of that region.
        item_bytes: Bytes of one element.
        dtype: Torch name without the prefix.
    """

    region: int
    region_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    item_bytes: int
    dtype: str

    def wrong(self, name: str, spec: GroupSpec, why: str) -> InvalidGeometry:
        """Return the error that a tensor is not what was said."""
        shape, stride = list(self.shape), list(self.stride)
        return InvalidGeometry(
            f"layer {name!r} with shape {shape} and strides {stride}: {why}",
            group=spec.name,
            layer=name,
            layout=spec.layout,
            shape=str(shape),
            stride=str(stride),
        )
