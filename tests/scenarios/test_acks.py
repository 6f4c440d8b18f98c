"""Who must say that it is done before blocks are free, played out. Cases A1 A4 A5 A7 A8 A9 A10."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.core.fanin import TransferAck
from moriiod.core.snapshot import take_counts, take_snapshot
from tests.support.lone import SETTINGS, FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import pack
from tests.support.world_helpers import Story

ACKED = ("publish", "t", "released", "acked")


def pending(story: Story, rank: int = 0) -> tuple[int, ...]:
    (row,) = take_snapshot(story.prefill[rank].machine, story.now, 9).transfers
    return row.pending_ack_ranks


# --- A1 -----------------------------------------------------------------------------------------


def test_A1_prefill_4_to_decode_8_releases_with_the_second_of_two_ranks():
    story = Story(4, 8)
    for worker in story.p_workers:
        worker.publish("t", (1, 2))
    story.d_workers[0].pull("t", story.p_address, (1, 2), (5, 6))
    story.run()
    assert story.outcomes_of(story.d_workers[0]) == [("received", "acked")]
    assert story.ends(story.p) == []
    assert pending(story) == (1,)
    story.d_workers[1].pull("t", story.p_address, (1, 2), (5, 6))
    story.run()
    assert story.ends(story.p) == [ACKED]


@pytest.mark.parametrize(
    ("prefill", "decode", "needed"), [(2, 8, 4), (1, 8, 8), (8, 8, 1), (8, 4, 1), (4, 8, 2)]
)
def test_A1_release_needs_exactly_the_ranks_that_read(prefill, decode, needed):
    story = Story(prefill, decode)
    for worker in story.p_workers:
        worker.publish("t", (1,))
    for n, worker in enumerate(story.d_workers, start=1):
        assert len(story.ends(story.p)) == (n > needed)
        worker.pull("t", story.p_address, (1,), (5,))
        story.run()
    assert story.ends(*story.p_workers) == [ACKED] * prefill


def test_A1_one_rank_that_acks_many_times_is_one_rank():
    story = Story(1, 2)
    story.p.publish("t", (1,))
    story.d_workers[0].pull("t", story.p_address, (1,), (5,))
    story.run_but(msg.Ack)
    for _ in range(20):
        story.deliver_one(msg.Ack, keep=True)
    story.run()
    assert story.ends(story.p) == []
    assert pending(story) == (1,)


# --- A4 -----------------------------------------------------------------------------------------


def release(story: Story, rank: int, size: int = 8, name: str = "t9") -> None:
    """An ACK of an old peer's rank: its structured release, which states a size and no rank."""
    ack = TransferAck.release(name, size, f"connection {rank}")
    story.prefill[0].step(ev.LegacyAckReceived(ack))


@pytest.mark.parametrize("before", [(0, 1), (0,), (0, 1, 0, 1, 1)])
def test_A4_acks_that_come_before_the_publish_count_once_each(before):
    story = Story(4, 8)
    for rank in before:
        release(story, rank)
    story.pass_time(0.05)
    story.p.publish("t9", (1,))
    if 1 not in before:
        assert story.ends(story.p) == []
        release(story, 1)
    assert story.ends(story.p) == [("publish", "t9", "released", "acked")]
    release(story, 0)
    release(story, 1)
    story.run()
    assert len(story.p.ended) == 1
    assert take_counts(story.prefill[0].machine).early_messages == 0


@pytest.mark.parametrize("early", [0, 1, 2])
def test_A4_pull_that_comes_before_the_publish_waits_for_it(early):
    story = Story(1, 2)
    for worker in story.d_workers[:early]:
        worker.pull("t", story.p_address, (1,), (5,))
    story.live_for(3.0)
    assert story.ends() == []
    assert take_counts(story.prefill[0].machine).early_messages == early
    story.p.publish("t", (1,))
    for worker in story.d_workers[early:]:
        worker.pull("t", story.p_address, (1,), (5,))
    start = story.now
    story.run()
    assert story.now == start
    assert story.ends(story.p) == [ACKED]
    assert story.outcomes_of(*story.d_workers) == [("received", "acked")] * 2


def test_A4_publish_that_never_comes_fails_the_pull_and_nothing_stays():
    story = Story()
    story.d.pull("t", story.p_address, (1,), (5,))
    story.live_for(9.0)
    assert story.outcomes_of(story.d) == [("failed", "UNKNOWN_TRANSFER")]
    assert take_counts(story.prefill[0].machine).early_messages == 0
    story.assert_empty()


# --- A5 -----------------------------------------------------------------------------------------


