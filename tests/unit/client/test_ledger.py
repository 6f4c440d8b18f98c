"""Requests, answers, events: each transfer ends once, whatever is refused, repeated or lost."""

from __future__ import annotations

import pytest

from moriiod.client.types import ClientSettings
from moriiod.core.requests import (
    Abort,
    ConfirmEvents,
    LayerReady,
    Ping,
    Publish,
    Pull,
    Push,
    Refused,
    Reject,
    Reserve,
    Seal,
)
from moriiod.errors import Busy, TransferConflict
from tests.support.client_protocol import PEER, Shell, ended

BUSY = Refused("BUSY", "full", True, {"limit": "max_transfers"})
CONFLICT = Refused("ALREADY_EXISTS", "other blocks", False)
UNKNOWN = Refused("UNKNOWN_TRANSFER", "never heard of", False)


@pytest.fixture
def shell() -> Shell:
    shell = Shell()
    shell.attach()
    return shell


def pull(transfer_id: str = "t1") -> Pull:
    return Pull(transfer_id, PEER, (b"",), (b"",))


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "role"),
    [
        (Publish("t1", (b"",)), "publish"),
        (pull(), "pull"),
        (Push("t1", (b"",)), "push"),
        (Reserve("t1", PEER, (b"",)), "reserve"),
    ],
)
def test_refused_transfer_ends_as_failed_with_the_code(shell: Shell, body: Pull, role: str) -> None:
    shell.reply(shell.submit(body), BUSY)
    (event,) = shell.protocol.ledger.take_events()
    assert (event.role, event.outcome, event.reason) == (role, "failed", "BUSY")
    assert event.retryable
    assert event.message == "full"
    assert len(shell.protocol.ledger.table) == 0
    assert shell.protocol.ledger.take_problems() == []


def test_accepted_transfer_is_in_flight_until_its_event(shell: Shell) -> None:
    shell.reply(shell.submit(pull()))
    assert shell.protocol.ledger.take_events() == []
    assert len(shell.protocol.ledger.table) == 1
    shell.event(1, ended("t1"))
    assert [e.transfer_id for e in shell.protocol.ledger.take_events()] == ["t1"]
    assert len(shell.protocol.ledger.table) == 0


def test_refused_repeat_of_a_live_id_is_a_problem_and_the_first_lives_on(shell: Shell) -> None:
    first, second = shell.submit(pull()), shell.submit(pull())
    shell.reply(first)
    shell.reply(second, CONFLICT)
    ledger = shell.protocol.ledger
    assert ledger.take_events() == []
    (problem,) = ledger.take_problems()
    assert (problem.request, problem.transfer_id, problem.code) == ("Pull", "t1", "ALREADY_EXISTS")
    shell.event(1, ended("t1"))
    assert len(ledger.take_events()) == 1


def test_refused_repeat_after_the_first_was_refused_ends_once(shell: Shell) -> None:
    first, second = shell.submit(pull()), shell.submit(pull())
    shell.reply(first, BUSY)
    shell.reply(second, BUSY)
    assert len(shell.protocol.ledger.take_events()) == 1
    assert len(shell.protocol.ledger.take_problems()) == 1


def test_accepted_repeat_is_absorbed_by_the_first(shell: Shell) -> None:
    first, second = shell.submit(pull()), shell.submit(pull())
    shell.reply(first)
    shell.reply(second)
    shell.event(1, ended("t1"))
    assert len(shell.protocol.ledger.take_events()) == 1
    assert len(shell.protocol.ledger.table) == 0


def test_repeat_that_the_daemon_saw_after_the_first_ended_is_a_transfer_of_its_own(
    shell: Shell,
) -> None:
    first, second = shell.submit(pull()), shell.submit(pull())
    shell.reply(first)
    shell.event(1, ended("t1", outcome="failed", reason="ABORTED"))
    shell.reply(second)
    assert len(shell.protocol.ledger.take_events()) == 1
    assert len(shell.protocol.ledger.table) == 1
    shell.event(2, ended("t1"))
    (event,) = shell.protocol.ledger.take_events()
    assert event.outcome == "received"


