"""What a pair of instances would do with one prompt, worked out without any daemon."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moriiod.cli.models import Model
from moriiod.core.blocks import pair_for_read, tables_of
from moriiod.core.compare import compare_layouts
from moriiod.core.geometry import CacheLayout
from moriiod.core.headplan import GroupHeads, HeadPlan, HeadRule, HeadSlice
from moriiod.core.layout import check_layout
from moriiod.core.pairing import BlockTable
from moriiod.core.planner import Planner
from moriiod.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Instance:
    """One side of the pair.

    Attributes:
        tp_size: Its TP size.
        block_tokens: Tokens in a block of its block tables; 0 = as the model has it.
        kernel_tokens: Tokens in a kernel block; 0 = the same.
    """

    tp_size: int
    block_tokens: int = 0
    kernel_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PairCost:
    """What one decode rank reads from one prefill rank for the prompt.

    Attributes:
        n_bytes: Payload.
        descriptors: Contiguous copies, if no two blocks are neighbours.
        token_descriptors: Those among them that hold one token each.
    """

    n_bytes: int
    descriptors: int
    token_descriptors: int


@dataclass(frozen=True, slots=True)
class Preview:
    """The head plan of a pair and the cost of one prompt.

    Attributes:
        model: Of both instances.
        tokens: Length of the prompt.
        heads: Who takes what from whom.
        costs: By (prefill rank, decode rank), for every pair that reads.
    """

    model: Model
    tokens: int
    heads: HeadPlan
    costs: dict[tuple[int, int], PairCost]

    def slices(self, decode_rank: int) -> Iterator[tuple[str, HeadSlice]]:
        """Yield what a decode rank takes, with the name of the group."""
        for index, group in enumerate(self.model.groups):
            for one in self.heads.slices(index, decode_rank):
                yield group.name, one


def make_preview(
    model: Model,
    sides: tuple[Instance, Instance],
    tokens: int,
    *,
    allows_uneven: bool = False,
    max_token_spans: int = 0,
) -> Preview:
    """Work out what a prefill and a decode instance would do with a prompt.

    Args:
        model: Of both instances.
        sides: Prefill, decode.
        tokens: Length of the prompt.
        allows_uneven: As topology.allow_uneven of both.
        max_token_spans: As limits.max_token_spans; 0 = no limit.

    Raises:
        InvalidTopology: The sizes do not fit each other or the heads.
        GeometryMismatch: The block sizes cannot be bridged.
        InvalidGeometry: Kernel blocks do not fill blocks.
        UnsupportedTopology: More descriptors of single tokens than the limit.
    """
    prefill, decode = (_Side(model, one, tokens) for one in sides)
    rule = HeadRule.of_layout(decode.layout, allows_uneven=allows_uneven)
    heads = rule.plan(sides[0].tp_size, sides[1].tp_size)
    compare_layouts(decode.layout, prefill.layout, sides[1].tp_size, sides[0].tp_size)
    pairs = pair_for_read(decode.layout, decode.tables, prefill.layout, prefill.tables)
    known: dict[tuple[GroupHeads, ...], PairCost] = {}
    costs = {}
    for rank in range(sides[1].tp_size):
        for source in heads.sources(rank):
            share = heads.heads_for_read(source, rank)
            if share not in known:
                planner = Planner(decode.layout, prefill.layout, pairs, 0, share, max_token_spans)
                plan = planner.plan()
                known[share] = PairCost(
                    plan.n_bytes,
                    sum(len(layer.spans.sizes) for layer in plan.layers),
                    plan.n_token_spans,
                )
            costs[source, rank] = known[share]
    return Preview(model, tokens, heads, costs)


class _Side:
    """One instance's cache and the prompt's blocks in it, no two of them neighbours."""

    def __init__(self, model: Model, instance: Instance, tokens: int) -> None:
        if instance.block_tokens:
            model = model.with_blocks(instance.block_tokens)
        if tokens < 1:
            raise InvalidArgument(f"a prompt has at least one token, not {tokens}", got=tokens)
        positions = [group.positions(tokens) for group in model.groups]
        num_blocks = 2 * max(len(one) for one in positions)
        self.layout: CacheLayout = model.layout(
            instance.tp_size, num_blocks, instance.kernel_tokens
        )
        check_layout(self.layout)
        ids = [2 * np.arange(len(one), dtype=np.int64) for one in positions]
        self.tables: tuple[BlockTable, ...] = tables_of(ids, tuple(one.start for one in positions))
