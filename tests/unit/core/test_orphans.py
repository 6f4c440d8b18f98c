"""Reservations that outlived their daemon: fenced at every producer, then reported. Case M9."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.errors import PeerLost
from tests.support.lone import FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import pack

OLD = new_id()
LOST = ("reserve", "t", "failed", "DAEMON_LOST")


class Successor:
    """A decode rank's new daemon, whose worker brings orphans along."""

    def __init__(self, producers: int = 1, size: int = 1) -> None:
        self.lone = Lone(0, size, instance="D")
        self.peers = [FarPeer(self.lone, r, producers, instance="P") for r in range(producers)]
        self.generation = new_id()
        self.route = b"w"
        self.lone.step(ev.WorkerConnected(self.generation, 1, 0))

    @property
    def peer(self) -> FarPeer:
        return self.peers[0]

    def attach(self, *orphans: req.Orphan, lost: str | None = OLD) -> req.Reply:
        attach = req.Attach(self.generation, "w", lost, orphans)
        self.lone.step(ev.RequestReceived(self.route, 1, attach))
        return self.lone.one(ef.ReplyToClient).body

    def orphan(self, name: str = "t", **changes: object) -> req.Orphan:
        return replace(req.Orphan(name, self.peer.address), **changes)  # type: ignore[arg-type]

    def is_clean(self) -> bool:
        machine = self.lone.machine
        return (
            len(machine.orphans) == 0
            and machine.orphans._legs == {}
            and machine.peers.outbox.count() == 0
            and not any(peer.users for peer in machine.peers)
            and not any(client.pins for client in machine.clients)
        )


@pytest.fixture
def one() -> Successor:
    return Successor()


def test_M9_orphan_is_reported_when_its_producer_has_fenced_the_lost_daemon(one):
    assert isinstance(one.attach(one.orphan()), req.Attached)
    assert one.lone.ended == []
    one.peer.welcome()
    request = one.peer.got(msg.FenceRequest)
    assert request.old_epoch == OLD
    one.lone.wait(0.25)
    assert one.peer.got(msg.FenceRequest) == request
    one.peer.say(msg.Fenced(request.fence_id, OLD))
    assert one.lone.ended == [LOST]
    assert one.is_clean()
    one.peer.say(msg.Fenced(request.fence_id, OLD))
    assert one.lone.effects == ()


def test_M9_orphans_of_several_lost_daemons_are_fenced_each_by_its_own(one):
    older = new_id()
    one.attach(one.orphan("t"), one.orphan("u", epoch=older))
    one.peer.welcome()
    first, second = one.peer.heard(msg.FenceRequest)
    assert (first.old_epoch, second.old_epoch) == (OLD, older)
    one.peer.say(msg.Fenced(second.fence_id, OLD))  # says nothing about the older one
    assert one.lone.ended == []
    one.peer.say(msg.Fenced(second.fence_id, older))
    assert one.lone.ended == [("reserve", "u", "failed", "DAEMON_LOST")]


def test_every_rank_that_may_write_is_asked_and_no_other():
    """Which heads the cache has is not known yet, but those of half the ranks cannot be ours."""
    one = Successor(size=2, producers=4)
    one.attach(one.orphan())
    assert [effect.port for effect in one.lone.of(ef.OpenRoute)] == [6301, 6302]


def test_orphan_waits_for_every_rank():
    one = Successor()
    one.attach(one.orphan())
    (orphan,) = one.lone.machine.orphans
    one.peer.welcome()
    leg = orphan.legs[0]
    orphan.legs.append(type(leg)(orphan, leg.endpoint, leg.expected))
    one.peer.say(msg.Fenced(leg.fence_id, OLD))
    assert one.lone.ended == []
    orphan.legs[1].close()
    orphan.settle()
    orphan.settle()
    one.lone.wait(0.0)
    assert [e for e in one.lone.machine.ctx.take_effects() if isinstance(e, ef.SendEvent)]


