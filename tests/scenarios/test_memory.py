"""Memory that comes, is refused, and goes with its worker or its daemon. Cases M1 M4 M6 M9."""

from __future__ import annotations

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.core.snapshot import take_snapshot
from moriiod.errors import RegistrationFailed
from tests.support.lone import FarPeer, Lone, LoneWorker
from tests.support.sim import Worker, make_groups, pack
from tests.support.world_helpers import Story

# --- M1 -----------------------------------------------------------------------------------------


def test_M1_region_registered_twice_works_until_it_is_unregistered_twice():
    story = Story()
    again = req.RegisterCaches(make_groups(), (story.p.memory.nbytes,))
    assert story.p.ask(again) == req.Done()
    assert story.p.ask(req.UnregisterCaches()) == req.Done()
    story.p.publish("t", (1,))
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run()
    assert story.outcomes_of(story.p, story.d) == [("released", "acked"), ("received", "acked")]

    assert story.p.ask(req.UnregisterCaches()) == req.Done()
    answer = story.p.publish("u", (1,))
    assert isinstance(answer, req.Refused)
    assert answer.code == "NOT_REGISTERED"
    story.run()
    assert story.prefill[0].registered == {}


def test_M1_unregistering_while_a_peer_reads_waits_for_the_read():
    story = Story()
    story.p.publish("t", (1,))
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run(copies=False)
    story.p.ask(req.UnregisterCaches())
    story.run(copies=False)
    assert story.p.generation in story.prefill[0].registered
    assert story.ends(story.p) == []
    story.run()
    assert story.prefill[0].registered == {}
    assert story.outcomes_of(story.p, story.d) == [("failed", "WORKER_LOST")] * 2
    story.assert_empty()


# --- M4 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("errno", [22, 12])
@pytest.mark.parametrize("n_bytes", [3_607_764_992, 943_718_400])
def test_M4_memory_that_the_engine_refuses_is_answered_and_never_used(n_bytes, errno):
    lone = Lone()
    peer = FarPeer(lone).dial()
    n_blocks = n_bytes // 64
    worker = LoneWorker(lone, make_groups(n_blocks, 8), register=False)
    assert worker.region_bytes == (n_bytes,)
    worker.send(req.RegisterCaches(worker.groups, worker.region_bytes))
    lone.step(
        ev.MemoryRefused(worker.generation, RegistrationFailed("no", n_bytes=n_bytes, errno=errno))
    )
    answer = worker.answer
    assert isinstance(answer, req.Refused)
    assert answer.code == "REGISTRATION_FAILED"
    assert answer.fields == {"n_bytes": n_bytes, "errno": errno}

    # Nobody is told that it is ready, and nothing uses it.
    peer.beat()
    assert peer.got(msg.HeartbeatReply).generations == ()
    peer.say(msg.LayoutRequest(worker.generation))
    assert peer.got(msg.LayoutReply).layout is None
    for body in (req.Publish("t", (pack(1),)), req.Push("t", (pack(1),))):
        assert worker.refusal(body).code == "NOT_REGISTERED"
    assert lone.ever(ef.OpenSession) == lone.ever(ef.PostOp) == []

    # The daemon lives, for this worker and for others.
    worker.register()
    LoneWorker(lone)
    peer.beat()
    assert len(peer.got(msg.HeartbeatReply).generations) == 2


# --- M6 -----------------------------------------------------------------------------------------


def assert_gone(story: Story, worker: Worker) -> None:
    """Nothing of a worker is left at its daemon."""
    daemon = worker.daemon
    assert worker.generation not in daemon.registered
    rows = take_snapshot(daemon.machine, story.now, 99).clients
    assert worker.generation not in {row.generation for row in rows}


def test_M6_worker_that_is_killed_right_after_it_registered_leaves_nothing_ten_times_over():
    story = Story()
    for _ in range(10):
        worker = story.p
        story.kill_worker(worker)
        story.run()
        assert_gone(story, worker)
        story.replace_worker(worker)
        story.run()
    assert len(story.prefill[0].registered) == 1
    assert len(story.prefill[0].machine.clients) == 1
    assert story.prefill[0].machine.next_deadline() is None


def test_M6_worker_that_is_killed_before_the_engine_has_its_memory_leaves_nothing():
    story = Story()
    story.kill_worker(story.p)
    fresh = story.replace_worker(story.p)
    story.kill_worker(fresh)  # its registration is still with the engine
    story.run()
    assert story.prefill[0].registered == {}
    assert len(story.prefill[0].machine.clients) == 0


def test_M6_producer_killed_while_it_is_read_is_drained_first_and_its_reader_is_told():
    story = Story()
    story.p.publish("t", (1, 2))
    story.d.pull("t", story.p_address, (1, 2), (5, 6))
    story.run(copies=False)
    worker = story.p
    story.kill_worker(worker)
    story.run(copies=False)
    assert worker.generation in story.prefill[0].registered  # the read is still in flight
    assert story.ends(story.d) == []
    story.run()
    assert_gone(story, worker)
    assert story.outcomes_of(story.d) == [("failed", "WORKER_LOST")]
    story.assert_empty()


