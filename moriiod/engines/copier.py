"""Scattered copies between two mapped regions at close to the speed of one plain memcpy.

Python pays about half a microsecond for a call, a 16 KiB block is copied in about one, so how the
calls are made decides the speed. Three ways, each best somewhere (figures in docs/engines.md):

* ``gather``: ranges of one size whose destinations are neighbours: one ``take`` a slice.
* ``bounce``: small ranges of one size, scattered on both sides: ``take`` into a buffer that
  stays in the CPU's cache, ``put`` from there.
* ``move``: everything else: ``memmove`` a range, called from C code that walks the lists.

All but the ``put`` of at most 1 MiB run without the GIL. Nothing here checks bounds:
``engines.bounds`` has done that before a program is compiled.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from moriiod.core.plan import Int64Array
from moriiod.engines.mapping import MappedRegion

#: Most bytes of one step unless told otherwise: a cancel never waits for more than a few
#: milliseconds.
STEP_BYTES: Final = 4 << 20
#: Size of the bounce buffer: half of a common second-level cache of 2 MiB, or all of one of 1 MiB.
BOUNCE_BYTES: Final = 1 << 20
#: Longer ranges are copied in pieces of this size.
PIECE_BYTES: Final = 1 << 20
#: Below this, two cheap passes beat one expensive call a range.
BOUNCE_BELOW_BYTES: Final = 12 << 10
#: Units smaller than this are not worth the index arithmetic of ``take``.
MIN_UNIT_BYTES: Final = 64
#: Mean number of units a run or range must have for ``gather``, may have for cutting into units.
RUN_UNITS: Final = 8

_void_p, _size_t = ctypes.c_void_p, ctypes.c_size_t
#: Two declared arguments and a third that is converted once for all calls: 8 % faster than three.
_memmove_same_size: Any = ctypes.CDLL(None)["memmove"]
_memmove_same_size.argtypes, _memmove_same_size.restype = (_void_p, _void_p), None
_memmove: Any = ctypes.CDLL(None)["memmove"]
_memmove.argtypes, _memmove.restype = (_void_p, _void_p, _size_t), None


@dataclass(frozen=True, slots=True, eq=False)
class CopyProgram:
    """How to copy one set of ranges, whatever regions and base offsets it is applied to.

    Attributes:
        method: See the module.
        source: int64 [n]. For ``move`` byte offsets, else offsets in units from ``source_first``.
        target: int64 [n]. For ``bounce`` offsets in units from ``target_first``, else bytes.
        sizes: int64 [n] bytes, or None where every range has ``unit`` bytes.
        unit: Bytes of one range where all are equal, else 0.
        edges: Step ``i`` copies ranges ``edges[i]`` to ``edges[i + 1]``.
        source_first: Smallest source offset in bytes.
        target_first: Smallest target offset in bytes.
    """

    method: Literal["gather", "bounce", "move"]
    source: Int64Array
    target: Int64Array
    sizes: Int64Array | None
    unit: int
    edges: tuple[int, ...]
    source_first: int
    target_first: int

    @property
    def n_steps(self) -> int:
        """Number of steps until everything is copied."""
        return len(self.edges) - 1


def compile_program(
    source: Int64Array, target: Int64Array, sizes: Int64Array, step_bytes: int = STEP_BYTES
) -> CopyProgram:
    """Choose how to copy ``sizes[i]`` bytes from ``source[i]`` to ``target[i]``, for all i.

    Args:
        source: int64 [n], byte offsets; may overlap.
        target: int64 [n], byte offsets; ranges must not overlap.
        sizes: int64 [n], bytes, all positive.
        step_bytes: Most bytes of one step; a range that is longer is cut.
    """
    unit = _common_unit(source, target, sizes)
    if unit:
        if int(sizes.max()) > unit:
            small = _cut(source, target, sizes, unit)
        else:
            small = source, target
        order = np.argsort(small[1], kind="stable")
        by_target = small[1][order]
        breaks = np.flatnonzero(np.diff(by_target) != unit) + 1
        if len(order) >= RUN_UNITS * (len(breaks) + 1):
            return _gather((small[0][order], by_target), unit, breaks, step_bytes)
        if unit < BOUNCE_BELOW_BYTES:
            return _bounce(small[0], small[1], unit, min(BOUNCE_BYTES, step_bytes))
    return _move(source, target, sizes, step_bytes)


class Copier:
    """Runs programs, one step at a time. One per thread: it owns a bounce buffer."""

    def __init__(self) -> None:
        self._buffer = np.empty(BOUNCE_BYTES, dtype=np.uint8)

    def run_step(
        self,
        program: CopyProgram,
        step: int,
        source: tuple[MappedRegion, int],
        target: tuple[MappedRegion, int],
    ) -> int:
        """Copy the ranges of one step; return the number of bytes.

        Args:
            program: From ``compile_program``.
            step: 0 to ``program.n_steps - 1``.
            source: Region and base offset in bytes that the program's source offsets start at.
            target: The same for the target.
        """
        part = slice(program.edges[step], program.edges[step + 1])
        if program.method == "move":
            return _run_move(program, part, source, target)
        n_bytes = (part.stop - part.start) * program.unit
        index = program.source[part]
        units = _units(source[0], source[1] + program.source_first, program.unit)
        if program.method == "gather":
            first = target[1] + int(program.target[part.start])
            out = _units(target[0], first, program.unit)[: len(index)]
            # "raise" would go through a copy of the output.
            units.take(index, out=out, mode="clip")
        else:
            buffer = self._buffer[:n_bytes].view(units.dtype)
            units.take(index, out=buffer, mode="clip")
            goal = _units(target[0], target[1] + program.target_first, program.unit)
            goal.put(program.target[part], buffer, mode="clip")
        return n_bytes


def _units(region: MappedRegion, first_byte: int, unit: int) -> npt.NDArray[np.void]:
    """View a region from ``first_byte`` on as elements of ``unit`` bytes."""
    count = (region.n_bytes - first_byte) // unit
    return np.ndarray((count,), np.dtype((np.void, unit)), region.array, first_byte)


def _run_move(
    program: CopyProgram,
    part: slice,
    source: tuple[MappedRegion, int],
    target: tuple[MappedRegion, int],
) -> int:
    sources = (program.source[part] + (source[0].address + source[1])).tolist()
    targets = (program.target[part] + (target[0].address + target[1])).tolist()
    if program.sizes is None:
        size = _size_t.from_param(program.unit)
        deque(map(_memmove_same_size, targets, sources, repeat(size)), maxlen=0)
        return len(sources) * program.unit
    sizes = program.sizes[part].tolist()
    deque(map(_memmove, targets, sources, sizes), maxlen=0)
    return sum(sizes)


def _common_unit(source: Int64Array, target: Int64Array, sizes: Int64Array) -> int:
    """Return the size all ranges are multiples of and aligned to, or 0."""
    if len(sizes) < RUN_UNITS:
        return 0
    unit = int(sizes.min())
    total = int(sizes.sum())
    if unit < MIN_UNIT_BYTES or unit > PIECE_BYTES or total > RUN_UNITS * unit * len(sizes):
        return 0
    for offsets in (sizes, source - source.min(), target - target.min()):
        if (offsets % unit).any():
            return 0
    return unit


def _cut(
    source: Int64Array, target: Int64Array, sizes: Int64Array, piece: int
) -> tuple[Int64Array, Int64Array]:
    """Cut every range into pieces; the last of a range is shorter where sizes do not divide."""
    counts = -(-sizes // piece)
    starts = np.cumsum(counts) - counts
    inner = (np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts, counts)) * piece
    return np.repeat(source, counts) + inner, np.repeat(target, counts) + inner


def _gather(
    offsets: tuple[Int64Array, Int64Array],
    unit: int,
    breaks: npt.NDArray[np.intp],
    step_bytes: int,
) -> CopyProgram:
    source, target = offsets
    first = int(source.min())
    marks = np.arange(0, len(source), max(1, step_bytes // unit))
    edges = np.union1d(np.union1d(marks, breaks), [len(source)])
    return CopyProgram(
        method="gather",
        source=(source - first) // unit,
        target=target,
        sizes=None,
        unit=unit,
        edges=tuple(edges.tolist()),
        source_first=first,
        target_first=int(target.min()),
    )


def _bounce(source: Int64Array, target: Int64Array, unit: int, step_bytes: int) -> CopyProgram:
    # In source order the CPU's prefetcher helps the reads; writes do not wait for memory.
    order = np.argsort(source, kind="stable")
    first, goal = int(source.min()), int(target.min())
    edges = range(0, len(order), max(1, step_bytes // unit))
    return CopyProgram(
        method="bounce",
        source=(source[order] - first) // unit,
        target=(target[order] - goal) // unit,
        sizes=None,
        unit=unit,
        edges=(*edges, len(order)),
        source_first=first,
        target_first=goal,
    )


def _move(
    source: Int64Array, target: Int64Array, sizes: Int64Array, step_bytes: int
) -> CopyProgram:
    piece = min(PIECE_BYTES, step_bytes)
    if len(sizes) and int(sizes.max()) > piece:
        counts = -(-sizes // piece)
        rests = sizes - (counts - 1) * piece
        source, target = _cut(source, target, sizes, piece)
        sizes = np.full(len(source), piece, dtype=np.int64)
        sizes[np.cumsum(counts) - 1] = rests
    order = np.argsort(source, kind="stable")
    sizes = sizes[order]
    ends = np.cumsum(sizes)
    cuts = np.searchsorted(ends, np.arange(step_bytes, int(ends[-1]), step_bytes), side="right")
    edges = np.union1d(cuts, [0, len(sizes)])
    is_uniform = bool((sizes == sizes[0]).all())
    return CopyProgram(
        method="move",
        source=source[order],
        target=target[order],
        sizes=None if is_uniform else sizes,
        unit=int(sizes[0]) if is_uniform else 0,
        edges=tuple(edges.tolist()),
        source_first=int(source.min()),
        target_first=int(target.min()),
    )
