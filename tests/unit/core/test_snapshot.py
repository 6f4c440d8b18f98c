"""What a look at the core shows, in a world with a prefill TP2 and a decode TP4 group."""

from __future__ import annotations

import pytest

from moriiod.core.snapshot import DELIVERING, take_counts, take_snapshot
from tests.support.sim import N_LAYERS, PIECE, World

MANY = 100


@pytest.fixture
def world() -> World:
    return World(2, 4)


def test_publish_shows_which_ranks_have_not_acknowledged(world: World) -> None:
    for worker in world.p_workers:
        worker.publish("t", (1, 2))
    machine = world.prefill[1].machine
    row = take_snapshot(machine, world.now, MANY).transfers[0]
    assert (row.transfer_id, row.role, row.state) == ("t", "publish", "open")
    assert row.legs == ()
    world.d_workers[2].pull("t", world.p_address, (1, 2), (5, 6))
    world.run()
    row = take_snapshot(machine, world.now, MANY).transfers[0]
    assert row.pending_ack_ranks == (3,)


def test_lease_shows_its_holders_and_what_is_left_of_it(world: World) -> None:
    world.p_workers[0].publish("t", (1,))
    world.d_workers[0].pull("t", world.p_address, (1,), (5,))
    world.run(copies=False)
    world.pass_time(2.0)
    snapshot = take_snapshot(world.prefill[0].machine, world.now, MANY)
    (lease,) = snapshot.leases
    assert (lease.transfer_id, lease.holders) == ("t", 1)
    assert 0 < lease.remaining_s <= world.settings.lease_s
    assert snapshot.transfers[0].legs == ("D dp 0 tp 0: holding",)
    (pull,) = take_snapshot(world.decode[0].machine, world.now, MANY).transfers
    assert pull.legs == ("P dp 0 tp 0: reading",)
    assert pull.age_s == pytest.approx(2.0)


def test_peer_and_link_are_shown_on_both_ends(world: World) -> None:
    world.p_workers[0].publish("t", (1,))
    world.d_workers[0].pull("t", world.p_address, (1,), (5,))
    world.run()
    consumer = take_snapshot(world.decode[0].machine, world.now, MANY)
    (peer,) = consumer.peers
    assert (peer.instance, peer.tp_rank, peer.tp_size, peer.state) == ("P", 0, 2, "up")
    (link,) = consumer.links
    assert (link.state, link.peer) == ("up", "P dp 0 tp 0")
    assert peer.address == f"{link.host} port {link.port}"
    (peer,) = take_snapshot(world.prefill[0].machine, world.now, MANY).peers
    assert (peer.instance, peer.tp_rank, peer.tp_size) == ("D", 0, 4)


def test_S1_lease_whose_reader_fell_silent_is_quarantined_with_its_bytes(world: World) -> None:
    producer, consumer = world.prefill[0], world.decode[0]
    world.p_workers[0].publish("t", (1, 2, 3))
    world.d_workers[0].pull("t", world.p_address, (1, 2, 3), (5, 6, 7))
    world.run(copies=False)
    assert take_counts(producer.machine).quarantined_transfers == 0
    world.cut.add(frozenset((producer.port, consumer.port)))
    for _ in range(120):
        world.pass_time(0.5)
        world.run(copies=False)
    snapshot = take_snapshot(producer.machine, world.now, MANY)
    (row,) = snapshot.quarantined
    assert (row.transfer_id, row.role, row.state) == ("t", "publish", "revoking")
    assert row.n_bytes == 3 * N_LAYERS * PIECE
    assert row.peers == ("D dp 0 tp 0",)
    assert (snapshot.counts.quarantined_transfers, snapshot.counts.quarantined_bytes) == (
        1,
        row.n_bytes,
    )
    (peer,) = snapshot.peers
    assert peer.state == "fencing"
    assert peer.silent_s > world.settings.link_timeout_s
    assert snapshot.leases == ()


def test_S1_reservation_whose_producer_fell_silent_is_quarantined(world: World) -> None:
    producer, consumer = world.prefill[0], world.decode[0]
    world.d_workers[0].reserve("t", world.p_address, (5, 6))
    world.p_workers[0].push("t", (1, 2))
    world.run(copies=False)
    world.cut.add(frozenset((producer.port, consumer.port)))
    for _ in range(60):
        world.pass_time(0.5)
        world.run(copies=False)
    (row,) = take_snapshot(consumer.machine, world.now, MANY).quarantined
    assert (row.role, row.n_bytes, row.peers) == (
        "reserve",
        2 * N_LAYERS * PIECE,
        ("P dp 0 tp 0",),
    )


def test_transfer_that_was_reported_but_has_acks_to_deliver_says_so(world: World) -> None:
    consumer = world.decode[0].machine
    world.p_workers[0].publish("t", (1,))
    world.d_workers[0].pull("t", world.p_address, (), ())  # nothing to read: received at once
    assert take_counts(consumer).transfers == {("pull", DELIVERING): 1}
    world.run()
    assert take_counts(consumer).transfers == {}


def test_limits_say_how_much_is_in_use(world: World) -> None:
    world.p_workers[0].publish("t", (1,))
    rows = {
        row.name: row for row in take_snapshot(world.prefill[0].machine, world.now, MANY).limits
    }
    assert rows["max_transfers"].used == 1
    assert rows["max_transfers"].limit == world.settings.max_transfers
    assert rows["max_clients"].used == 1
    assert rows["max_tombstones"].used is None


def test_early_claims_are_counted_also_when_they_were_given_up(world: World) -> None:
    producer = world.prefill[0].machine
    world.d_workers[0].pull("t", world.p_address, (1,), (5,))
    world.run()
    assert take_counts(producer).early_messages == 1
    world.cut.add(frozenset((world.prefill[0].port, world.decode[0].port)))  # no repeats
    for _ in range(40):
        world.pass_time(0.5)
        world.run()
    counts = take_counts(producer)
    assert (counts.early_messages, counts.early_dropped) == (0, 1)


def test_lists_are_cut_and_counts_are_whole(world: World) -> None:
    for block in range(8):
        world.p_workers[0].publish(f"t{block}", (block,))
    snapshot = take_snapshot(world.prefill[0].machine, world.now, 3)
    assert len(snapshot.transfers) == len(snapshot.leases) == 3
    assert snapshot.counts.transfers == {("publish", "open"): 8}
    assert snapshot.counts.leases_open == 8


def test_worker_is_shown_with_its_memory(world: World) -> None:
    (row,) = take_snapshot(world.prefill[0].machine, world.now, MANY).clients
    memory = world.p_workers[0].memory.nbytes
    assert (row.state, row.memory, row.registered_bytes) == ("attached", "registered", memory)
    assert (row.regions, row.layers, row.transfers) == (1, N_LAYERS, 0)
