"""One wrong byte anywhere is found, and it is said where."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moriiod.cli.demo.cache import RankCache
from moriiod.cli.demo.pattern import Origin
from moriiod.cli.demo.plan import CacheShape

ORIGIN = Origin(seed=1, instance=0, tp_rank=2, request=7)
SHAPES = [CacheShape(2, 12, 0, 4), CacheShape(2, 12, 8, 4)]
BLOCKS = [9, 2, 5]


@pytest.fixture(params=SHAPES, ids=["mla", "heads"])
def shape(request: pytest.FixtureRequest) -> CacheShape:
    return request.param


def filled_cache(shape: CacheShape) -> RankCache:
    # Not a fixture: pytest would hold the memory beyond the check for leaks.
    made = RankCache(shape, canary=-77)
    for layer in range(2):
        made.fill(BLOCKS, ORIGIN, layer)
    return made


def layer_bytes(cache: RankCache, layer: int) -> torch.Tensor:
    tensor = list(cache.tensors.values())[layer]
    return tensor.flatten().view(torch.uint8)


def test_what_was_filled_is_right_and_the_rest_untouched(shape: CacheShape) -> None:
    cache = filled_cache(shape)
    assert cache.find_wrong(BLOCKS, ORIGIN) == ""
    assert cache.find_touched(BLOCKS) == (cache.n_bytes(9), "")


@pytest.mark.parametrize(
    "other",
    [replace(ORIGIN, tp_rank=3), replace(ORIGIN, instance=1), replace(ORIGIN, request=8)],
    ids=["rank", "instance", "request"],
)
def test_bytes_of_somebody_else_are_wrong(shape: CacheShape, other: Origin) -> None:
    cache = filled_cache(shape)
    assert "layer 0 piece 0" in cache.find_wrong(BLOCKS, other)


def test_blocks_in_another_order_are_wrong(shape: CacheShape) -> None:
    cache = filled_cache(shape)
    assert "block 2 " in cache.find_wrong([2, 9, 5], ORIGIN)


def test_every_single_byte_of_the_cache_counts(shape: CacheShape) -> None:
    cache = filled_cache(shape)
    data = layer_bytes(cache, 1)
    for index in (0, 1, len(data) // 3, len(data) // 2, len(data) - 1):
        data[index] ^= 0x80
        wrong = cache.find_wrong(BLOCKS, ORIGIN) + cache.find_touched(BLOCKS)[1]
        assert "layer 1" in wrong
        assert "1 bytes differ" in wrong
        data[index] ^= 0x80
    assert cache.find_wrong(BLOCKS, ORIGIN) + cache.find_touched(BLOCKS)[1] == ""


def test_blanked_blocks_are_unused_ones(shape: CacheShape) -> None:
    cache = filled_cache(shape)
    cache.blank(BLOCKS)
    assert cache.find_touched(()) == (cache.n_bytes(12), "")
    assert "byte 0 of block 9" in cache.find_wrong(BLOCKS, ORIGIN)


def test_planted_fault_is_one_byte_of_that_block(shape: CacheShape) -> None:
    cache = filled_cache(shape)
    cache.flip_byte(5)
    assert "of block 5" in cache.find_wrong(BLOCKS, ORIGIN)
    cache.flip_byte(5)
    assert cache.find_wrong(BLOCKS, ORIGIN) == ""
