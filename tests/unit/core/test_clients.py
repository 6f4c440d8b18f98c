"""Workers: attach, memory, events. Cases M1 M4 M6 Z4 Z5 as far as they are the registry's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.errors import RegistrationFailed
from tests.support.lone import SETTINGS, FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import make_groups, pack


@pytest.fixture
def lone() -> Lone:
    return Lone()


def attach(lone: Lone, route: bytes, generation: str, name: str = "w") -> req.Reply:
    lone.step(ev.RequestReceived(route, 1, req.Attach(generation, name)))
    return lone.one(ef.ReplyToClient).body


# --- Life -----------------------------------------------------------------------------------------


def test_attach_tells_who_the_daemon_is():
    lone = Lone(3, 8, instance="prefill-0", dp=(1, 2))
    generation = new_id()
    lone.step(ev.WorkerConnected(generation, 1, 0))
    assert attach(lone, b"r", generation) == req.Attached("prefill-0", 3, 8, 1, 2, "shm")


def test_worker_that_did_not_introduce_itself_cannot_attach(lone):
    reply = attach(lone, b"r", new_id())
    assert isinstance(reply, req.Refused)
    assert reply.code == "NOT_REGISTERED"


def test_attaching_again_on_the_same_route_is_no_conflict(lone):
    worker = LoneWorker(lone)
    assert isinstance(attach(lone, worker.route, worker.generation), req.Attached)


def test_Z4_second_route_for_a_generation_is_a_duplicate_client(lone):
    worker = LoneWorker(lone)
    reply = attach(lone, b"another", worker.generation, "again")
    assert isinstance(reply, req.Refused)
    assert (reply.code, reply.fields) == ("DUPLICATE_CLIENT", {"name": "again"})
    assert worker.ask(req.Publish("t", (pack(1),))) == req.Done()


def test_Z4_second_generation_on_a_route_is_a_duplicate_client_until_the_first_is_gone(lone):
    worker, other = LoneWorker(lone), new_id()
    lone.step(ev.WorkerConnected(other, 2, 0))
    reply = attach(lone, worker.route, other)
    assert isinstance(reply, req.Refused)
    assert reply.code == "DUPLICATE_CLIENT"
    lone.step(ev.WorkerDied(worker.generation))
    assert isinstance(attach(lone, worker.route, other), req.Attached)


def test_worker_whose_name_is_taken_is_disconnected_and_the_first_one_stays(lone):
    worker = LoneWorker(lone)
    lone.step(ev.WorkerConnected(worker.generation, 2, 0))
    assert lone.effects == (
        ef.CountProblem("worker_refused", "pid 2"),
        ef.DisconnectWorker(worker.generation),
    )
    assert worker.ask(req.Publish("t", (pack(1),))) == req.Done()


def test_more_workers_than_the_limit_are_disconnected():
    lone = Lone(settings=replace(SETTINGS, max_clients=1))
    worker = LoneWorker(lone)
    extra = new_id()
    lone.step(ev.WorkerConnected(extra, 2, 0))
    assert lone.one(ef.DisconnectWorker).generation == extra
    lone.step(ev.WorkerDied(worker.generation))
    lone.step(ev.MemoryReleased(worker.generation))
    lone.step(ev.WorkerConnected(extra, 2, 0))
    assert lone.effects == ()


def test_what_shells_say_of_unknown_workers_is_ignored(lone):
    lone.step(ev.RegionOffered(new_id(), 0, 1))
    lone.step(ev.WorkerDied(new_id()))
    assert lone.effects == ()


def test_M6_worker_that_dies_before_it_attached_leaves_nothing(lone):
    generation = new_id()
    lone.step(ev.WorkerConnected(generation, 1, 0))
    lone.step(ev.RegionOffered(generation, 0, 64))
    lone.step(ev.WorkerDied(generation))
    assert lone.effects == (ef.DisconnectWorker(generation),)
    assert len(lone.machine.clients) == 0


def test_M6_dead_workers_memory_is_released_once_and_then_it_is_forgotten(lone):
    worker = LoneWorker(lone)
    lone.step(ev.WorkerDied(worker.generation))
    assert lone.effects == (ef.ReleaseMemory(worker.generation),)
    lone.step(ev.WorkerDied(worker.generation))
    lone.step(ev.RegionOffered(worker.generation, 1, 8))
    assert lone.effects == ()
    lone.step(ev.MemoryReleased(worker.generation))
    assert lone.effects == (ef.DisconnectWorker(worker.generation),)
    assert len(lone.machine.clients) == 0


def test_M6_worker_that_dies_while_the_engine_takes_its_memory_is_released_after(lone):
    worker = LoneWorker(lone, register=False)
    worker.send(req.RegisterCaches(worker.groups, worker.region_bytes))
    lone.step(ev.WorkerDied(worker.generation))
    assert lone.effects == ()
    lone.step(ev.MemoryRegistered(worker.generation, (b"",)))
    assert lone.effects == (ef.ReleaseMemory(worker.generation),)
    lone.step(ev.MemoryReleased(worker.generation))
    assert lone.effects == (ef.DisconnectWorker(worker.generation),)


def test_M6_worker_that_dies_while_the_engine_refuses_its_memory_is_forgotten(lone):
    worker = LoneWorker(lone, register=False)
    worker.send(req.RegisterCaches(worker.groups, worker.region_bytes))
    lone.step(ev.WorkerDied(worker.generation))
    lone.step(ev.MemoryRefused(worker.generation, RegistrationFailed("no")))
    assert lone.effects == (ef.DisconnectWorker(worker.generation),)


def test_detached_worker_is_answered_and_then_gone(lone):
    worker = LoneWorker(lone)
    worker.send(req.Publish("t", (pack(1),)))
    worker.send(req.Detach())
    kinds = [type(effect).__name__ for effect in lone.effects]
    assert kinds == ["ReplyToClient", "Transition", "Transition", "ReleaseMemory"]
    assert lone.ended == []  # nobody is there to hear it
    refusal = worker.refusal(req.Publish("u", (pack(1),)))
    assert refusal.code == "NOT_REGISTERED"


# --- Memory ---------------------------------------------------------------------------------------


def test_registration_is_answered_when_the_engine_has_the_memory(lone):
    worker = LoneWorker(lone, register=False)
    worker.send(req.RegisterCaches(worker.groups, worker.region_bytes))
    assert lone.effects == (ef.RegisterMemory(worker.layout),)
    assert worker.refusal(req.Publish("t", (pack(1),))).code == "NOT_REGISTERED"
    lone.step(ev.MemoryRegistered(worker.generation, (b"descriptor",)))
    assert lone.effects == (ef.ReplyToClient(worker.route, 2, req.Done()),)


@pytest.mark.parametrize("offered", [None, 255])
def test_region_that_was_not_handed_over_or_is_too_small_is_refused(lone, offered):
    worker = LoneWorker(lone, register=False)
    (needed,) = worker.region_bytes
    assert needed == 192
    if offered is not None:
        lone.step(ev.RegionOffered(worker.generation, 1, offered))
    refusal = worker.refusal(req.RegisterCaches(worker.groups, (needed, 256)))
    assert refusal.code == "INVALID_GEOMETRY"
    assert refusal.fields == {
        "region": 1,
        "described_bytes": 256,
        "offered_bytes": offered or 0,
    }
    assert lone.of(ef.RegisterMemory) == []


def test_layout_that_does_not_fit_its_region_is_refused_before_the_engine_sees_it(lone):
    worker = LoneWorker(lone, register=False)
    refusal = worker.refusal(req.RegisterCaches(make_groups(13), worker.region_bytes))
    assert refusal.code == "INVALID_GEOMETRY"
    worker.register()


def test_M1_registered_twice_needs_two_to_unregister(lone):
    worker = LoneWorker(lone)
    again = req.RegisterCaches(worker.groups, worker.region_bytes)
    assert worker.ask(again) == req.Done()
    assert worker.ask(req.UnregisterCaches()) == req.Done()
    assert lone.of(ef.ReleaseMemory) == []
    assert worker.ask(req.Publish("t", (pack(1),))) == req.Done()
    worker.send(req.Abort("t", "publish"))
    assert worker.ask(req.UnregisterCaches()) == req.Done()
    assert lone.one(ef.ReleaseMemory).generation == worker.generation
    assert worker.refusal(req.Publish("t", (pack(1),))).code == "NOT_REGISTERED"
    assert worker.refusal(req.UnregisterCaches()).code == "NOT_REGISTERED"


def test_another_layout_is_refused_while_one_is_registered(lone):
    worker = LoneWorker(lone)
    other = req.RegisterCaches(make_groups(4), worker.region_bytes)
    assert worker.refusal(other).code == "ALREADY_EXISTS"


def test_layout_that_is_on_its_way_in_or_out_is_busy(lone):
    worker = LoneWorker(lone, register=False)
    request = req.RegisterCaches(worker.groups, worker.region_bytes)
    worker.send(request)
    assert worker.refusal(request).code == "BUSY"
    lone.step(ev.MemoryRegistered(worker.generation, (b"",)))
    worker.send(req.UnregisterCaches())
    assert worker.refusal(request).code == "BUSY"
    lone.step(ev.MemoryReleased(worker.generation))
    assert lone.effects == ()
    # A generation names one memory for ever: peers may still have the old one mapped.
    worker.offer()
    assert worker.refusal(request).code == "NOT_REGISTERED"


def test_M4_refused_memory_is_answered_with_size_and_errno_and_can_be_tried_again(lone):
    worker = LoneWorker(lone, register=False)
    worker.send(req.RegisterCaches(worker.groups, worker.region_bytes))
    error = RegistrationFailed("the NIC says no", n_bytes=192, errno=22)
    lone.step(ev.MemoryRefused(worker.generation, error))
    answer = worker.answer
    assert isinstance(answer, req.Refused)
    assert answer.code == "REGISTRATION_FAILED"
    assert answer.fields == {"n_bytes": 192, "errno": 22}
    assert worker.refusal(req.Publish("t", (pack(1),))).code == "NOT_REGISTERED"
    worker.register()


def test_unregistering_ends_what_uses_the_memory_before_it_is_released(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone).dial()
    worker.send(req.Publish("t", (pack(1),)))
    claim = peer.claim("t", 1)
    worker.send(req.UnregisterCaches())
    assert lone.of(ef.ReleaseMemory) == []
    assert worker.refusal(req.Publish("u", (pack(2),))).code == "NOT_REGISTERED"
    assert worker.refusal(req.UnregisterCaches()).code == "NOT_REGISTERED"
    peer.say(msg.LayoutRequest(worker.generation))
    assert peer.got(msg.LayoutReply).layout is None
    peer.beat()
    assert peer.got(msg.HeartbeatReply).generations == ()
    peer.ack(claim, ok=False)
    assert lone.ended == [("publish", "t", "failed", "WORKER_LOST")]
    assert lone.one(ef.ReleaseMemory).generation == worker.generation


def test_memory_that_is_registered_again_before_it_was_released_stays(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone).dial()
    worker.send(req.Publish("t", (pack(1),)))
    claim = peer.claim("t", 1)
    worker.send(req.UnregisterCaches())
    assert worker.ask(req.RegisterCaches(worker.groups, worker.region_bytes)) == req.Done()
    peer.ack(claim, ok=False)
    assert lone.of(ef.ReleaseMemory) == []
    assert worker.ask(req.Publish("u", (pack(1),))) == req.Done()


def test_engine_events_that_nobody_asked_for_are_counted_and_ignored(lone):
    worker = LoneWorker(lone)
    for generation in (worker.generation, new_id()):
        lone.step(ev.MemoryRegistered(generation, ()))
        assert lone.problems == ["engine_event_unexpected"]
        lone.step(ev.MemoryRefused(generation, RegistrationFailed("no")))
        assert lone.problems == ["engine_event_unexpected"]
        lone.step(ev.MemoryReleased(generation))
        assert lone.problems == ["engine_event_unexpected"]
    assert worker.ask(req.Publish("t", (pack(1),))) == req.Done()


# --- Events ---------------------------------------------------------------------------------------


def end_some(worker: LoneWorker, n: int, first: int = 0) -> None:
    for i in range(first, first + n):
        worker.send(req.Publish(f"t{i}", (pack(1),)))
        worker.send(req.Abort(f"t{i}", "publish"))


def told(lone: Lone) -> list[int]:
    return [effect.sequence for effect in lone.of(ef.SendEvent)]


def test_Z5_events_go_out_up_to_the_window_and_follow_what_is_confirmed():
    lone = Lone(settings=replace(SETTINGS, event_window=3))
    worker = LoneWorker(lone)
    end_some(worker, 5)
    assert [effect.sequence for effect in lone.ever(ef.SendEvent)] == [1, 2, 3]
    worker.send(req.ConfirmEvents(2))
    assert told(lone) == [4, 5]
    worker.send(req.ConfirmEvents(5))
    assert told(lone) == []
    assert not next(iter(lone.machine.clients)).unconfirmed


def test_Z5_event_that_was_not_delivered_is_sent_again_when_the_client_is_heard(lone):
    worker = LoneWorker(lone)
    end_some(worker, 3)
    lone.step(ev.EventUndelivered(worker.route, 2))
    lone.step(ev.EventUndelivered(worker.route, 3))
    lone.step(ev.EventUndelivered(b"nobody", 1))
    assert lone.effects == ()
    worker.send(req.ConfirmEvents(1))
    assert told(lone) == [2, 3]


def test_undelivered_event_that_was_confirmed_meanwhile_is_not_sent_again(lone):
    worker = LoneWorker(lone)
    end_some(worker, 2)
    worker.send(req.ConfirmEvents(2))
    lone.step(ev.EventUndelivered(worker.route, 1))
    end_some(worker, 1, first=2)
    assert told(lone) == [3]


def test_confirmation_of_events_that_were_never_sent_loses_none():
    lone = Lone(settings=replace(SETTINGS, event_window=2))
    worker = LoneWorker(lone)
    end_some(worker, 4)
    worker.send(req.ConfirmEvents(1 << 62))
    assert told(lone) == [3, 4]
