"""From block pairs to a transfer plan: vectorised, and once for all layers spaced alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from moriiod.core.geometry import CacheLayout, KvLayer
from moriiod.core.plan import BlockSpans, Int64Array, LayerSpans, TransferPlan
from moriiod.errors import InvalidArgument, LengthMismatch, OutOfRange


@dataclass(frozen=True, slots=True, eq=False)
class BlockPairs:
    """Blocks of one group to copy: ``local[i]`` and ``remote[i]`` are for the same tokens.

    Both are int64 [n] and lie inside their caches (``layout.unpack_blocks``).
    """

    local: Int64Array
    remote: Int64Array


@dataclass(frozen=True, slots=True)
class _Spacing:
    """All that the block part of a plan depends on, apart from the block ids. Bytes."""

    pieces: int
    piece_bytes: int
    local_stride: int
    local_kv: int
    remote_stride: int
    remote_kv: int


class Planner:
    """Plans for one transfer between one local and one remote cache.

    The block part is computed at most once for each distinct spacing of layers, however many
    layers there are and however many calls ask for them (WRITE asks layer by layer).

    Args:
        local: Our cache, passed by ``check_layout``.
        remote: The peer rank's cache, passed by ``check_layout`` and ``compare_layouts``.
        pairs: What to copy, one entry for each group; empty where nothing is to move.
        max_span_bytes: Largest size of one span; 0 = no limit.

    Raises:
        LengthMismatch: Not one entry of pairs for each group of both caches.
        InvalidArgument: A negative span limit.
    """

    def __init__(
        self,
        local: CacheLayout,
        remote: CacheLayout,
        pairs: Sequence[BlockPairs],
        max_span_bytes: int = 0,
    ) -> None:
        if not len(pairs) == len(local.groups) == len(remote.groups):
            raise LengthMismatch(
                f"{len(pairs)} lists of blocks for {len(local.groups)} local and "
                f"{len(remote.groups)} remote KV groups",
                given=len(pairs),
                local_groups=len(local.groups),
                remote_groups=len(remote.groups),
            )
        if max_span_bytes < 0:
            raise InvalidArgument(f"a span cannot have {max_span_bytes} bytes at most")
        self._pairs = tuple(pairs)
        self._max_span_bytes = max_span_bytes
        #: (group, local layer, remote layer), by the layer's index over all groups.
        self._layers: list[tuple[int, KvLayer, KvLayer]] = [
            (index, mine, theirs)
            for index, (here, there) in enumerate(zip(local.groups, remote.groups, strict=True))
            for mine, theirs in zip(here.layers, there.layers, strict=True)
        ]
        self._spans: dict[tuple[int, _Spacing], BlockSpans] = {}

    @property
    def n_layers(self) -> int:
        """Layers of all groups together."""
        return len(self._layers)

    def plan(self, layers: Collection[int] | None = None) -> TransferPlan:
        """Return what to copy for some layers, in ascending order of their indexes.

        Layers of a group without blocks to move are left out, so a plan may be empty.

        Args:
            layers: Indexes over all groups in order; None = all. Repeats count once.

        Raises:
            OutOfRange: There is no such layer; fields ``id`` and ``limit``.
        """
        wanted = range(self.n_layers) if layers is None else sorted(set(layers))
        if wanted and not 0 <= wanted[0] <= wanted[-1] < self.n_layers:
            bad = wanted[0] if wanted[0] < 0 else wanted[-1]
            raise OutOfRange(
                f"layer {bad} is not in 0..{self.n_layers - 1}", id=bad, limit=self.n_layers
            )
        planned = []
        for index in wanted:
            group, mine, theirs = self._layers[index]
            if len(self._pairs[group].local):
                planned.append(
                    LayerSpans(
                        spans=self._block_spans(group, mine, theirs),
                        local_region=mine.region,
                        local_offset=mine.offset,
                        remote_region=theirs.region,
                        remote_offset=theirs.offset,
                    )
                )
        return TransferPlan(tuple(planned), sum(layer.spans.n_bytes for layer in planned))

    def _block_spans(self, group: int, mine: KvLayer, theirs: KvLayer) -> BlockSpans:
        spacing = _Spacing(
            pieces=mine.pieces,
            piece_bytes=mine.piece_bytes,
            local_stride=mine.block_stride,
            local_kv=mine.kv_stride,
            remote_stride=theirs.block_stride,
            remote_kv=theirs.kv_stride,
        )
        spans = self._spans.get((group, spacing))
        if spans is None:
            spans = _plan_blocks(self._pairs[group], spacing, self._max_span_bytes)
            self._spans[group, spacing] = spans
        return spans


def build_plan(
    local: CacheLayout,
    remote: CacheLayout,
    pairs: Sequence[BlockPairs],
    layers: Collection[int] | None = None,
    max_span_bytes: int = 0,
) -> TransferPlan:
    """Return one plan; see ``Planner``, which is cheaper where a transfer needs several.

    Raises:
        LengthMismatch: See ``Planner``.
        InvalidArgument: See ``Planner``.
        OutOfRange: See ``Planner.plan``.
    """
    return Planner(local, remote, pairs, max_span_bytes).plan(layers)


def _plan_blocks(pairs: BlockPairs, spacing: _Spacing, max_span_bytes: int) -> BlockSpans:
    local, remote = _starts(pairs, spacing)
    size = spacing.piece_bytes
    is_next = (local[1:] - local[:-1] == size) & (remote[1:] - remote[:-1] == size)
    heads = np.flatnonzero(np.concatenate(([True], ~is_next)))
    counts = np.diff(heads, append=len(local))
    local, remote, sizes = local[heads], remote[heads], counts * size
    if max_span_bytes and int(sizes.max()) > max_span_bytes:
        local, remote, sizes = _split(local, remote, sizes, max_span_bytes)
    for array in (local, remote, sizes):
        array.setflags(write=False)
    return BlockSpans(local, remote, sizes, spacing.pieces * len(pairs.local) * size)


def _starts(pairs: BlockPairs, spacing: _Spacing) -> tuple[Int64Array, Int64Array]:
    """Byte offsets of every piece on both sides, in ascending order of the local ones."""
    order = np.argsort(pairs.local, kind="stable")
    local = pairs.local[order] * spacing.local_stride
    remote = pairs.remote[order] * spacing.remote_stride
    if spacing.pieces == 1:
        return local, remote
    both_local = np.stack((local, local + spacing.local_kv))
    both_remote = np.stack((remote, remote + spacing.remote_kv))
    if spacing.local_kv < spacing.local_stride:
        # K and V of a block lie together: block by block is the ascending order.
        return both_local.T.ravel(), both_remote.T.ravel()
    if int(local[-1]) < spacing.local_kv + int(local[0]):
        return both_local.ravel(), both_remote.ravel()
    order = np.argsort(both_local.ravel(), kind="stable")
    return both_local.ravel()[order], both_remote.ravel()[order]


def _split(
    local: Int64Array, remote: Int64Array, sizes: Int64Array, limit: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
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
