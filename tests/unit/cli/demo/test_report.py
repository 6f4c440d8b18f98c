"""What people and programs are shown of a demo, and how far it is."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from moriiod.cli.demo.audit import Audit
from moriiod.cli.demo.figures import DaemonFigures
from moriiod.cli.demo.plan import DemoOptions, plan_waves
from moriiod.cli.demo.progress import show_progress
from moriiod.cli.demo.report import outcome_document, print_outcome
from moriiod.cli.demo.router import ModeResult
from moriiod.cli.demo.run import Outcome
from moriiod.cli.demo.shapes import KvChoice


def outcome_of(options: DemoOptions) -> Outcome:
    outcome = Outcome(options, Audit(options), start_s=1.0, seconds=2.0)
    for wave in plan_waves(options, "read"):
        for request in wave:
            outcome.audit.open(request)
    result = ModeResult("read", 1, 4, 8, 2_000_000_000, 0.5, [0.001, 0.003])
    outcome.modes.append(result)
    outcome.figures = {rank: DaemonFigures(4, 4, 4, 0, 0, 0) for rank in options.ranks}
    return outcome


def printed(outcome: Outcome) -> str:
    text = io.StringIO()
    print_outcome(outcome, Console(file=text, width=110, highlight=False))
    return text.getvalue()


def test_table_shows_the_rank_map_the_rate_and_the_verdict() -> None:
    text = printed(outcome_of(DemoOptions(prefill_tp=1, decode_tp=2, requests=4)))
    assert "4.00 GB/s" in text
    assert "P0/0          D0/0..1" in text
    assert text.splitlines()[-1] == "PASS"


def test_slice_map_says_which_heads_come_from_where() -> None:
    options = DemoOptions(prefill_tp=4, decode_tp=2, kv=KvChoice(8), requests=4)
    text = printed(outcome_of(options))
    assert "0..1 of P0, 2..3 of P1" in text
    assert "4..5 of P2, 6..7 of P3" in text
    hybrid = DemoOptions(
        kv=KvChoice(model="kimi-linear-48b"), prefill_tp=1, decode_tp=2, requests=4
    )
    rows = [line.split() for line in printed(outcome_of(hybrid)).splitlines()]
    assert ["D0/1", "mla", "all", "of", "P0"] in rows
    assert ["kda-conv", "16..31", "of", "P0"] in rows


def test_rank_that_nobody_reads_names_who_releases_it() -> None:
    options = DemoOptions(prefill_tp=2, decode_tp=1, decode_instances=2, requests=4)
    text = printed(outcome_of(options))
    assert "nobody; released by D*/0" in text
    assert "requests by pair: P0 to D0: 2, P0 to D1: 2" in text


def test_problem_turns_the_verdict_and_shows_the_logs() -> None:
    outcome = outcome_of(DemoOptions(requests=4))
    outcome.problems.extend(f"number {index}" for index in range(30))
    outcome.tails.append(("daemon P0/0", "last words"))
    text = printed(outcome)
    assert text.splitlines()[-1] == "FAIL"
    for part in ("end of the log of daemon P0/0", "last words", "number 19", "10 more problems"):
        assert part in text
    assert "number 20" not in text


def test_nothing_done_shows_only_the_reason() -> None:
    options = DemoOptions()
    outcome = Outcome(options, Audit(options))
    outcome.problems.append("no daemon came up")
    assert printed(outcome) == "problem: no daemon came up\nFAIL\n"


def test_json_has_the_same_figures() -> None:
    outcome = outcome_of(DemoOptions(prefill_tp=1, decode_tp=2, requests=4))
    document = json.loads(json.dumps(outcome_document(outcome)))
    assert document["result"] == "PASS"
    assert document["modes"][0]["gb_per_s"] == 4.0
    assert document["ranks"][-1]["expected_acks"] == 8
    assert {row["rank"] for row in document["ranks"]} == {"P0/0", "D0/0", "D0/1"}


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_reaches_its_end(is_terminal: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, width=80, force_terminal=is_terminal, highlight=False)
    with show_progress(console) as progress:
        progress.step("starting 3 daemons")
        progress.start("read", 10)
        for done in range(11):
            progress.advance(done)
    assert "starting 3 daemons" in text.getvalue()
    assert "10/10" in text.getvalue()
    if not is_terminal:
        assert text.getvalue().count("READ") == 5
