"""Which differences of two caches are bridged and which are named. Cases G7 G8."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core.compare import compare_layouts, geometry_digest
from moriiod.errors import GeometryMismatch
from tests.support.caches import cache, group, layer

BASE = cache(group([layer("a"), layer("b", offset=1 << 20)], layout="block_first"))


def changed(**values) -> object:
    return cache(replace(BASE.groups[0], **values))


def changed_layer(**values) -> object:
    first, *others = BASE.groups[0].layers
    return changed(layers=(replace(first, **values), *others))


@pytest.mark.parametrize(
    ("other", "field", "local", "remote"),
    [
        (changed(dtype="float8_e4m3fn"), "dtype", "bfloat16", "float8_e4m3fn"),
        (changed(dtype="float8_e4m3fnuz"), "dtype", "bfloat16", "float8_e4m3fnuz"),
        (changed(head_size=64), "head_size", 128, 64),
        (changed_layer(piece_bytes=2048), "piece_bytes", 4096, 2048),
    ],
)
def test_G7_dtype_or_item_length_is_named_with_both_values(other, field, local, remote):
    with pytest.raises(GeometryMismatch) as caught:
        compare_layouts(BASE, other)
    fields = caught.value.fields
    assert (fields["field"], fields["local"], fields["remote"]) == (field, local, remote)
    assert repr(local) in caught.value.message
    assert repr(remote) in caught.value.message
    assert (geometry_digest(BASE) == geometry_digest(other)) is (field == "piece_bytes")


def test_G7_item_lengths_of_the_case():
    small = cache(group([layer(piece_bytes=16384, block_stride=16384)]))
    large = cache(group([layer(piece_bytes=32768, block_stride=32768)]))
    with pytest.raises(GeometryMismatch, match="32768 here and 16384"):
        compare_layouts(large, small)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (changed(head_order="NHD"), "head_order"),
        (changed(block_tokens=24), "block_tokens"),
        (changed(kernel_tokens=3), "kernel_tokens"),
        (changed(content="kernel_blocks=2"), "content"),
        (changed(layout="kv_first"), "layout"),
        (changed(total_kv_heads=2), "total_kv_heads"),
        (changed(layers=BASE.groups[0].layers[:1]), "layers"),
        (changed_layer(name="c"), "layer name"),
        (changed_layer(kv_stride=4096, block_stride=8192), "pieces"),
        (cache(*BASE.groups, group(name="other")), "groups"),
    ],
)
def test_G8_what_differs_is_named_whoever_compares(other, field):
    for one, two in ((BASE, other), (other, BASE)):
        with pytest.raises(GeometryMismatch) as caught:
            compare_layouts(one, two)
        assert caught.value.fields["field"] == field
    bridged_by_factor = ("block_tokens", "kernel_tokens")
    assert (geometry_digest(BASE) == geometry_digest(other)) is (field in bridged_by_factor)


@pytest.mark.parametrize(
    "other",
    [
        changed(num_blocks=211),
        changed(
            block_tokens=64,
            layers=tuple(
                replace(one, piece_bytes=4 * 4096, block_stride=4 * 4096)
                for one in BASE.groups[0].layers
            ),
        ),
        changed(
            kernel_tokens=4,
            layers=tuple(
                replace(one, piece_bytes=1024, block_stride=1024) for one in BASE.groups[0].layers
            ),
        ),
        changed(name="another"),
        changed_layer(block_stride=8192, offset=1 << 25, region=1),
        replace(BASE, generation="f" * 32, region_bytes=(1, 2, 3)),
    ],
)
def test_G8_block_counts_strides_offsets_and_regions_may_differ(other):
    compare_layouts(BASE, other)
    compare_layouts(other, BASE)
    assert geometry_digest(BASE) == geometry_digest(other)


def test_digest_is_stable_across_builds():
    assert geometry_digest(cache()) == (
        "93f78a69298e62e30426cf90e400ad8457485e2068da5b2cc52074d1b6da4c5d"
    )


def test_heads_of_different_tp_sizes_compare_by_token_and_head():
    def rank(heads: int, per_head: int = 256) -> object:
        size = 16 * heads * per_head
        one = layer(block_stride=size, piece_bytes=size)
        return cache(group([one], total_kv_heads=8))

    compare_layouts(rank(2), rank(1), 4, 8)
    compare_layouts(rank(1), rank(8), 16, 1)
    with pytest.raises(GeometryMismatch, match=r"token and head .* 256 here and 128"):
        compare_layouts(rank(2), rank(1, 128), 4, 8)
    odd = cache(group([layer(piece_bytes=4097)], total_kv_heads=8))
    with pytest.raises(GeometryMismatch, match=r"piece_bytes .* whole bytes"):
        compare_layouts(rank(2), odd, 4, 8)


def test_packed_content_needs_equal_kernel_blocks_where_tokens_may_interleave():
    def side(tokens: int, content: str, layout: str) -> object:
        one = layer(block_stride=tokens * 256, piece_bytes=tokens * 256)
        return cache(group([one], block_tokens=tokens, content=content, layout=layout))

    compare_layouts(side(16, "", "kv_first"), side(32, "", "kv_first"))
    compare_layouts(side(16, "fp8_ds_mla", "mla"), side(32, "fp8_ds_mla", "mla"))
    with pytest.raises(GeometryMismatch, match="kernel_tokens"):
        compare_layouts(side(16, "x8", "kv_first"), side(32, "x8", "kv_first"))


def test_state_parts_are_compared_one_by_one():
    def rank(*parts: int) -> object:
        one = layer(block_stride=1 << 12, piece_bytes=sum(parts), parts=parts)
        return cache(group([one], layout="state", block_tokens=1, total_kv_heads=4))

    compare_layouts(rank(64, 32), rank(32, 16), 2, 4)
    with pytest.raises(GeometryMismatch, match="token and head"):
        compare_layouts(rank(64, 32), rank(16, 32), 2, 4)
    with pytest.raises(GeometryMismatch, match="parts"):
        compare_layouts(rank(64, 32), rank(48), 2, 4)