def test_rule_S1_producer_that_cannot_be_asked_keeps_the_blocks_and_is_asked_again(one):
    one.attach(one.orphan())
    one.lone.wait(64.0)
    assert len(one.lone.of(ef.OpenRoute)) == 7
    assert one.lone.ever(ef.SendEvent) == []
    one.peer.welcome()
    request = one.peer.got(msg.FenceRequest)
    one.peer.say(msg.Fenced(request.fence_id, OLD))
    assert one.lone.ended == [LOST]
    assert one.is_clean()


def test_rule_S1_producer_that_falls_silent_is_asked_again_when_it_is_back(one):
    one.attach(one.orphan())
    one.peer.welcome()
    first = one.peer.got(msg.FenceRequest)
    one.lone.wait(12.0)
    assert one.lone.machine.peers.outbox.count() == 0
    one.peer.welcome()
    again = one.peer.got(msg.FenceRequest)
    assert again == first
    one.peer.say(msg.Fenced(again.fence_id, OLD))
    assert one.lone.ended == [LOST]


def test_rule_S7_restarted_producer_is_asked_as_well(one):
    one.attach(one.orphan())
    one.peer.welcome()
    fresh = one.peer.restarted()
    fresh.say(msg.UnknownEpoch(one.lone.identity.epoch))
    fresh.welcome()
    one.lone.wait(2.0)
    fresh.reply_beat()
    one.lone.wait(2.0)
    request = fresh.got(msg.FenceRequest)
    fresh.say(msg.Fenced(request.fence_id, OLD))
    assert one.lone.ended == [LOST]


def test_name_that_is_being_fenced_cannot_be_reserved_again_before(one):
    one.attach(one.orphan())
    worker = LoneWorker(one.lone)
    again = req.Reserve("t", one.peer.address, (pack(1),))
    assert worker.ask(again) == req.Done()  # another worker's names are its own
    worker.send(req.Abort("t", "reserve"))
    route = one.route
    one.lone.step(ev.RequestReceived(route, 2, again))
    refusal = one.lone.one(ef.ReplyToClient).body
    assert isinstance(refusal, req.Refused)
    assert refusal.code == "ALREADY_EXISTS"


def test_orphan_without_an_epoch_is_counted_and_left_out(one):
    assert isinstance(one.attach(one.orphan(), lost=None), req.Attached)
    assert one.lone.problems == ["orphan_without_epoch"]
    assert one.is_clean()


def test_orphan_of_an_impossible_reservation_is_reported_at_once():
    """Its daemon refused it, or its sizes are not ours: nobody was ever granted anything."""
    one = Successor(size=4)
    peer = replace(one.peer.address, tp_size=3)
    one.attach(one.orphan(peer=peer))
    assert one.lone.problems == ["orphan_impossible"]
    assert one.lone.ended == [LOST]
    assert one.is_clean()


def test_worker_that_is_lost_does_not_wait_for_its_orphans(one):
    one.attach(one.orphan("t"), one.orphan("u"))
    one.peer.welcome()
    one.lone.step(ev.WorkerDied(one.generation))
    assert one.lone.of(ef.DisconnectWorker) == [ef.DisconnectWorker(one.generation)]
    assert one.is_clean()


def test_signals_to_a_fence_that_is_over_change_nothing(one):
    one.attach(one.orphan())
    (orphan,) = one.lone.machine.orphans
    (leg,) = orphan.legs
    one.peer.welcome()
    (known,) = one.lone.machine.peers
    leg.peer_forgotten()
    leg.peer_fenced()
    one.peer.say(msg.Fenced(leg.fence_id, OLD))
    leg.link_up(known)
    leg.connect()
    leg.peer_lost(PeerLost("late"))
    orphan.settle()
    one.lone.wait(0.0)
    assert one.lone.effects == ()
    assert one.is_clean()
