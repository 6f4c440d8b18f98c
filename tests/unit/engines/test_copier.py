"""The copier against the obvious loop: every way of copying, every byte."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moriiod.core.plan import Int64Array
from moriiod.engines.copier import (
    BOUNCE_BYTES,
    PIECE_BYTES,
    STEP_BYTES,
    Copier,
    CopyProgram,
    compile_program,
)
from moriiod.engines.mapping import MappedRegion
from moriiod.wire.memfd import create_sealed_memfd


class Memories:
    """A source and a target, mapped, full of different bytes."""

    def __init__(self, n_bytes: int) -> None:
        self.regions = []
        for seed in (1, 2):
            fd = create_sealed_memfd("t", n_bytes)
            region = MappedRegion(fd, n_bytes)
            os.close(fd)
            dice = np.random.default_rng(seed)
            region.array[:] = dice.integers(0, 256, n_bytes, dtype=np.uint8)
            self.regions.append(region)
        self.source, self.target = self.regions

    def check(self, program: CopyProgram, ranges: list[Int64Array], bases: tuple[int, int]) -> None:
        """Run a program and compare the whole target with what a loop makes of it."""
        want = self.target.array.copy()
        for start, to, size in zip(*(array.tolist() for array in ranges), strict=True):
            start, to = start + bases[0], to + bases[1]
            want[to : to + size] = self.source.array[start : start + size]
        copier, copied = Copier(), 0
        for step in range(program.n_steps):
            n_bytes = copier.run_step(
                program, step, (self.source, bases[0]), (self.target, bases[1])
            )
            assert 0 < n_bytes <= STEP_BYTES + PIECE_BYTES
            copied += n_bytes
        assert copied == int(ranges[2].sum())
        assert (self.target.array == want).all()

    def close(self) -> None:
        for region in self.regions:
            region.close()


def run(
    source: Int64Array, target: Int64Array, sizes: Int64Array, bases: tuple[int, int] = (0, 0)
) -> CopyProgram:
    """Compile, run and check; return the program."""
    end = max(int((source + sizes).max()) + bases[0], int((target + sizes).max()) + bases[1])
    memories = Memories(end + 100)
    program = compile_program(source, target, sizes)
    memories.check(program, [source, target, sizes], bases)
    memories.close()
    return program


def arrays(*lists: list[int]) -> list[Int64Array]:
    return [np.asarray(values, dtype=np.int64) for values in lists]


def scattered(n: int, unit: int, n_slots: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    dice = np.random.default_rng(n)
    pick = [dice.permutation(n_slots)[:n].astype(np.int64) * unit for _ in "ab"]
    return pick[0], pick[1], np.full(n, unit, dtype=np.int64)


@pytest.mark.parametrize(
    ("n", "unit", "n_slots", "method"),
    [
        (64, 4096, 64, "gather"),
        (64, 65536, 64, "gather"),
        (300, 64, 300, "gather"),
        (64, 4096, 200, "bounce"),
        (3000, 1024, 9000, "bounce"),
        (64, 16384, 200, "move"),
        (8, PIECE_BYTES, 8, "gather"),
        (100, 3, 300, "move"),
    ],
)
@pytest.mark.parametrize("bases", [(0, 0), (7, 77)])
def test_each_method_copies_exactly(
    n: int, unit: int, n_slots: int, method: str, bases: tuple[int, int]
) -> None:
    assert run(*scattered(n, unit, n_slots), bases).method == method


def test_runs_of_blocks_are_gathered_run_by_run() -> None:
    """Destinations in five runs with gaps between them, sources anywhere."""
    target = np.concatenate([np.arange(20) + 25 * i for i in range(5)]).astype(np.int64) * 512
    source = np.random.default_rng(1).permutation(100).astype(np.int64) * 512
    program = run(source, target, np.full(100, 512, dtype=np.int64))
    assert (program.method, program.n_steps) == ("gather", 5)


def test_steps_are_cut_at_the_step_size() -> None:
    unit = 65536
    n = 3 * STEP_BYTES // unit + 1
    source, target, sizes = scattered(n, unit, n)
    assert run(source, target, sizes).n_steps == 4


def test_bounce_steps_fit_the_buffer() -> None:
    source, target, sizes = scattered(BOUNCE_BYTES // 4096 + 1, 4096, 2000)
    assert run(source, target, sizes).n_steps == 2


def test_merged_ranges_are_cut_into_units() -> None:
    sizes = np.asarray([1, 3, 2, 1, 5, 1, 2, 1, 4], dtype=np.int64) * 256
    target = np.cumsum(sizes) - sizes
    order = np.random.default_rng(3).permutation(len(sizes))
    source = np.empty_like(sizes)
    source[order] = np.cumsum(sizes[order]) - sizes[order]
    program = run(source, target, sizes)
    assert (program.method, program.unit) == ("gather", 256)


def test_large_ranges_are_copied_in_pieces() -> None:
    source, target, sizes = arrays([10, 6 << 20], [5 << 20, 1], [(5 << 20) + 3, PIECE_BYTES])
    program = run(source, target, sizes)
    assert program.method == "move"
    assert program.n_steps >= 2


def test_one_byte_is_copied() -> None:
    assert run(*arrays([3], [9], [1])).n_steps == 1


def test_misaligned_ranges_of_one_size_are_moved() -> None:
    source = np.arange(40, dtype=np.int64) * 4160
    program = run(source, source[::-1].copy() + 13, np.full(40, 4096, dtype=np.int64))
    assert program.method == "move"
    assert program.unit == 4096


@settings(max_examples=60)
@given(st.data())
def test_any_ranges_are_copied_exactly(data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from([1, 7, 64, 256, 4096]))
    counts = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=40))
    order = data.draw(st.permutations(range(len(counts))))
    gaps = data.draw(st.lists(st.integers(0, 2), min_size=len(counts), max_size=len(counts)))
    skew = data.draw(st.sampled_from([0, 0, 5]))
    sizes = np.asarray(counts, dtype=np.int64) * unit
    padded = sizes + np.asarray(gaps, dtype=np.int64) * (unit + skew)
    target = np.cumsum(padded) - padded
    source = np.empty_like(target)
    picked = np.asarray(order)
    source[picked] = np.cumsum(padded[picked]) - padded[picked]
    run(source, target, sizes, (data.draw(st.integers(0, 9)), data.draw(st.integers(0, 9))))