def test_A5_flood_of_acks_for_unknown_ids_is_bounded_counted_and_delays_nobody():
    lone = Lone(settings=replace(SETTINGS, max_early=4096, early_ttl_s=30.0))
    worker = LoneWorker(lone)
    machine = lone.machine
    for i in range(100_000):
        lone.now = 100.0 + i / 10_000
        machine.step(ev.LegacyAckReceived(TransferAck.plain(f"never-{i}", "c")), lone.now)
    assert machine.leases.early_dropped == 100_000 - 4096
    assert take_counts(machine).early_messages == 4096
    assert len(machine.ctx.timers) == 1
    assert len(machine.ctx.timers._heap) < 100

    worker.send(req.Publish("real", (pack(1),)))
    lone.step(ev.LegacyAckReceived(TransferAck.plain("real", "c")))
    assert lone.ended == [("publish", "real", "released", "acked")]
    for _ in range(1_000):
        assert lone.step(ev.LegacyAckReceived(TransferAck.plain("real", "c"))) == ()
    assert take_counts(machine).early_messages == 4096
    lone.wait(40.0)
    assert take_counts(machine).early_messages == 0
    assert take_counts(machine).early_dropped == 100_000


def test_A5_peers_acks_and_claims_for_unknown_ids_are_answered_and_not_kept():
    lone = Lone(settings=replace(SETTINGS, max_early=100))
    worker = LoneWorker(lone)
    peer = FarPeer(lone).dial()
    for i in range(2_000):
        peer.say(msg.Ack(f"never-{i}", new_id(), new_id(), 0, 1, True))
        assert peer.got(msg.AckConfirmed).valid is False
        peer.say(msg.Claim(f"never-{i}", new_id(), True, (pack(1),)))
        assert bool(peer.heard(msg.ClaimRefused)) == (i >= 100)
    assert take_counts(lone.machine).early_messages == 100
    assert lone.machine.peers.outbox.count() == 0
    worker.send(req.Publish("t", (pack(1),)))
    granted = peer.claim("t", 1)
    for expected in (True, False):
        peer.ack(granted)
        assert (lone.ended == [ACKED]) == expected
        assert peer.got(msg.AckConfirmed).valid is True


# --- A7 -----------------------------------------------------------------------------------------


def test_A7_bad_consumer_size_is_counted_and_the_transfer_lives_on():
    story = Story(4, 8)
    daemon = story.prefill[0]
    story.p.publish("t", (1,), remote_tp_size=8)
    for bad in (6, 0, -8, "eight", True, 2**40):
        ack = TransferAck("t", bad, None, "c", states_size=True)  # type: ignore[arg-type]
        daemon.step(ev.LegacyAckReceived(ack))
    assert daemon.problems == ["ack_invalid"] * 6
    assert pending(story) == (0, 1)
    release(story, 0, name="t")
    release(story, 1, name="t")
    assert story.ends(story.p) == [ACKED]
    assert daemon.problems == ["ack_invalid"] * 6


def test_A7_ack_without_a_size_is_one_distinct_ack_and_not_enough_for_two():
    story = Story(4, 8)
    daemon = story.prefill[0]
    story.p.publish("t", (1,), remote_tp_size=8)
    for _ in range(3):
        daemon.step(ev.LegacyAckReceived(TransferAck.plain("t", "one connection")))
    assert story.ends(story.p) == []
    daemon.step(ev.LegacyAckReceived(TransferAck.plain("t", "another connection")))
    assert story.ends(story.p) == [ACKED]


# --- A8 -----------------------------------------------------------------------------------------


def terminal(lone: Lone) -> list[tuple[str, str]]:
    return [(e.body.outcome, e.body.reason) for e in lone.ever(ef.SendEvent)]


@pytest.mark.parametrize("acks_first", [True, False])
@pytest.mark.parametrize("after_s", [0.999, 1.000, 1.001])
def test_A8_ack_and_expiry_in_one_tick_end_the_transfer_once(after_s, acks_first):
    for i in range(200):
        lone = Lone(0, 4)
        lone.now = 100.0 + i * 0.1  # 200 different roundings
        worker = LoneWorker(lone)
        peers = [FarPeer(lone, rank, 8).dial() for rank in range(2)]
        worker.send(req.Publish("t", (pack(1),), lease_s=1.0))
        grants = [peer.claim("t", 1) for peer in peers]
        peers[0].ack(grants[0])
        if acks_first:
            lone.now += after_s
        else:
            lone.wait(after_s)
        peers[1].ack(grants[1])
        lone.wait(1.0)
        (end,) = terminal(lone)
        in_time = after_s < 1.0 or acks_first
        assert end == (("released", "acked") if in_time else ("failed", "LEASE_EXPIRED"))
        peers[1].ack(grants[1])
        assert peers[1].got(msg.AckConfirmed).valid is in_time
        assert len(terminal(lone)) == 1
        if acks_first and after_s > 1.0:
            break  # a late timer: nobody has said yet that the lease is over


@pytest.mark.parametrize("after_s", [0.999, 1.000, 1.001])
def test_A8_old_peers_ack_and_expiry_in_one_tick_end_the_transfer_once(after_s):
    for i in range(200):
        lone = Lone(0, 4)
        lone.now = 100.0 + i * 0.1
        worker = LoneWorker(lone)
        worker.send(req.Publish("t", (pack(1),), lease_s=1.0))
        lone.step(ev.LegacyAckReceived(TransferAck.release("t", 8, "a")))
        lone.wait(after_s)
        lone.step(ev.LegacyAckReceived(TransferAck.release("t", 8, "b")))
        lone.wait(1.0)
        assert terminal(lone) == [
            ("released", "acked") if after_s < 1.0 else ("failed", "LEASE_EXPIRED")
        ]


