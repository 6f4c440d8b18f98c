"""Aborts, deadlines, leases, renewals and stopping, played out. Cases L2 L3 L4 L5 L8 L9."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.core.snapshot import take_snapshot
from tests.support.lone import FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import N_LAYERS, SETTINGS, pack
from tests.support.world_helpers import Story

# --- L2 -----------------------------------------------------------------------------------------


def test_L2_reject_before_anything_was_allocated_releases_the_producer_at_once():
    story = Story(2, 4)
    for worker in story.p_workers:
        worker.publish("t1", (1, 2))
    for worker in story.d_workers:
        assert worker.ask(req.Reject("t1", story.p_address)) == req.Done()
    start = story.now
    story.run()
    assert story.now == start
    assert story.outcomes_of(*story.p_workers) == [("released", "aborted")] * 2
    assert story.ends(*story.d_workers) == []
    story.assert_empty()


def test_L2_reject_that_comes_before_the_publish_releases_it_as_soon_as_it_is_there():
    story = Story()
    story.d.ask(req.Reject("t1", story.p_address))
    story.live_for(1.0)
    story.p.publish("t1", (1,))
    story.run()
    assert story.outcomes_of(story.p) == [("released", "aborted")]
    story.assert_empty()


@pytest.mark.parametrize("published", [True, False])
def test_L2_both_sides_of_a_read_abort(published):
    story = Story()
    if published:
        story.p.publish("t1", (1,))
    story.d.pull("t1", story.p_address, (1,), (5,))
    story.run(copies=False)
    story.d.ask(req.Abort("t1", "pull"))
    if published:
        story.p.ask(req.Abort("t1", "publish"))
    story.live_for(1.0)
    assert story.outcomes_of(story.d) == [("failed", "ABORTED")]
    assert story.outcomes_of(story.p) == [("released", "aborted")] * published
    story.live_for(9.0)
    story.assert_empty()


def test_L2_consumer_that_aborts_its_reservation_releases_a_push_that_has_not_begun():
    story = Story()
    story.p.push("t1", (1,))
    story.d.reserve("t1", story.p_address, (5,))
    story.run()
    start = story.now
    story.d.ask(req.Abort("t1", "reserve"))
    story.run()
    assert story.now == start
    assert story.ends() == [
        ("push", "t1", "released", "aborted"),
        ("reserve", "t1", "failed", "ABORTED"),
    ]
    story.assert_empty()


def test_L2_both_sides_of_a_write_abort_at_once():
    story = Story()
    story.p.push("t1", (1,))
    story.d.reserve("t1", story.p_address, (5,))
    story.run()
    story.d.ask(req.Abort("t1", "reserve"))
    story.p.ask(req.Abort("t1", "push"))
    story.run()
    assert story.ends() == [
        ("push", "t1", "failed", "ABORTED"),
        ("reserve", "t1", "failed", "ABORTED"),
    ]
    story.assert_empty()


def test_L2_late_write_for_an_aborted_reservation_is_dropped():
    story = Story()
    story.p.push("t1", (1,))
    story.d.reserve("t1", story.p_address, (5,))
    story.run_but(msg.Grant)
    story.d.ask(req.Abort("t1", "reserve"))
    story.run_but(msg.Grant)  # the revocation overtakes the grant
    assert story.outcomes_of(story.d) == [("failed", "ABORTED")]
    story.p.ask(req.LayerReady("t1", tuple(range(N_LAYERS))))
    story.run(copies=False)
    assert not story.ops
    story.p.ask(req.Abort("t1", "push"))
    story.live_for(1.0)
    story.assert_empty()


# --- L3 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("alloc_at", [1.9, 2.0, 2.1, 10.0])
def test_L3_grant_after_the_pushs_deadline_starts_no_write_and_is_answered_at_once(alloc_at):
    story = Story()
    story.p.push("t", (1,), timeout_s=2.0)
    story.p.ask(req.LayerReady("t", tuple(range(N_LAYERS))))
    story.p.ask(req.Seal("t", N_LAYERS))
    before = story.d.memory[:, 5].copy()
    story.live_for(alloc_at)
    story.d.reserve("t", story.p_address, (5,))
    start = story.now
    if alloc_at < 2.0:
        story.run()
        assert story.ends() == [
            ("push", "t", "released", "acked"),
            ("reserve", "t", "received", "acked"),
        ]
        return
    story.run_but(msg.WriteFailed)
    assert not story.ops
    assert (story.d.memory[:, 5] == before).all()
    story.run()
    assert story.now == start
    assert story.ends() == [
        ("push", "t", "failed", "TIMED_OUT"),
        ("reserve", "t", "failed", "TIMED_OUT"),
    ]
    story.live_for(20.0)
    assert len(story.p.ended) == 1  # the source was given back once
    story.assert_empty()


# --- L4 -----------------------------------------------------------------------------------------


def test_L4_read_that_outlasts_the_lease_keeps_it_while_the_reader_lives():
    story = Story()
    story.p.publish("t", (1,), lease_s=2.0)
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run(copies=False)
    story.live_for(5.0, copies=False)
    assert story.times_said(msg.Revoke) == 0
    assert story.ends() == []
    story.run()
    assert story.outcomes_of() == [("released", "acked"), ("received", "acked")]


def test_L4_reader_that_is_alive_but_does_not_renew_is_revoked_shown_and_waited_for():
    story = Story()
    story.p.publish("t", (1,), lease_s=2.0)
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run(copies=False)
    story.live_for(6.0, msg.Renew, copies=False)
    assert story.ends() == []
    (row,) = take_snapshot(story.prefill[0].machine, story.now, 9).quarantined
    assert (row.role, row.state, row.peers) == ("publish", "revoking", ("D dp 0 tp 0",))
    story.run()
    assert story.outcomes_of() == [("failed", "LEASE_EXPIRED")] * 2
    story.assert_empty()


def test_L4_reader_that_dies_frees_the_blocks_only_when_it_cannot_read_any_more():
    story = Story()
    story.p.publish("t", (1,), lease_s=2.0)
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run(copies=False)
    reader = story.decode[0]
    reader.is_stopped = True  # alive, reading, and saying nothing
    story.live_for(30.0, copies=False)
    assert story.ends(story.p) == []
    assert reader.epoch in story.prefill[0].fences  # the engine was asked for proof
    story.kill_daemon(reader)  # now nothing of it can touch our memory
    story.run(copies=False)
    assert story.outcomes_of(story.p) == [("failed", "LEASE_EXPIRED")]


# --- L5 -----------------------------------------------------------------------------------------


def read_from(story: Story, begins_at: float, ends_at: float, *lost: type[msg.PeerBody]) -> None:
    """Publish for one second; the read begins and ends so long after that."""
    published = story.now
    story.p.publish("t", (1,), lease_s=1.0)
    story.live_for(begins_at, *lost)
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run_but(*lost, copies=False)
    story.live_for(published + ends_at - story.now, *lost, copies=False)
    story.run()


def test_L5_read_within_the_lease_succeeds():
    story = Story()
    read_from(story, 0.5, 0.9)
    assert story.outcomes_of() == [("released", "acked"), ("received", "acked")]


def test_L5_read_that_begins_within_the_lease_extends_it():
    story = Story()
    read_from(story, 0.9, 1.4)
    assert story.times_said(msg.Renew) > 0
    assert story.outcomes_of() == [("released", "acked"), ("received", "acked")]


def test_L5_read_that_cannot_extend_the_lease_fails_when_it_ends_too_late():
    story = Story()
    read_from(story, 0.9, 1.4, msg.Renew)
    assert story.outcomes_of() == [("failed", "LEASE_EXPIRED")] * 2
    assert story.d.ended[0].n_bytes == 0


def test_L5_read_after_the_lease_fails_and_moves_nothing():
    story = Story()
    before = story.d.memory[:, 5].copy()
    read_from(story, 1.2, 1.2)
    assert story.outcomes_of() == [("failed", "LEASE_EXPIRED")] * 2
    assert story.d.ended[0].n_bytes == 0
    assert story.times_said(msg.LayoutRequest) == 0
    assert not (story.d.memory[:, 5] == before).all()  # given back, and in use again


# --- L8 -----------------------------------------------------------------------------------------


def test_L8_renewal_is_answered_with_what_is_kept_and_what_is_unknown():
    lone = Lone()
    worker = LoneWorker(lone)
    peer = FarPeer(lone).dial()
    worker.send(req.Publish("right", (pack(1),), lease_s=30.0))
    granted = peer.claim("right", 1)
    right, wrong = ("right", granted.lease_id), ("wrong", new_id())
    (lease,) = lone.machine.leases
    lone.wait(3.0)
    for asked, kept, unknown in (
        ((right,), 1, ()),
        ((wrong,), 0, (wrong,)),
        ((right, wrong), 1, (wrong,)),
        ((), 0, ()),
    ):
        peer.say(msg.Renew(asked))
        renewed = peer.got(msg.Renewed)
        assert (len(renewed.leases), renewed.unknown) == (kept, unknown)
        assert lone.problems == ["renew_unknown"] * bool(unknown)
    assert lease.expires_at == 133.0
    many = tuple((f"never-{i}", new_id()) for i in range(10_000))
    peer.say(msg.Renew((*many[:5_000], right, *many[5_000:])))
    renewed = peer.got(msg.Renewed)
    assert (len(renewed.leases), len(renewed.unknown)) == (1, 10_000)


def test_L8_renewal_never_shortens_a_lease():
    lone = Lone()
    worker = LoneWorker(lone)
    peer = FarPeer(lone).dial()
    worker.send(req.Publish("t", (pack(1),), lease_s=1.0))
    granted = peer.claim("t", 1)
    (lease,) = lone.machine.leases
    lease.expires_at = 500.0
    peer.say(msg.Renew((("t", granted.lease_id),)))
    assert lease.expires_at == 500.0
    assert peer.got(msg.Renewed).leases == (("t", granted.lease_id, 400.0),)


def test_L8_leases_of_128_waiting_requests_outlast_their_term_by_their_consumers_heartbeat():
    """All of them wait behind one slow read; each is renewed from the moment it was granted."""
    n = 128
    settings = replace(
        SETTINGS, max_ops_in_flight=1, pull_timeout_s=120.0, lease_s=30.0, max_transfers=1024
    )
    story = Story(n_blocks=n, settings=settings)
    for i in range(n):
        story.p.publish(f"t{i}", (i,))
        story.d.pull(f"t{i}", story.p_address, (i,), (i,))
    story.run(copies=False)
    story.settle_quietly(61.0)
    assert story.ends() == []
    story.run()
    assert story.outcomes_of(story.p) == [("released", "acked")] * n
    assert story.outcomes_of(story.d) == [("received", "acked")] * n


# --- L9 -----------------------------------------------------------------------------------------


def drain(story: Story, daemon_index: int, timeout_s: float) -> None:
    daemon = (story.prefill + story.decode)[daemon_index]
    daemon.step(ev.DrainRequested(timeout_s))


def test_L9_stop_without_transfers_is_clean_and_at_once():
    story = Story()
    story.p.publish("t", (1,))
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run()
    drain(story, 0, 10.0)
    assert story.prefill[0].drained is True
    story.run()
    assert story.times_said(msg.Goodbye) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_L9_slow_transfer_is_waited_for_and_new_ones_are_refused(which):
    story = Story()
    story.p.publish("t", (1,))
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run(copies=False)
    drain(story, which, 10.0)
    worker, body = (
        (story.p, req.Publish("u", (pack(2),))),
        (story.d, req.Pull("u", story.p_address, (pack(2),), (pack(2),))),
    )[which]
    answer = worker.ask(body)
    assert isinstance(answer, req.Refused)
    assert (answer.code, answer.retryable) == ("DRAINING", True)
    story.live_for(3.0, copies=False)
    daemon = worker.daemon
    assert daemon.drained is None
    story.run()
    assert story.outcomes_of() == [("released", "acked"), ("received", "acked")]
    assert daemon.drained is True


@pytest.mark.parametrize("which", [0, 1])
def test_L9_endless_transfer_is_aborted_at_the_limit_for_workers_and_peers(which):
    story = Story()
    story.p.publish("t", (1,))
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run(copies=False)
    drain(story, which, 2.0)
    story.live_for(1.9, copies=False)
    (op,) = story.ops.values()
    assert not op.is_cancelled
    story.live_for(0.2, copies=False)
    assert op.is_cancelled
    story.copy(op)
    story.run()
    assert [reason for _, reason in story.outcomes_of()] in (
        ["DRAINING", "DRAINING"],  # the producer stops, and its reader is told why
        ["aborted", "DRAINING"],  # the consumer stops, and its producer is released
    )
    assert (story.prefill + story.decode)[which].drained is True


def test_L9_copy_that_cannot_be_ended_makes_the_end_unclean_within_the_grace():
    story = Story()
    story.p.publish("t", (1,))
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run(copies=False)
    drain(story, 1, 2.0)
    story.live_for(3.1, copies=False)
    assert story.decode[0].drained is False
    assert story.ends(story.d) == []  # and what it still touches is given back to nobody
    assert story.times_said(msg.Goodbye) == 0


def test_L9_pending_handshake_does_not_hold_up_the_end():
    story = Story()
    nobody = req.PeerAddress("127.0.0.1", 9999)
    story.d.pull("t", nobody, (1,), (5,))
    drain(story, 1, 1.0)
    story.live_for(1.1)
    assert story.outcomes_of(story.d) == [("failed", "DRAINING")]
    assert story.decode[0].drained is True


def test_L9_second_signal_waits_for_nobody_and_still_frees_nothing_that_is_touched():
    story = Story()
    story.p.publish("t", (1,))
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run(copies=False)
    drain(story, 1, 600.0)
    story.live_for(1.0, copies=False)
    drain(story, 1, 600.0)
    story.live_for(0.1, copies=False)
    (op,) = story.ops.values()
    assert op.is_cancelled
    assert story.ends(story.d) == []
    story.live_for(1.0, copies=False)
    assert story.decode[0].drained is False


def test_L9_nothing_is_posted_after_the_drain_has_ended():
    story = Story()
    story.d.reserve("t", story.p_address, (5,))
    story.p.push("t", (1,))
    story.run(copies=False)
    drain(story, 0, 0.0)
    story.live_for(2.0)
    assert story.prefill[0].drained is True
    effects = story.prefill[0].machine.step(
        ev.RequestReceived(story.p.route, 99, req.LayerReady("t", (0,))), story.now
    )
    assert not [effect for effect in effects if isinstance(effect, ef.PostOp)]
    assert not story.ops
