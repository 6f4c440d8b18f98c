"""Transfer plans by example. Cases G1 G3 G5 G9."""

from __future__ import annotations

import numpy as np
import pytest

from moriiod.core.layout import check_layout
from moriiod.core.planner import BlockPairs, Planner, build_plan
from moriiod.errors import InvalidArgument, LengthMismatch, OutOfRange
from tests.support.caches import cache, group, layer

TWO_LAYERS = cache(group([layer("a"), layer("b", offset=1 << 20)]))


def pairs(local, remote) -> BlockPairs:
    return BlockPairs(np.array([*local], np.int64), np.array([*remote], np.int64))


def spans_of(plan) -> list[tuple[int, int, int]]:
    (planned,) = plan.layers
    spans = planned.spans
    return list(zip(spans.local.tolist(), spans.remote.tolist(), spans.sizes.tolist(), strict=True))


def test_G3_nothing_to_move_is_an_empty_plan():
    plan = build_plan(TWO_LAYERS, TWO_LAYERS, [pairs([], [])])
    assert (plan.layers, plan.n_bytes) == ((), 0)


def test_contiguous_blocks_merge_and_scattered_ones_do_not():
    layout = cache()
    plan = build_plan(layout, layout, [pairs([3, 0, 1, 6], [5, 2, 3, 6])])
    assert spans_of(plan) == [
        (0, 2 * 4096, 2 * 4096),
        (3 * 4096, 5 * 4096, 4096),
        (6 * 4096, 6 * 4096, 4096),
    ]
    assert plan.n_bytes == 4 * 4096


def test_blocks_merge_only_where_both_sides_are_contiguous():
    local, padded = cache(), cache(group([layer(block_stride=5000)]))
    assert len(spans_of(build_plan(local, padded, [pairs([0, 1], [0, 1])]))) == 2
    assert len(spans_of(build_plan(padded, local, [pairs([0, 1], [0, 1])]))) == 2


def test_k_merges_with_v_where_they_touch_on_both_sides():
    block_first = cache(group([layer(block_stride=8192, kv_stride=4096)], layout="block_first"))
    assert spans_of(build_plan(block_first, block_first, [pairs([2, 3], [5, 6])])) == [
        (2 * 8192, 5 * 8192, 4 * 4096)
    ]


def test_k_and_v_runs_lie_num_blocks_apart_on_each_side():
    def kv_first(num_blocks):
        one = layer(block_stride=64, kv_stride=64 * num_blocks, piece_bytes=64)
        return cache(group([one], layout="kv_first", num_blocks=num_blocks))

    plan = build_plan(kv_first(8), kv_first(16), [pairs([7, 0], [1, 2])])
    assert spans_of(plan) == [
        (0, 2 * 64, 64),
        (7 * 64, 1 * 64, 64),
        (8 * 64, 18 * 64, 64),
        (15 * 64, 17 * 64, 64),
    ]


def test_k_and_v_that_interleave_oddly_are_still_in_ascending_order():
    odd = cache(group([layer(block_stride=8192, kv_stride=3 * 8192 + 4096)], layout="block_first"))
    check_layout(odd)
    plan = build_plan(odd, odd, [pairs(range(8), range(8))])
    starts = [local for local, _, _ in spans_of(plan)]
    assert starts == sorted(starts)
    assert plan.n_bytes == 16 * 4096


def test_spans_are_split_at_the_largest_message():
    layout = cache(group([layer(piece_bytes=100, block_stride=100)]))
    plan = build_plan(layout, layout, [pairs([0, 1, 5], [2, 3, 5])], max_span_bytes=150)
    assert spans_of(plan) == [(0, 200, 150), (150, 350, 50), (500, 500, 100)]
    assert plan.n_bytes == 300
    unsplit = build_plan(layout, layout, [pairs([0, 1, 5], [2, 3, 5])], max_span_bytes=200)
    assert spans_of(unsplit) == [(0, 200, 200), (500, 500, 100)]


def test_offsets_above_4_gib_are_exact():
    stride = (1 << 30) + 4096
    big = cache(group([layer(block_stride=stride)], num_blocks=1000), region_bytes=[1 << 60])
    check_layout(big)
    assert spans_of(build_plan(big, big, [pairs([999], [997])])) == [
        (999 * stride, 997 * stride, 4096)
    ]


def test_a_source_block_may_go_to_several_destinations():
    layout = cache()
    assert spans_of(build_plan(layout, layout, [pairs([0, 1], [5, 5])])) == [
        (0, 5 * 4096, 4096),
        (4096, 5 * 4096, 4096),
    ]


