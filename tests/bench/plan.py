"""How long does planning take? Prints median times and ratios; nothing here is a pass or a fail.

    python tests/bench/plan.py [--layers 61] [--repeats 30]

For 128, 1024 and 4096 blocks, scattered and contiguous, K/V-first layout, all layers in one region
and each in a region of its own: the block part alone (unpack, pair, plan one layer), the whole plan
of all layers, and the same spans made by a plain loop over layers and blocks, as in-process
connectors do. Then what split heads, other block sizes and NHD add, for one layer and for all.
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

from moriiod.core.blocks import pair_for_read, tables_of
from moriiod.core.geometry import CacheLayout, HeadOrder, KvGroup, KvLayer
from moriiod.core.headplan import HeadRule, HeadShape
from moriiod.core.layout import check_layout, pair_by_position, unpack_blocks
from moriiod.core.plan import TransferPlan
from moriiod.core.planner import BlockPairs, build_plan

PIECE_BYTES = 16 * 8 * 128 * 2
#: Blocks the local and the remote cache have, as a multiple of those that move.
SPARES = (1.25, 2.5)


def kv_first(n_layers: int, num_blocks: int, *, is_shared: bool = True) -> CacheLayout:
    """A cache of ``n_layers`` layers [2, blocks, ...], in one region or in one each."""
    kv_stride = num_blocks * PIECE_BYTES
    layers = tuple(
        KvLayer(f"layer.{i}", 0, i * 2 * kv_stride, PIECE_BYTES, kv_stride, PIECE_BYTES)
        if is_shared
        else KvLayer(f"layer.{i}", i, 0, PIECE_BYTES, kv_stride, PIECE_BYTES)
        for i in range(n_layers)
    )
    group = KvGroup("full", "kv_first", "HND", "bfloat16", 16, num_blocks, 8, 128, layers)
    n_bytes = 2 * kv_stride
    regions = (n_layers * n_bytes,) if is_shared else (n_bytes,) * n_layers
    return CacheLayout("0" * 32, (group,), regions)


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


def measure(n_layers: int, repeats: int, name: str, n: int, *, is_shared: bool) -> None:
    """Print the line of one block table."""
    local, remote = (kv_first(n_layers, int(n * spare), is_shared=is_shared) for spare in SPARES)
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
    regions = "one" if is_shared else "each"
    print(
        f"{regions:>7} {n:>6} {name:>10} {n_spans:>6} {one:>10.3f} {every:>10.3f} "
        f"{lists:>8.1f} {lists / every:>6.0f}"
    )


def split_sides(
    order: HeadOrder, block_tokens: tuple[int, int], n_layers: int
) -> list[CacheLayout]:
    """Decode TP 8 and prefill TP 4 of a model with 8 KV heads, 4096 blocks of 16 tokens."""
    sides = []
    for heads, tokens in zip((1, 2), block_tokens, strict=True):
        piece, blocks = heads * tokens * 256, 2 * 65536 // tokens
        layers = tuple(
            KvLayer(f"layer.{i}", i, 0, piece, blocks * piece, piece) for i in range(n_layers)
        )
        group = KvGroup("full", "kv_first", order, "bfloat16", tokens, blocks, 8, 128, layers)
        sides.append(CacheLayout("0" * 32, (group,), (2 * blocks * piece,) * n_layers))
    return sides


def measure_split(
    n_layers: int, repeats: int, name: str, order: HeadOrder, block_tokens: tuple[int, int]
) -> None:
    """Print the line of one way to split heads, for a prompt of 65536 tokens."""
    dice = np.random.default_rng(1)
    share = HeadRule((HeadShape(8),)).plan(4, 8).heads_for_read(0, 1)
    ids = [dice.permutation(2 * 65536 // tokens)[: 65536 // tokens] for tokens in block_tokens]

    def plan(layers: int) -> TransferPlan:
        local, remote = split_sides(order, block_tokens, layers)
        tables = [tables_of([one.astype(np.int64)], ()) for one in ids]
        pairs = pair_for_read(local, tables[0], remote, tables[1])
        return build_plan(local, remote, pairs, heads=share)

    n_spans = len(plan(1).layers[0].spans.sizes)
    one, every = median_ms(repeats, plan, 1), median_ms(repeats, plan, n_layers)
    print(f"{name:>30} {n_spans:>8} {one:>10.3f} {every:>10.3f}")


def main() -> None:
    """Print one line for each number of blocks and kind of block table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    print(f"{options.layers} layers; times in ms, median of {options.repeats}")
    print(
        f"{'regions':>7} {'blocks':>6} {'table':>10} {'spans':>6} {'block part':>10} "
        f"{'all layers':>10} {'lists':>8} {'ratio':>6}"
    )
    for is_shared in (True, False):
        for n in (128, 1024, 4096):
            for name in ("scattered", "contiguous"):
                measure(options.layers, options.repeats, name, n, is_shared=is_shared)
    print("\nprefill TP 4 -> decode TP 8, 8 KV heads, 65536 tokens, layouts made anew each time")
    print(f"{'way':>30} {'spans':>8} {'one layer':>10} {'all layers':>10}")
    measure_split(options.layers, options.repeats, "HND, blocks of 16", "HND", (16, 16))
    measure_split(options.layers, options.repeats, "HND, 64 from 16", "HND", (64, 16))
    measure_split(options.layers, options.repeats, "HND, 16 from 64", "HND", (16, 64))
    measure_split(options.layers, options.repeats, "NHD, blocks of 16", "NHD", (16, 16))


if __name__ == "__main__":
    main()