def test_same_id_in_another_role_is_another_transfer(shell: Shell) -> None:
    shell.submit(pull())
    shell.reply(shell.submit(Publish("t1", (b"",))), BUSY)
    (event,) = shell.protocol.ledger.take_events()
    assert event.role == "publish"
    assert ("pull", "t1") in shell.protocol.ledger.table


@pytest.mark.parametrize("body", [LayerReady("t1", (3,)), Seal("t1", 3), Abort("t1", "push")])
def test_refused_call_about_a_live_push_is_a_problem(shell: Shell, body: Seal) -> None:
    shell.reply(shell.submit(Push("t1", (b"",))))
    shell.reply(shell.submit(body), UNKNOWN)
    (problem,) = shell.protocol.ledger.take_problems()
    assert (problem.request, problem.transfer_id) == (type(body).__name__, "t1")
    assert ("push", "t1") in shell.protocol.ledger.table


@pytest.mark.parametrize("body", [LayerReady("t1", (3,)), Seal("t1", 3), Abort("t1", "push")])
def test_refused_call_about_a_push_that_has_ended_is_nothing(shell: Shell, body: Seal) -> None:
    opened = shell.submit(Push("t1", (b"",)))
    about = shell.submit(body)
    shell.reply(opened, BUSY)
    shell.reply(about, UNKNOWN)
    assert shell.protocol.ledger.take_problems() == []


def test_refused_reject_is_a_problem(shell: Shell) -> None:
    shell.reply(shell.submit(Reject("t1", PEER)), BUSY)
    (problem,) = shell.protocol.ledger.take_problems()
    assert (problem.request, problem.transfer_id) == ("Reject", "t1")


def test_answer_that_nobody_asked_for_is_void(shell: Shell) -> None:
    shell.reply(999, CONFLICT)
    assert shell.protocol.ledger.take_problems() == []


def test_problems_are_bounded() -> None:
    shell = Shell(ClientSettings(max_problems=3))
    shell.attach()
    for index in range(5):
        shell.reply(shell.submit(Reject(f"t{index}", PEER)), BUSY)
    assert [p.transfer_id for p in shell.protocol.ledger.take_problems()] == ["t2", "t3", "t4"]


# --- events ---------------------------------------------------------------------------------------


def test_event_that_comes_twice_is_taken_once(shell: Shell) -> None:
    shell.submit(pull("a"))
    shell.event(1, ended("a"))
    shell.submit(pull("a"))
    shell.event(1, ended("a"))
    assert len(shell.protocol.ledger.take_events()) == 1
    assert len(shell.protocol.ledger.table) == 1


def test_event_after_a_gap_waits_for_the_missing_one_and_asks_for_it(shell: Shell) -> None:
    ledger = shell.protocol.ledger
    for name in "ab":
        shell.submit(pull(name))
    shell.event(2, ended("b"))
    assert ledger.take_events() == []
    assert ledger.is_confirmation_due
    assert ledger.confirmation() == ConfirmEvents(0)
    shell.event(1, ended("a"))
    shell.event(2, ended("b"))
    assert [e.transfer_id for e in ledger.take_events()] == ["a", "b"]


def test_events_are_confirmed_once_and_only_when_taken(shell: Shell) -> None:
    ledger = shell.protocol.ledger
    for name in "abc":
        shell.submit(pull(name))
    shell.event(1, ended("a"))
    shell.event(2, ended("b"))
    assert not ledger.is_confirmation_due
    ledger.take_events()
    assert ledger.is_confirmation_due
    assert ledger.confirmation() == ConfirmEvents(2)
    ledger.confirmation_sent()
    assert not ledger.is_confirmation_due
    ledger.take_events()
    assert not ledger.is_confirmation_due
    shell.event(3, ended("c"))
    ledger.take_events()
    assert ledger.confirmation() == ConfirmEvents(3)


