"""WRITE, consumer side: grants and how they end. Cases A10 G3 G4 L2 R2 T4. Rule S1."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.core.reserve import Reserve
from moriiod.errors import PeerLost
from tests.support.lone import SETTINGS, FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import pack

RECEIVED = ("reserve", "t", "received", "acked")


class Consumer:
    """A decode rank with a worker, and the prefill ranks that write to it."""

    def __init__(self, size: int = 1, producers: int = 1, **settings: float) -> None:
        self.lone = Lone(0, size, instance="D", settings=replace(SETTINGS, **settings))
        self.worker = LoneWorker(self.lone)
        self.peers = [FarPeer(self.lone, r, producers, instance="P") for r in range(producers)]

    @property
    def peer(self) -> FarPeer:
        """The rank that writes."""
        return self.peers[0]

    def reserve(self, *blocks: int, **more: object) -> Reserve:
        request = req.Reserve("t", self.peer.address, (pack(*blocks),), **more)  # type: ignore[arg-type]
        assert self.worker.ask(request) == req.Done()
        return next(iter(self.lone.machine.reserves))

    def granted(self, **more: object) -> Reserve:
        reserve = self.reserve(5, 6, **more)
        self.peer.welcome()
        return reserve

    def accepted(self, **more: object) -> Reserve:
        reserve = self.granted(**more)
        self.peer.accept()
        return reserve

    def restart(self) -> FarPeer:
        fresh = self.peer.restarted()
        fresh.say(msg.UnknownEpoch(self.lone.identity.epoch))
        fresh.welcome()
        return fresh

    def is_clean(self) -> bool:
        machine = self.lone.machine
        return (
            len(machine.reserves) == 0
            and machine.admission.active == 0
            and machine.peers.outbox.count() == 0
            and machine.reserves._legs == {}
            and not any(peer.users for peer in machine.peers)
        )


@pytest.fixture
def one() -> Consumer:
    return Consumer()


# --- The good way ---------------------------------------------------------------------------------


def test_reservation_grants_its_blocks_and_is_received_with_the_producers_word(one):
    one.reserve(5, 6, first=(2,))
    assert one.lone.one(ef.OpenRoute).port == 6301
    one.peer.welcome()
    grant = one.peer.got(msg.Grant)
    assert (grant.transfer_id, grant.generation) == ("t", one.worker.generation)
    assert (grant.writes, grant.blocks, grant.first) == (True, (pack(5, 6),), (2,))
    one.lone.wait(0.25)
    assert one.peer.got(msg.Grant) == grant
    one.peer.accept()
    one.lone.wait(0.6)
    assert one.peer.heard(msg.Grant) == []
    one.peer.write_done(n_layers=2, n_bytes=32)
    assert one.peer.got(msg.WriteConfirmed).grant_id == grant.grant_id
    (told,) = one.lone.of(ef.SendEvent)
    assert told.body == req.TransferEnded(
        "t", "reserve", "received", "acked", n_bytes=32, n_layers=2
    )
    assert one.is_clean()


def test_T4_repeats_of_the_end_are_confirmed_and_told_once(one):
    one.granted()
    for expected in (1, 0, 0):
        one.peer.write_done()
        assert one.peer.heard(msg.WriteConfirmed)
        assert len(one.lone.ended) == expected
    one.peer.write_failed()
    assert one.peer.heard(msg.WriteConfirmed)
    assert one.lone.ended == []
    one.peer.accept()
    assert one.lone.effects == ()


def test_G3_full_prefix_hit_is_received_at_once_and_the_producers_are_let_go(one):
    one.reserve()
    assert one.lone.ended == [RECEIVED]
    one.peer.welcome()
    grant = one.peer.got(msg.Grant)
    assert (grant.writes, grant.blocks, grant.first) == (False, (), ())
    one.peer.accept()
    one.peer.write_done(n_layers=0, n_bytes=0)
    assert one.lone.ended == []
    assert one.is_clean()


def test_ranks_that_write_nothing_do_not_hold_up_the_end():
    consumer = Consumer(producers=2)
    consumer.reserve(5)
    writes, rests = consumer.peers
    writes.welcome()
    rests.welcome()
    assert rests.got(msg.Grant).writes is False
    consumer.lone.step(ev.TimerFired())
    grant = writes.last(msg.Grant)
    writes.say(msg.WriteDone("t", grant.grant_id, 2, 16))
    assert consumer.lone.ended == [RECEIVED]
    writes.say(msg.WriteDone("t", grant.grant_id, 2, 16))
    writes.say(msg.WriteFailed("t", grant.grant_id, msg.WireError("ABORTED", "no", False, {})))
    assert consumer.lone.ended == []
    rests.accept()
    rests.write_done(n_bytes=0)
    assert consumer.lone.ended == []
    assert consumer.is_clean()


@pytest.mark.parametrize("happens", ["failed", "unreachable", "lost", "over"])
def test_failure_of_a_rank_that_writes_nothing_fails_nothing(happens):
    consumer = Consumer(producers=2)
    reserve = consumer.reserve(5)
    writes, rests = consumer.peers
    writes.welcome()
    routes = {x.port: x.route for x in consumer.lone.ever(ef.OpenRoute)}
    if happens == "unreachable":
        consumer.lone.step(ev.RouteFailed(routes[rests.port], PeerLost("no way")))
    else:
        rests.welcome()
    match happens:
        case "failed":
            rests.write_failed()
        case "lost":
            consumer.lone.wait(3.0)
            writes.reply_beat()
            consumer.lone.wait(1.0)
        case "over":
            rests.say(msg.Goodbye())
    assert reserve.is_active
    assert reserve.legs[1].is_over
    grant = writes.last(msg.Grant)
    writes.say(msg.WriteDone("t", grant.grant_id, 2, 16))
    assert consumer.lone.ended == [RECEIVED]
    assert consumer.is_clean()
    assert consumer.lone.ever(ef.FencePeer) == []


def test_reservation_is_received_when_every_source_has_written():
    """Two sources, as a build that splits heads would have."""
    consumer = Consumer(producers=2)
    reserve = consumer.reserve(5)
    reserve.legs[1].writes = True
    for peer in consumer.peers:
        peer.welcome()
        peer.accept()
    consumer.peers[0].write_done(n_layers=2, n_bytes=16)
    assert consumer.lone.ended == []
    consumer.peers[1].write_done(n_layers=2, n_bytes=16)
    (told,) = consumer.lone.of(ef.SendEvent)
    assert (told.body.outcome, told.body.n_bytes, told.body.n_layers) == ("received", 32, 2)


# --- Requests that are refused --------------------------------------------------------------------


def test_A10_live_reservation_belongs_to_its_first_owner(one):
    one.reserve(5)
    other = LoneWorker(one.lone)
    again = req.Reserve("t", one.peer.address, (pack(5),))
    assert one.worker.ask(again) == req.Done()
    assert one.worker.refusal(replace(again, blocks=(pack(6),))).code == "ALREADY_EXISTS"
    assert other.refusal(again).code == "ALREADY_EXISTS"
    assert len(one.lone.machine.reserves) == 1


@pytest.mark.parametrize(
    ("blocks", "first", "code"),
    [
        (pack(12), (), "OUT_OF_RANGE"),
        (pack(5, 5), (), "INVALID_ARGUMENT"),
        (pack(5), (0, 0), "LENGTH_MISMATCH"),
    ],
)
def test_G4_blocks_that_cannot_be_written_are_refused_and_nothing_is_granted(
    one, blocks, first, code
):
    refusal = one.worker.refusal(req.Reserve("t", one.peer.address, (blocks,), first))
    assert refusal.code == code
    assert one.lone.of(ef.OpenRoute) == []
    assert one.is_clean()


def test_R2_sizes_that_are_no_multiples_are_refused_naming_both():
    consumer = Consumer(size=4)
    peer = replace(consumer.peer.address, tp_size=6)
    refusal = consumer.worker.refusal(req.Reserve("t", peer, (pack(5),)))
    assert refusal.code == "INVALID_TOPOLOGY"
    assert refusal.fields == {"producer_tp_size": "6", "consumer_tp_size": "4"}


# --- What fails -----------------------------------------------------------------------------------


def test_T2_producer_that_gave_up_fails_the_reservation_at_once(one):
    one.accepted()
    one.peer.write_failed("TIMED_OUT")
    assert one.lone.ended == [("reserve", "t", "failed", "TIMED_OUT")]
    assert one.peer.heard(msg.WriteConfirmed)
    assert one.is_clean()


def test_unreachable_producer_fails_the_reservation(one):
    one.reserve(5)
    one.lone.wait(5.0)
    assert one.lone.ended == [("reserve", "t", "failed", "PEER_UNREACHABLE")]
    assert one.is_clean()


@pytest.mark.parametrize("state", ["dialing", "granted", "accepted"])
@pytest.mark.parametrize("why", ["abort", "timeout", "worker"])
def test_rule_S1_blocks_are_given_back_only_with_the_producers_word(state, why):
    one = Consumer()
    {"dialing": lambda: one.reserve(5), "granted": one.granted, "accepted": one.accepted}[state]()
    match why:
        case "abort":
            assert one.worker.ask(req.Abort("t", "reserve")) == req.Done()
        case "timeout":
            for _ in range(15):
                one.lone.wait(1.0)
                if state != "dialing":
                    one.peer.reply_beat()
        case "worker":
            one.lone.step(ev.WorkerDied(one.worker.generation))
    ended = [effect.body.reason for effect in one.lone.ever(ef.SendEvent)]
    released = one.lone.ever(ef.ReleaseMemory)
    if state != "dialing":
        revoke = one.peer.last(msg.RevokeGrant)
        assert revoke.grant_id == one.peer.last(msg.Grant).grant_id
        assert ended == []
        assert released == []
        one.lone.wait(0.25)
        assert one.peer.heard(msg.RevokeGrant) == [revoke]
        assert one.peer.heard(msg.Grant) == []
        one.peer.write_failed()
        ended = [effect.body.reason for effect in one.lone.of(ef.SendEvent)]
        released = one.lone.of(ef.ReleaseMemory)
    reasons = {"abort": ["ABORTED"], "timeout": ["TIMED_OUT"], "worker": []}
    if (state, why) == ("dialing", "timeout"):
        reasons["timeout"] = ["PEER_UNREACHABLE"]
    assert ended == reasons[why]
    assert [e.generation for e in released] == [one.worker.generation] * (why == "worker")
    assert one.is_clean()


def test_rule_S2_write_that_is_done_after_the_abort_is_still_a_failure(one):
    one.accepted()
    one.worker.send(req.Abort("t", "reserve"))
    one.peer.write_done()
    assert one.lone.ended == [("reserve", "t", "failed", "ABORTED")]
    assert one.is_clean()


def test_link_that_comes_after_the_abort_grants_nothing(one):
    one.reserve(5)
    one.worker.send(req.Abort("t", "reserve"))
    one.peer.welcome()
    assert one.peer.heard(msg.Grant) == []
    assert one.is_clean()


# --- Loss of the producer -------------------------------------------------------------------------


def test_rule_S1_silent_producer_keeps_the_blocks_until_the_engine_has_proof(one):
    one.accepted()
    one.lone.wait(4.0)
    assert one.lone.of(ef.FencePeer) == [ef.FencePeer(one.peer.epoch)]
    one.lone.wait(100.0)
    assert one.lone.ever(ef.SendEvent) == []
    one.lone.step(ev.PeerFenced(one.peer.epoch))
    assert one.lone.ended == [("reserve", "t", "failed", "PEER_LOST")]
    # Should it come back, it answers for the grant before it is let in again.
    one.peer.welcome()
    assert one.lone.of(ef.ReadmitPeer) == []
    one.lone.wait(5.0)
    assert one.peer.heard(msg.RevokeGrant)
    one.peer.write_failed()
    one.peer.reply_beat()
    assert one.lone.of(ef.ReadmitPeer) == [ef.ReadmitPeer(one.peer.epoch)]
    assert one.is_clean()


def test_rule_S1_silent_producer_that_comes_back_ends_the_grant_itself(one):
    one.accepted()
    one.lone.wait(4.0)
    one.peer.welcome()
    one.peer.write_done()
    assert one.lone.ended == [("reserve", "t", "failed", "PEER_LOST")]
    assert one.is_clean()


def test_goodbye_of_the_producer_is_proof_enough(one):
    one.accepted()
    one.peer.say(msg.Goodbye())
    assert one.lone.ended == [("reserve", "t", "failed", "PEER_LOST")]
    assert one.lone.ever(ef.FencePeer) == []
    assert one.is_clean()


def test_rule_S7_restart_of_a_producer_that_had_accepted_fails_with_proof_only(one):
    one.accepted()
    fresh = one.restart()
    assert one.lone.of(ef.FencePeer) == [ef.FencePeer(one.peer.epoch)]
    assert one.lone.ended == []
    one.lone.step(ev.PeerFenced(one.peer.epoch))
    assert one.lone.ended == [("reserve", "t", "failed", "PEER_RESTARTED")]
    assert fresh.heard(msg.Grant) == []
    assert one.is_clean()


def test_rule_S7_restart_of_a_producer_that_had_not_accepted_is_granted_anew_with_proof(one):
    one.granted()
    old = one.peer.last(msg.Grant)
    fresh = one.restart()
    assert fresh.heard(msg.Grant) == []
    one.lone.step(ev.PeerFenced(one.peer.epoch))
    grant = fresh.got(msg.Grant)
    assert grant.grant_id != old.grant_id
    assert replace(grant, grant_id=old.grant_id) == old
    fresh.say(msg.WriteDone("t", old.grant_id, 2, 32))  # nobody's: the old grant is void
    assert one.lone.ended == []
    fresh.write_done()
    assert one.lone.ended == [RECEIVED]
    assert one.is_clean()


def test_rule_S7_reservation_given_up_while_the_old_producer_is_fenced_is_not_granted_anew(one):
    one.granted()
    fresh = one.restart()
    one.worker.send(req.Abort("t", "reserve"))
    assert one.lone.ended == []
    one.lone.step(ev.PeerFenced(one.peer.epoch))
    assert one.lone.ended == [("reserve", "t", "failed", "ABORTED")]
    assert fresh.heard(msg.Grant) == []
    assert one.is_clean()


def test_rule_S1_abort_while_the_producer_is_silent_asks_for_the_fence(one):
    one.accepted()
    known = one.lone.machine.peers.get(one.peer.epoch)
    assert known is not None
    known.is_up = False
    one.worker.send(req.Abort("t", "reserve"))
    assert one.lone.of(ef.FencePeer) == [ef.FencePeer(one.peer.epoch)]


# --- What comes too late --------------------------------------------------------------------------


def test_signals_to_a_leg_that_is_beyond_them_change_nothing(one):
    reserve = one.accepted()
    (leg,) = reserve.legs
    (known,) = one.lone.machine.peers
    one.peer.write_done()
    late = PeerLost("late")
    leg.link_up(known)
    leg.link_failed(late)
    leg.peer_lost(late)
    leg.peer_fenced()
    leg.peer_forgotten()
    leg.revoke()
    reserve.fail(late)
    reserve.receive()
    reserve.settle()
    one.lone.wait(0.0)
    assert one.lone.effects == ()
    assert one.is_clean()


def test_link_to_a_daemon_that_is_over_when_it_is_told_is_no_link(one):
    reserve = one.reserve(5)
    other = FarPeer(one.lone, instance="X").dial()
    known = one.lone.machine.peers.get(other.epoch)
    assert known is not None
    other.restarted().dial()
    reserve.legs[0].link_up(known)
    effects = one.lone.machine.ctx.take_effects()
    told = [effect.body for effect in effects if isinstance(effect, ef.SendEvent)]
    assert [event.reason for event in told] == ["PEER_LOST"]


def test_word_of_another_peer_about_a_grant_does_not_count(one):
    one.accepted()
    stranger = FarPeer(one.lone, instance="X").dial()
    grant_id = one.peer.last(msg.Grant).grant_id
    error = msg.WireError("ABORTED", "no", False, {})
    for body in (
        msg.WriteDone("t", grant_id, 2, 32),
        msg.WriteFailed("t", grant_id, error),
        msg.GrantAccepted("t", new_id()),
    ):
        stranger.say(body)
        assert one.lone.ended == []
    one.peer.write_done()
    assert one.lone.ended == [RECEIVED]
