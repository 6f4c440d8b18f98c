"""One logical KV cache of a model, and what every rank of any TP size holds of it, byte for byte.

The oracle of the layout tests. It knows tensors, not offsets: every layer is a numpy view with the
shape and strides that an engine would give it, and tokens are written into it one by one. Nothing
here is shared with the planner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moriiod.core.blocks import pair_for_read, pair_for_write, tables_of
from moriiod.core.geometry import CacheLayout, KvGroup, KvLayer
from moriiod.core.headplan import HeadPlan, HeadRule
from moriiod.core.plan import TransferPlan
from moriiod.core.planner import Planner
from moriiod.engines.bounds import check_plan

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GroupModel:
    """One KV group of a model, before it is spread over ranks.

    Attributes:
        layout: As in ``KvGroup``.
        order: NHD or HND.
        heads: KV heads of the model; for mla 1; for a state the shares it splits into.
        parts: Bytes of one head of one token, for each part (only a state has several).
        layers: Number of layers. Layer i has ``grow * i`` bytes more in each part.
    """

    layout: str = "kv_first"
    order: str = "HND"
    heads: int = 4
    parts: tuple[int, ...] = (2,)
    layers: int = 2
    grow: int = 0
    content: str = ""

    @property
    def pieces(self) -> int:
        return 2 if self.layout in ("kv_first", "block_first") else 1

    def parts_of(self, layer: int) -> tuple[int, ...]:
        return tuple(n + self.grow * layer for n in self.parts)

    def local_heads(self, rank: int, tp: int) -> range:
        """Heads of a rank, from the definition."""
        if self.layout == "mla":
            return range(1)
        if tp <= self.heads:
            return range(rank * self.heads // tp, (rank + 1) * self.heads // tp)
        return range(rank * self.heads // tp, rank * self.heads // tp + 1)


@dataclass(frozen=True)
class SideGroup:
    """How one side holds a group: its blocks, and the table of the one request.

    Attributes:
        block_tokens: Tokens in a block.
        kernel_tokens: Tokens in a kernel block, 0 = the same.
        blocks: Blocks of the cache.
        table: Block ids of the request.
        first: Position of the first of them, in blocks.
        pad: Bytes between blocks.
    """

    block_tokens: int = 4
    kernel_tokens: int = 0
    blocks: int = 8
    table: tuple[int, ...] = ()
    first: int = 0
    pad: int = 0


@dataclass(frozen=True)
class Side:
    """One instance.

    Attributes:
        tp: Its TP size.
        groups: One for each group of the model.
        shares_region: All layers in one region instead of one each.
        base: Bytes in front of the first layer of a region.
    """

    tp: int
    groups: tuple[SideGroup, ...]
    shares_region: bool = True
    base: int = 0

    @property
    def hole(self) -> int:
        """Bytes at the start of a region that are never touched, so that they take no memory."""
        return self.base if self.base >= 1 << 30 else 0


@dataclass
class Rank:
    """One rank's cache: its description, its regions, and views of its layers."""

    layout: CacheLayout
    regions: list[Bytes]
    #: By group and layer: [pieces, kernel blocks, heads, tokens, bytes] for each part.
    views: list[list[list[Bytes]]] = field(default_factory=list)


def logical(model: Sequence[GroupModel], n_tokens: int, seed: int) -> list[list[list[Bytes]]]:
    """Return the model's KV: by group, layer and part [pieces, heads, tokens, bytes]."""
    dice = np.random.default_rng(seed)
    return [
        [
            [
                dice.integers(0, 256, (group.pieces, group.heads, n_tokens, n), dtype=np.uint8)
                for n in group.parts_of(layer)
            ]
            for layer in range(group.layers)
        ]
        for group in model
    ]


