"""Runs of byte ranges by example; ``test_layout_properties`` compares them with enumeration."""

from __future__ import annotations

import pytest

from moriiod.core.overlap import Run, first_overlap


def run(label: str, start: int, stride: int = 100, count: int = 3, size: int = 10) -> Run:
    return Run(label, start, stride, count, size)


def test_a_run_ends_behind_its_last_range():
    assert run("a", 10, size=7).end == 217


def test_nothing_and_one_run_do_not_overlap():
    assert first_overlap([]) is None
    assert first_overlap([run("a", 0)]) is None


def test_ranges_larger_than_their_stride_overlap_themselves():
    bad = run("a", 0, stride=9)
    assert first_overlap([bad]) == (bad, bad)


@pytest.mark.parametrize("start", [10, 90, 290, 1000])
def test_ranges_that_only_touch_do_not_overlap(start):
    assert first_overlap([run("a", 0), run("b", start)]) is None


@pytest.mark.parametrize("start", [0, 9, 91, 99, 100, 209])
def test_ranges_that_share_one_byte_do(start):
    a, b = run("a", 0), run("b", start)
    assert first_overlap([b, a]) in ((a, b), (b, a))


def test_a_run_behind_the_end_of_another_is_apart_although_they_meet_modulo_the_stride():
    assert first_overlap([run("a", 0), run("b", 300), run("c", 600)]) is None


def test_runs_of_different_strides_count_as_overlapping_where_their_extents_do():
    a = run("a", 0)
    assert first_overlap([a, run("b", 210, stride=50)]) is None
    b = run("b", 50, stride=50)
    assert first_overlap([a, b]) == (a, b)


def test_single_ranges_are_compared_by_their_bytes_alone():
    a, b = run("a", 0, stride=1, count=1), run("b", 9, stride=1, count=1)
    assert first_overlap([a, b]) == (a, b)
    assert first_overlap([a, run("b", 10, stride=1, count=1)]) is None


def test_four_thousand_interleaved_layers_of_many_blocks_are_checked_without_enumeration():
    stride = 4096 * 64
    runs = [run(str(i), i * 64, stride, 1 << 32, 64) for i in range(4096)]
    assert first_overlap(runs) is None
    late = run("late", 4095 * 64 + 63 + 5 * stride, stride, 1, 1)
    assert first_overlap([*runs, late]) is not None
