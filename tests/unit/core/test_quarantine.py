"""What is shown of blocks that nobody may reuse yet, and of legs of every kind. Rule S1."""

from __future__ import annotations

import pytest

from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.core.quarantine import quarantined
from moriiod.core.snapshot import Snapshot, TransferRow, take_counts, take_snapshot
from tests.support.lone import FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import pack

#: Bytes of one block in both layers of the plain layout.
BLOCK = 16


@pytest.fixture
def lone() -> Lone:
    return Lone(instance="D")


def look(lone: Lone) -> Snapshot:
    return take_snapshot(lone.machine, lone.now, 100)


def only_transfer(lone: Lone) -> TransferRow:
    (row,) = look(lone).transfers
    return row


def test_rule_S1_revoked_lease_is_quarantined_until_its_reader_has_answered(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone, instance="C").dial()
    worker.send(req.Publish("t", (pack(1, 2, 3),)))
    granted = peer.claim("t", 1)
    assert list(quarantined(lone.machine, lone.now)) == []
    worker.send(req.Abort("t", "publish"))
    lone.wait(1.5)
    (row,) = quarantined(lone.machine, lone.now)
    assert (row.transfer_id, row.role, row.state) == ("t", "publish", "revoking")
    assert (row.n_bytes, row.age_s, row.peers) == (3 * BLOCK, 1.5, ("C dp 0 tp 0",))
    peer.ack(granted)
    assert list(quarantined(lone.machine, lone.now)) == []


def test_rule_S1_reservations_that_drain_are_quarantined_and_living_ones_are_not(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone, instance="P")
    for name, block in (("t", 5), ("u", 6), ("v", 7)):
        worker.send(req.Reserve(name, peer.address, (pack(block),)))
    worker.send(req.Reserve("prefix", peer.address, (pack(),)))
    peer.welcome()
    for name in "tu":
        worker.send(req.Abort(name, "reserve"))
    rows = list(quarantined(lone.machine, lone.now))
    assert [(row.transfer_id, row.n_bytes) for row in rows] == [("t", BLOCK), ("u", BLOCK)]
    assert {row.peers for row in rows} == {("P dp 0 tp 0",)}
    assert take_counts(lone.machine).quarantined_bytes == 2 * BLOCK


def test_rule_S1_orphan_is_quarantined_with_whom_it_waits_for(lone):
    generation, old = new_id(), new_id()
    lone.step(ev.WorkerConnected(generation, 1, 0))
    peer = FarPeer(lone, instance="P")
    attach = req.Attach(generation, "w", old, (req.Orphan("t", peer.address),))
    lone.step(ev.RequestReceived(b"w", 1, attach))
    (row,) = quarantined(lone.machine, lone.now)
    assert (row.transfer_id, row.state, row.n_bytes) == ("t", "fencing", 0)
    assert row.peers == ("127.0.0.1 port 6301",)
    assert only_transfer(lone).legs == ("127.0.0.1 port 6301: asked",)


def test_orphan_shows_which_producers_are_fenced(lone):
    generation = new_id()
    lone.step(ev.WorkerConnected(generation, 1, 0))
    peer = FarPeer(lone, instance="P")
    attach = req.Attach(generation, "w", new_id(), (req.Orphan("t", peer.address),))
    lone.step(ev.RequestReceived(b"w", 1, attach))
    (orphan,) = lone.machine.orphans
    (leg,) = orphan.legs
    orphan.legs.append(type(leg)(orphan, leg.endpoint, leg.expected))
    leg.close()
    assert only_transfer(lone).legs == ("127.0.0.1 port 6301: fenced", "127.0.0.1 port 6301: asked")


def test_push_shows_where_it_stands_with_each_consumer(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone, instance="C").dial()
    worker.send(req.Push("t", (pack(1),)))
    assert only_transfer(lone).legs == ()
    peer.reserve("t", 5)
    assert only_transfer(lone).legs == ("C dp 0 tp 0: preparing",)
    peer.describe()
    assert only_transfer(lone).legs == ("C dp 0 tp 0: writing",)


def test_pull_shows_where_it_dials_and_then_whom_it_asks(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone, instance="P")
    worker.send(req.Pull("t", peer.address, (pack(1),), (pack(1),)))
    assert only_transfer(lone).legs == ("127.0.0.1 port 6301: dialing",)
    (link,) = look(lone).links
    assert (link.state, link.peer, link.waiters) == ("dialling", "", 1)
    peer.welcome()
    assert only_transfer(lone).legs == ("P dp 0 tp 0: claiming",)


def test_reservation_shows_where_it_stands_with_each_producer(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone, instance="P")
    worker.send(req.Reserve("t", peer.address, (pack(5),)))
    peer.welcome()
    assert only_transfer(lone).legs == ("P dp 0 tp 0: granted",)


def test_worker_shows_how_far_it_is(lone):
    generation = new_id()
    lone.step(ev.WorkerConnected(generation, 7, 1000))
    lone.step(ev.RegionOffered(generation, 0, 64))
    (row,) = look(lone).clients
    assert (row.state, row.memory, row.pid, row.uid) == ("connected", "none", 7, 1000)
    assert (row.regions, row.registered_bytes, row.layers) == (1, 0, 0)
    worker = LoneWorker(lone)
    peer = FarPeer(lone, instance="C").dial()
    worker.send(req.Publish("t", (pack(1),)))
    peer.claim("t", 1)
    lone.step(ev.WorkerDied(worker.generation))
    row = look(lone).clients[1]
    assert (row.state, row.memory, row.transfers) == ("gone", "registered", 1)


def test_peer_shows_whether_it_is_up_lost_fencing_or_over(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone, instance="C").dial()
    assert [row.state for row in look(lone).peers] == ["up"]
    lone.wait(5.0)
    assert [row.state for row in look(lone).peers] == ["lost"]
    peer.beat()
    worker.send(req.Publish("t", (pack(1),)))
    peer.claim("t", 1)
    lone.wait(5.0)
    (row,) = look(lone).peers
    assert (row.state, row.silent_s, row.users) == ("fencing", 5.0, 1)
    fresh = peer.restarted().dial()
    rows = {row.epoch: row.state for row in look(lone).peers}
    assert rows == {fresh.epoch: "up", peer.epoch: "over"}
    assert lone.ever_sent(msg.Goodbye) == []