def make_rank(model: Sequence[GroupModel], side: Side, rank: int, seed: int) -> Rank:
    """Return a rank's cache full of noise."""
    dice = np.random.default_rng((seed, rank, side.tp))
    sizes: list[int] = []
    groups = []
    placed: list[list[tuple[int, KvLayer]]] = []
    for g, (group, held) in enumerate(zip(model, side.groups, strict=True)):
        n_heads = len(group.local_heads(rank, side.tp))
        layers = []
        for i in range(group.layers):
            if not sizes or not side.shares_region:
                sizes.append(side.base)
            one = _place(group, held, i, n_heads, sizes[-1], len(sizes) - 1, f"g{g}.l{i}")
            sizes[-1] = _end(one, held) + 3
            layers.append(one)
        placed.append([(n_heads, one) for one in layers])
        groups.append(
            KvGroup(
                name=f"group{g}",
                layout=group.layout,  # type: ignore[arg-type]
                head_order=group.order,  # type: ignore[arg-type]
                dtype="uint8",
                block_tokens=held.block_tokens,
                num_blocks=held.blocks,
                total_kv_heads=group.heads,
                head_size=group.parts[0],
                layers=tuple(layers),
                content=group.content,
                kernel_tokens=held.kernel_tokens,
            )
        )
    regions = [np.zeros(n, np.uint8) for n in sizes]
    for region in regions:
        there = region[side.hole :]
        there[:] = dice.integers(0, 256, len(there), dtype=np.uint8)
    layout = CacheLayout(f"{rank:032x}", tuple(groups), tuple(sizes))
    found = Rank(layout, regions)
    for group, held, layers_of in zip(model, side.groups, placed, strict=True):
        found.views.append(
            [
                _views(group, held, regions[one.region], (n_heads, one), group.parts_of(i))
                for i, (n_heads, one) in enumerate(layers_of)
            ]
        )
    return found


