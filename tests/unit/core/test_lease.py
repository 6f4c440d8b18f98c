"""READ, producer side: claims, acks, expiry, revocation. Cases A4 A5 A8 A10 G4 L4 L5 L8."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.core.fanin import TransferAck
from moriiod.core.lease import Lease
from moriiod.errors import PeerLost
from tests.support.lone import SETTINGS, FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import pack


class Producer:
    """A prefill rank with a worker, and the decode ranks that read it."""

    def __init__(self, size: int = 1, consumers: int = 1, **settings: float) -> None:
        self.lone = Lone(0, size, settings=replace(SETTINGS, **settings))
        self.worker = LoneWorker(self.lone)
        self.peers = [FarPeer(self.lone, rank, consumers).dial() for rank in range(consumers)]

    def publish(self, *blocks: int, name: str = "t", **more: object) -> Lease:
        request = req.Publish(name, (pack(*blocks),), **more)  # type: ignore[arg-type]
        assert self.worker.ask(request) == req.Done()
        return next(lease for lease in self.lone.machine.leases if lease.transfer_id == name)


@pytest.fixture
def one() -> Producer:
    return Producer()


@pytest.fixture
def pair() -> Producer:
    return Producer(consumers=2)


# --- Publishing -----------------------------------------------------------------------------------


def test_lease_is_as_long_as_asked_or_as_configured(one):
    assert one.publish(1, name="a").expires_at == 120.0
    assert one.publish(1, name="b", lease_s=2.5).expires_at == 102.5


def test_A10_live_id_belongs_to_its_first_owner(one):
    one.publish(1, 2)
    other = LoneWorker(one.lone)
    assert one.worker.ask(req.Publish("t", (pack(1, 2),))) == req.Done()  # the same: no-op
    assert one.worker.refusal(req.Publish("t", (pack(9),))).code == "ALREADY_EXISTS"
    assert other.refusal(req.Publish("t", (pack(1, 2),))).code == "ALREADY_EXISTS"
    assert len(one.lone.machine.leases) == 1


def test_G4_block_that_the_cache_does_not_have_is_refused_with_id_and_limit(one):
    refusal = one.worker.refusal(req.Publish("t", (pack(11, 12),)))
    assert refusal.code == "OUT_OF_RANGE"
    assert (refusal.fields["id"], refusal.fields["limit"]) == (12, 12)
    assert len(one.lone.machine.leases) == 0


def test_R2_published_size_that_is_no_multiple_is_refused_naming_both(one):
    worker = LoneWorker(Lone(0, 4))
    refusal = worker.refusal(req.Publish("t", (pack(1),), remote_tp_size=6))
    assert refusal.code == "INVALID_TOPOLOGY"
    assert refusal.fields == {"producer_tp_size": "4", "consumer_tp_size": "6"}


# --- Claims ---------------------------------------------------------------------------------------


def test_claim_of_published_blocks_is_granted_with_what_is_left_of_the_lease(one):
    lease = one.publish(1, 2, 3)
    one.lone.wait(5.0)
    (peer,) = one.peers
    granted = peer.claim("t", 3, 1, 3)
    assert granted.lease_id == lease.lease_id
    assert (granted.generation, granted.ttl_s) == (one.worker.generation, 15.0)


def test_repeated_claim_is_answered_again_and_counted_once(one):
    lease = one.publish(1)
    claim = msg.Claim("t", new_id(), True, (pack(1),))
    (peer,) = one.peers
    for _ in range(3):
        peer.say(claim)
        assert peer.got(msg.ClaimGranted).pull_id == claim.pull_id
    assert len(lease.claims) == 1
    assert len(one.lone.machine.leases) == 1


@pytest.mark.parametrize(
    ("claimed", "code"),
    [
        ((pack(4),), "OUT_OF_RANGE"),
        ((pack(1, 99),), "OUT_OF_RANGE"),
        ((), "LENGTH_MISMATCH"),
        ((pack(1), pack(1)), "LENGTH_MISMATCH"),
    ],
)
def test_rule_S5_claim_of_other_blocks_than_were_published_is_refused(one, claimed, code):
    lease = one.publish(1, 2)
    (peer,) = one.peers
    peer.say(msg.Claim("t", new_id(), True, claimed))
    assert peer.got(msg.ClaimRefused).error.code == code
    assert lease.claims == {}
    assert peer.claim("t", 2).transfer_id == "t"


def test_claim_that_reads_nothing_needs_no_blocks(one):
    one.publish(1, 2)
    (peer,) = one.peers
    granted = peer.claim("t", reads=False)
    peer.ack(granted)
    assert one.lone.ended == [("publish", "t", "released", "acked")]


def test_second_instance_cannot_claim_what_another_one_reads(one):
    one.publish(1)
    one.peers[0].claim("t", 1)
    stranger = FarPeer(one.lone, instance="other").dial()
    stranger.say(msg.Claim("t", new_id(), True, (pack(1),)))
    assert stranger.got(msg.ClaimRefused).error.code == "ALREADY_EXISTS"


def test_R2_rank_that_does_not_read_us_cannot_claim():
    producer = Producer(size=2, consumers=4)
    producer.publish(1)
    for rank, code in ((2, "INVALID_TOPOLOGY"), (3, "INVALID_TOPOLOGY")):
        producer.peers[rank].say(msg.Claim("t", new_id(), True, (pack(1),)))
        assert producer.peers[rank].got(msg.ClaimRefused).error.code == code
    assert producer.peers[1].claim("t", 1).transfer_id == "t"


def test_R2_consumer_whose_size_is_no_multiple_cannot_claim():
    producer = Producer(size=2, consumers=3)
    producer.publish(1)
    producer.peers[0].say(msg.Claim("t", new_id(), True, (pack(1),)))
    error = producer.peers[0].got(msg.ClaimRefused).error
    assert error.code == "INVALID_TOPOLOGY"
    assert error.fields == {"producer_tp_size": "2", "consumer_tp_size": "3"}


@pytest.mark.parametrize("published", [0, 1, 2])
def test_R1_size_of_the_handshake_decides_who_must_ack(published):
    producer = Producer(size=1, consumers=2)
    lease = producer.publish(1, remote_tp_size=published)
    granted = producer.peers[0].claim("t", 1)
    assert ("tp_size_disagrees" in producer.lone.problems) == (published == 1)
    assert lease.fan_in.pending() == {0, 1}
    producer.peers[0].ack(granted)
    assert producer.lone.ended == []
    producer.peers[1].ack(producer.peers[1].claim("t", 1))
    assert producer.lone.ended == [("publish", "t", "released", "acked")]


# --- Early claims ---------------------------------------------------------------------------------


def test_A4_claim_before_the_publish_is_granted_by_it(pair):
    claims = [msg.Claim("t", new_id(), True, (pack(1),)) for _ in pair.peers]
    for peer, claim in zip(pair.peers, claims, strict=True):
        peer.say(claim)
        peer.say(claim)
        assert pair.lone.sent == []
    assert pair.lone.machine.leases.early_claims == 2
    pair.publish(1)
    for peer, claim in zip(pair.peers, claims, strict=True):
        assert peer.got(msg.ClaimGranted).pull_id == claim.pull_id
    assert pair.lone.machine.leases.early_claims == 0


def test_A4_claim_of_a_transfer_that_is_never_published_is_refused_in_time(one):
    (peer,) = one.peers
    claim = msg.Claim("t", new_id(), True, (pack(1),))
    peer.say(claim)
    one.lone.wait(7.9)
    assert peer.heard(msg.ClaimRefused) == []
    one.lone.wait(0.1)
    refused = peer.got(msg.ClaimRefused)
    assert (refused.pull_id, refused.error.code) == (claim.pull_id, "UNKNOWN_TRANSFER")
    assert one.lone.machine.leases.early_dropped == 1


def test_A5_claims_beyond_the_limit_are_refused_at_once_and_counted():
    producer = Producer(max_early=2)
    (peer,) = producer.peers
    for name in "ab":
        peer.say(msg.Claim(name, new_id(), True, (pack(1),)))
    peer.say(msg.Claim("c", new_id(), True, (pack(1),)))
    assert peer.got(msg.ClaimRefused).error.code == "UNKNOWN_TRANSFER"
    assert producer.lone.problems == ["early_buffer_full"]
    producer.publish(1, name="a")
    assert peer.got(msg.ClaimGranted).transfer_id == "a"


def test_claim_after_the_end_is_told_why_it_ended(one):
    one.publish(1, lease_s=1.0)
    one.lone.wait(1.0)
    (peer,) = one.peers
    peer.say(msg.Claim("t", new_id(), True, (pack(1),)))
    assert peer.got(msg.ClaimRefused).error.code == "LEASE_EXPIRED"
    one.publish(1)
    peer.ack(peer.claim("t", 1))
    peer.say(msg.Claim("t", new_id(), True, (pack(1),)))
    assert peer.got(msg.ClaimRefused).error.code == "UNKNOWN_TRANSFER"


# --- Acks -----------------------------------------------------------------------------------------


def test_ack_is_confirmed_and_repeats_are_confirmed_alike(one):
    one.publish(1)
    (peer,) = one.peers
    granted = peer.claim("t", 1)
    for expected in (1, 0, 0):
        peer.ack(granted)
        assert peer.got(msg.AckConfirmed) == msg.AckConfirmed("t", granted.pull_id, True)
        assert len(one.lone.ended) == expected


def test_A1_ack_of_one_rank_leaves_the_others_pending(pair):
    lease = pair.publish(1)
    grants = [peer.claim("t", 1) for peer in pair.peers]
    pair.peers[1].ack(grants[1])
    pair.peers[1].ack(grants[1])
    assert lease.fan_in.pending() == {0}
    assert pair.lone.ended == []
    pair.peers[0].ack(grants[0])
    assert pair.lone.ended == [("publish", "t", "released", "acked")]


def test_release_waits_for_every_claim_also_when_the_set_is_complete(one):
    """A second attempt of the same rank may still be reading."""
    one.publish(1)
    (peer,) = one.peers
    first, second = peer.claim("t", 1), peer.claim("t", 1)
    peer.ack(first)
    assert one.lone.ended == []
    peer.ack(second)
    assert one.lone.ended == [("publish", "t", "released", "acked")]


def test_ack_in_the_name_of_another_rank_is_counted_and_ignored(pair):
    lease = pair.publish(1)
    granted = pair.peers[0].claim("t", 1)
    for rank, size in ((1, 2), (0, 1)):
        ack = msg.Ack("t", granted.pull_id, granted.lease_id, rank, size, True)
        pair.peers[0].say(ack)
        assert pair.lone.effects == (ef.CountProblem("ack_not_of_sender", "t"),)
    assert lease.fan_in.pending() == {0, 1}


def test_rule_S3_ack_of_an_older_lease_of_the_same_name_does_not_count(one):
    one.publish(1)
    (peer,) = one.peers
    old = peer.claim("t", 1)
    one.worker.send(req.Abort("t", "publish"))
    peer.ack(old, ok=False)
    lease = one.publish(1)
    peer.ack(old)
    assert peer.got(msg.AckConfirmed).valid is False
    assert lease.fan_in.pending() == {0}


def test_rule_S3_ack_without_a_claim_confirms_nothing(one):
    lease = one.publish(1)
    (peer,) = one.peers
    peer.say(msg.Ack("t", new_id(), lease.lease_id, 0, 1, True))
    assert peer.got(msg.AckConfirmed).valid is False
    assert lease.fan_in.pending() == {0}
    assert one.lone.ended == []


def test_rule_S3_validity_of_old_acks_is_remembered_up_to_a_limit():
    producer = Producer(max_tombstones=1)
    (peer,) = producer.peers
    producer.publish(1, name="a")
    first = peer.claim("a", 1)
    peer.ack(first)
    producer.publish(1, name="b")
    second = peer.claim("b", 1)
    peer.ack(second)
    peer.ack(second)
    assert peer.got(msg.AckConfirmed).valid is True
    peer.ack(first)
    assert peer.got(msg.AckConfirmed).valid is False


def test_consumer_that_gave_up_makes_the_end_aborted(one):
    one.publish(1)
    (peer,) = one.peers
    peer.ack(peer.claim("t", 1), ok=False)
    assert one.lone.ended == [("publish", "t", "released", "aborted")]


# --- Acks of old peers ----------------------------------------------------------------------------


def legacy(producer: Producer, ack: TransferAck) -> None:
    producer.lone.step(ev.LegacyAckReceived(ack))


def test_A7_ack_of_an_old_peer_that_cannot_be_is_counted_and_ignored():
    producer = Producer(size=4)
    lease = producer.publish(1)
    for size in (6, 0, -8, "eight", True, 2**40):
        legacy(producer, TransferAck("t", size, None, "c", states_size=True))  # type: ignore[arg-type]
        assert producer.lone.problems == ["ack_invalid"]
    assert lease.is_open
    legacy(producer, TransferAck.release("t", 8, "a"))
    legacy(producer, TransferAck.release("t", 8, "b"))
    assert producer.lone.ended == [("publish", "t", "released", "acked")]


def test_A7_early_ack_of_an_old_peer_that_cannot_be_is_counted_and_not_kept():
    producer = Producer(size=4)
    legacy(producer, TransferAck("t", 0, None, "c", states_size=True))
    assert producer.lone.problems == ["ack_invalid"]
    assert len(producer.lone.machine.leases.early_acks) == 0


def test_A4_early_acks_of_old_peers_are_kept_counted_once_and_given_up_in_time(one):
    legacy(one, TransferAck.plain("t", "c"))
    legacy(one, TransferAck.plain("t", "c"))
    legacy(one, TransferAck.plain("u", "c"))
    assert len(one.lone.machine.leases.early_acks) == 2
    one.worker.send(req.Publish("t", (pack(1),)))
    assert one.lone.ended == [("publish", "t", "released", "acked")]
    one.lone.wait(8.0)
    assert len(one.lone.machine.leases.early_acks) == 0
    assert one.lone.machine.leases.early_dropped == 1
    assert one.lone.machine.next_deadline() is not None  # only the peer is watched


def test_A5_repeats_for_a_transfer_that_was_released_are_not_kept(one):
    one.publish(1)
    for _ in range(3):
        legacy(one, TransferAck.plain("t", "c"))
    assert len(one.lone.machine.leases.early_acks) == 0


# --- Renewal --------------------------------------------------------------------------------------


def test_L8_renewal_answers_what_is_kept_and_what_is_unknown_and_never_shortens(one):
    lease = one.publish(1)
    unclaimed = one.publish(2, name="u")
    (peer,) = one.peers
    granted = peer.claim("t", 1)
    one.lone.wait(4.0)
    stale = ("t", new_id())
    not_ours = ("u", unclaimed.lease_id)
    peer.say(msg.Renew((("t", granted.lease_id), stale, ("x", new_id()), not_ours)))
    renewed = peer.got(msg.Renewed)
    assert renewed.leases == (("t", granted.lease_id, 20.0),)
    assert [name for name, _ in renewed.unknown] == ["t", "x", "u"]
    assert one.lone.problems == ["renew_unknown"]
    assert lease.expires_at == 124.0
    assert unclaimed.expires_at == 120.0


def test_L4_lease_that_is_renewed_does_not_expire(one):
    one.publish(1, lease_s=2.0)
    (peer,) = one.peers
    granted = peer.claim("t", 1)
    for _ in range(10):
        one.lone.wait(1.5)
        peer.say(msg.Renew((("t", granted.lease_id),)))
    assert one.lone.ever_sent(msg.Revoke) == []
    peer.ack(granted)
    assert one.lone.ended == [("publish", "t", "released", "acked")]


# --- Revocation -----------------------------------------------------------------------------------


def test_rule_S1_expiry_revokes_and_waits_for_who_may_be_reading(one):
    lease = one.publish(1, lease_s=1.0)
    (peer,) = one.peers
    granted = peer.claim("t", 1)
    one.lone.wait(1.0)
    revoke = peer.got(msg.Revoke)
    assert (revoke.pull_id, revoke.lease_id) == (granted.pull_id, granted.lease_id)
    assert revoke.error.code == "LEASE_EXPIRED"
    assert lease.state == "revoking"
    one.lone.wait(3.0)
    assert peer.heard(msg.Revoke)  # repeated
    assert one.lone.ended == []
    peer.say(msg.Renew((("t", granted.lease_id),)))
    assert peer.got(msg.Renewed).unknown == (("t", granted.lease_id),)
    peer.ack(granted)
    assert peer.got(msg.AckConfirmed).valid is False
    assert one.lone.ended == [("publish", "t", "failed", "LEASE_EXPIRED")]
    assert one.lone.machine.peers.outbox.count() == 0


def test_claim_that_comes_while_the_lease_is_revoked_is_refused(pair):
    pair.publish(1)
    pair.peers[0].claim("t", 1)
    pair.worker.send(req.Abort("t", "publish"))
    pair.peers[1].say(msg.Claim("t", new_id(), True, (pack(1),)))
    assert pair.peers[1].got(msg.ClaimRefused).error.code == "ABORTED"
    pair.worker.send(req.Abort("t", "publish"))  # again: nothing more to do
    assert pair.lone.sent == []


def test_claim_that_was_acked_cannot_be_claimed_again(pair):
    pair.publish(1)
    claim = msg.Claim("t", new_id(), True, (pack(1),))
    pair.peers[0].say(claim)
    pair.peers[0].ack(pair.peers[0].got(msg.ClaimGranted))
    pair.peers[0].say(claim)
    assert pair.peers[0].got(msg.ClaimRefused).error.code == "LEASE_EXPIRED"


def test_abort_by_the_worker_is_a_release_and_waits_for_the_readers(one):
    one.publish(1)
    (peer,) = one.peers
    granted = peer.claim("t", 1)
    one.worker.send(req.Abort("t", "publish"))
    assert peer.got(msg.Revoke).error.code == "ABORTED"
    one.lone.wait(3.0)
    peer.beat()
    assert one.lone.ever(ef.SendEvent) == []
    peer.ack(granted, ok=False)
    assert one.lone.ended == [("publish", "t", "released", "aborted")]


def test_rule_S1_silent_reader_is_fenced_and_the_lease_ends_only_with_the_proof(one):
    one.publish(1)
    (peer,) = one.peers
    peer.claim("t", 1)
    one.lone.wait(4.0)
    assert one.lone.of(ef.FencePeer) == [ef.FencePeer(peer.epoch)]
    one.lone.wait(50.0)
    assert one.lone.ended == []
    one.lone.step(ev.PeerFenced(peer.epoch))
    assert [outcome for _, _, outcome, _ in one.lone.ended] == ["failed"]
    # Should it come back, it must know that the lease is over before it may reach us again.
    assert peer.last(msg.Revoke).transfer_id == "t"


def test_rule_S1_lease_that_is_revoked_while_its_reader_is_silent_asks_for_the_fence(one):
    one.publish(1)
    (peer,) = one.peers
    peer.claim("t", 1)
    known = one.lone.machine.peers.get(peer.epoch)
    assert known is not None
    known.is_up = False
    one.worker.send(req.Abort("t", "publish"))
    assert one.lone.of(ef.FencePeer) == [ef.FencePeer(peer.epoch)]
    one.lone.step(ev.PeerFenced(peer.epoch))
    assert one.lone.ended == [("publish", "t", "released", "aborted")]


def test_goodbye_of_a_reader_ends_all_its_claims(one):
    one.publish(1, name="a")
    one.publish(1, name="b")
    (peer,) = one.peers
    peer.claim("a", 1)
    peer.claim("b", 1)
    peer.say(msg.Goodbye())
    assert one.lone.ended == [
        ("publish", "a", "failed", "ABORTED"),
        ("publish", "b", "failed", "ABORTED"),
    ]
    assert one.lone.of(ef.FencePeer) == []


def test_claim_that_is_over_asks_for_no_fence(one):
    lease = one.publish(1)
    (peer,) = one.peers
    peer.ack(peer.claim("t", 1))
    (claim,) = lease.claims.values()
    claim.peer_lost(PeerLost("late"))
    claim.peer_forgotten()
    one.lone.wait(0.0)
    assert one.lone.effects == ()


def test_reader_that_is_silent_for_ever_is_not_forgotten_while_it_may_be_reading(one):
    one.publish(1)
    (peer,) = one.peers
    peer.claim("t", 1)
    one.lone.wait(1000.0)
    assert one.lone.machine.peers.get(peer.epoch) is not None
    assert [lease.state for lease in one.lone.machine.leases] == ["revoking"]


def test_early_claim_of_a_peer_that_fell_silent_is_fenced_when_it_is_granted(one):
    (peer,) = one.peers
    peer.say(msg.Claim("t", new_id(), True, (pack(1),)))
    one.lone.wait(5.0)
    one.publish(1)
    assert one.lone.of(ef.FencePeer) == [ef.FencePeer(peer.epoch)]


def test_worker_that_is_lost_ends_its_leases(one):
    one.publish(1)
    (peer,) = one.peers
    granted = peer.claim("t", 1)
    one.lone.step(ev.WorkerDied(one.worker.generation))
    assert peer.got(msg.Revoke).error.code == "WORKER_LOST"
    assert one.lone.of(ef.ReleaseMemory) == []
    peer.ack(granted, ok=False)
    assert one.lone.one(ef.ReleaseMemory).generation == one.worker.generation
