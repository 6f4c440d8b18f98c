"""Plans against a byte-by-byte oracle, and overlap checks against enumeration."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moriiod.core.compare import compare_layouts, geometry_digest
from moriiod.core.geometry import CacheLayout, KvGroup, KvLayer
from moriiod.core.layout import (
    check_layout,
    pair_by_position,
    unpack_blocks,
)
from moriiod.core.overlap import Run, first_overlap
from moriiod.core.plan import TransferPlan
from moriiod.core.planner import BlockPairs, build_plan
from moriiod.errors import GeometryMismatch, InvalidArgument, InvalidGeometry
from tests.support.caches import cache, group, layer, pack

# --- One random model, placed at random on two sides ------------------------------------------


@st.composite
def placed_layer(draw: st.DrawFn, name: str, pieces: int, piece_bytes: int, n: int) -> KvLayer:
    """A layer at offset 0 whose pieces are laid out in one of the ways that tensors have."""
    pad = draw(st.integers(0, 5))
    if pieces == 1:
        stride, kv = piece_bytes + pad, 0
    elif draw(st.booleans()):
        stride = piece_bytes + pad
        kv = n * stride + draw(st.integers(0, 9))
    else:
        kv = piece_bytes + pad
        stride = kv + piece_bytes + draw(st.integers(0, 5))
        # No tensor has V this many blocks behind K, but the formula allows it.
        kv += draw(st.sampled_from([0, 0, 1, 2])) * stride
    return layer(name, block_stride=stride, kv_stride=kv, piece_bytes=piece_bytes)


def end_of(one: KvLayer, n: int) -> int:
    return (one.pieces - 1) * one.kv_stride + (n - 1) * one.block_stride + one.piece_bytes


@st.composite
def sides(draw: st.DrawFn, shape: list[list[tuple[int, int]]]) -> CacheLayout:
    """One side's cache for a model of ``shape``: (pieces, piece_bytes) by group and layer."""
    n_regions = draw(st.integers(1, 3))
    ends = [0] * n_regions
    groups: list[KvGroup] = []
    for g, layers in enumerate(shape):
        n = draw(st.integers(1, 7))
        placed = []
        for i, (pieces, piece_bytes) in enumerate(layers):
            one = draw(placed_layer(f"l{g}.{i}", pieces, piece_bytes, n))
            region = draw(st.integers(0, n_regions - 1))
            offset = ends[region] + draw(st.integers(0, 9))
            ends[region] = offset + end_of(one, n)
            placed.append(replace(one, region=region, offset=offset))
        groups.append(group(placed, name=f"g{g}", layout="kv_first", num_blocks=n))
    return cache(*groups, region_bytes=[end + draw(st.integers(0, 9)) or 1 for end in ends])


@st.composite
def transfers(draw: st.DrawFn) -> tuple[CacheLayout, CacheLayout, list[BlockPairs]]:
    """Two caches of one model and the blocks to copy; local blocks are distinct."""
    one_layer = st.tuples(st.integers(1, 2), st.integers(1, 6))
    shape = draw(st.lists(st.lists(one_layer, min_size=1, max_size=3), min_size=1, max_size=2))
    local, remote = draw(sides(shape)), draw(sides(shape))
    pairs = []
    for here, there in zip(local.groups, remote.groups, strict=True):
        to = draw(st.permutations(range(here.num_blocks)))[draw(st.integers(0, here.num_blocks)) :]
        source = st.integers(0, there.num_blocks - 1)
        of = draw(st.lists(source, min_size=len(to), max_size=len(to)))
        pairs.append(BlockPairs(np.array(to, np.int64), np.array(of, np.int64)))
    return local, remote, pairs


def memory_of(layout: CacheLayout, seed: int) -> list[np.ndarray]:
    dice = np.random.default_rng(seed)
    return [dice.integers(0, 256, n, dtype=np.uint8) for n in layout.region_bytes]


def copy_by_plan(plan: TransferPlan, local: list[np.ndarray], remote: list[np.ndarray]) -> None:
    for planned in plan.layers:
        spans = planned.spans
        for to, of, size in zip(spans.local, spans.remote, spans.sizes, strict=True):
            to, of = to + planned.local_offset, of + planned.remote_offset
            assert 0 <= to <= to + size <= len(local[planned.local_region])
            assert 0 <= of <= of + size <= len(remote[planned.remote_region])
            local[planned.local_region][to : to + size] = remote[planned.remote_region][
                of : of + size
            ]


def copy_byte_by_byte(
    local: CacheLayout,
    remote: CacheLayout,
    pairs: list[BlockPairs],
    wanted: set[int],
    memory: tuple[list[np.ndarray], list[np.ndarray]],
) -> int:
    """The oracle: the layout's formula, one byte at a time. Returns how many bytes."""
    copied = index = 0
    for g, here in enumerate(local.groups):
        for mine, theirs in zip(here.layers, remote.groups[g].layers, strict=True):
            for to, of in zip(pairs[g].local.tolist(), pairs[g].remote.tolist(), strict=True):
                for piece in range(mine.pieces if index in wanted else 0):
                    for byte in range(mine.piece_bytes):
                        a = mine.offset + piece * mine.kv_stride + to * mine.block_stride + byte
                        b = theirs.offset + piece * theirs.kv_stride + of * theirs.block_stride
                        memory[0][mine.region][a] = memory[1][theirs.region][b + byte]
                        copied += 1
            index += 1
    return copied


