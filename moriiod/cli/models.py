"""KV caches of known models: the groups they have, and the layout of each rank at a TP size."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from moriiod.core.geometry import CacheLayout, HeadOrder, KvGroup, KvLayer, Layout
from moriiod.core.headplan import HeadShape
from moriiod.errors import InvalidArgument

_GENERATION: Final = "0" * 32


class LayoutChoice(enum.Enum):
    """Layout of plain attention."""

    KV_FIRST = "kv_first"
    BLOCK_FIRST = "block_first"
    FUSED = "fused"
    MLA = "mla"


#: The same in the words of the core.
LAYOUTS: Final[dict[LayoutChoice, Layout]] = {
    LayoutChoice.KV_FIRST: "kv_first",
    LayoutChoice.BLOCK_FIRST: "block_first",
    LayoutChoice.FUSED: "fused",
    LayoutChoice.MLA: "mla",
}


class OrderChoice(enum.Enum):
    """What is outermost in a block."""

    HND = "HND"
    NHD = "NHD"


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """One KV group of a model.

    Attributes:
        name: What it holds.
        layout: See ``core.geometry``.
        head_order: NHD or HND.
        heads: KV heads of the model; of a state, the heads it splits by; 1 for mla.
        layers: Number of layers.
        token_bytes: Bytes of one head of one token in one piece; of a state, of one head in each
            of its parts. For mla, of the latent.
        block_tokens: Tokens in a block; 1 for a state.
        window: Tokens of a sliding window; 0 = the whole prompt.
    """

    name: str
    layout: Layout
    head_order: HeadOrder
    heads: int
    layers: int
    token_bytes: tuple[int, ...]
    block_tokens: int = 16
    window: int = 0

    @property
    def shape(self) -> HeadShape:
        """How it is spread over ranks."""
        return HeadShape(self.heads, is_replicated=self.layout == "mla")

    @property
    def pieces(self) -> int:
        """K and V apart, or one."""
        return 2 if self.layout in ("kv_first", "block_first") else 1

    def with_blocks(self, block_tokens: int) -> ModelGroup:
        """Return the group with blocks of another size; state has none."""
        return self if self.layout == "state" else replace(self, block_tokens=block_tokens)

    def positions(self, tokens: int) -> range:
        """Return the blocks of a prompt that exist when its prefill is over."""
        if self.layout == "state":
            return range(1)
        end = -(-tokens // self.block_tokens)
        first = max(0, tokens - self.window) // self.block_tokens if self.window else 0
        return range(first, end)


@dataclass(frozen=True, slots=True)
class Model:
    """A model's KV cache, with two bytes an element unless it says otherwise."""

    name: str
    groups: tuple[ModelGroup, ...]

    def with_blocks(self, block_tokens: int) -> Model:
        """Return the model with blocks of another size in every group that has tokens."""
        return replace(self, groups=tuple(group.with_blocks(block_tokens) for group in self.groups))

    def layout(self, tp_size: int, num_blocks: int, kernel_tokens: int = 0) -> CacheLayout:
        """Return what each rank of a TP group registers: one region, layer behind layer."""
        end, groups = 0, []
        for group in self.groups:
            layers = []
            for layer in _place(group, tp_size, num_blocks, kernel_tokens):
                layers.append(replace(layer, offset=end))
                end += num_blocks * group.pieces * layer.piece_bytes * _tiles(group, kernel_tokens)
            groups.append(
                KvGroup(
                    name=group.name,
                    layout=group.layout,
                    head_order=group.head_order,
                    dtype="uint8",
                    block_tokens=group.block_tokens,
                    num_blocks=num_blocks,
                    total_kv_heads=group.heads,
                    head_size=max(group.token_bytes),
                    layers=tuple(layers),
                    kernel_tokens=0 if group.layout == "state" else kernel_tokens,
                )
            )
        return CacheLayout(_GENERATION, tuple(groups), (end,))


def _tiles(group: ModelGroup, kernel_tokens: int) -> int:
    return group.block_tokens // _tile_tokens(group, kernel_tokens)


def _tile_tokens(group: ModelGroup, kernel_tokens: int) -> int:
    return group.block_tokens if group.layout == "state" or not kernel_tokens else kernel_tokens


def _place(
    group: ModelGroup, tp_size: int, num_blocks: int, kernel_tokens: int
) -> Iterator[KvLayer]:
    tokens = _tile_tokens(group, kernel_tokens)
    parts = tuple(n * group.shape.local_heads(tp_size) * tokens for n in group.token_bytes)
    piece = sum(parts)
    stride, kv_stride = piece, 0
    if group.layout == "kv_first":
        kv_stride = num_blocks * (group.block_tokens // tokens) * piece
    elif group.layout == "block_first":
        stride, kv_stride = 2 * piece, piece
    for index in range(group.layers):
        yield KvLayer(
            f"{group.name}.{index}",
            region=0,
            offset=0,
            block_stride=stride,
            kv_stride=kv_stride,
            piece_bytes=piece,
            parts=parts if len(parts) > 1 else (),
        )


def attention(
    heads: int,
    *,
    layers: int,
    head_size: int = 128,
    layout: Layout = "kv_first",
    head_order: HeadOrder = "HND",
) -> ModelGroup:
    """Return a group of plain attention layers in bfloat16; fused has K and V in one piece."""
    element = 2 * (2 if layout == "fused" else 1)
    size = (head_size * element,)
    return ModelGroup("attention", layout, head_order, heads, layers, size)


def latent(layers: int, token_bytes: int = 576 * 2, name: str = "mla") -> ModelGroup:
    """Return a group of MLA layers, or of key-only side caches."""
    return ModelGroup(name, "mla", "NHD", 1, layers, (token_bytes,))


def _kda(layers: int, heads: int, size: int) -> tuple[ModelGroup, ModelGroup]:
    """Return the two states of Kimi delta attention: q, k, v convolutions, and the memory."""
    conv = ModelGroup("kda-conv", "state", "HND", heads, layers, (3 * size * 2,) * 3, 1)
    ssm = ModelGroup("kda-state", "state", "HND", heads, layers, (size * size * 4,), 1)
    return conv, ssm


_ALL: Final = (
    Model("llama-3-70b", (attention(8, layers=80),)),
    Model("qwen3-235b", (attention(4, layers=94),)),
    Model("deepseek-v3", (latent(61),)),
    Model("deepseek-v3.2", (latent(61), latent(61, 132, "indexer-keys"))),
    Model(
        "gpt-oss-120b",
        (
            replace(attention(8, layers=18, head_size=64), name="full"),
            replace(attention(8, layers=18, head_size=64), name="sliding", window=128),
        ),
    ),
    Model("kimi-linear-48b", (latent(7), *_kda(20, 32, 128))),
)
#: By name.
MODELS: Final = MappingProxyType({model.name: model for model in _ALL})


def find_model(name: str) -> Model:
    """Return a known model.

    Raises:
        InvalidArgument: There is none of this name; says which there are.
    """
    model = MODELS.get(name)
    if model is None:
        raise InvalidArgument(
            f"no model {name[:64]!r} is known; there are {', '.join(MODELS)}",
            field="model",
            got=name[:64],
        )
    return model
