"""The machine as a whole: time, routing of messages by epoch, fence requests. Rule S7."""

from __future__ import annotations

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.core.fanin import TransferAck
from tests.support.lone import FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import make_groups, pack


@pytest.fixture
def lone() -> Lone:
    return Lone()


# --- Time -----------------------------------------------------------------------------------------


def test_S2_time_never_goes_back(lone):
    worker = LoneWorker(lone)
    worker.send(req.Publish("t", (pack(1),)))
    deadline = lone.machine.next_deadline()
    lone.machine.step(ev.TimerFired(), 110.0)
    lone.machine.step(ev.TimerFired(), 50.0)
    assert lone.machine.ctx.now == 110.0
    assert lone.machine.next_deadline() == deadline == 120.0


def test_nothing_waits_in_a_machine_that_has_nothing_to_do(lone):
    assert lone.machine.next_deadline() is None
    assert lone.step(ev.TimerFired()) == ()
    assert lone.machine.is_quiet


def test_timers_that_are_due_together_all_fire_in_one_step(lone):
    worker = LoneWorker(lone)
    for name in "ab":
        worker.send(req.Publish(name, (pack(1),)))
    lone.now += 60.0
    lone.step(ev.TimerFired())
    assert lone.ended == [
        ("publish", "a", "failed", "LEASE_EXPIRED"),
        ("publish", "b", "failed", "LEASE_EXPIRED"),
    ]


# --- Epochs ---------------------------------------------------------------------------------------


def test_rule_S7_stranger_is_asked_to_say_hello_first(lone):
    peer = FarPeer(lone)
    peer.say(msg.Claim("t", new_id(), True, (pack(1),)))
    assert lone.effects == (
        ef.CountProblem("unknown_epoch", "Claim"),
        ef.SendToPeer(peer.route, msg.UnknownEpoch(peer.epoch)),
    )


def test_rule_S7_message_for_another_start_of_this_daemon_is_not_taken(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone).dial()
    worker.send(req.Publish("t", (pack(1),)))
    peer.say(msg.Claim("t", new_id(), True, (pack(1),)), to=new_id())
    assert lone.problems == ["unknown_epoch"]
    assert lone.sent == [msg.UnknownEpoch(peer.epoch)]
    assert peer.claim("t", 1).transfer_id == "t"


def test_rule_S7_welcomed_stranger_is_only_let_in_by_a_message_for_us(lone):
    peer = FarPeer(lone)
    peer.say(msg.Hello(new_id(), (1,), peer.identity, ("shm",)))
    peer.say(msg.Heartbeat(1, ()), to=new_id())
    assert len(lone.machine.peers) == 0
    peer.beat()
    assert [p.epoch for p in lone.machine.peers] == [peer.epoch]


def test_rule_S7_message_of_a_void_epoch_is_counted_and_not_answered(lone):
    peer = FarPeer(lone).dial()
    peer.restarted().dial()
    peer.say(msg.Claim("t", new_id(), False, ()))
    assert lone.effects == (ef.CountProblem("stale_epoch", "Claim"),)


def test_message_that_only_the_handshake_knows_is_unexpected_elsewhere(lone):
    peer = FarPeer(lone).dial()
    peer.say("gibberish")  # type: ignore[arg-type]
    assert lone.problems == ["unexpected_message"]


# --- Messages for attempts that nobody knows ------------------------------------------------------