def test_M6_consumer_killed_while_it_reads_is_drained_first_and_the_producer_is_released():
    story = Story()
    story.p.publish("t", (1, 2))
    story.d.pull("t", story.p_address, (1, 2), (5, 6))
    story.run(copies=False)
    worker = story.d
    story.kill_worker(worker)
    story.run(copies=False)
    assert worker.generation in story.decode[0].registered
    assert story.ends(story.p) == []
    story.run()
    assert_gone(story, worker)
    assert story.outcomes_of(story.p) == [("released", "aborted")]
    story.assert_empty()


@pytest.mark.parametrize("victim", ["producer", "consumer"])
def test_M6_worker_killed_while_a_write_is_in_flight_is_drained_first(victim):
    story = Story()
    story.d.reserve("t", story.p_address, (5,))
    story.p.push("t", (1,))
    story.run(copies=False)
    story.p.ask(req.LayerReady("t", (0,)))
    worker, other = (story.p, story.d) if victim == "producer" else (story.d, story.p)
    story.kill_worker(worker)
    story.run(copies=False)
    assert worker.generation in worker.daemon.registered
    assert story.ends() == []
    story.run()
    assert_gone(story, worker)
    expected = ("failed", "WORKER_LOST") if victim == "producer" else ("released", "aborted")
    assert story.outcomes_of(other) == [expected]
    story.assert_empty()


def test_M6_worker_killed_after_heartbeats_is_no_longer_announced_to_peers():
    story = Story()
    story.p.publish("t", (1,))
    story.d.pull("t", story.p_address, (1,), (5,))
    story.live_for(3.0)
    assert len(story.decode[0].sessions) == 1
    worker = story.p
    story.kill_worker(worker)
    story.live_for(2.0)
    assert_gone(story, worker)
    assert story.decode[0].sessions == {}  # the peer's heartbeat no longer names its memory


# --- M9 -----------------------------------------------------------------------------------------


def test_M9_worker_that_the_restarted_daemon_does_not_know_is_told_so_and_can_come_again():
    story = Story()
    old_route = story.p.route
    story.kill_daemon(story.prefill[0])
    daemon = story.restart_daemon(story.prefill[0])
    replies: list[ef.ReplyToClient] = []
    for body in (req.Publish("t", (pack(1),)), req.Abort("t", "publish")):
        effects = daemon.machine.step(ev.RequestReceived(old_route, 9, body), story.now)
        replies += [x for x in effects if isinstance(x, ef.ReplyToClient)]
    assert {reply.body.code for reply in replies if isinstance(reply.body, req.Refused)} == {
        "NOT_REGISTERED"
    }
    assert len(replies) == 2
    story.run()
    story.p.publish("t", (1,))
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run()
    assert story.outcomes_of(story.p, story.d) == [("released", "acked"), ("received", "acked")]


def test_M9_reservation_of_a_lost_daemon_is_reported_when_its_producer_writes_no_more():
    story = Story()
    story.d.reserve("t", story.p_address, (5, 6))
    story.p.push("t", (1, 2))
    story.run(copies=False)
    story.p.ask(req.LayerReady("t", (0,)))
    (op,) = story.ops.values()
    story.kill_daemon(story.decode[0])
    story.restart_daemon(story.decode[0])
    story.run(copies=False)
    # The producer's daemon was asked, and has cancelled; its copy is not over yet.
    assert story.times_said(msg.FenceRequest) >= 1
    assert op.is_cancelled
    assert story.ends(story.d) == []
    assert 5 in story.d.busy
    story.run()
    story.live_for(3.0)
    assert story.ends(story.d) == [("reserve", "t", "failed", "DAEMON_LOST")]
    assert story.outcomes_of(story.p) == [("failed", "PEER_RESTARTED")]
    story.assert_empty()


def test_M9_reservation_whose_producer_is_away_stays_quarantined_until_it_was_asked():
    story = Story()
    story.d.reserve("t", story.p_address, (5,))
    story.p.push("t", (1,))
    story.run(copies=False)
    story.p.ask(req.LayerReady("t", (0,)))
    story.kill_daemon(story.decode[0])
    story.cut.add(frozenset((story.prefill[0].port, story.decode[0].port)))
    daemon = story.restart_daemon(story.decode[0])
    story.live_for(20.0, copies=False)
    assert story.ends(story.d) == []
    (row,) = take_snapshot(daemon.machine, story.now, 9).quarantined
    assert (row.role, row.state) == ("reserve", "fencing")
    answer = story.d.ask(req.Reserve("t", story.p_address, (pack(6),)))
    assert isinstance(answer, req.Refused)
    assert answer.code == "ALREADY_EXISTS"
    story.cut.clear()
    story.live_for(20.0)
    assert ("reserve", "t", "failed", "DAEMON_LOST") in story.ends(story.d)


def test_M9_reads_of_a_lost_daemon_are_over_at_once_and_never_reported_as_received():
    story = Story()
    story.p.publish("t", (1,))
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run(copies=False)
    story.kill_daemon(story.decode[0])
    assert story.ends(story.d) == [("pull", "t", "failed", "DAEMON_LOST")]
    story.restart_daemon(story.decode[0])
    story.live_for(10.0)
    assert story.ends(story.d) == [("pull", "t", "failed", "DAEMON_LOST")]
    # The producer's lease ends by the proof that its reader is gone.
    assert story.outcomes_of(story.p) == [("failed", "ABORTED")]
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run()
    assert story.outcomes_of(story.d)[-1] == ("failed", "ABORTED")
