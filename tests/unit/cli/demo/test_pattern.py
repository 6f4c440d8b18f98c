"""Bytes say where they come from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moriiod.cli.demo.pattern import Origin, canary, mix, pieces

ORIGIN = Origin(seed=1, instance=0, tp_rank=2, request=7)


def words(origin: Origin = ORIGIN, layer: int = 3, piece: int = 0, n_blocks: int = 4) -> set[int]:
    return set(pieces(origin, layer, piece, n_blocks, 64).ravel().tolist())


def test_same_origin_gives_the_same_bytes_however_many_blocks_are_asked_for() -> None:
    few, many = pieces(ORIGIN, 3, 0, 2, 64), pieces(ORIGIN, 3, 0, 9, 64)
    assert np.array_equal(few, many[:2])


def test_no_word_comes_twice_in_a_request() -> None:
    found = [words(layer=layer, piece=piece) for layer in range(8) for piece in range(2)]
    assert len(set().union(*found)) == sum(len(each) for each in found) == 16 * 4 * 64


def test_every_other_origin_shares_no_word() -> None:
    others = [
        replace(ORIGIN, seed=2),
        replace(ORIGIN, instance=1),
        replace(ORIGIN, tp_rank=3),
        replace(ORIGIN, request=8),
    ]
    for other in others:
        assert words().isdisjoint(words(other))


def test_largest_coordinates_do_not_run_into_each_other() -> None:
    corner = Origin(1, instance=7, tp_rank=63, request=19999)
    neighbours = [replace(corner, instance=6), replace(corner, tp_rank=62)]
    found = words(corner, layer=511, piece=1, n_blocks=8192)
    for neighbour in neighbours:
        assert found.isdisjoint(words(neighbour, layer=511, piece=1, n_blocks=8192))
    assert found.isdisjoint(words(replace(corner, request=20000), 0, 0, 8192))


def test_canaries_are_signed_words_of_each_rank() -> None:
    found = {
        canary(1, side, i, r) for side in ("prefill", "decode") for i in (0, 1) for r in (0, 1)
    }
    assert len(found) == 8
    assert all(-(1 << 63) <= word < 1 << 63 for word in found)
    assert {word % (1 << 64) for word in found}.isdisjoint(words())


def test_mix_is_splitmix64() -> None:
    # The generator of Steele, Lea and Flood adds its step before the mixing.
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
