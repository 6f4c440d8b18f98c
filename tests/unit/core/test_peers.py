"""Peers by epoch: heard, lost, fenced, void, forgotten. Rules S1 and S7."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core.peers import Peer
from moriiod.errors import MoriiodError, PeerLost
from tests.support.lone import SETTINGS, FarPeer, Lone, new_id


class User:
    """Something that depends on a peer, and what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.leaves_when_forgotten: Peer | None = None
        self.lone: Lone | None = None

    def peer_lost(self, error: MoriiodError) -> None:
        self.told.append(error.code)

    def peer_fenced(self) -> None:
        self.told.append("fenced")

    def peer_forgotten(self) -> None:
        self.told.append("forgotten")
        if self.lone is not None and self.leaves_when_forgotten is not None:
            self.lone.machine.peers.unuse(self.leaves_when_forgotten, self)


class Owner(Lone):
    """A lone machine of which only the peers are used."""

    def use(self, peer: FarPeer) -> tuple[Peer, User]:
        user, known = User(), self.machine.peers.get(peer.epoch)
        assert known is not None
        self.machine.peers.use(known, user)
        return known, user

    def flush(self) -> None:
        self.machine.ctx.run_deferred()
        self.effects = self.machine.ctx.take_effects()
        self.log += self.effects


@pytest.fixture
def lone() -> Owner:
    return Owner()


@pytest.fixture
def peer(lone: Owner) -> FarPeer:
    return FarPeer(lone).dial()


# --- Silence --------------------------------------------------------------------------------------


def test_rule_S1_peer_is_lost_after_the_whole_time_of_silence_and_not_before(lone, peer):
    known, user = lone.use(peer)
    lone.wait(3.999)
    assert known.is_up
    lone.wait(0.001)
    assert not known.is_up
    assert user.told == ["PEER_LOST"]
    assert lone.problems == ["peer_lost"]


def test_S1_peer_that_is_heard_in_time_is_never_lost(lone, peer):
    known, user = lone.use(peer)
    for _ in range(40):
        lone.wait(3.9)
        peer.beat()
    assert known.is_up
    assert user.told == []


def test_lost_peer_that_speaks_again_is_up_and_can_be_lost_again(lone, peer):
    known, user = lone.use(peer)
    lone.wait(4.0)
    peer.beat()
    assert known.is_up
    lone.wait(4.0)
    assert user.told == ["PEER_LOST", "PEER_LOST"]


def test_who_starts_using_a_lost_peer_is_told_at_once(lone, peer):
    lone.wait(4.0)
    _, user = lone.use(peer)
    lone.flush()
    assert user.told == ["PEER_LOST"]


def test_silent_peer_without_users_is_forgotten_in_time(lone, peer):
    lone.wait(29.0)
    assert lone.machine.peers.get(peer.epoch) is not None
    lone.wait(4.0)
    assert lone.machine.peers.get(peer.epoch) is None
    assert not lone.machine.peers.is_void(peer.epoch)
    peer.beat()
    assert lone.problems == ["unknown_epoch"]
    assert lone.sent == [msg.UnknownEpoch(peer.epoch)]


def test_silent_peer_is_kept_for_users_that_need_it_and_forgotten_after_the_last(lone, peer):
    known, stubborn = lone.use(peer)
    _, light = lone.use(peer)
    light.lone, light.leaves_when_forgotten = lone, known
    lone.wait(299.0)
    assert light.told == stubborn.told == ["PEER_LOST"]
    lone.wait(2.0)
    assert light.told == stubborn.told == ["PEER_LOST", "forgotten"]
    assert lone.machine.peers.get(peer.epoch) is known
    lone.machine.peers.unuse(known, stubborn)
    lone.wait(5.0)
    assert lone.machine.peers.get(peer.epoch) is None


def test_messages_for_a_forgotten_peer_are_not_repeated_any_more(lone, peer):
    known, _ = lone.use(peer)
    lone.machine.peers.post(known, ("ack", "1"), msg.Goodbye())
    known.users.clear()
    lone.wait(40.0)
    assert lone.machine.peers.outbox.count() == 0
    assert lone.machine.next_deadline() is None


# --- Epochs ---------------------------------------------------------------------------------------


def test_rule_S7_new_epoch_of_a_rank_ends_the_old_one_at_its_first_word(lone, peer):
    known, user = lone.use(peer)
    fresh = peer.restarted()
    fresh.say(msg.Hello(new_id(), (1,), fresh.identity, ("shm",)))
    assert user.told == []
    fresh.beat()
    assert user.told == ["PEER_RESTARTED"]
    assert (known.is_void, known.is_up) == (True, False)
    peer.beat()
    assert lone.effects == (ef.CountProblem("stale_epoch", "Heartbeat"),)
    lone.machine.peers.void(known, PeerLost("again"))
    lone.flush()
    assert user.told == ["PEER_RESTARTED"]


def test_rule_S7_nothing_is_sent_to_an_epoch_that_is_over(lone, peer):
    known, _ = lone.use(peer)
    peer.restarted().dial()
    lone.machine.peers.send(peer.epoch, msg.Goodbye())
    lone.machine.peers.post(known, ("ack", "1"), msg.Goodbye())
    lone.flush()
    assert lone.sent == []
    assert lone.machine.peers.outbox.count() == 0


