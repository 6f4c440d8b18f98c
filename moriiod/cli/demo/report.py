"""Prints what a demo came to: tables for people, or one JSON object."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moriiod.cli.demo.plan import DemoOptions, Rank
from moriiod.cli.demo.router import ModeResult
from moriiod.cli.demo.run import Outcome

_MIB: Final = 1 << 20
_SHOWN_PROBLEMS: Final = 20


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Print the tables, the problems and the verdict."""
    if outcome.modes:
        _print_modes(outcome, console)
    if outcome.figures:
        _print_ranks(outcome, console)
        _print_sums(outcome, console)
    for name, tail in outcome.tails:
        console.print(Text(f"\nend of the log of {name}:", style="bold"))
        console.print(Text(tail or "(empty)"), soft_wrap=True)
    for problem in outcome.problems[:_SHOWN_PROBLEMS]:
        console.print(Text(f"problem: {problem}", style="red"), soft_wrap=True)
    more = len(outcome.problems) - _SHOWN_PROBLEMS
    if more > 0:
        console.print(f"and {more} more problems")
    verdict, style = ("FAIL", "bold red") if outcome.problems else ("PASS", "bold green")
    console.print(Text(verdict, style=style))


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """Return the same as plain values, for JSON."""
    return {
        "result": "FAIL" if outcome.problems else "PASS",
        "options": asdict(outcome.options),
        "modes": [_mode_document(result) for result in outcome.modes],
        "ranks": [_rank_document(outcome, rank) for rank in sorted(outcome.figures)],
        "pairs": outcome.audit.pairs(),
        "verified_bytes": outcome.audit.verified_bytes,
        "canary_bytes": outcome.audit.canary_bytes,
        "start_s": round(outcome.start_s, 3),
        "seconds": round(outcome.seconds, 3),
        "problems": outcome.problems,
        "logs": dict(outcome.tails),
    }


def _print_sums(outcome: Outcome, console: Console) -> None:
    audit = outcome.audit
    if outcome.options.n_pairs > 1:
        pairs = ", ".join(f"{pair}: {count}" for pair, count in audit.pairs().items())
        console.print(f"\nrequests by pair: {pairs}", soft_wrap=True)
    console.print(
        f"\ncompared {_size(audit.verified_bytes)} of received blocks and "
        f"{_size(audit.canary_bytes)} of unused ones; {outcome.start_s:.1f} s to start, "
        f"{outcome.seconds:.1f} s in all"
    )


def _print_modes(outcome: Outcome, console: Console) -> None:
    table = _table(
        "mode", "requests", "waves", "transfers", "bytes", "time", "rate", "median", "max"
    )
    for result in outcome.modes:
        latencies = result.latencies_s or [0.0]
        table.add_row(
            result.mode.upper(),
            str(result.requests),
            str(result.waves),
            str(result.transfers),
            _size(result.n_bytes),
            f"{result.seconds:.2f} s",
            f"{_rate(result):.2f} GB/s",
            f"{statistics.median(latencies) * 1000:.0f} ms",
            f"{max(latencies) * 1000:.0f} ms",
        )
    console.print()
    console.print(table)


def _print_ranks(outcome: Outcome, console: Console) -> None:
    table = _table(
        "prefill rank", "read by", "requests", "released once", "ACKs expected", "ACKs got"
    )
    for rank in outcome.options.ranks_of("prefill"):
        row = _rank_document(outcome, rank)
        table.add_row(
            rank.name,
            _readers(outcome, row),
            str(row["requests"]),
            str(row["released_once"]),
            str(row["expected_acks"]),
            str(row["acks"]),
        )
    console.print()
    console.print(table)
    table = _table("decode rank", "reads from", "requests", "received", "bytes")
    for rank in outcome.options.ranks_of("decode"):
        row = _rank_document(outcome, rank)
        table.add_row(
            rank.name,
            _names("P", outcome.options.prefill_instances, row["peers"]),
            str(row["requests"]),
            str(row["received"]),
            _size(row["bytes"]),
        )
    console.print()
    console.print(table)
    console.print()
    console.print(_slice_table(outcome))


def _slice_table(outcome: Outcome) -> Table:
    """Return which heads of each group a decode rank takes from which prefill rank."""
    options = outcome.options
    table = _table("decode rank", "group", "heads")
    for rank in options.ranks_of("decode", 0):
        for index, group in enumerate(options.kv.groups(1)):
            name = f"D*/{rank.tp_rank}" if options.decode_instances > 1 else rank.name
            text = _slice_text(options, rank, index)
            table.add_row("" if index else name, group.name, text)
    return table


def _readers(outcome: Outcome, row: dict[str, Any]) -> str:
    instances = outcome.options.decode_instances
    if row["peers"]:
        return _names("D", instances, row["peers"])
    return "nobody; released by " + _names("D", instances, row["released_by"])


def _names(letter: str, instances: int, ranks: list[int]) -> str:
    """Name ranks of the only instance, or of each of several."""
    instance = "0" if instances == 1 else "*"
    numbers = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}..{ranks[-1]}"
    return f"{letter}{instance}/{numbers}"


def _mode_document(result: ModeResult) -> dict[str, Any]:
    latencies = result.latencies_s or [0.0]
    return {
        "mode": result.mode,
        "requests": result.requests,
        "waves": result.waves,
        "transfers": result.transfers,
        "bytes": result.n_bytes,
        "seconds": round(result.seconds, 4),
        "gb_per_s": round(_rate(result), 3),
        "median_latency_s": round(statistics.median(latencies), 4),
        "max_latency_s": round(max(latencies), 4),
    }


def _rank_document(outcome: Outcome, rank: Rank) -> dict[str, Any]:
    audit, options = outcome.audit, outcome.options
    found = outcome.figures[rank]
    requests = audit.requests_of(rank)
    heads = options.heads
    row: dict[str, Any] = {"rank": rank.name, "requests": len(requests)}
    if rank.side == "prefill":
        return row | {
            "peers": sorted(heads.readers(rank.tp_rank)),
            "released_by": sorted(heads.ack_set(rank.tp_rank)),
            "released_once": audit.released_once(rank),
            "acks": found.acks,
            "expected_acks": audit.expected_acks(rank),
        }
    return row | {
        "peers": list(heads.sources(rank.tp_rank)),
        "heads": [_slice_text(options, rank, index) for index in range(len(heads.shapes))],
        "received": found.received,
        "bytes": sum(audit.bytes_of(request) for request in requests),
    }


def _slice_text(options: DemoOptions, rank: Rank, index: int) -> str:
    """Say which heads of a group come from which prefill rank: ``0..1 of P1, 2..3 of P2``."""
    heads, group = options.heads, options.kv.groups(1)[index]
    slices = heads.slices(index, rank.tp_rank)
    if group.shape.is_replicated:
        return f"all of P{slices[0].producer_rank}"
    first = group.shape.heads_of_rank(rank.tp_rank, options.decode_tp).start
    parts = []
    for one in slices:
        start = first + one.consumer_head
        numbers = str(start) if one.count == 1 else f"{start}..{start + one.count - 1}"
        parts.append(f"{numbers} of P{one.producer_rank}")
    return ", ".join(parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        is_text = index == 0 or name in ("read by", "reads from", "group", "heads")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    return table


def _rate(result: ModeResult) -> float:
    return result.n_bytes / result.seconds / 1e9 if result.seconds else 0.0


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:.1f} MiB"
