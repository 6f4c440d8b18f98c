"""Do runs of equally spaced byte ranges share a byte? Exact, and in O(runs * log(runs)).

The layers of one storage may lie one behind the other or interleave block by block, so it is not
enough to compare first and last bytes; and blocks can be many, so they are never enumerated.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` ranges of ``size`` bytes whose starts are ``stride`` bytes apart."""

    label: str
    start: int
    stride: int
    count: int
    size: int

    @property
    def end(self) -> int:
        """First byte behind the last range."""
        return self.start + (self.count - 1) * self.stride + self.size

    @property
    def circle(self) -> int:
        """Modulus under which two runs can be compared."""
        # A single range has no spacing: on a circle that never comes round, only extents count.
        return self.stride if self.count > 1 else self.end


def first_overlap(runs: Iterable[Run]) -> tuple[Run, Run] | None:
    """Return two runs that share a byte, or one run twice if its own ranges do; else None.

    Two runs of one stride whose extents overlap share a byte exactly if their ranges meet modulo
    the stride. Runs of different strides are taken to overlap where their extents do: no tensor
    lies like that.
    """
    in_order = sorted(runs, key=lambda run: run.start)
    # What the sweep is inside of: (start modulo stride, index), in order. All of one stride, and
    # no two of them meet on its circle, so a new run can only meet its two neighbours.
    residues: list[tuple[int, int]] = []
    ends: list[tuple[int, int]] = []
    for index, run in enumerate(in_order):
        if run.count > 1 and run.size > run.stride:
            return run, run
        while ends and ends[0][0] <= run.start:
            gone = heapq.heappop(ends)[1]
            del residues[bisect_left(residues, _residue(in_order, gone))]
        place = bisect_left(residues, _residue(in_order, index))
        if residues:
            for other in (residues[place - 1][1], residues[place % len(residues)][1]):
                if _share_a_byte(in_order[other], run):
                    return in_order[other], run
        residues.insert(place, _residue(in_order, index))
        heapq.heappush(ends, (run.end, index))
    return None


def _residue(runs: list[Run], index: int) -> tuple[int, int]:
    run = runs[index]
    return run.start % run.circle, index


def _share_a_byte(low: Run, high: Run) -> bool:
    """Whether two runs whose extents overlap share a byte; ``low`` starts first."""
    if low.circle != high.circle:
        return True
    gap = (high.start - low.start) % low.circle
    return gap < low.size or low.circle - gap < high.size