@given(st.data(), transfers(), st.integers(0, 12))
def test_a_plan_copies_exactly_the_bytes_the_formula_says(data, transfer, max_span):
    local, remote, pairs = transfer
    check_layout(local)
    check_layout(remote)
    compare_layouts(local, remote)
    n_layers = sum(len(one.layers) for one in local.groups)
    wanted = data.draw(st.sets(st.integers(0, n_layers - 1)))
    plan = build_plan(local, remote, pairs, wanted, max_span)

    source = memory_of(remote, 1)
    by_plan, by_byte = memory_of(local, 2), memory_of(local, 2)
    copy_by_plan(plan, by_plan, source)
    copied = copy_byte_by_byte(local, remote, pairs, wanted, (by_byte, source))
    assert plan.n_bytes == copied
    for one, two in zip(by_plan, by_byte, strict=True):
        np.testing.assert_array_equal(one, two)


@given(transfers(), st.integers(0, 12))
@settings(max_examples=400)
def test_spans_are_sorted_apart_merged_and_no_larger_than_the_limit(transfer, max_span):
    local, remote, pairs = transfer
    for planned in build_plan(local, remote, pairs, max_span_bytes=max_span).layers:
        spans = planned.spans
        assert spans.local.dtype == spans.remote.dtype == spans.sizes.dtype == np.int64
        rows = list(
            zip(spans.local.tolist(), spans.remote.tolist(), spans.sizes.tolist(), strict=True)
        )
        assert spans.n_bytes == sum(size for _, _, size in rows)
        assert all(0 < size <= (max_span or size) for _, _, size in rows)
        for (to, of, size), (next_to, next_of, _) in pairwise(rows):
            assert to + size <= next_to
            if not max_span:
                assert to + size < next_to or of + size != next_of


@given(transfers())
def test_every_layer_with_equal_spacing_shares_one_block_part(transfer):
    local, remote, pairs = transfer
    plan = build_plan(local, remote, pairs)
    spacings = {
        (
            *(g, mine.piece_bytes, mine.block_stride, mine.kv_stride),
            *(theirs.block_stride, theirs.kv_stride),
        )
        for g, here in enumerate(local.groups)
        for mine, theirs in zip(here.layers, remote.groups[g].layers, strict=True)
        if len(pairs[g].local)
    }
    assert len({id(planned.spans) for planned in plan.layers}) == len(spacings)


# --- Layouts ----------------------------------------------------------------------------------


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 8), st.integers(0, 30), st.integers(1, 6)),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 60),
)
def test_a_layout_passes_only_if_all_its_bytes_are_inside_and_used_once(n, layers, there):
    layout = cache(
        group(
            [
                layer(f"l{i}", offset=offset, block_stride=stride, kv_stride=kv, piece_bytes=size)
                for i, (offset, stride, kv, size) in enumerate(layers)
            ],
            layout="kv_first",
            num_blocks=n,
        ),
        region_bytes=[there],
    )
    used = [
        one.offset + piece * one.kv_stride + block * one.block_stride + byte
        for one in layout.groups[0].layers
        for piece in range(one.pieces)
        for block in range(n)
        for byte in range(one.piece_bytes)
    ]
    is_right = max(used) < there and len(set(used)) == len(used)
    has_one_stride = n == 1 or len({one.block_stride for one in layout.groups[0].layers}) == 1
    try:
        check_layout(layout)
    except InvalidGeometry:
        # Layers of different strides whose extents overlap are refused without a closer look.
        assert not is_right or not has_one_stride
    else:
        assert is_right


@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 4), st.integers(1, 5)), min_size=2, max_size=4
    ),
    st.integers(4, 16),
)
@settings(max_examples=400)
def test_overlap_of_runs_with_one_stride_is_exact(shapes, stride):
    runs = [
        Run(str(i), start, stride, count + 1, min(size, stride))
        for i, (start, count, size) in enumerate(shapes)
    ]
    used = [
        run.start + block * run.stride + byte
        for run in runs
        for block in range(run.count)
        for byte in range(run.size)
    ]
    assert (first_overlap(runs) is None) is (len(set(used)) == len(used))


@given(transfers(), st.data())
def test_digests_agree_exactly_where_layouts_of_one_size_compare(transfer, data):
    local, remote, _ = transfer
    change = data.draw(
        st.sampled_from([{}, {"dtype": "int8"}, {"head_size": 1}, {"content": "x"}, {"name": "n"}])
    )
    other = replace(remote, groups=(replace(remote.groups[0], **change), *remote.groups[1:]))
    try:
        compare_layouts(local, other)
        is_equal = True
    except GeometryMismatch:
        is_equal = False
    assert is_equal is not bool(change.keys() - {"name"})
    assert (geometry_digest(local) == geometry_digest(other)) is is_equal


# --- Block lists ------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40)), st.integers(0, 45), st.booleans())
def test_block_lists_pass_only_if_in_range_and_distinct_where_asked(ids, num_blocks, distinct):
    is_right = all(i < num_blocks for i in ids) and (not distinct or len(set(ids)) == len(ids))
    try:
        got = unpack_blocks(pack(ids), num_blocks, "blocks", distinct=distinct)
    except InvalidArgument:
        assert not is_right
    else:
        assert is_right
        assert got.tolist() == ids


@given(
    st.lists(st.integers(0, 99), max_size=8),
    st.lists(st.integers(0, 99), max_size=8),
    st.integers(0, 8),
    st.integers(0, 8),
)
def test_pairs_hold_the_same_positions(to, of, to_first, of_first):
    by_position = {of_first + i: block for i, block in enumerate(of)}
    is_right = to_first + len(to) == of_first + len(of) and to_first >= of_first
    try:
        got_to, got_of = pair_by_position(
            np.array(to, np.int64), np.array(of, np.int64), to_first, of_first
        )
    except InvalidArgument:
        assert not is_right
    else:
        assert is_right
        assert got_to.tolist() == to
        assert got_of.tolist() == [by_position[to_first + i] for i in range(len(to))]
