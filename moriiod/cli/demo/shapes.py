"""The KV cache of a demo's model: its groups, and what each rank of a TP size holds of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from moriiod.cli.models import Model, ModelGroup, attention, find_model, latent
from moriiod.core.geometry import HeadOrder, Layout
from moriiod.core.headplan import HeadRule

WORD_BYTES: Final = 8
#: bfloat16.
ITEM_BYTES: Final = 2
#: A slot of recurrent state is megabytes in life; the demo's has at most this for each head.
_STATE_BYTES: Final = 1024
#: Blocks of a sliding window, so that most requests are longer.
_WINDOW_BLOCKS: Final = 3


@dataclass(frozen=True, slots=True)
class KvChoice:
    """Which cache the demo's model has.

    Attributes:
        kv_heads: KV heads; 0 = an MLA latent, which every rank holds.
        layout: Of plain attention.
        head_order: Of plain attention.
        model: A known model instead of all these; "" = none.
    """

    kv_heads: int = 0
    layout: Layout = "kv_first"
    head_order: HeadOrder = "HND"
    model: str = ""

    def groups(self, layers: int) -> tuple[ModelGroup, ...]:
        """Return the groups, each with so many layers.

        Raises:
            InvalidArgument: There is no such model.
        """
        return tuple(_scaled(group, layers) for group in self._model(layers).groups)

    def rule(self, *, allows_uneven: bool) -> HeadRule:
        """Return what decides who reads whom."""
        return HeadRule(tuple(group.shape for group in self.groups(1)), allows_uneven)

    def _model(self, layers: int) -> Model:
        if self.model:
            return find_model(self.model)
        if not self.kv_heads:
            return Model("mla", (latent(layers),))
        group = attention(
            self.kv_heads, layers=layers, layout=self.layout, head_order=self.head_order
        )
        return Model("attention", (group,))


def _scaled(group: ModelGroup, layers: int) -> ModelGroup:
    sizes = group.token_bytes
    if group.layout == "state":
        sizes = tuple(min(n, _STATE_BYTES) for n in sizes)
    window = _WINDOW_BLOCKS * group.block_tokens if group.window else 0
    return replace(group, layers=layers, token_bytes=sizes, window=window)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One KV group of one rank.

    Attributes:
        group: Of the model.
        blocks: Blocks (slots) of each tensor.
        tp_size: TP size of the rank's instance.
    """

    group: ModelGroup
    blocks: int
    tp_size: int

    @property
    def heads(self) -> int:
        """Heads that the rank holds."""
        return self.group.shape.local_heads(self.tp_size)

    @property
    def part_words(self) -> tuple[int, ...]:
        """Words of one head in one block, for each part of a piece."""
        return tuple(n * self.group.block_tokens // WORD_BYTES for n in self.group.token_bytes)

    @property
    def piece_words(self) -> int:
        """Words of one piece of one block."""
        return self.heads * sum(self.part_words)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, all pieces."""
        return self.group.pieces * self.piece_words * WORD_BYTES

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the tensors, in the order that both sides use."""
        return tuple(
            f"model.layers.{index}.{self.group.name}" for index in range(self.group.layers)
        )

    @property
    def head_size(self) -> int:
        """Elements of one head of K, or of the latent; 1 of a state."""
        if self.group.layout == "state":
            return 1
        elements = self.group.token_bytes[0] // ITEM_BYTES
        return elements // 2 if self.group.layout == "fused" else elements

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of one layer's tensor as it lies in memory."""
        group, tokens = self.group, self.group.block_tokens
        inner = (tokens, self.heads) if group.head_order == "NHD" else (self.heads, tokens)
        match group.layout:
            case "mla":
                return (self.blocks, tokens, self.head_size)
            case "state":
                parts = len(group.token_bytes)
                return (self.blocks, parts * self.heads, group.token_bytes[0] // ITEM_BYTES)
            case "fused":
                return (self.blocks, *inner, 2 * self.head_size)
            case "block_first":
                return (self.blocks, 2, *inner, self.head_size)
            case _:
                return (2, self.blocks, *inner, self.head_size)

    def rows(self, blocks: Sequence[int]) -> Sequence[int]:
        """Return which of a request's blocks this group uses."""
        if self.group.layout == "state":
            return blocks[:1]
        window = self.group.window // self.group.block_tokens
        return blocks[-window:] if window else blocks


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The KV cache of one rank.

    Attributes:
        choice: Which cache.
        layers: Layers of each group.
        blocks: Blocks of each tensor.
        tp_size: TP size of the rank's instance.
    """

    choice: KvChoice
    layers: int
    blocks: int
    tp_size: int

    @property
    def groups(self) -> tuple[GroupShape, ...]:
        """One for each KV group."""
        return tuple(
            GroupShape(group, self.blocks, self.tp_size)
            for group in self.choice.groups(self.layers)
        )

    @property
    def n_layers(self) -> int:
        """Layers of all groups together."""
        return sum(shape.group.layers for shape in self.groups)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the rank's whole cache."""
        return sum(self.blocks * one.group.layers * one.block_bytes for one in self.groups)

    def request_bytes(self, blocks: Sequence[int]) -> int:
        """Return the size of a request's blocks in all layers."""
        return sum(
            len(one.rows(blocks)) * one.group.layers * one.block_bytes for one in self.groups
        )

    def tables(self, blocks: Sequence[int]) -> list[list[int]]:
        """Return the block table of each group for a request."""
        return [list(one.rows(blocks)) for one in self.groups]