ATTEMPT, LEASE = new_id(), new_id()
ERROR = msg.WireError("ABORTED", "no", False, {})


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        (msg.ClaimRefused("t", ATTEMPT, ERROR), []),
        (msg.AckConfirmed("t", ATTEMPT, True), []),
        (msg.Renewed((("t", LEASE, 9.0),), (("u", LEASE),)), []),
        (msg.GrantAccepted("t", ATTEMPT), []),
        (msg.WriteConfirmed("t", ATTEMPT), []),
        (msg.Fenced(ATTEMPT, LEASE), []),
        (msg.LayoutReply(ATTEMPT, None), []),
        # Who waits for our word gets it, whatever we remember: nothing of ours touches anything.
        (
            msg.ClaimGranted("t", ATTEMPT, LEASE, new_id(), 9.0),
            [msg.Ack("t", ATTEMPT, LEASE, 0, 1, False)],
        ),
        (
            msg.Revoke("t", ATTEMPT, LEASE, ERROR),
            [msg.Ack("t", ATTEMPT, LEASE, 0, 1, False)],
        ),
        (msg.WriteDone("t", ATTEMPT, 1, 1), [msg.WriteConfirmed("t", ATTEMPT)]),
        (msg.WriteFailed("t", ATTEMPT, ERROR), [msg.WriteConfirmed("t", ATTEMPT)]),
        (msg.Ack("t", ATTEMPT, LEASE, 0, 1, True), [msg.AckConfirmed("t", ATTEMPT, False)]),
        (msg.LayoutRequest(ATTEMPT), [msg.LayoutReply(ATTEMPT, None)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_message_about_what_nobody_knows_starts_nothing(lone, body, answers):
    peer = FarPeer(lone).dial()
    peer.say(body)
    assert lone.sent == answers
    assert lone.ended == []
    assert lone.machine.is_quiet


def test_revocation_of_a_grant_that_nobody_knows_is_remembered(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone).dial()
    peer.say(msg.RevokeGrant("t", ATTEMPT))
    assert peer.got(msg.WriteFailed).grant_id == ATTEMPT
    peer.say(msg.WriteConfirmed("t", ATTEMPT))
    # The grant itself was slower on the wire.
    worker.send(req.Push("t", (pack(1),)))
    peer.say(msg.Grant("t", ATTEMPT, peer.generation, True, (pack(1),), ()))
    assert peer.got(msg.WriteFailed).error.code == "ABORTED"
    assert lone.of(ef.OpenSession) == []


# --- What peers are told of our memory ------------------------------------------------------------


def test_registered_memory_is_described_to_peers(lone):
    worker = LoneWorker(lone, make_groups(4, 1))
    peer = FarPeer(lone).dial()
    peer.say(msg.LayoutRequest(worker.generation))
    reply = peer.got(msg.LayoutReply)
    assert reply.layout is not None
    assert (reply.layout.layout, reply.layout.engine) == (worker.layout, "shm")
    assert reply.layout.descriptors == (b"region",)


def test_M4_memory_that_is_not_registered_is_described_to_nobody(lone):
    worker = LoneWorker(lone, register=False)
    peer = FarPeer(lone).dial()
    assert lone.sent == [msg.HeartbeatReply(1, ())]
    for generation in (worker.generation, new_id()):
        peer.say(msg.LayoutRequest(generation))
        assert peer.got(msg.LayoutReply).layout is None


# --- Fence requests -------------------------------------------------------------------------------


def test_M9_restarted_daemon_learns_when_nothing_reaches_its_old_epoch_any_more(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone).dial()
    worker.send(req.Push("t", (pack(1),)))
    peer.reserve("t", 5)
    peer.describe()
    worker.send(req.LayerReady("t", (0,)))
    op = lone.one(ef.PostOp)
    fresh = peer.restarted()
    fresh.say(msg.Hello(new_id(), (1,), fresh.identity, ("shm",)))
    fence_id = new_id()
    fresh.say(msg.FenceRequest(fence_id, peer.epoch))
    assert fresh.heard(msg.Fenced) == []
    assert lone.one(ef.CancelOp).op == op.op
    lone.op_ended(op)
    assert lone.ended == [("push", "t", "failed", "PEER_RESTARTED")]
    fresh.say(msg.FenceRequest(fence_id, peer.epoch))  # it asks until it is answered
    assert fresh.got(msg.Fenced) == msg.Fenced(fence_id, peer.epoch)


def test_M9_epoch_that_was_never_heard_of_is_fenced_at_once_and_for_good(lone):
    peer, old = FarPeer(lone).dial(), new_id()
    peer.say(msg.FenceRequest(ATTEMPT, old))
    assert peer.got(msg.Fenced) == msg.Fenced(ATTEMPT, old)
    assert lone.machine.peers.is_void(old)


def test_M9_fence_request_is_answered_again_when_it_is_repeated(lone):
    peer, old = FarPeer(lone).dial(), new_id()
    for _ in range(2):
        peer.say(msg.FenceRequest(ATTEMPT, old))
        assert peer.heard(msg.Fenced) == [msg.Fenced(ATTEMPT, old)]


def test_fence_request_of_a_daemon_under_another_name_ends_the_epoch_that_it_names(lone):
    """A worker may have moved to another rank's daemon: who asks need not be who was asked."""
    old, asking = FarPeer(lone, instance="old").dial(), FarPeer(lone, instance="new").dial()
    asking.say(msg.FenceRequest(ATTEMPT, old.epoch))
    assert asking.heard(msg.Fenced) == [], "one that is heard is not ended by a stranger"
    assert not lone.machine.peers.is_void(old.epoch)
    while lone.machine.peers.get(old.epoch).is_up:
        lone.wait(1.0)
        asking.beat()
    asking.say(msg.FenceRequest(ATTEMPT, old.epoch))
    assert asking.got(msg.Fenced).old_epoch == old.epoch
    assert lone.machine.peers.is_void(old.epoch)


def test_rule_S7_daemon_cannot_ask_for_a_fence_of_itself(lone):
    peer = FarPeer(lone).dial()
    peer.say(msg.FenceRequest(ATTEMPT, peer.epoch))
    assert peer.got(msg.Fenced) == msg.Fenced(ATTEMPT, peer.epoch)
    assert not lone.machine.peers.is_void(peer.epoch)


def test_fence_request_of_a_peer_that_is_over_is_dropped(lone):
    worker = LoneWorker(lone)
    first = FarPeer(lone).dial()
    worker.send(req.Push("t", (pack(1),)))
    first.reserve("t", 5)
    first.describe()
    worker.send(req.LayerReady("t", (0,)))
    op = lone.one(ef.PostOp)
    second = first.restarted().dial()
    second.say(msg.FenceRequest(ATTEMPT, first.epoch))
    second.restarted().dial()
    lone.op_ended(op)
    assert [body for body in lone.sent if isinstance(body, msg.Fenced)] == []


# --- Old peers ------------------------------------------------------------------------------------


def test_ack_of_an_old_peer_goes_to_the_lease(lone):
    worker = LoneWorker(lone)
    worker.send(req.Publish("t", (pack(1),)))
    lone.step(ev.LegacyAckReceived(TransferAck.plain("t", "c1")))
    assert lone.ended == [("publish", "t", "released", "acked")]
