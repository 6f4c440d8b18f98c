"""One wrong byte anywhere is found, and it is said where."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moriiod.cli.demo.cache import RankCache, Sources
from moriiod.cli.demo.pattern import Origin
from moriiod.cli.demo.shapes import CacheShape, GroupShape, KvChoice
from moriiod.core.headplan import HeadSlice

ORIGIN = Origin(seed=1, instance=0, tp_rank=2, request=7)
CHOICES = [
    KvChoice(),
    KvChoice(8),
    KvChoice(8, "kv_first", "NHD"),
    KvChoice(8, "block_first"),
    KvChoice(8, "fused"),
    KvChoice(8, "fused", "NHD"),
    KvChoice(model="kimi-linear-48b"),
    KvChoice(model="gpt-oss-120b"),
    KvChoice(model="deepseek-v3.2"),
]
BLOCKS = [9, 2, 5]


@pytest.fixture(params=CHOICES, ids=str)
def shape(request: pytest.FixtureRequest) -> CacheShape:
    return CacheShape(request.param, 2, 12, 4)


def own(origin: Origin, shape: CacheShape) -> Sources:
    return Sources.own(origin, shape)


def filled_cache(shape: CacheShape) -> RankCache:
    # Not a fixture: pytest would hold the memory beyond the check for leaks.
    made = RankCache(shape, canary=-77)
    for layer in range(shape.n_layers):
        made.fill(BLOCKS, ORIGIN, layer)
    return made


def layer_bytes(cache: RankCache, layer: int) -> torch.Tensor:
    tensor = list(cache.tensors.values())[layer]
    in_memory = tensor if tensor.is_contiguous() else tensor.transpose(1, 2)
    return in_memory.flatten().view(torch.uint8)


def test_what_was_filled_is_right_and_the_rest_untouched(shape: CacheShape) -> None:
    cache = filled_cache(shape)
    assert cache.find_wrong(BLOCKS, own(ORIGIN, shape)) == ""
    free = shape.cache_bytes - shape.request_bytes(BLOCKS)
    assert cache.find_touched([BLOCKS]) == (free, "")


@pytest.mark.parametrize(
    "other",
    [replace(ORIGIN, tp_rank=3), replace(ORIGIN, instance=1), replace(ORIGIN, request=8)],
    ids=["rank", "instance", "request"],
)
def test_bytes_of_somebody_else_are_wrong(shape: CacheShape, other: Origin) -> None:
    cache = filled_cache(shape)
    assert "layer 0 piece 0" in cache.find_wrong(BLOCKS, own(other, shape))


def test_blocks_in_another_order_are_wrong(shape: CacheShape) -> None:
    cache = filled_cache(shape)
    assert "block 2 " in cache.find_wrong([2, 9, 5], own(ORIGIN, shape))


def test_every_single_byte_of_the_cache_counts(shape: CacheShape) -> None:
    cache = filled_cache(shape)
    data = layer_bytes(cache, 1)
    for index in (0, 1, len(data) // 3, len(data) // 2, len(data) - 1):
        data[index] ^= 0x80
        wrong = cache.find_wrong(BLOCKS, own(ORIGIN, shape)) + cache.find_touched([BLOCKS])[1]
        assert "layer 1" in wrong
        assert "1 bytes differ" in wrong
        data[index] ^= 0x80
    assert cache.find_wrong(BLOCKS, own(ORIGIN, shape)) + cache.find_touched([BLOCKS])[1] == ""


def test_blanked_blocks_are_unused_ones(shape: CacheShape) -> None:
    cache = filled_cache(shape)
    cache.blank(BLOCKS)
    assert cache.find_touched(()) == (shape.cache_bytes, "")
    assert "byte 0 of block 9" in cache.find_wrong(BLOCKS, own(ORIGIN, shape))


def test_planted_fault_is_one_byte_of_that_block(shape: CacheShape) -> None:
    cache = filled_cache(shape)
    cache.flip_byte([9, 5])
    assert "of block 9" in cache.find_wrong(BLOCKS, own(ORIGIN, shape))
    cache.flip_byte([9, 5])
    assert cache.find_wrong(BLOCKS, own(ORIGIN, shape)) == ""


@pytest.mark.parametrize(("p", "d"), [(4, 8), (8, 4), (2, 8), (4, 1), (2, 2)])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_expected_bytes_are_those_of_the_ranks_that_hold_the_heads(
    choice: KvChoice, p: int, d: int
) -> None:
    heads = choice.rule(allows_uneven=False).plan(p, d)
    there = CacheShape(choice, 1, 12, p)
    producers = [RankCache(there, canary=-1) for _ in range(p)]
    for rank, cache in enumerate(producers):
        for layer in range(there.n_layers):
            cache.fill(BLOCKS, origin_of(rank), layer)
    here = CacheShape(choice, 1, 12, d)
    for rank in range(d):
        consumer = RankCache(here, canary=-1)
        for group, shape in enumerate(here.groups):
            for one in heads.slices(group, rank):
                copy_heads(producers[one.producer_rank], consumer, one, shape)
        sources = Sources.of_rank(heads, rank, there, origin_of)
        assert consumer.find_wrong(BLOCKS, sources) == ""
        if there.groups[0].heads > 1:
            wrong = Sources.of_rank(heads, rank, there, lambda r: origin_of(r + 1))
            assert consumer.find_wrong(BLOCKS, wrong)


def origin_of(rank: int) -> Origin:
    return Origin(1, 0, rank, 7)


def copy_heads(producer: RankCache, consumer: RankCache, one: HeadSlice, shape: GroupShape) -> None:
    """Copy a slice tensor by tensor, head by head, as torch sees them."""
    for name in shape.layer_names:
        here, there = consumer.tensors[name], producer.tensors[name]
        if shape.group.shape.is_replicated:
            here.copy_(there)
            continue
        axis = head_axis(shape)
        parts = len(shape.group.token_bytes)
        for part in range(parts):
            mine = part * (here.shape[axis] // parts) + one.consumer_head
            theirs = part * (there.shape[axis] // parts) + one.producer_head
            here.narrow(axis, mine, one.count).copy_(there.narrow(axis, theirs, one.count))


def head_axis(shape: GroupShape) -> int:
    if shape.group.layout in ("fused", "state"):
        return 1
    return 2 if shape.group.head_order == "HND" else 3
