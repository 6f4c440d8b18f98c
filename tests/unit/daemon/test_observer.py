"""What becomes a number or a log line."""

from __future__ import annotations

import numpy as np
import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import requests as req
from moriiod.core.geometry import RemoteLayout
from moriiod.core.messages import AckConfirmed
from moriiod.core.plan import TransferPlan
from moriiod.daemon.observer import Observer
from moriiod.errors import EngineOpFailed
from moriiod.telemetry.metrics import Metrics
from tests.support.caches import cache
from tests.support.daemon_parts import ROUTE, counted, make_metrics

PEER = "b" * 32


@pytest.fixture
def metrics() -> Metrics:
    return make_metrics()


@pytest.fixture
def observer(metrics: Metrics) -> Observer:
    return Observer(metrics, lambda epoch: f"instance-{epoch[0]}")


def post(observer: Observer, op: int, now: float) -> None:
    observer.effect(ef.PostOp(op, 1, "read", TransferPlan((), 8)), now)


def test_end_of_a_transfer_is_counted_with_its_reason(metrics: Metrics, observer: Observer) -> None:
    end = ef.Transition("t1", "pull", "draining", "failed", "TIMED_OUT", age_s=3.0, n_bytes=0)
    observer.effect(end, 1.0)
    observer.effect(ef.Transition("t2", "pull", "new", "active", "1 legs"), 1.0)
    assert counted(metrics, "moriiod_transfers_total") == {("pull", "failed", "TIMED_OUT"): 1}
    assert counted(metrics, "moriiod_transfer_duration_seconds_sum") == {("pull",): 3.0}


def test_bytes_of_a_read_are_counted_for_the_transfer_and_for_the_peer(
    metrics: Metrics, observer: Observer
) -> None:
    observer.effect(ef.OpenSession(1, PEER, "0" * 32, RemoteLayout(cache(), "shm", ())), 1.0)
    post(observer, 1, 1.0)
    observer.event(ev.OpEnded(1, 4096), 1.5)
    observer.effect(ef.Transition("t", "pull", "confirming", "received", "acked", 2.0, 4096), 2.0)
    assert counted(metrics, "moriiod_bytes_total") == {("read",): 4096}
    assert counted(metrics, "moriiod_peer_bytes_total") == {("instance-b", "read"): 4096}
    assert counted(metrics, "moriiod_op_duration_seconds_sum") == {("read",): 0.5}
    assert counted(metrics, "moriiod_engine_ops_total") == {("read", "ok"): 1}


def test_operation_the_engine_had_no_room_for_is_not_counted_until_it_ends(
    metrics: Metrics, observer: Observer
) -> None:
    post(observer, 1, 1.0)
    observer.event(ev.OpRefused(1), 1.0)
    observer.event(ev.OpEnded(1, 0), 1.0)
    assert counted(metrics, "moriiod_engine_ops_total") == {}
    post(observer, 1, 2.0)
    observer.event(ev.OpEnded(1, 0, EngineOpFailed("x")), 2.25)
    assert counted(metrics, "moriiod_engine_ops_total") == {("read", "failed"): 1}


def test_request_is_counted_with_its_answer_also_when_that_comes_later(
    metrics: Metrics, observer: Observer
) -> None:
    observer.event(ev.RequestReceived(ROUTE, 1, req.RegisterCaches((), ())), 1.0)
    observer.event(ev.RequestReceived(ROUTE, 2, req.Ping()), 1.0)
    observer.effect(ef.ReplyToClient(ROUTE, 2, req.Done()), 1.0)
    observer.event(ev.MemoryRegistered("0" * 32, ()), 2.0)
    observer.effect(ef.ReplyToClient(ROUTE, 1, req.Refused("BUSY", "", True)), 2.0)
    assert counted(metrics, "moriiod_requests_total") == {
        ("Ping", "accepted"): 1,
        ("RegisterCaches", "refused"): 1,
    }


def test_acks_lost_peers_and_problems_are_counted(metrics: Metrics, observer: Observer) -> None:
    observer.effect(ef.SendToPeer("d:1", AckConfirmed("t", "a" * 32, True)), 1.0)
    observer.effect(ef.SendToPeer("d:1", AckConfirmed("t", "a" * 32, False)), 1.0)
    observer.effect(ef.CountProblem("peer_lost", "prefill-0"), 1.0)
    observer.problem(ef.CountProblem("ipc_malformed_request", "..."), 1.0)
    assert counted(metrics, "moriiod_acks_total") == {("valid",): 1, ("invalid",): 1}
    assert counted(metrics, "moriiod_peers_lost_total") == {("prefill-0",): 1}
    assert counted(metrics, "moriiod_protocol_problems_total") == {
        ("peer_lost",): 1,
        ("ipc_malformed_request",): 1,
    }


def test_event_sent_twice_is_a_repeat_and_clients_do_not_add_up(
    metrics: Metrics, observer: Observer
) -> None:
    body = req.TransferEnded("t", "pull", "received", "acked")
    for sequence in (1, 2, 2):
        observer.event_sent(ef.SendEvent(ROUTE, sequence, body), is_delivered=True, now=1.0)
    for n in np.arange(1000):
        event = ef.SendEvent(str(n).encode(), 1, body)
        observer.event_sent(event, is_delivered=True, now=1.0)
    assert len(observer._offered) == 256
    assert counted(metrics, "moriiod_events_sent_total") == {("first",): 1002, ("repeat",): 1}


def test_token_descriptors_are_counted_when_they_end_and_warned_about_once_a_peer(
    metrics: Metrics, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    observer.effect(ef.OpenSession(1, PEER, "0" * 32, RemoteLayout(cache(), "shm", ())), 1.0)
    for op in (1, 2):
        observer.effect(ef.PostOp(op, 1, "read", TransferPlan((), 8, 96)), 1.0)
    observer.event(ev.OpEnded(1, 8), 1.5)
    observer.event(ev.OpRefused(2), 1.5)
    observer.effect(ef.PostOp(2, 1, "read", TransferPlan((), 8, 96)), 2.0)
    observer.event(ev.OpEnded(2, 8), 2.5)
    assert counted(metrics, "moriiod_token_spans_total") == {("instance-b",): 192}
    assert [record.getMessage() for record in caplog.records] == [
        "heads are split in an NHD layout: one descriptor for each token; HND on both sides needs "
        "one for each block"
    ]
