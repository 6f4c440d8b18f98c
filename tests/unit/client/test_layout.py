"""From shapes and strides to KV groups: right ones pass, doubtful ones name both readings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moriiod.client.layout import describe_groups
from moriiod.client.spec import GroupSpec, TensorFacts
from moriiod.core.geometry import KvGroup
from moriiod.errors import InvalidGeometry

T, H, D = 16, 2, 8
SPEC = GroupSpec("full", "kv_first", "NHD", T, 8, D, ("l0",))


def packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def tensor(
    *shape: int,
    stride: tuple[int, ...] | None = None,
    offset: int = 0,
    region: int = 0,
    dtype: str = "bfloat16",
) -> TensorFacts:
    return TensorFacts(region, 1 << 20, shape, stride or packed(shape), offset, 2, dtype)


def describe(facts: TensorFacts, tp_size: int | None = 4, **changes: Any) -> KvGroup:
    (group,) = describe_groups({"l0": facts}, [replace(SPEC, **changes)], tp_size)
    return group


def refused(facts: TensorFacts, tp_size: int | None = 4, **changes: Any) -> str:
    with pytest.raises(InvalidGeometry) as raised:
        describe(facts, tp_size, **changes)
    return raised.value.message


# --- each layout ----------------------------------------------------------------------------------


def test_kv_first_has_two_pieces_a_stride_of_all_blocks_apart() -> None:
    group = describe(tensor(2, 10, T, H, D, offset=64))
    (layer,) = group.layers
    assert (group.num_blocks, group.dtype, group.total_kv_heads) == (10, "bfloat16", 8)
    assert layer.offset == 128
    assert layer.piece_bytes == T * H * D * 2
    assert layer.block_stride == layer.piece_bytes
    assert layer.kv_stride == 10 * layer.piece_bytes


def test_block_first_has_v_beside_k() -> None:
    group = describe(tensor(10, 2, T, H, D), layout="block_first")
    (layer,) = group.layers
    assert layer.kv_stride == layer.piece_bytes == T * H * D * 2
    assert layer.block_stride == 2 * layer.piece_bytes


def test_fused_has_one_piece() -> None:
    group = describe(tensor(10, H, T, 2 * D), layout="fused", head_order="HND")
    (layer,) = group.layers
    assert (layer.pieces, layer.piece_bytes) == (1, H * T * 2 * D * 2)


def test_fused_with_layers_between_its_blocks_keeps_their_spacing() -> None:
    # What vLLM's CPU backend makes: one buffer, layers interleaved block by block.
    page = H * T * 2 * D
    facts = {
        f"l{i}": tensor(10, H, T, 2 * D, stride=(4 * page, T * 2 * D, 2 * D, 1), offset=i * page)
        for i in range(4)
    }
    spec = replace(SPEC, layout="fused", head_order="HND", layers=tuple(facts))
    (group,) = describe_groups(facts, [spec], 4)
    assert [layer.offset for layer in group.layers] == [i * page * 2 for i in range(4)]
    assert {layer.block_stride for layer in group.layers} == {4 * page * 2}


def test_mla_has_the_latent_of_every_token() -> None:
    group = describe(tensor(10, T, 576), layout="mla", total_kv_heads=1, head_size=576)
    (layer,) = group.layers
    assert group.is_replicated
    assert (layer.pieces, layer.piece_bytes) == (1, T * 576 * 2)


def test_G5_padded_blocks_keep_their_stride() -> None:
    stride = (10 * 300, 300, H * D, D, 1)
    (layer,) = describe(tensor(2, 10, T, H, D, stride=stride)).layers
    assert (layer.block_stride, layer.piece_bytes) == (600, 512)


def test_flat_pieces_are_taken_as_said() -> None:
    (layer,) = describe(tensor(2, 10, T * H * D)).layers
    assert layer.piece_bytes == T * H * D * 2


def test_single_block_has_the_stride_of_its_payload() -> None:
    stride = (512, 0, H * D, D, 1)
    (layer,) = describe(tensor(2, 1, T, H, D, stride=stride)).layers
    assert layer.block_stride == T * H * D * 2


# --- head order -----------------------------------------------------------------------------------


def test_strides_tell_the_head_order_not_the_order_of_dimensions() -> None:
    # Logically NHD, permuted so that heads are outermost in memory.
    block = T * H * D
    stride = (10 * block, block, D, T * D, 1)
    facts = tensor(2, 10, T, H, D, stride=stride)
    assert describe(facts, head_order="HND").head_order == "HND"
    assert "NHD was said, but its strides read HND" in refused(facts, head_order="NHD")


def test_heads_first_dimensions_are_hnd() -> None:
    facts = tensor(2, 10, H, T, D)
    assert describe(facts, head_order="HND").num_blocks == 10
    assert "NHD was said" in refused(facts, head_order="NHD")


def test_as_many_heads_as_tokens_are_taken_as_said() -> None:
    facts = tensor(2, 10, 16, 16, D)
    for order in ("NHD", "HND"):
        assert describe(facts, total_kv_heads=64, head_order=order).head_order == order


def test_one_head_has_any_order() -> None:
    for order in ("NHD", "HND"):
        assert describe(tensor(2, 10, T, 1, D), 8, head_order=order).head_order == order


def test_fused_order_follows_the_strides() -> None:
    facts = tensor(10, H, T, 2 * D, stride=(T * H * 2 * D, 2 * D, H * 2 * D, 1))
    assert describe(facts, layout="fused", head_order="NHD").head_order == "NHD"
    assert "HND was said, but its strides read NHD" in refused(
        facts, layout="fused", head_order="HND"
    )


# --- refused --------------------------------------------------------------------------------------


def test_two_blocks_fit_both_readings_and_are_refused_with_both() -> None:
    for layout in ("kv_first", "block_first"):
        text = refused(tensor(2, 2, T, H, D), layout=layout)
        assert "could be either" in text
        assert "kv_first" in text
        assert "block_first" in text


def test_G8_kv_first_that_is_block_first_is_refused_with_both() -> None:
    text = refused(tensor(10, 2, T, H, D), layout="kv_first")
    assert "it is not kv_first" in text
    assert "block_first has 2 where K and V are and 10 blocks" in text
    assert "it is not block_first" in refused(tensor(2, 10, T, H, D), layout="block_first")


def test_fused_with_tokens_before_heads_is_refused_with_both() -> None:
    text = refused(tensor(10, T, H, 2 * D), layout="fused", head_order="NHD")
    assert "[blocks, heads, tokens, content]" in text
    assert "[blocks, tokens, heads, content]" in text


def test_wrong_numbers_are_refused_by_name() -> None:
    assert "head size is 8, 64 was said" in refused(tensor(2, 10, T, H, D), head_size=64)
    assert "the 32 tokens" in refused(tensor(2, 10, T, H, D), block_tokens=32)
    assert "it has 2 KV heads" in refused(tensor(2, 10, T, H, D), 8)
    assert "it has 2 KV heads" in refused(tensor(2, 10, T, H, D), None, total_kv_heads=3)
    assert "mla has 1 KV head" in refused(
        tensor(10, T, 576), layout="mla", head_size=576, total_kv_heads=8
    )
    assert "[16, 576]" in refused(tensor(10, T, 576), layout="mla", head_size=512, total_kv_heads=1)
    assert "no multiple" in refused(tensor(2, 10, T * H * D + 1))


def test_more_ranks_than_heads_have_one_head_each() -> None:
    assert describe(tensor(2, 10, T, 1, D), 16, total_kv_heads=4).num_blocks == 10
    assert "it has 2 KV heads" in refused(tensor(2, 10, T, 2, D), 16, total_kv_heads=4)


def test_unknown_tp_size_accepts_a_divisor_of_the_heads() -> None:
    assert describe(tensor(2, 10, T, H, D), None).num_blocks == 10


def test_fused_content_of_another_size_must_be_explained() -> None:
    facts = tensor(10, H, T, 20)
    assert "say in `content`" in refused(facts, layout="fused", head_order="HND")
    group = describe(facts, layout="fused", head_order="HND", content="fp8 with scales")
    assert group.content == "fp8 with scales"


@pytest.mark.parametrize("layout", ["kv_first", "block_first", "fused", "mla"])
def test_wrong_number_of_dimensions_is_refused(layout: str) -> None:
    assert "dimensions" in refused(tensor(2, 10), layout=layout)
    assert "dimensions" in refused(tensor(2, 10, 2, T, H, D), layout=layout)


def test_unknown_layout_and_empty_tensor_are_refused() -> None:
    assert "no layout 'paged'" in refused(tensor(2, 10, T, H, D), layout="paged")
    assert "empty" in refused(tensor(2, 0, T, H, D))


def test_pieces_with_gaps_are_refused() -> None:
    wide = tensor(2, 10, T, H, D, stride=(10 * 512, 512, 2 * H * D, D, 1))
    assert "not contiguous" in refused(wide)
    transposed = tensor(10, T, 8, stride=(T * 8, 1, T))
    assert "not contiguous" in refused(transposed, layout="mla", total_kv_heads=1)


def test_expanded_tensor_is_refused() -> None:
    assert "same bytes" in refused(tensor(2, 10, T, H, D, stride=(512, 0, H * D, D, 1)))
    assert "same bytes" in refused(tensor(2, 10, T, H, D, stride=(0, 512, H * D, D, 1)))


def test_blocks_that_overlap_or_leave_the_region_are_refused() -> None:
    overlapping = tensor(2, 10, T, H, D, stride=(10 * 100, 100, H * D, D, 1))
    assert "overlap" in refused(overlapping)
    assert "region 0" in refused(replace(tensor(2, 10, T, H, D), region_bytes=1000))


# --- groups ---------------------------------------------------------------------------------------


def two(**changes: Any) -> dict[str, TensorFacts]:
    other = {"shape": (2, 10, T, H, D), "offset": 1 << 16} | changes
    shape = other.pop("shape")
    return {"l0": tensor(2, 10, T, H, D), "l1": tensor(*shape, **other)}


def test_every_tensor_is_in_exactly_one_group() -> None:
    both = replace(SPEC, layers=("l0", "l1"))
    assert len(describe_groups(two(), [both], 4)[0].layers) == 2
    for specs, text in [
        ([SPEC], "'l1' belongs to no group"),
        ([both, replace(SPEC, name="b")], "'l0' is named twice"),
        ([both, replace(SPEC, name="b", layers=("x",))], "no tensor for layer 'x'"),
        ([both, replace(SPEC, name="b", layers=())], "has no layers"),
    ]:
        with pytest.raises(InvalidGeometry, match=text):
            describe_groups(two(), specs, 4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shape": (2, 11, T, H, D)}, "11 blocks"),
        ({"dtype": "float16"}, "float16"),
        ({"shape": (2, 10, T, 4, D)}, "4 KV heads"),
    ],
)
def test_layers_of_a_group_are_alike(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidGeometry, match=text):
        describe_groups(two(**changes), [replace(SPEC, layers=("l0", "l1"))], None)


def test_M2_layers_of_two_groups_may_share_memory() -> None:
    other = replace(SPEC, name="window", layers=("l1",))
    groups = describe_groups(two(offset=0), [SPEC, other], 4)
    assert [group.layers[0].offset for group in groups] == [0, 0]


def test_layers_in_several_regions_keep_theirs() -> None:
    facts = two(offset=0)
    facts["l1"] = replace(facts["l1"], region=1)
    (group,) = describe_groups(facts, [replace(SPEC, layers=("l0", "l1"))], 4)
    assert [layer.region for layer in group.layers] == [0, 1]


# --- kernel blocks, head sizes of single layers ---------------------------------------------------


def test_kernel_blocks_smaller_than_the_block_table_s() -> None:
    group = describe(tensor(2, 40, T, H, D), block_tokens=4 * T, kernel_tokens=T)
    (layer,) = group.layers
    assert (group.num_blocks, group.tiles_per_block, group.tile_tokens) == (10, 4, T)
    assert layer.piece_bytes == layer.block_stride == T * H * D * 2
    assert layer.kv_stride == 40 * layer.piece_bytes


@pytest.mark.parametrize(
    ("facts", "changes", "why"),
    [
        (tensor(2, 40, T, H, D), {"block_tokens": 4 * T}, "kernel_tokens says"),
        (tensor(2, 41, T, H, D), {"block_tokens": 2 * T, "kernel_tokens": T}, "multiple of 2"),
        (tensor(2, 40, T, H, D), {"block_tokens": 24, "kernel_tokens": T}, "do not fill"),
        (tensor(2, 40, T, H, D), {"block_tokens": 0}, "do not fill"),
        (tensor(2, 40, T, H, D), {"head_sizes": {"other": 8}}, "'other'"),
        (tensor(2, 40, T, H, D), {"parts": {"l0": (8, 8)}}, "mean nothing"),
    ],
)
def test_G8_kernel_blocks_that_do_not_fit_are_refused(
    facts: TensorFacts, changes: dict[str, Any], why: str
) -> None:
    assert why in refused(facts, **changes)


def test_G9_layers_of_one_group_may_differ_in_head_size() -> None:
    facts = {"l0": tensor(10, T, 576), "k": tensor(10, T, 132, region=1)}
    spec = replace(
        SPEC, layout="mla", total_kv_heads=1, head_size=576, layers=("l0", "k"),
        head_sizes={"k": 132},
    )  # fmt: skip
    (group,) = describe_groups(facts, [spec], 4)
    assert [layer.piece_bytes for layer in group.layers] == [T * 576 * 2, T * 132 * 2]


# --- recurrent state ------------------------------------------------------------------------------

STATE = replace(
    SPEC, layout="state", head_order="HND", block_tokens=1, total_kv_heads=32, head_size=1
)


def state(facts: TensorFacts, tp_size: int | None = 4, **changes: Any) -> KvGroup:
    (group,) = describe_groups({"l0": facts}, [replace(STATE, **changes)], tp_size)
    return group


def test_state_is_one_piece_a_slot_split_by_heads() -> None:
    group = state(tensor(6, 8, 16, 4))
    (layer,) = group.layers
    assert (group.num_blocks, group.block_tokens, group.total_kv_heads) == (6, 1, 32)
    assert (layer.pieces, layer.piece_bytes, layer.parts) == (1, 8 * 16 * 4 * 2, ())


def test_convolution_has_a_part_for_each_projection() -> None:
    (layer,) = state(tensor(6, 16 + 16 + 32, 3), parts={"l0": (16, 16, 32)}).layers
    assert layer.parts == (16 * 3 * 2, 16 * 3 * 2, 32 * 3 * 2)
    # Positions outermost: every position is split alike.
    (layer,) = state(tensor(6, 3, 64), parts={"l0": (16, 16, 32)}).layers
    assert layer.parts == (16 * 2, 16 * 2, 32 * 2) * 3
    assert layer.piece_bytes == sum(layer.parts)


def test_convolution_and_state_of_one_group_may_have_different_types() -> None:
    facts = {"conv": tensor(6, 64, 3), "ssm": tensor(6, 8, 16, region=1, dtype="float32")}
    spec = replace(STATE, layers=("conv", "ssm"), parts={"conv": (32, 32)})
    (group,) = describe_groups(facts, [spec], 4)
    assert group.dtype == "bfloat16/float32"


@pytest.mark.parametrize(
    ("facts", "changes", "why"),
    [
        (tensor(6, 64, 64), {"parts": {"l0": (32, 32)}}, "dimension 1 or dimension 2"),
        (tensor(6, 65, 3), {"parts": {"l0": (32, 32)}}, "no dimension"),
        (tensor(6, 64, 3), {"parts": {"l0": (60, 4)}}, "does not split into 8 heads"),
        (tensor(6, 4, 3), {}, "does not split into 8 heads"),
        (tensor(6, 9, 64), {"parts": {"l0": (32, 32)}}, "more than 16"),
        (tensor(6), {}, "needs slots"),
        (tensor(6, 8, 16, stride=(300, 17, 1)), {}, "not contiguous"),
        (tensor(6, 8, 16, stride=(0, 16, 1)), {}, "same bytes"),
        (tensor(6, 8, 16), {"block_tokens": 16}, "no tokens"),
        (tensor(6, 8, 16), {"head_order": "NHD"}, "no tokens"),
        (tensor(6, 8, 16), {"total_kv_heads": 6}, "spread evenly"),
    ],
)
def test_state_that_contradicts_its_description_is_refused(
    facts: TensorFacts, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidGeometry) as raised:
        state(facts, **changes)
    assert why in raised.value.message


def test_state_of_an_unknown_tp_size_is_taken_as_said() -> None:
    assert state(tensor(6, 5, 16), tp_size=None).layers[0].piece_bytes == 160
