"""``engine.shm_chunk_bytes``: no step of a copy is longer than it says."""

from __future__ import annotations

import numpy as np
import pytest

from moriiod.core.plan import Int64Array
from moriiod.engines.copier import compile_program

KIB = 1024


def ranges(method: str) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return ranges for which this method is chosen."""
    dice = np.random.default_rng(1)
    n, size = (64, 32 * KIB) if method != "bounce" else (512, 4 * KIB)
    source = dice.permutation(n) * size
    target = np.arange(n) * size if method == "gather" else dice.permutation(n) * size
    if method == "move":  # nothing is aligned to the size of the ranges
        source, target, size = source * 2, target * 3, 48 * KIB
    return source, target, np.full(n, size, dtype=np.int64)


@pytest.mark.parametrize("method", ["gather", "bounce", "move"])
@pytest.mark.parametrize("step_bytes", [4 * KIB, 64 * KIB, 1024 * KIB])
def test_steps_are_as_long_as_asked(method: str, step_bytes: int) -> None:
    source, target, sizes = ranges(method)
    program = compile_program(source, target, sizes, step_bytes)
    lengths = np.full(len(program.source), program.unit) if program.sizes is None else program.sizes
    steps = [
        int(lengths[start:stop].sum())
        for start, stop in zip(program.edges, program.edges[1:], strict=False)
    ]
    assert sum(steps) == int(sizes.sum())
    # A range of common size is not cut any further, and the last of a step may stick out.
    assert max(steps) <= step_bytes + int(lengths.max())
