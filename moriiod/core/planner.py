"""From block pairs to a transfer plan: vectorised, and once for all layers spaced alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moriiod.core.geometry import CacheLayout, KvGroup, KvLayer
from moriiod.core.headplan import GroupHeads
from moriiod.core.pairing import unit_tokens
from moriiod.core.plan import BlockSpans, Int64Array, LayerSpans, TransferPlan
from moriiod.core.spans import UnitShape, merge, pieces_of, runs_of, split
from moriiod.errors import InvalidArgument, LengthMismatch, OutOfRange, UnsupportedTopology


@dataclass(frozen=True, slots=True, eq=False)
class BlockPairs:
    """Units of one group to copy: ``local[i]`` and ``remote[i]`` are for the same tokens.

    Both are int64 [n] and lie inside their caches (``pairing.pair_tables``). Where both sides have
    blocks of one size and no smaller kernel blocks, a unit is a block.
    """

    local: Int64Array
    remote: Int64Array


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer on both sides, and its group's index."""

    group: int
    local: KvLayer
    remote: KvLayer


class Planner:
    """Plans for one transfer between one local and one remote cache.

    The block part is computed at most once for each distinct spacing of layers, however many
    layers there are and however many calls ask for them (WRITE asks layer by layer).

    Args:
        local: Our cache, passed by ``check_layout``.
        remote: The peer rank's cache, passed by ``check_layout`` and ``compare_layouts``.
        pairs: What to copy, one entry for each group; empty where nothing is to move.
        max_span_bytes: Largest size of one span; 0 = no limit.
        heads: What the two ranks share of each group; None = both hold all heads (TP size 1).
        max_token_spans: Most spans of a plan that hold single tokens, which is what heads that are
            split in an NHD layout need; 0 = no limit.

    Raises:
        LengthMismatch: Not one entry of pairs or heads for each group of both caches.
        InvalidArgument: A negative limit.
    """

    def __init__(
        self,
        local: CacheLayout,
        remote: CacheLayout,
        pairs: Sequence[BlockPairs],
        max_span_bytes: int = 0,
        heads: Sequence[GroupHeads] | None = None,
        max_token_spans: int = 0,
    ) -> None:
        if not len(pairs) == len(local.groups) == len(remote.groups):
            raise LengthMismatch(
                f"{len(pairs)} lists of blocks for {len(local.groups)} local and "
                f"{len(remote.groups)} remote KV groups",
                given=len(pairs),
                local_groups=len(local.groups),
                remote_groups=len(remote.groups),
            )
        if max_span_bytes < 0 or max_token_spans < 0:
            raise InvalidArgument(
                f"limits cannot be negative: {max_span_bytes} bytes, {max_token_spans} spans"
            )
        self._pairs = tuple(pairs)
        self._max_span_bytes = max_span_bytes
        self._max_token_spans = max_token_spans
        self._shapes = [
            _unit_shape(here, there, None if heads is None else heads[index])
            for index, (here, there) in enumerate(zip(local.groups, remote.groups, strict=True))
        ]
        self._names = [group.name for group in local.groups]
        #: By the layer's index over all groups.
        self._layers: list[_Layer] = [
            _Layer(index, mine, theirs)
            for index, (here, there) in enumerate(zip(local.groups, remote.groups, strict=True))
            for mine, theirs in zip(here.layers, there.layers, strict=True)
        ]
        self._spans: dict[tuple[object, ...], BlockSpans] = {}

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
            UnsupportedTopology: More spans of single tokens than the limit allows.
        """
        wanted = range(self.n_layers) if layers is None else sorted(set(layers))
        if wanted and not 0 <= wanted[0] <= wanted[-1] < self.n_layers:
            bad = wanted[0] if wanted[0] < 0 else wanted[-1]
            raise OutOfRange(
                f"layer {bad} is not in 0..{self.n_layers - 1}", id=bad, limit=self.n_layers
            )
        chosen = [self._layers[index] for index in wanted]
        n_token_spans = self._check_token_spans(chosen)
        planned = [
            LayerSpans(
                spans=self._block_spans(layer),
                local_region=layer.local.region,
                local_offset=layer.local.offset,
                remote_region=layer.remote.region,
                remote_offset=layer.remote.offset,
            )
            for layer in chosen
            if len(self._pairs[layer.group].local) and self._shapes[layer.group].heads.runs
        ]
        n_bytes = sum(layer.spans.n_bytes for layer in planned)
        return TransferPlan(tuple(planned), n_bytes, n_token_spans)

    def _check_token_spans(self, layers: Sequence[_Layer]) -> int:
        """Return how many spans of single tokens the layers need.

        Raises:
            UnsupportedTopology: Too many.
        """
        n = 0
        for layer in layers:
            shape = self._shapes[layer.group]
            if shape.is_by_token:
                runs = len(shape.heads.runs) * shape.unit_tokens
                n += len(self._pairs[layer.group].local) * layer.local.pieces * runs
        if self._max_token_spans and n > self._max_token_spans:
            by_token = [i for i, shape in enumerate(self._shapes) if shape.is_by_token]
            names = ", ".join(self._names[i] for i in by_token)
            raise UnsupportedTopology(
                f"splitting the heads of NHD blocks ({names}) needs {n} descriptors of one token "
                f"each, limits.max_token_spans is {self._max_token_spans}: use the HND layout on "
                "both sides, TP sizes that hold the same heads, or raise the limit",
                needed=n,
                limit=self._max_token_spans,
            )
        return n

    def _block_spans(self, layer: _Layer) -> BlockSpans:
        mine, theirs = layer.local, layer.remote
        key = (
            layer.group,
            *(mine.block_stride, mine.kv_stride, mine.piece_bytes, mine.parts),
            *(theirs.block_stride, theirs.kv_stride, theirs.piece_bytes, theirs.parts),
        )
        spans = self._spans.get(key)
        if spans is None:
            pairs, shape = self._pairs[layer.group], self._shapes[layer.group]
            local, remote, sizes = merge(
                *pieces_of(pairs.local, pairs.remote, runs_of(shape, mine, theirs))
            )
            limit = self._max_span_bytes
            if limit and int(sizes.max()) > limit:
                local, remote, sizes = split(local, remote, sizes, limit)
            for array in (local, remote, sizes):
                array.setflags(write=False)
            spans = self._spans[key] = BlockSpans(local, remote, sizes, int(sizes.sum()))
        return spans


def build_plan(
    local: CacheLayout,
    remote: CacheLayout,
    pairs: Sequence[BlockPairs],
    layers: Collection[int] | None = None,
    max_span_bytes: int = 0,
    heads: Sequence[GroupHeads] | None = None,
) -> TransferPlan:
    """Return one plan; see ``Planner``, which is cheaper where a transfer needs several.

    Raises:
        LengthMismatch: See ``Planner``.
        InvalidArgument: See ``Planner``.
        OutOfRange: See ``Planner.plan``.
    """
    return Planner(local, remote, pairs, max_span_bytes, heads).plan(layers)


def _unit_shape(here: KvGroup, there: KvGroup, heads: GroupHeads | None) -> UnitShape:
    return UnitShape(
        order=here.head_order,
        local_tokens=here.tile_tokens,
        remote_tokens=there.tile_tokens,
        unit_tokens=unit_tokens(here, there),
        heads=heads or GroupHeads.all_of(here.total_kv_heads),
    )
