"""How long does planning take? Prints median times; nothing here is a pass or a fail.

    python tests/bench/plan.py [--layers 61] [--repeats 30]

For 128, 1024 and 4096 blocks, scattered and contiguous, K/V-first layout, one region for all
layers: the block part alone (unpack, pair, plan one layer), the whole plan of all layers, and the
same spans made by a plain loop over layers and blocks, as in-process connectors do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from moriiod.core.geometry import CacheLayout, KvGroup, KvLayer
from moriiod.core.layout import check_layout, pair_by_position, unpack_blocks
from moriiod.core.plan import TransferPlan
from moriiod.core.planner import BlockPairs, build_plan

PIECE_BYTES = 16 * 8 * 128 * 2
#: Blocks the local and the remote cache have, as a multiple of those that move.
SPARES = (1.25, 2.5)


def kv_first(n_layers: int, num_blocks: int) -> CacheLayout:
    """A cache of ``n_layers`` layers [2, blocks, ...] one behind the other in one region."""
    kv_stride = num_blocks * PIECE_BYTES
    layers = tuple(
        KvLayer(f"layer.{i}", 0, i * 2 * kv_stride, PIECE_BYTES, kv_stride, PIECE_BYTES)
        for i in range(n_layers)
    )
    group = KvGroup("full", "kv_first", "HND", "bfloat16", 16, num_blocks, 8, 128, layers)
    return CacheLayout("0" * 32, (group,), (n_layers * 2 * kv_stride,))


def plan_blocks(
    local: CacheLayout, remote: CacheLayout, packed: tuple[bytes, bytes], layers: range | None
) -> TransferPlan:
    """What a pull costs the daemon from packed ids to the plan."""
    to = unpack_blocks(packed[0], local.groups[0].num_blocks, "local", distinct=True)
    of = unpack_blocks(packed[1], remote.groups[0].num_blocks, "remote")
    return build_plan(local, remote, [BlockPairs(*pair_by_position(to, of))], layers)


def plan_with_lists(
    local: CacheLayout, remote: CacheLayout, ids: tuple[list[int], list[int]]
) -> list[list[tuple[int, int, int]]]:
    """The same spans, layer by layer in plain Python: offset lists, then sort, then merge."""
    plans = []
    for mine, theirs in zip(local.groups[0].layers, remote.groups[0].layers, strict=True):
        offsets = sorted(
            (
                mine.offset + piece * mine.kv_stride + to * mine.block_stride,
                theirs.offset + piece * theirs.kv_stride + of * theirs.block_stride,
            )
            for piece in range(mine.pieces)
            for to, of in zip(*ids, strict=True)
        )
        spans: list[tuple[int, int, int]] = []
        start_to, start_of = offsets[0]
        end_to, end_of = start_to, start_of
        for to, of in offsets:
            if to != end_to or of != end_of:
                spans.append((start_to, start_of, end_to - start_to))
                start_to, start_of = to, of
            end_to, end_of = to + mine.piece_bytes, of + mine.piece_bytes
        spans.append((start_to, start_of, end_to - start_to))
        plans.append(spans)
    return plans


def median_ms(repeats: int, call: Callable[..., object], *args: object) -> float:
    """Median duration of a call in ms, after one call that is not counted."""
    call(*args)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call(*args)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def measure(n_layers: int, repeats: int, name: str, n: int) -> None:
    """Print the line of one block table."""
    local, remote = (kv_first(n_layers, int(n * spare)) for spare in SPARES)
    check_layout(local)
    check_layout(remote)
    if name == "scattered":
        dice = np.random.default_rng(1)
        to, of = (dice.permutation(side.groups[0].num_blocks)[:n] for side in (local, remote))
    else:
        to, of = np.arange(n), np.arange(7, n + 7)
    packed = to.astype("<u4").tobytes(), of.astype("<u4").tobytes()
    n_spans = len(plan_blocks(local, remote, packed, None).layers[0].spans.sizes)
    one = median_ms(repeats, plan_blocks, local, remote, packed, range(1))
    every = median_ms(repeats, plan_blocks, local, remote, packed, None)
    lists = median_ms(3, plan_with_lists, local, remote, (to.tolist(), of.tolist()))
    print(
        f"{n:>6} {name:>10} {n_spans:>6} {one:>10.3f} {every:>10.3f} {lists:>8.1f} "
        f"{lists / every:>6.0f}"
    )


def main() -> None:
    """Print one line for each number of blocks and kind of block table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    print(f"{options.layers} layers; times in ms, median of {options.repeats}")
    print(
        f"{'blocks':>6} {'table':>10} {'spans':>6} {'block part':>10} {'all layers':>10} "
        f"{'lists':>8} {'ratio':>6}"
    )
    for n in (128, 1024, 4096):
        for name in ("scattered", "contiguous"):
            measure(options.layers, options.repeats, name, n)


if __name__ == "__main__":
    main()
