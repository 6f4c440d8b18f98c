"""The verdict: everything that did not happen exactly once, and well, is a problem."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.cli.demo.audit import Audit
from moriiod.cli.demo.figures import DaemonFigures, read_figures
from moriiod.cli.demo.messages import Checked, Ended
from moriiod.cli.demo.plan import DemoOptions, DemoRequest, Rank, plan_waves

OPTIONS = DemoOptions(prefill_tp=2, decode_tp=1, requests=2, blocks=16, layers=2)
GOOD = {
    ("read", "prefill"): ("publish", "released", "acked"),
    ("read", "decode"): ("pull", "received", "acked"),
    ("write", "prefill"): ("push", "released", "acked"),
    ("write", "decode"): ("reserve", "received", "acked"),
}
P0, P1, D0 = Rank("prefill", 0, 0), Rank("prefill", 0, 1), Rank("decode", 0, 0)


def requests() -> list[DemoRequest]:
    return [r for mode in OPTIONS.modes for wave in plan_waves(OPTIONS, mode) for r in wave]


def good_end(audit: Audit, request: DemoRequest, rank: Rank) -> Ended:
    role, outcome, reason = GOOD[request.mode, rank.side]
    n_bytes = audit.bytes_of(request) if rank.side == "decode" else 0
    return Ended(request.number, role, outcome, reason, "", n_bytes, 1.0, 2.0)


def perfect(skip: tuple[Rank, int] | None = None) -> Audit:
    """A demo in which all went well, except that one end was not reported."""
    audit = Audit(OPTIONS)
    for request in requests():
        audit.open(request)
        for side in ("prefill", "decode"):
            for rank in audit.ranks_of(request, side):
                if (rank, request.number) != skip:
                    audit.ended(rank, good_end(audit, request, rank))
        audit.checked(D0, Checked(request.number, audit.bytes_of(request), ""))
    return audit


def test_perfect_demo_has_no_problems() -> None:
    audit = perfect()
    audit.judge_transfers()
    assert audit.problems == []
    assert audit.verified_bytes == sum(audit.bytes_of(request) for request in requests())
    assert [audit.released_once(rank) for rank in (P0, P1)] == [4, 4]


@pytest.mark.parametrize("rank", [P0, P1, D0], ids=lambda rank: rank.name)
@pytest.mark.parametrize("number", range(4))
def test_missing_end_is_a_problem(rank: Rank, number: int) -> None:
    audit = perfect(skip=(rank, number))
    assert audit.without_end(audit.requests, rank.side) == [(rank, requests()[number])]
    audit.judge_transfers()
    assert len(audit.problems) == 1
    assert rank.name in audit.problems[0]
    assert "ended 0 times" in audit.problems[0]


@pytest.mark.parametrize("rank", [P0, P1, D0], ids=lambda rank: rank.name)
def test_second_end_is_a_problem(rank: Rank) -> None:
    audit = perfect()
    audit.ended(rank, good_end(audit, requests()[2], rank))
    audit.judge_transfers()
    assert len(audit.problems) == 1
    assert "ended 2 times" in audit.problems[0]


@pytest.mark.parametrize(
    ("rank", "change"),
    [
        (P0, {"outcome": "failed", "reason": "LEASE_EXPIRED", "text": "too late"}),
        (P1, {"reason": "aborted"}),
        (P1, {"role": "pull"}),
        (D0, {"outcome": "failed", "reason": "PEER_LOST"}),
        (D0, {"n_bytes": 5}),
    ],
)
def test_end_that_is_not_good_is_a_problem(rank: Rank, change: dict[str, object]) -> None:
    request = requests()[1]
    audit = perfect(skip=(rank, request.number))
    audit.ended(rank, replace(good_end(audit, request, rank), **change))
    audit.judge_transfers()
    assert len(audit.problems) == 1
    assert request.transfer_id in audit.problems[0]


def test_wrong_byte_and_bytes_nobody_compared_are_problems() -> None:
    audit = perfect()
    audit.checked(D0, Checked(None, 4096, "block 3"))
    assert (audit.problems, audit.canary_bytes) == (["D0/0: block 3"], 4096)

    unchecked = Audit(OPTIONS)
    request = requests()[0]
    unchecked.open(request)
    for rank in (P0, P1, D0):
        unchecked.ended(rank, good_end(unchecked, request, rank))
    unchecked.judge_transfers()
    assert "not compared" in unchecked.problems[0]


def good_figures() -> dict[Rank, DaemonFigures]:
    ours = DaemonFigures(acks=2, released=4, received=0, failed=0, live=0, quarantined=0)
    return {P0: ours, P1: ours, D0: replace(ours, acks=0, released=0, received=4)}


def test_producer_rank_that_nobody_reads_expects_the_ack_of_its_releaser() -> None:
    audit = perfect()
    assert [audit.expected_acks(rank) for rank in (P0, P1, D0)] == [2, 2, 0]
    audit.judge_daemons(good_figures())
    assert audit.problems == []


def test_repeated_acks_are_no_problem() -> None:
    audit = perfect()
    figures = good_figures()
    figures[P0] = replace(figures[P0], acks=3)
    audit.judge_daemons(figures)
    assert audit.problems == []


@pytest.mark.parametrize(
    ("rank", "change"),
    [
        (P0, {"acks": 1}),
        (P1, {"released": 3}),
        (P1, {"released": 5}),
        (D0, {"received": 3}),
        (D0, {"failed": 1}),
        (P0, {"live": 1}),
        (P0, {"quarantined": 1}),
    ],
)
def test_daemon_whose_books_differ_is_a_problem(rank: Rank, change: dict[str, int]) -> None:
    audit = perfect()
    figures = good_figures()
    figures[rank] = replace(figures[rank], **change)
    audit.judge_daemons(figures)
    assert len(audit.problems) == 1
    assert audit.problems[0].startswith(f"daemon {rank.name}")


def test_figures_are_read_from_a_status_document() -> None:
    document = """{
        "transfers": {"live": 1, "counts": []}, "quarantined": {"transfers": 2},
        "counters": {
            "acks": [{"result": "valid", "count": 7}, {"result": "invalid", "count": 1}],
            "transfers": [
                {"role": "publish", "outcome": "released", "reason": "acked", "count": 3},
                {"role": "push", "outcome": "released", "reason": "acked", "count": 4},
                {"role": "push", "outcome": "released", "reason": "aborted", "count": 9},
                {"role": "pull", "outcome": "received", "reason": "acked", "count": 5},
                {"role": "pull", "outcome": "failed", "reason": "PEER_LOST", "count": 6}
            ]
        }
    }"""
    assert read_figures(document) == DaemonFigures(7, 7, 5, 6, 1, 2)


@pytest.mark.parametrize("document", ["", "[]", "{}", '{"counters": {}, "transfers": {}}'])
def test_document_without_the_figures_is_refused(document: str) -> None:
    with pytest.raises(ValueError, match="status document"):
        read_figures(document)
