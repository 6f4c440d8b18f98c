"""What all transfers share: one end, limits before anything starts, a memory of the past."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import requests as req
from moriiod.core.transfers import Ending, Memorial
from moriiod.errors import InvariantViolation, TransferAborted
from tests.support.lone import SETTINGS, Lone, LoneWorker
from tests.support.sim import pack


def test_rule_S2_second_end_of_a_transfer_is_a_bug_and_never_told():
    lone = Lone()
    worker = LoneWorker(lone)
    worker.ask(req.Publish("t", (pack(1),)))
    (lease,) = lone.machine.leases
    lease.report(Ending("released", "acked"))
    with pytest.raises(InvariantViolation) as caught:
        lease.report(Ending("released", "acked"))
    assert caught.value.fields == {"transfer_id": "t", "role": "publish"}


def test_end_tells_age_bytes_and_reason():
    lone = Lone()
    worker = LoneWorker(lone)
    worker.ask(req.Publish("t", (pack(1),)))
    lone.wait(2.5)
    worker.send(req.Abort("t", "publish"))
    assert lone.ended == [("publish", "t", "released", "aborted")]
    end = lone.of(ef.Transition)[-1]
    assert (end.old, end.new, end.detail, end.age_s) == ("revoking", "released", "aborted", 2.5)


def test_failure_carries_code_text_and_whether_to_retry():
    ending = Ending.failure(TransferAborted("x" * 5000))
    assert (ending.outcome, ending.reason, ending.retryable) == ("failed", "ABORTED", False)
    assert len(ending.message) == 2000


# --- Admission ----------------------------------------------------------------------------------


def test_too_many_transfers_are_answered_busy_until_one_ends():
    lone = Lone(settings=replace(SETTINGS, max_transfers=2))
    worker = LoneWorker(lone)
    for name in "ab":
        assert worker.ask(req.Publish(name, (pack(1),))) == req.Done()
    refusal = worker.refusal(req.Publish("c", (pack(1),)))
    assert (refusal.code, refusal.retryable) == ("BUSY", True)
    assert refusal.fields == {"limit": "max_transfers", "value": 2, "retry_after_s": 1.0}
    worker.send(req.Abort("a", "publish"))
    assert worker.ask(req.Publish("c", (pack(1),))) == req.Done()


def test_Z7_too_many_blocks_in_one_transfer_are_too_large_naming_the_limit():
    lone = Lone(settings=replace(SETTINGS, max_blocks_per_transfer=3))
    worker = LoneWorker(lone)
    assert worker.ask(req.Publish("a", (pack(1, 2, 3),))) == req.Done()
    refusal = worker.refusal(req.Publish("b", (pack(1, 2, 3, 4),)))
    assert refusal.code == "TOO_LARGE"
    assert refusal.fields == {"limit": "max_blocks_per_transfer", "value": 3, "n_blocks": 4}


def test_client_that_does_not_confirm_gets_no_more_transfers():
    lone = Lone(settings=replace(SETTINGS, max_unconfirmed_events=2))
    worker = LoneWorker(lone)
    for name in "ab":
        worker.ask(req.Publish(name, (pack(1),)))
    worker.send(req.Abort("a", "publish"))  # an unconfirmed event now, and one live transfer
    refusal = worker.refusal(req.Publish("c", (pack(1),)))
    assert (refusal.code, refusal.fields["limit"]) == ("BUSY", "max_unconfirmed_events")
    worker.send(req.ConfirmEvents(1))
    assert worker.ask(req.Publish("c", (pack(1),))) == req.Done()


# --- Memorial -----------------------------------------------------------------------------------


def test_memorial_forgets_the_oldest_and_keeps_what_was_put_again():
    memorial: Memorial[str, int] = Memorial(2)
    memorial.put("a", 1)
    memorial.put("b", 2)
    memorial.put("a", 3)
    memorial.put("c", 4)
    assert len(memorial) == 2
    assert (memorial.get("a"), memorial.get("b"), memorial.get("c")) == (3, None, 4)


def test_memorial_can_be_told_to_forget():
    memorial: Memorial[str, int] = Memorial(2)
    memorial.put("a", 1)
    memorial.discard("a")
    memorial.discard("never there")
    assert memorial.get("a") is None
    assert len(memorial) == 0
