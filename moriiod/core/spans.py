"""Byte spans of paired units: what is contiguous on both sides, sorted, merged and split.

All of it is arithmetic on int64 arrays. A unit is a run of tokens inside one kernel block on both
sides. Inside a unit, the same *runs* of bytes are copied for every unit and every layer that is
spaced alike; the spans of a layer are the sums of all unit starts and all runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moriiod.core.geometry import HeadOrder, KvLayer
from moriiod.core.headplan import GroupHeads
from moriiod.core.plan import Int64Array

#: Local offsets, remote offsets and sizes of spans, int64 [n] each.
Spans = tuple[Int64Array, Int64Array, Int64Array]


@dataclass(frozen=True, slots=True)
class UnitShape:
    """How the units of one group lie in the kernel blocks of both sides.

    Attributes:
        order: What is outermost in a piece; the same on both sides.
        local_tokens: Tokens of a local kernel block.
        remote_tokens: Tokens of a remote kernel block.
        unit_tokens: The smaller one of the two.
        heads: What the two ranks share.
    """

    order: HeadOrder
    local_tokens: int
    remote_tokens: int
    unit_tokens: int
    heads: GroupHeads

    @property
    def is_by_token(self) -> bool:
        """Whether every token is a span of its own: heads are split inside each token."""
        return self.order == "NHD" and not self.heads.is_whole


@dataclass(frozen=True, slots=True, eq=False)
class SideSpacing:
    """Where units and pieces start on one side. Bytes, but for ``units``.

    Attributes:
        units: Units in a kernel block.
        block_stride: From one kernel block to the next.
        unit_stride: From one unit to the next inside a piece.
        kv_stride: From K to V.
    """

    units: int
    block_stride: int
    unit_stride: int
    kv_stride: int

    def starts(self, units: Int64Array) -> Int64Array:
        """Return the byte where each unit starts."""
        if self.units == 1:
            return units * self.block_stride
        starts: Int64Array = units // self.units * self.block_stride
        starts += units % self.units * self.unit_stride
        return starts


@dataclass(frozen=True, slots=True, eq=False)
class UnitRuns:
    """What is copied of each unit: ``local[i]`` and ``remote[i]`` from its starts, ``sizes[i]``."""

    pieces: int
    local_side: SideSpacing
    remote_side: SideSpacing
    local: Int64Array
    remote: Int64Array
    sizes: Int64Array


def runs_of(shape: UnitShape, mine: KvLayer, theirs: KvLayer) -> UnitRuns:
    """Return what is copied of each unit of a layer."""
    heads, unit = shape.heads, shape.unit_tokens
    per_local, per_remote = shape.local_tokens // unit, shape.remote_tokens // unit
    if heads.is_whole and per_local == per_remote:
        rows = [(0, 0, mine.piece_bytes)]
    else:
        rows = _split_runs(shape, mine, theirs)
    table = np.array(rows, dtype=np.int64)
    return UnitRuns(
        mine.pieces,
        SideSpacing(
            per_local,
            mine.block_stride,
            _unit_stride(shape, mine.piece_bytes, shape.local_tokens, heads.local),
            mine.kv_stride,
        ),
        SideSpacing(
            per_remote,
            theirs.block_stride,
            _unit_stride(shape, theirs.piece_bytes, shape.remote_tokens, heads.remote),
            theirs.kv_stride,
        ),
        *(np.ascontiguousarray(column) for column in table.T),
    )


def _unit_stride(shape: UnitShape, piece_bytes: int, tokens: int, heads: int) -> int:
    per_token = piece_bytes // tokens
    return shape.unit_tokens * (per_token if shape.order == "NHD" else per_token // heads)


def _split_runs(shape: UnitShape, mine: KvLayer, theirs: KvLayer) -> list[tuple[int, int, int]]:
    heads, unit = shape.heads, shape.unit_tokens
    rows: list[tuple[int, int, int]] = []
    local_base = remote_base = 0
    for local_part, remote_part in zip(
        mine.parts or (mine.piece_bytes,), theirs.parts or (theirs.piece_bytes,), strict=True
    ):
        one = local_part // (shape.local_tokens * heads.local)  # bytes of one head of one token
        if shape.order == "NHD" and heads.is_whole:
            rows.append((local_base, remote_base, unit * heads.local * one))
        for run in () if shape.order == "NHD" and heads.is_whole else heads.runs:
            if shape.order == "NHD":
                # Every token is a span of its own.
                steps, local_step, remote_step = unit, heads.local * one, heads.remote * one
                local_head = remote_head = one
                size = run.count * one
            elif shape.local_tokens == shape.remote_tokens:
                steps, local_step, remote_step = 1, 0, 0
                local_head = remote_head = shape.local_tokens * one
                size = run.count * local_head
            else:
                # A unit is only a part of each head's tokens.
                local_head, remote_head = shape.local_tokens * one, shape.remote_tokens * one
                steps, local_step, remote_step = run.count, local_head, remote_head
                size = unit * one
            local = local_base + run.local_head * local_head
            remote = remote_base + run.remote_head * remote_head
            rows += [(local + i * local_step, remote + i * remote_step, size) for i in range(steps)]
        local_base += local_part
        remote_base += remote_part
    return rows


def pieces_of(local_units: Int64Array, remote_units: Int64Array, runs: UnitRuns) -> Spans:
    """Return every run of every piece of every unit, in ascending order of local offsets."""
    order = np.argsort(local_units, kind="stable")
    local = _spread(runs.local_side, local_units[order], runs.local, runs)
    remote = _spread(runs.remote_side, remote_units[order], runs.remote, runs)
    sizes = np.tile(runs.sizes, runs.pieces * len(order))
    if len(local) > 1 and not (local[1:] > local[:-1]).all():
        order = np.argsort(local, kind="stable")
        local, remote, sizes = local[order], remote[order], sizes[order]
    return local, remote, sizes


def _spread(
    side: SideSpacing, units: Int64Array, offsets: Int64Array, runs: UnitRuns
) -> Int64Array:
    starts = side.starts(units)
    if runs.pieces == 1:
        return (starts[:, None] + offsets[None, :]).ravel()
    kv = np.array((0, side.kv_stride), dtype=np.int64)
    if runs.local_side.kv_stride < runs.local_side.block_stride:
        # K and V of a block lie together: block by block is the ascending order.
        return (starts[:, None, None] + kv[None, :, None] + offsets[None, None, :]).ravel()
    return (kv[:, None, None] + starts[None, :, None] + offsets[None, None, :]).ravel()


def merge(local: Int64Array, remote: Int64Array, sizes: Int64Array) -> Spans:
    """Join spans that follow each other on both sides."""
    is_next = (local[1:] - local[:-1] == sizes[:-1]) & (remote[1:] - remote[:-1] == sizes[:-1])
    heads = np.flatnonzero(np.concatenate(([True], ~is_next)))
    if len(heads) == len(sizes):
        return local, remote, sizes
    return local[heads], remote[heads], np.add.reduceat(sizes, heads)


def split(local: Int64Array, remote: Int64Array, sizes: Int64Array, limit: int) -> Spans:
    """Cut spans into parts of at most ``limit`` bytes, all but the last of exactly that."""
    parts = -(-sizes // limit)
    firsts = np.cumsum(parts) - parts
    skipped = (np.arange(int(parts.sum()), dtype=np.int64) - np.repeat(firsts, parts)) * limit
    left = np.repeat(sizes, parts) - skipped
    return (
        np.repeat(local, parts) + skipped,
        np.repeat(remote, parts) + skipped,
        np.minimum(left, limit),
    )
