"""Load, stops, clocks, slow and doubled workers, played out. Cases S1 S2 Z4 Z5."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from tests.support.lone import SETTINGS as LONE_SETTINGS
from tests.support.lone import Lone, LoneWorker, new_id
from tests.support.sim import SETTINGS, pack
from tests.support.world_helpers import Story

#: As in the report: leases of 3 s, a beat each second.
TIGHT = replace(SETTINGS, lease_s=3.0, heartbeat_interval_s=1.0, link_timeout_s=5.0)

# --- S1 -----------------------------------------------------------------------------------------


def reading(settings: object = TIGHT) -> Story:
    story = Story(settings=settings)  # type: ignore[arg-type]
    story.p.publish("t", (1,))
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run(copies=False)
    story.live_for(2.5, copies=False)
    return story


def stall(story: Story, seconds: float, *names: str) -> None:
    """Nothing happens in these daemons for so long; then they see everything at once."""
    stopped = [d for d in story.daemons if f"{d.instance}{d.rank}" in names]
    epochs = {daemon.epoch for daemon in stopped}
    for daemon in stopped:
        daemon.is_stopped = True
    end = story.now + seconds
    while story.now < end:
        # What is sent to a stopped daemon waits in its socket.
        story.run_where(lambda message: message.target not in epochs, copies=False)
        story.pass_time(0.05)
    for daemon in stopped:
        daemon.is_stopped = False


@pytest.mark.parametrize("names", [("P0",), ("D0",), ("P0", "D0")])
@pytest.mark.parametrize("timer_first", [True, False])
def test_S1_daemon_that_stands_still_for_two_seconds_loses_nothing(names, timer_first):
    """Heavy work on the loop, a busy host, SIGSTOP: on waking, timers may well be served first."""
    story = reading()
    for _ in range(4):
        stall(story, 2.0, *names)
        if timer_first:
            for daemon in story.daemons:
                daemon.step(ev.TimerFired())
        story.live_for(1.0, copies=False)
    assert story.ends() == []
    assert [problem for daemon in story.daemons for problem in daemon.problems] == []
    story.run()
    assert story.outcomes_of() == [("released", "acked"), ("received", "acked")]


def test_S1_published_lease_does_not_run_out_before_its_time_however_late_the_timers_are():
    story = Story(settings=TIGHT)
    story.p.publish("t", (1,))
    story.d.pull("t", story.p_address, (1,), (5,))
    stall(story, 2.0, "P0")
    story.run()
    assert story.outcomes_of() == [("released", "acked"), ("received", "acked")]


def test_S1_reader_that_stands_still_for_ten_seconds_is_expired_and_told_so_when_it_wakes():
    story = reading()
    stall(story, 10.0, "D0")
    assert story.ends() == []  # expired, and waited for: it may still be copying
    assert story.prefill[0].problems == ["peer_lost"]
    assert story.times_said(msg.Revoke) > 1
    assert story.decode[0].epoch in story.prefill[0].fences
    story.run()  # its copy ends well, as far as it can tell
    story.live_for(3.0)
    assert story.outcomes_of(story.p) == [("failed", "LEASE_EXPIRED")]
    assert [outcome for outcome, _ in story.outcomes_of(story.d)] == ["failed"]
    story.assert_empty()
    # Awake, it is a peer like any other again.
    story.p.publish("u", (2,))
    story.d.pull("u", story.p_address, (2,), (6,))
    story.run()
    assert story.outcomes_of(story.d)[-1] == ("received", "acked")


def test_S1_worker_that_is_stopped_is_not_dead():
    """Its life is watched by its process, so a stop of any length expires nothing of it."""
    story = Story(settings=TIGHT)
    story.d.reserve("t", story.p_address, (5,))
    story.p.push("t", (1,), timeout_s=60.0)
    story.live_for(10.0)  # neither worker says anything
    assert story.ends() == []
    story.p.ask(req.LayerReady("t", (0, 1)))
    story.p.ask(req.Seal("t", 2))
    story.run()
    assert story.outcomes_of() == [("released", "acked"), ("received", "acked")]


# --- S2 -----------------------------------------------------------------------------------------


class Duo:
    """A producer and a consumer whose clocks have nothing in common."""

    def __init__(self, producers_clock: float, consumers_clock: float) -> None:
        self.p, self.d = Lone(instance="P"), Lone(instance="D")
        self.p.now, self.d.now = producers_clock, consumers_clock
        self.p_worker, self.d_worker = LoneWorker(self.p), LoneWorker(self.d)
        self.wire: list[tuple[Lone, Lone, str, msg.PeerBody, str]] = []
        self.seen = {id(self.p): len(self.p.log), id(self.d): len(self.d.log)}

    def collect(self) -> None:
        for source, target in ((self.p, self.d), (self.d, self.p)):
            for effect in source.log[self.seen[id(source)] :]:
                if isinstance(effect, ef.SendToPeer):
                    route = effect.route if target is self.d else "a:d"
                    if source is self.p:
                        route = self.d.ever(ef.OpenRoute)[-1].route
                    self.wire.append((source, target, route, effect.body, effect.to))
            self.seen[id(source)] = len(source.log)

    def run(self) -> None:
        self.collect()
        while self.wire:
            source, target, route, body, to = self.wire.pop(0)
            target.step(ev.PeerMessageReceived(route, source.identity.epoch, body, to))
            target.open_sessions()
            self.collect()

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.p.wait(0.25)
            self.d.wait(0.25)
            self.run()

    def ends(self) -> list[tuple[str, str]]:
        told = [*self.p.ever(ef.SendEvent), *self.d.ever(ef.SendEvent)]
        return [(effect.body.outcome, effect.body.reason) for effect in told]


@pytest.mark.parametrize("offset", [-600.0, 0.0, 600.0, 1e9])
def test_S2_clocks_that_differ_do_not_matter_because_only_durations_cross_the_wire(offset):
    duo = Duo(1e5, 1e5 + offset)
    duo.p_worker.send(req.Publish("t", (pack(1),), lease_s=5.0))
    peer = req.PeerAddress("127.0.0.1", 6301)
    duo.d_worker.send(req.Pull("t", peer, (pack(1),), (pack(1),)))
    duo.run()
    (op,) = duo.d.ever(ef.PostOp)
    duo.wait(12.0)
    assert duo.ends() == []
    duo.d.op_ended(op)
    duo.run()
    assert duo.ends() == [("released", "acked"), ("received", "acked")]


@pytest.mark.parametrize("offset", [-600.0, 600.0])
def test_S2_lease_ends_after_its_time_on_the_producers_clock(offset):
    duo = Duo(1e5, 1e5 + offset)
    duo.p_worker.send(req.Publish("t", (pack(1),), lease_s=5.0))
    duo.wait(4.75)
    assert duo.ends() == []
    duo.wait(0.25)
    assert duo.ends() == [("failed", "LEASE_EXPIRED")]


# --- Z4 -----------------------------------------------------------------------------------------


def test_Z4_replacement_under_a_stopped_workers_identity_is_refused_and_replies_stay_apart():
    lone = Lone()
    stopped = LoneWorker(lone, name="w0")
    stopped.send(req.Publish("t", (pack(1),)))
    fresh = new_id()
    lone.step(ev.WorkerConnected(fresh, 2, 0))
    attach = req.Attach(fresh, "w0")
    lone.step(ev.RequestReceived(stopped.route, 1, attach))
    refusal = lone.one(ef.ReplyToClient).body
    assert isinstance(refusal, req.Refused)
    assert (refusal.code, refusal.fields) == ("DUPLICATE_CLIENT", {"name": "w0"})
    # Under a route of its own it is served at once, and the stopped one hears nothing of it.
    lone.step(ev.RequestReceived(b"own", 1, attach))
    assert isinstance(lone.one(ef.ReplyToClient).body, req.Attached)
    assert lone.one(ef.ReplyToClient).route == b"own"
    lone.step(ev.WorkerDied(fresh))
    assert [effect.route for effect in lone.of(ef.SendEvent)] == []


def test_Z4_identity_is_free_again_when_its_worker_is_gone_and_old_events_go_to_nobody():
    lone = Lone()
    dead = LoneWorker(lone, name="w0")
    dead.send(req.Publish("t", (pack(1),)))
    fresh = new_id()
    lone.step(ev.WorkerConnected(fresh, 2, 0))
    lone.step(ev.WorkerDied(dead.generation))
    assert lone.of(ef.SendEvent) == []
    lone.step(ev.RequestReceived(dead.route, 1, req.Attach(fresh, "w0")))
    assert isinstance(lone.one(ef.ReplyToClient).body, req.Attached)
    lone.step(ev.RequestReceived(dead.route, 2, req.ConfirmEvents(5)))
    assert lone.of(ef.SendEvent) == []


# --- Z5 -----------------------------------------------------------------------------------------


def test_Z5_reader_that_stops_for_20000_completions_gets_all_of_them_once_and_in_order():
    n = 20_000
    lone = Lone(settings=replace(LONE_SETTINGS, event_window=512))
    slow, quick = LoneWorker(lone, name="slow"), LoneWorker(lone, name="quick")
    for i in range(n):
        slow.send(req.Publish(f"t{i}", (pack(1),)))
        slow.send(req.Abort(f"t{i}", "publish"))
    client = lone.machine.clients.of_route(slow.route)
    sent = [effect for effect in lone.ever(ef.SendEvent) if effect.route == slow.route]
    assert len(sent) == 512  # no more than the window is anywhere on its way
    assert len(client.unconfirmed) == n

    quick.send(req.Publish("quick", (pack(1),)))
    quick.send(req.Abort("quick", "publish"))
    assert lone.ended == [("publish", "quick", "released", "aborted")]

    # Some of what was sent never arrived; then it reads on.
    lone.step(ev.EventUndelivered(slow.route, 300))
    got: list[str] = []
    arrived = sent[:299]
    while len(got) < n:
        got += [effect.body.transfer_id for effect in arrived]
        slow.send(req.ConfirmEvents(len(got)))
        arrived = lone.of(ef.SendEvent)
        assert [effect.sequence for effect in arrived] == list(
            range(len(got) + 1, min(len(got) + 512, n) + 1)
        )
    assert got == [f"t{i}" for i in range(n)]
    assert not client.unconfirmed
    assert lone.ever(ef.DisconnectWorker) == []


def test_Z5_client_that_never_reads_is_refused_more_and_loses_nothing():
    lone = Lone(settings=replace(LONE_SETTINGS, event_window=8, max_unconfirmed_events=100))
    worker = LoneWorker(lone)
    for i in range(100):
        worker.send(req.Publish(f"t{i}", (pack(1),)))
        worker.send(req.Abort(f"t{i}", "publish"))
    refusal = worker.refusal(req.Publish("more", (pack(1),)))
    assert (refusal.code, refusal.fields["limit"]) == ("BUSY", "max_unconfirmed_events")
    got = [effect.sequence for effect in lone.ever(ef.SendEvent)]
    while len(got) < 100:
        worker.send(req.ConfirmEvents(got[-1]))
        got += [effect.sequence for effect in lone.of(ef.SendEvent)]
    assert got == list(range(1, 101))