def test_other_rank_or_instance_is_another_peer(lone):
    first = FarPeer(lone, 0, 2).dial()
    second = FarPeer(lone, 1, 2).dial()
    third = FarPeer(lone, 0, 2, instance="other").dial()
    assert [p.epoch for p in lone.machine.peers] == [first.epoch, second.epoch, third.epoch]


def test_goodbye_ends_the_epoch_and_is_its_own_fence(lone, peer):
    known, user = lone.use(peer)
    peer.say(msg.Goodbye())
    assert user.told == ["PEER_LOST"]
    assert (known.is_void, known.is_fenced) == (True, True)
    lone.machine.peers.fence(known)
    lone.flush()
    assert user.told == ["PEER_LOST", "fenced"]
    assert lone.of(ef.FencePeer) == []


def test_epochs_that_are_over_are_remembered_up_to_a_limit():
    lone = Owner(settings=replace(SETTINGS, max_tombstones=2))
    epochs = [new_id() for _ in range(3)]
    for epoch in epochs:
        lone.machine.peers.mark_void(epoch, ("P", 0, 0))
    assert [lone.machine.peers.is_void(epoch) for epoch in epochs] == [False, True, True]


def test_dropped_epoch_that_is_ended_late_leaves_its_successor_alone(lone, peer):
    old = lone.machine.peers.get(peer.epoch)
    assert old is not None
    lone.wait(40.0)
    assert lone.machine.peers.get(peer.epoch) is None
    fresh = peer.restarted().dial()
    lone.machine.peers.void(old, PeerLost("another epoch answers where it was"))
    assert [p.epoch for p in lone.machine.peers] == [fresh.epoch]
    again = fresh.restarted().dial()
    assert [p.epoch for p in lone.machine.peers] == [again.epoch]


# --- Fences ---------------------------------------------------------------------------------------


def test_fence_is_asked_for_once_and_its_proof_goes_to_every_user(lone, peer):
    known, user = lone.use(peer)
    _, other = lone.use(peer)
    lone.machine.peers.fence(known)
    lone.machine.peers.fence(known)
    lone.flush()
    assert lone.effects == (ef.FencePeer(peer.epoch),)
    assert lone.machine.peers.fencing == (known,)
    lone.step(ev.PeerFenced(peer.epoch))
    assert (user.told, other.told) == (["fenced"], ["fenced"])
    assert lone.machine.peers.fencing == ()
    lone.machine.peers.fence(known)
    lone.flush()
    assert lone.effects == ()
    assert user.told == ["fenced", "fenced"]


def test_proof_of_a_fence_that_nobody_asked_for_is_counted(lone, peer):
    lone.step(ev.PeerFenced(peer.epoch))
    assert lone.problems == ["engine_event_unexpected"]


def test_fenced_peer_that_comes_back_is_readmitted(lone, peer):
    known, user = lone.use(peer)
    lone.machine.peers.fence(known)
    lone.flush()
    lone.step(ev.PeerFenced(peer.epoch))
    peer.beat()
    assert ef.ReadmitPeer(peer.epoch) in lone.effects
    assert (known.is_fenced, known.fence_requested) == (False, False)
    del user.told[:]
    lone.machine.peers.fence(known)
    lone.flush()
    assert lone.effects == (ef.FencePeer(peer.epoch),)


def test_proof_that_comes_after_the_peer_is_back_tells_nobody(lone, peer):
    known, user = lone.use(peer)
    lone.machine.peers.fence(known)
    lone.flush()
    peer.beat()
    assert ef.ReadmitPeer(peer.epoch) in lone.effects
    lone.step(ev.PeerFenced(peer.epoch))
    assert user.told == []
    assert not known.is_fenced


def test_rule_S1_peer_that_owes_an_answer_to_a_revocation_is_not_readmitted_before(lone, peer):
    known, _ = lone.use(peer)
    lone.machine.peers.post(known, ("revoke", "1"), msg.Goodbye())
    lone.machine.peers.fence(known)
    lone.flush()
    lone.step(ev.PeerFenced(peer.epoch))
    peer.beat()
    assert lone.of(ef.ReadmitPeer) == []
    lone.machine.peers.outbox.confirm(peer.epoch, ("revoke", "1"))
    peer.beat()
    assert lone.of(ef.ReadmitPeer) == [ef.ReadmitPeer(peer.epoch)]


def test_rule_S1_silent_peer_that_owes_an_answer_is_remembered_longer_and_then_void(lone, peer):
    known, user = lone.use(peer)
    lone.machine.peers.post(known, ("revoke_grant", "1"), msg.Goodbye())
    lone.machine.peers.unuse(known, user)
    lone.wait(290.0)
    assert lone.machine.peers.get(peer.epoch) is known
    lone.wait(15.0)
    assert lone.machine.peers.is_void(peer.epoch)
    peer.beat()
    assert lone.problems == ["stale_epoch"]


def test_rule_S1_void_peer_can_be_fenced(lone, peer):
    known, user = lone.use(peer)
    peer.restarted().dial()
    lone.machine.peers.fence(known)
    lone.flush()
    assert lone.effects == (ef.FencePeer(peer.epoch),)
    lone.step(ev.PeerFenced(peer.epoch))
    assert user.told == ["PEER_RESTARTED", "fenced"]