def _tiles(held: SideGroup) -> tuple[int, int]:
    """Kernel blocks of the cache, and tokens of each."""
    tokens = held.kernel_tokens or held.block_tokens
    return held.blocks * (held.block_tokens // tokens), tokens


def _place(
    group: GroupModel, held: SideGroup, i: int, n_heads: int, offset: int, region: int, name: str
) -> KvLayer:
    tiles, tokens = _tiles(held)
    parts = tuple(n * n_heads * tokens for n in group.parts_of(i))
    piece = sum(parts)
    if group.layout == "kv_first":
        stride, kv = piece + held.pad, tiles * (piece + held.pad) + held.pad
    elif group.layout == "block_first":
        stride, kv = 2 * piece + held.pad, piece
    else:
        stride, kv = piece + held.pad, 0
    return KvLayer(
        name, region, offset, stride, kv, piece, parts if group.layout == "state" else ()
    )


def _end(one: KvLayer, held: SideGroup) -> int:
    tiles, _ = _tiles(held)
    return one.offset + one.kv_stride + (tiles - 1) * one.block_stride + one.piece_bytes


def _views(
    group: GroupModel,
    held: SideGroup,
    region: Bytes,
    placed: tuple[int, KvLayer],
    sizes: tuple[int, ...],
) -> list[Bytes]:
    n_heads, one = placed
    tiles, tokens = _tiles(held)
    views, start = [], one.offset
    for n in sizes:
        inner = (tokens * n, n) if group.order == "HND" else (n, n_heads * n)
        views.append(
            np.lib.stride_tricks.as_strided(
                region[start:],
                (group.pieces, tiles, n_heads, tokens, n),
                (one.kv_stride, one.block_stride, *inner, 1),
            )
        )
        start += tokens * n_heads * n
    return views


def _slots(held: SideGroup) -> Iterator[tuple[int, int, int]]:
    """Yield (token position, kernel block, token in it) of the whole table."""
    _, tokens = _tiles(held)
    for index, block in enumerate(held.table):
        for t in range(held.block_tokens):
            at = block * held.block_tokens + t
            yield (held.first + index) * held.block_tokens + t, at // tokens, at % tokens


def write(
    rank: Rank, number: int, model: Sequence[GroupModel], side: Side, content: Any, ends: list[int]
) -> None:
    """Write the logical bytes of the request's tokens, below each group's end, into a rank."""
    for g, (group, held) in enumerate(zip(model, side.groups, strict=True)):
        heads = group.local_heads(number, side.tp)
        for i in range(group.layers):
            for part, view in enumerate(rank.views[g][i]):
                for position, tile, t in _slots(held):
                    if position < ends[g]:
                        wanted = content[g][i][part][:, heads.start : heads.stop, position]
                        view[:, tile, :, t] = wanted


def capacity(held: SideGroup) -> int:
    """Return the position behind the last token that a table has room for."""
    return (held.first + len(held.table)) * held.block_tokens


@dataclass
class Case:
    """Two instances of one model and one request between them."""

    model: tuple[GroupModel, ...]
    producer: Side
    consumer: Side
    max_span_bytes: int = 0
    max_token_spans: int = 0

    def head_plan(self) -> HeadPlan:
        layout = make_rank(self.model, self.consumer, 0, 0).layout
        rule = HeadRule.of_layout(layout, allows_uneven=True)
        return rule.plan(self.producer.tp, self.consumer.tp)

    def planner(self, p: Rank, c: Rank, ranks: tuple[int, int], *, reads: bool) -> Planner:
        """Return the planner that the initiator of one pair makes."""
        heads = self.head_plan()
        ours, theirs = self.tables(self.consumer), self.tables(self.producer)
        if reads:
            pairs = pair_for_read(c.layout, ours, p.layout, theirs)
            share = heads.heads_for_read(*ranks)
            sides = (c.layout, p.layout)
        else:
            pairs = pair_for_write(p.layout, theirs, c.layout, ours)
            share = heads.heads_for_write(*ranks)
            sides = (p.layout, c.layout)
        return Planner(*sides, pairs, self.max_span_bytes, share, self.max_token_spans)

    @staticmethod
    def tables(side: Side) -> Any:
        ids = [np.array(held.table, np.int64) for held in side.groups]
        return tables_of(ids, tuple(held.first for held in side.groups))

    def run(self, *, reads: bool) -> int:
        """Move the request and compare every byte of every consumer rank; return bytes moved."""
        most = max(capacity(held) for held in (*self.producer.groups, *self.consumer.groups))
        content = logical(self.model, most, seed=7)
        full = [most] * len(self.model)
        sources = []
        for number in range(self.producer.tp):
            rank = make_rank(self.model, self.producer, number, 1)
            write(rank, number, self.model, self.producer, content, full)
            sources.append(rank)
        heads, moved = self.head_plan(), 0
        ends = [
            min(capacity(a), capacity(b))
            for a, b in zip(self.producer.groups, self.consumer.groups, strict=True)
        ]
        for c in range(self.consumer.tp):
            got, wanted = (make_rank(self.model, self.consumer, c, 2) for _ in range(2))
            for p in heads.sources(c):
                planner = self.planner(sources[p], got, (p, c), reads=reads)
                for plan in self._plans(planner, reads=reads):
                    copy(plan, got, sources[p], reads=reads)
                    moved += plan.n_bytes
            write(wanted, c, self.model, self.consumer, content, ends)
            for one, other in zip(got.regions, wanted.regions, strict=True):
                np.testing.assert_array_equal(one, other)
        return moved

    @staticmethod
    def _plans(planner: Planner, *, reads: bool) -> list[TransferPlan]:
        if reads:
            return [planner.plan()]
        return [planner.plan([layer]) for layer in reversed(range(planner.n_layers))]


def copy(plan: TransferPlan, consumer: Rank, producer: Rank, *, reads: bool) -> None:
    """Do what an engine does, after the checks that every engine makes."""
    here, there = (consumer, producer) if reads else (producer, consumer)
    check_plan(
        plan,
        "read" if reads else "write",
        [len(region) for region in here.regions],
        [len(region) for region in there.regions],
    )
    for layer in plan.layers:
        mine, theirs = here.regions[layer.local_region], there.regions[layer.remote_region]
        spans = layer.spans
        for a, b, n in zip(
            (spans.local + layer.local_offset).tolist(),
            (spans.remote + layer.remote_offset).tolist(),
            spans.sizes.tolist(),
            strict=True,
        ):
            if reads:
                mine[a : a + n] = theirs[b : b + n]
            else:
                theirs[b : b + n] = mine[a : a + n]


def prompt(
    n_tokens: int, block_tokens: int, blocks: int, *, skip: int = 0, **more: Any
) -> SideGroup:
    """Return a side's blocks for a prompt, scattered; ``skip`` blocks are there already."""
    n = -(-n_tokens // block_tokens)
    ids = np.random.default_rng((n_tokens, block_tokens, blocks)).permutation(blocks)[:n]
    return replace(
        SideGroup(block_tokens, blocks=blocks, **more),
        table=tuple(int(i) for i in ids[skip:]),
        first=skip,
    )
