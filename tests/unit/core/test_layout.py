"""Layout checks and block lists by example. Cases G1 G3 G4 G5 G7 G8."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from moriiod.core.layout import (
    check_layout,
    needed_bytes,
    pair_by_position,
    unpack_blocks,
)
from moriiod.errors import (
    InvalidArgument,
    InvalidGeometry,
    LengthMismatch,
    OutOfRange,
)
from tests.support.caches import cache, group, layer, pack


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


# --- check_layout -----------------------------------------------------------------------------

#: Case G5: payload 4096 in a stride of 4160, 28743 blocks.
G5_GROUP = group([layer(block_stride=4160)], num_blocks=28743)


def test_G5_a_region_that_ends_with_the_last_payload_is_enough():
    assert needed_bytes(G5_GROUP, G5_GROUP.layers[0]) == 119_570_816
    check_layout(cache(G5_GROUP, region_bytes=[119_570_816]))


@pytest.mark.parametrize("there", [119_570_815, 119_537_664, 117_731_328])
def test_G5_a_region_of_payloads_only_is_refused_naming_both_sizes(there):
    with pytest.raises(InvalidGeometry, match=f"119570816 .* {there}") as caught:
        check_layout(cache(G5_GROUP, region_bytes=[there]))
    assert caught.value.fields["needed_bytes"] == 119_570_816
    assert caught.value.fields["region_bytes"] == there


def test_last_piece_and_offset_count_for_the_region():
    kv_first = layer(offset=100, block_stride=64, kv_stride=64 * 8, piece_bytes=64)
    check_layout(cache(group([kv_first], layout="kv_first"), region_bytes=[100 + 2 * 8 * 64]))
    with pytest.raises(InvalidGeometry, match="needs 1124 bytes of region 0"):
        check_layout(
            cache(group([kv_first], layout="kv_first"), region_bytes=[100 + 2 * 8 * 64 - 1])
        )


def test_numbers_beyond_64_bits_are_refused_not_wrapped():
    huge = layer(offset=1 << 62, block_stride=1 << 62, piece_bytes=1 << 62)
    with pytest.raises(InvalidGeometry, match="needs"):
        check_layout(cache(group([huge], num_blocks=1 << 32), region_bytes=[1 << 62]))


def test_region_that_is_not_there_is_refused():
    with pytest.raises(InvalidGeometry, match="region 1, but there are only 1"):
        check_layout(cache(group([layer(region=1)])))


@pytest.mark.parametrize("kind", ["fused", "mla"])
def test_layouts_of_one_piece_cannot_have_a_kv_stride(kind):
    with pytest.raises(InvalidGeometry, match="no V piece"):
        check_layout(cache(group([layer(kv_stride=1 << 20)], layout=kind)))


def test_names_must_be_unique():
    two = [layer("a"), layer("a", offset=1 << 20)]
    with pytest.raises(InvalidGeometry, match="two layers are named 'a'"):
        check_layout(cache(group(two)))
    with pytest.raises(InvalidGeometry, match="two groups are named 'g'"):
        check_layout(cache(group([layer("a")], name="g"), group([layer("b")], name="g")))


def test_layers_of_all_groups_together_are_limited():
    def many(name):
        layers = [
            layer(f"{name}.{i}", offset=i * 64, block_stride=1 << 20, piece_bytes=64)
            for i in range(2049)
        ]
        return group(layers, name=name)

    with pytest.raises(InvalidGeometry, match="4098 layers are more than 4096"):
        check_layout(cache(many("a"), many("b")))


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (layer(block_stride=4095), "blocks of layer.0 overlap each other"),
        (layer(block_stride=8192, kv_stride=4095), "layer.0 (K) and layer.0 (V) overlap"),
        (layer(block_stride=8192, kv_stride=4097), "layer.0 (K) and layer.0 (V) overlap"),
        (layer(block_stride=4096, kv_stride=4096), "layer.0 (K) and layer.0 (V) overlap"),
        (layer(block_stride=4096, kv_stride=7 * 4096), "layer.0 (K) and layer.0 (V) overlap"),
    ],
)
def test_blocks_of_one_layer_must_not_share_a_byte(one, text):
    with pytest.raises(InvalidGeometry, match=re.escape(text)):
        check_layout(cache(group([one], layout="kv_first", num_blocks=8)))


@pytest.mark.parametrize(
    "one",
    [
        layer(block_stride=8192, kv_stride=4096),
        layer(block_stride=4096, kv_stride=8 * 4096),
        layer(block_stride=9000, kv_stride=4500),
        layer(block_stride=8192, kv_stride=7 * 8192 + 4096),
    ],
)
def test_k_and_v_may_lie_in_any_way_that_does_not_overlap(one):
    check_layout(cache(group([one], layout="block_first", num_blocks=8)))


def test_a_single_block_may_have_any_stride():
    check_layout(cache(group([layer(block_stride=1)], num_blocks=1)))
    check_layout(
        cache(group([layer(block_stride=1, kv_stride=4096)], layout="kv_first", num_blocks=1))
    )
    with pytest.raises(InvalidGeometry, match="overlap"):
        check_layout(
            cache(group([layer(block_stride=1, kv_stride=4095)], layout="kv_first", num_blocks=1))
        )


def test_layers_of_a_group_may_interleave_but_not_overlap():
    stride = 3 * 4096
    side_by_side = [layer(f"l{i}", offset=i * 4096, block_stride=stride) for i in range(3)]
    check_layout(cache(group(side_by_side)))
    moved = [*side_by_side[:2], replace(side_by_side[2], offset=2 * 4096 + 1)]
    with pytest.raises(InvalidGeometry, match=r"l2 and l0 overlap|l0 and l2 overlap"):
        check_layout(cache(group(moved)))
    apart = [moved[0], moved[1], replace(moved[2], region=1)]
    check_layout(cache(group(apart), region_bytes=[1 << 20, 1 << 20]))


def test_layers_one_behind_the_other_are_fine_up_to_the_byte():
    check_layout(cache(group([layer("a"), layer("b", offset=8 * 4096)])))
    with pytest.raises(InvalidGeometry, match="a and b overlap"):
        check_layout(cache(group([layer("a"), layer("b", offset=8 * 4096 - 1)])))


def test_interleaved_layers_of_different_strides_are_refused():
    with pytest.raises(InvalidGeometry, match="a and b overlap"):
        check_layout(
            cache(
                group([layer("a", block_stride=16384), layer("b", offset=4096, block_stride=8192)])
            )
        )


def test_groups_may_share_one_storage():
    check_layout(cache(group([layer("a")], name="full"), group([layer("b")], name="sliding")))


# --- unpack_blocks ----------------------------------------------------------------------------


def test_G4_the_limit_is_that_of_the_very_rank():
    assert unpack_blocks(pack([111487]), 111488, "rank1").tolist() == [111487]
    assert unpack_blocks(pack([111679]), 111680, "rank0").tolist() == [111679]
    for bad in (111488, 111500, 111679, 2**31, 2**32 - 1):
        with pytest.raises(OutOfRange) as caught:
            unpack_blocks(pack([0, bad, 5]), 111488, "rank1")
        assert caught.value.fields == {"what": "rank1", "id": bad, "limit": 111488}
    with pytest.raises(OutOfRange, match="rank0: block 111680"):
        unpack_blocks(pack([111680]), 111680, "rank0")


def test_G4_minus_one_as_it_would_travel_is_out_of_range():
    with pytest.raises(OutOfRange) as caught:
        unpack_blocks(b"\xff\xff\xff\xff", 111488, "rank1")
    assert caught.value.fields["id"] == 2**32 - 1


def test_G4_duplicate_destinations_are_refused_and_duplicate_sources_are_not():
    twice = pack([4, 9, 4])
    assert unpack_blocks(twice, 16, "sources").tolist() == [4, 9, 4]
    with pytest.raises(InvalidArgument, match="block 4 is named twice") as caught:
        unpack_blocks(twice, 16, "destinations", distinct=True)
    assert caught.value.fields == {"what": "destinations", "id": 4}
    assert unpack_blocks(pack([4, 9]), 16, "destinations", distinct=True).tolist() == [4, 9]


def test_blocks_are_int64_in_the_given_order():
    got = unpack_blocks(pack([7, 0, 3]), 8, "blocks", distinct=True)
    assert got.dtype == np.int64
    assert got.tolist() == [7, 0, 3]


def test_no_blocks_and_one_block():
    assert unpack_blocks(b"", 8, "blocks", distinct=True).tolist() == []
    assert unpack_blocks(pack([7]), 8, "blocks", distinct=True).tolist() == [7]


def test_broken_packing_is_refused():
    with pytest.raises(InvalidArgument, match="7 bytes"):
        unpack_blocks(b"1234567", 8, "blocks")


# --- pair_by_position -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "remote"), [((1, 2, 3), (7, 8)), ((), (7,)), ((1,), ()), ((), (0,) * 12)]
)
def test_G1_lists_that_do_not_end_together_are_refused_naming_both_lengths(local, remote):
    with pytest.raises(LengthMismatch) as caught:
        pair_by_position(ids(*local), ids(*remote), what="group full")
    assert caught.value.fields["destination_blocks"] == len(local)
    assert caught.value.fields["source_blocks"] == len(remote)
    assert caught.value.message.startswith("group full: ")


def test_equal_lists_pair_as_they_are():
    to, of = pair_by_position(ids(1, 2), ids(7, 8))
    assert (to.tolist(), of.tolist()) == ([1, 2], [7, 8])


def test_partial_prefix_hit_skips_what_the_destination_holds():
    to, of = pair_by_position(ids(1, 2), ids(5, 6, 7, 8), destination_first=2)
    assert (to.tolist(), of.tolist()) == ([1, 2], [7, 8])
    to, of = pair_by_position(ids(1, 2), ids(6, 7, 8), 12, 11)
    assert (to.tolist(), of.tolist()) == ([1, 2], [7, 8])


def test_G3_full_prefix_hit_pairs_nothing():
    to, of = pair_by_position(ids(), ids(5, 6, 7), destination_first=3)
    assert (to.tolist(), of.tolist()) == ([], [])
    to, of = pair_by_position(ids(), ids())
    assert (to.tolist(), of.tolist()) == ([], [])


def test_destination_that_starts_before_the_source_is_refused():
    with pytest.raises(InvalidArgument, match="starts at position 0, but the source only at 1"):
        pair_by_position(ids(1, 2, 3), ids(7, 8), 0, 1)