def test_G9_each_layer_is_planned_by_its_own_geometry():
    a = layer("a", block_stride=16384, kv_stride=8192, piece_bytes=8192)
    b = layer("b", region=1, block_stride=132 * 64, piece_bytes=132 * 64)
    c = layer("c", region=2, block_stride=16384, kv_stride=8192, piece_bytes=8192)
    layout = cache(group([a, b, c], layout="block_first"), region_bytes=[1 << 20] * 3)
    check_layout(layout)
    planner = Planner(layout, layout, [pairs([0, 2], [1, 3])])
    plan = planner.plan([1, 0])
    assert [planned.local_region for planned in plan.layers] == [0, 1]
    assert plan.layers[0].spans.sizes.tolist() == [16384, 16384]
    assert plan.layers[1].spans.local.tolist() == [0, 2 * 132 * 64]
    assert plan.layers[1].spans.sizes.tolist() == [132 * 64] * 2
    assert plan.n_bytes == 2 * 16384 + 2 * 132 * 64
    assert planner.plan([2]).layers[0].spans is plan.layers[0].spans


def test_layers_keep_their_own_regions_and_offsets():
    mine = cache(
        group([layer("a", offset=7), layer("b", region=1, offset=9)]), region_bytes=[1 << 20] * 2
    )
    theirs = cache(
        group([layer("a", region=1, offset=5), layer("b", offset=3)]), region_bytes=[1 << 20] * 2
    )
    got = [
        (p.local_region, p.local_offset, p.remote_region, p.remote_offset)
        for p in build_plan(mine, theirs, [pairs([0], [0])]).layers
    ]
    assert got == [(0, 7, 1, 5), (1, 9, 0, 3)]


def test_layer_indexes_count_over_all_groups_and_empty_groups_are_left_out():
    layout = cache(
        group([layer("a"), layer("b", offset=1 << 20)], name="full"),
        group([layer("c", piece_bytes=64)], name="sliding"),
    )
    blocks = [pairs([0], [1]), pairs([2, 3], [4, 5])]
    assert build_plan(layout, layout, blocks).n_bytes == 2 * 4096 + 2 * 64
    assert build_plan(layout, layout, blocks, layers=[2, 2]).n_bytes == 2 * 64
    assert build_plan(layout, layout, blocks, layers=[]).layers == ()
    assert build_plan(layout, layout, [pairs([], []), blocks[1]]).n_bytes == 2 * 64
    assert Planner(layout, layout, blocks).n_layers == 3


@pytest.mark.parametrize("bad", [-1, 2, 1 << 40])
def test_a_layer_that_is_not_there_is_refused(bad):
    with pytest.raises(OutOfRange) as caught:
        build_plan(TWO_LAYERS, TWO_LAYERS, [pairs([0], [0])], layers=[0, bad])
    assert caught.value.fields == {"id": bad, "limit": 2}


def test_G1_one_list_of_blocks_is_needed_for_each_group():
    with pytest.raises(LengthMismatch, match="2 lists of blocks for 1 local and 1 remote"):
        build_plan(TWO_LAYERS, TWO_LAYERS, [pairs([0], [0])] * 2)


def test_negative_span_limit_is_refused():
    with pytest.raises(InvalidArgument, match="-1 bytes"):
        build_plan(TWO_LAYERS, TWO_LAYERS, [pairs([0], [0])], max_span_bytes=-1)


def test_arrays_of_a_plan_are_shared_and_cannot_be_changed():
    plan = build_plan(TWO_LAYERS, TWO_LAYERS, [pairs([0], [0])])
    assert plan.layers[0].spans is plan.layers[1].spans
    with pytest.raises(ValueError, match="read-only"):
        plan.layers[0].spans.local[0] = 1


def test_G5_high_blocks_are_planned_by_stride_and_never_touch_the_padding():
    one = group([layer(block_stride=4160)], num_blocks=28743)
    layout = cache(one, region_bytes=[119_570_816])
    check_layout(layout)
    blocks = [0, 28299, 28300, 28734, 28735, 28738, 28742]
    (planned,) = build_plan(layout, layout, [pairs(blocks, blocks)]).layers
    assert planned.spans.local.tolist() == [b * 4160 for b in blocks]
    assert planned.spans.sizes.tolist() == [4096] * 7
    assert planned.spans.local[5] == 119_550_080
    assert planned.spans.local[5] + planned.spans.sizes[5] == 119_554_176
