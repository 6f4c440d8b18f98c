"""Stopping: no new work, wait, then end what is left, and say so. Case L9 (the core's part)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.errors import TransferAborted
from tests.support.lone import FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import pack


@pytest.fixture
def lone() -> Lone:
    return Lone()


def test_L9_idle_daemon_says_goodbye_and_is_done_at_once(lone):
    peer = FarPeer(lone).dial()
    lone.step(ev.DrainRequested(10.0))
    assert peer.got(msg.Goodbye) == msg.Goodbye()
    assert lone.effects[-1] == ef.DrainEnded(clean=True)
    lone.wait(60.0)
    assert lone.of(ef.DrainEnded) == []


def test_L9_transfer_that_ends_in_time_makes_the_end_clean(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone).dial()
    worker.send(req.Publish("t", (pack(1),)))
    lone.step(ev.DrainRequested(3.0))
    assert lone.effects == ()
    granted = peer.claim("t", 1)
    lone.wait(2.0)
    peer.ack(granted)
    assert lone.ended == [("publish", "t", "released", "acked")]
    assert lone.effects[-1] == ef.DrainEnded(clean=True)
    assert isinstance(lone.sent[-1], msg.Goodbye)


def publish(lone: Lone, worker: LoneWorker, peer: FarPeer) -> Callable[[], None]:
    worker.send(req.Publish("t", (pack(1),)))
    granted = peer.claim("t", 1)

    def end() -> None:
        assert peer.last(msg.Revoke).error.code == "DRAINING"
        peer.ack(granted, ok=False)

    return end


def pull(lone: Lone, worker: LoneWorker, peer: FarPeer) -> Callable[[], None]:
    worker.send(req.Pull("t", peer.address, (pack(1),), (pack(1),)))
    peer.welcome()
    peer.grant()
    peer.describe()
    op = lone.one(ef.PostOp)

    def end() -> None:
        assert lone.ever(ef.CancelOp) == [ef.CancelOp(op.op)]
        lone.op_ended(op, TransferAborted("cancelled"))
        ended = lone.ended
        peer.confirm(valid=False)
        assert ended == [("pull", "t", "failed", "DRAINING")]

    return end


def push(lone: Lone, worker: LoneWorker, peer: FarPeer) -> Callable[[], None]:
    worker.send(req.Push("t", (pack(1),)))
    peer.reserve("t", 5)
    peer.describe()
    worker.send(req.LayerReady("t", (0,)))
    op = lone.one(ef.PostOp)

    def end() -> None:
        assert lone.ever(ef.CancelOp) == [ef.CancelOp(op.op)]
        lone.op_ended(op, TransferAborted("cancelled"))
        assert peer.got(msg.WriteFailed).error.code == "DRAINING"
        peer.say(msg.WriteConfirmed("t", peer.last(msg.WriteFailed).grant_id))

    return end


def reserve(lone: Lone, worker: LoneWorker, peer: FarPeer) -> Callable[[], None]:
    worker.send(req.Reserve("t", peer.address, (pack(1),)))
    peer.welcome()
    peer.accept()

    def end() -> None:
        assert peer.last(msg.RevokeGrant).grant_id == peer.last(msg.Grant).grant_id
        peer.write_failed()

    return end


@pytest.mark.parametrize("begin", [publish, pull, push, reserve])
def test_L9_transfer_that_is_left_at_the_limit_is_ended_in_order(lone, begin):
    worker = LoneWorker(lone)
    peer = FarPeer(lone).dial()
    end = begin(lone, worker, peer)
    lone.step(ev.DrainRequested(2.0))
    lone.wait(2.0)
    assert lone.ever(ef.DrainEnded) == []
    end()
    told = [effect.body for effect in lone.ever(ef.SendEvent)]
    assert [(e.role, e.outcome, e.reason) for e in told] == [(begin.__name__, "failed", "DRAINING")]
    assert lone.effects[-1] == ef.DrainEnded(clean=True)


@pytest.mark.parametrize("begin", [publish, pull, push, reserve])
def test_L9_transfer_that_does_not_come_to_rest_ends_the_drain_unclean_and_frees_nothing(
    lone, begin
):
    worker = LoneWorker(lone)
    peer = FarPeer(lone).dial()
    begin(lone, worker, peer)
    lone.step(ev.DrainRequested(2.0))
    lone.wait(2.9)
    assert lone.ever(ef.DrainEnded) == []
    lone.wait(0.1)
    assert lone.ever(ef.DrainEnded) == [ef.DrainEnded(clean=False)]
    # Goodbye says that nothing of ours is in flight, so it is only said where that is true.
    assert bool(peer.heard(msg.Goodbye)) == (not lone.ever(ef.PostOp))
    assert lone.ever(ef.SendEvent) == []
    assert lone.ever(ef.ReleaseMemory) == []
    lone.wait(60.0)
    assert len(lone.ever(ef.DrainEnded)) == 1


def test_L9_pending_handshake_fails_at_the_limit(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone)
    worker.send(req.Pull("t", peer.address, (pack(1),), (pack(1),)))
    lone.step(ev.DrainRequested(2.0))
    lone.wait(2.0)
    assert lone.ended == [("pull", "t", "failed", "DRAINING")]
    assert lone.effects[-1] == ef.DrainEnded(clean=True)


def test_L9_second_request_does_not_wait_for_anybody(lone):
    worker = LoneWorker(lone)
    worker.send(req.Publish("t", (pack(1),)))
    lone.step(ev.DrainRequested(600.0))
    lone.wait(1.0)
    lone.step(ev.DrainRequested(600.0))
    lone.wait(0.0)
    assert lone.ended == [("publish", "t", "failed", "DRAINING")]
    assert lone.effects[-1] == ef.DrainEnded(clean=True)


def test_L9_daemon_waits_for_the_confirmation_of_what_it_told_its_peers(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone).dial()
    worker.send(req.Push("t", (pack(1),)))
    grant = peer.reserve("t", 5, writes=False)
    worker.send(req.Seal("t", 0))
    assert lone.ended == [("push", "t", "released", "acked")]
    lone.step(ev.DrainRequested(5.0))
    assert lone.of(ef.DrainEnded) == []
    peer.say(msg.WriteConfirmed("t", grant.grant_id))
    assert lone.effects[-1] == ef.DrainEnded(clean=True)


def test_L9_confirmation_that_never_comes_is_waited_for_up_to_the_grace(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone).dial()
    worker.send(req.Push("t", (pack(1),)))
    peer.reserve("t", 5, writes=False)
    worker.send(req.Seal("t", 0))
    lone.step(ev.DrainRequested(2.0))
    lone.wait(2.9)
    assert lone.ever(ef.DrainEnded) == []
    lone.wait(0.2)
    assert lone.ever(ef.DrainEnded) == [ef.DrainEnded(clean=True)]
    assert peer.last(msg.Goodbye) == msg.Goodbye()  # nothing of ours is in flight


def test_L9_request_after_the_end_changes_nothing(lone):
    lone.step(ev.DrainRequested(2.0))
    lone.step(ev.DrainRequested(2.0))
    assert lone.effects == ()
    assert lone.machine.next_deadline() is None


def test_L9_early_claims_and_grants_are_refused_while_draining(lone):
    peer = FarPeer(lone).dial()
    LoneWorker(lone)
    lone.machine.ctx.is_draining = True
    lone.machine._drain_reported = True
    pull_id = new_id()
    peer.say(msg.Claim("t", pull_id, True, (pack(1),)))
    assert peer.got(msg.ClaimRefused).error.code == "UNKNOWN_TRANSFER"
    grant = peer.reserve("u", 5)
    assert peer.got(msg.WriteFailed).grant_id == grant.grant_id
    assert lone.of(ef.DrainEnded) == []