def test_A8_what_was_counted_before_the_expiry_does_not_count_for_the_next_one_of_that_name():
    lone = Lone(0, 4)
    worker = LoneWorker(lone)
    peers = [FarPeer(lone, rank, 8).dial() for rank in range(2)]
    worker.send(req.Publish("t", (pack(1),), lease_s=1.0))
    old = [peer.claim("t", 1) for peer in peers]
    peers[0].ack(old[0])
    lone.wait(1.0)
    peers[1].ack(old[1], ok=False)
    assert terminal(lone) == [("failed", "LEASE_EXPIRED")]

    worker.send(req.Publish("t", (pack(1),), lease_s=5.0))
    granted = peers[1].claim("t", 1)
    peers[1].ack(granted)
    for peer, late in zip(peers, old, strict=True):
        peer.ack(late)  # late copies from the first time
    assert len(terminal(lone)) == 1
    peers[0].ack(peers[0].claim("t", 1))
    assert terminal(lone) == [("failed", "LEASE_EXPIRED"), ("released", "acked")]


def test_A8_old_peers_partial_count_is_gone_with_its_lease():
    lone = Lone(0, 4)
    worker = LoneWorker(lone)
    worker.send(req.Publish("t", (pack(1),), lease_s=1.0))
    lone.step(ev.LegacyAckReceived(TransferAck.release("t", 8, "a")))
    lone.wait(1.0)
    worker.send(req.Publish("t", (pack(1),), lease_s=1.0))
    lone.step(ev.LegacyAckReceived(TransferAck.release("t", 8, "b")))
    assert terminal(lone) == [("failed", "LEASE_EXPIRED")]
    lone.step(ev.LegacyAckReceived(TransferAck.release("t", 8, "a")))
    assert terminal(lone) == [("failed", "LEASE_EXPIRED"), ("released", "acked")]


# --- A9 -----------------------------------------------------------------------------------------

IDS = (
    "tx-6f1c1c52-7f3e-4c1e-9d3a-2f1f6b0d9a11",
    "cmpl-abc-0-1a2b3c4d",
    "0123456789abcdef",
    "abc",
    "abc-deadbeef",
    "abc-deadbeefX",
    "abcdef",
    "abc:tp3",
)


def test_A9_only_the_exact_id_is_acknowledged_whatever_it_looks_like():
    story = Story()
    daemon = story.prefill[0]
    for i, name in enumerate(IDS):
        story.p.publish(name, (i,))
    for name in ("abc-", "abc-deadbee", "ABC", " abc", "abc:tp", "tp3", "cmpl-abc-0"):
        daemon.step(ev.LegacyAckReceived(TransferAck.plain(name, "c")))
    assert story.ends(story.p) == []
    for done, name in enumerate(IDS, start=1):
        daemon.step(ev.LegacyAckReceived(TransferAck.plain(name, "c")))
        assert [e.transfer_id for e in story.p.ended] == list(IDS[:done])


@pytest.mark.parametrize(("published", "pulled"), list(itertools.permutations(IDS[3:7], 2)))
def test_A9_only_the_exact_id_is_read(published, pulled):
    story = Story()
    story.p.publish(published, (1,))
    story.d.pull(pulled, story.p_address, (1,), (5,))
    story.live_for(9.0)
    assert story.outcomes_of(story.d) == [("failed", "UNKNOWN_TRANSFER")]
    assert story.ends(story.p) == []


# --- A10 ----------------------------------------------------------------------------------------


def test_A10_second_request_under_a_live_id_is_refused_and_steals_nothing():
    lone = Lone()
    first, second = LoneWorker(lone, name="first"), LoneWorker(lone, name="second")
    peer = FarPeer(lone).dial()
    mine = req.Publish("t1", (pack(1, 2, 3, 4),))
    assert first.ask(mine) == req.Done()
    for worker in (first, second):
        refusal = worker.refusal(req.Publish("t1", (pack(9, 10, 11),)))
        assert refusal.code == "ALREADY_EXISTS"
    assert first.ask(mine) == req.Done()  # its own owner repeats it: a no-op
    assert len(lone.machine.leases) == 1

    peer.say(msg.Claim("t1", new_id(), True, (pack(9),)))
    assert peer.got(msg.ClaimRefused).error.code == "OUT_OF_RANGE"
    peer.ack(peer.claim("t1", 1, 4))
    (told,) = lone.of(ef.SendEvent)
    assert told.route == first.route
    assert second.ask(req.Publish("t1", (pack(9, 10, 11),))) == req.Done()
    assert peer.claim("t1", 9).generation == second.generation