def test_Z5_slow_reader_gets_every_event(shell: Shell) -> None:
    ledger = shell.protocol.ledger
    taken: list[str] = []
    for start in range(0, 20_000, 500):
        for index in range(start, start + 500):
            shell.reply(shell.submit(pull(f"t{index}")))
            shell.event(index + 1, ended(f"t{index}"))
        if start % 2000 == 0:
            taken += [e.transfer_id for e in ledger.take_events()]
            ledger.confirmation_sent()
    taken += [e.transfer_id for e in ledger.take_events()]
    assert taken == [f"t{index}" for index in range(20_000)]


def test_event_for_a_transfer_that_is_not_ours_is_confirmed_and_dropped(shell: Shell) -> None:
    shell.event(1, ended("stranger"))
    assert shell.protocol.ledger.take_events() == []
    assert shell.protocol.ledger.confirmation() == ConfirmEvents(1)


def test_events_count_from_the_start_again_after_a_new_attach(shell: Shell) -> None:
    shell.submit(pull("a"))
    shell.event(1, ended("a"))
    shell.protocol.ledger.take_events()
    shell.lose_daemon()
    shell.attach("b" * 32)
    shell.submit(pull("b"))
    shell.event(1, ended("b"))
    assert [e.transfer_id for e in shell.protocol.ledger.take_events()] == ["b"]


def test_event_taken_in_before_the_loss_is_not_ended_again(shell: Shell) -> None:
    shell.submit(pull("a"))
    shell.event(1, ended("a"))
    shell.lose_daemon()
    (event,) = shell.protocol.ledger.take_events()
    assert event.outcome == "received"


# --- limits ---------------------------------------------------------------------------------------


def test_requests_without_answer_are_bounded() -> None:
    shell = Shell(ClientSettings(max_outstanding=2))
    shell.attach()
    first = shell.submit(Ping())
    shell.submit(Ping())
    with pytest.raises(Busy) as raised:
        shell.submit(Ping())
    assert raised.value.fields["limit"] == "max_outstanding"
    shell.reply(first)
    shell.submit(Ping())


def test_transfers_in_flight_are_bounded() -> None:
    shell = Shell(ClientSettings(max_in_flight=1))
    shell.attach()
    shell.reply(shell.submit(pull("a")))
    with pytest.raises(Busy) as raised:
        shell.submit(pull("b"))
    assert raised.value.fields["limit"] == "max_in_flight"
    shell.submit(Ping())
    shell.event(1, ended("a"))
    shell.submit(pull("b"))


def test_id_of_an_orphan_cannot_be_used_again_before_it_ended(shell: Shell) -> None:
    shell.submit(Reserve("r", PEER, (b"",)))
    shell.lose_daemon()
    shell.attach("b" * 32)
    with pytest.raises(TransferConflict):
        shell.submit(Reserve("r", PEER, (b"",)))
    shell.submit(pull("r"))


# --- waiting calls --------------------------------------------------------------------------------


def test_answer_is_kept_for_who_waits(shell: Shell) -> None:
    number = shell.submit(Ping(), is_waited_for=True)
    ledger = shell.protocol.ledger
    assert not ledger.has_answer(number)
    shell.reply(number, BUSY)
    assert ledger.has_answer(number)
    assert ledger.take_answer(number) == BUSY
    assert ledger.take_answer(number) is None
    assert ledger.take_problems() == []


def test_answer_nobody_waits_for_any_more_is_dropped(shell: Shell) -> None:
    number = shell.submit(Ping(), is_waited_for=True)
    shell.protocol.ledger.stop_waiting(number)
    shell.reply(number)
    assert shell.protocol.ledger.take_answer(number) is None
    assert shell.protocol.ledger.outstanding == 0
