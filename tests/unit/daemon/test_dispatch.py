"""The dispatcher: every order reaches the shell whose business it is."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import requests as req
from moriiod.core.geometry import RemoteLayout
from moriiod.core.messages import Goodbye
from moriiod.core.plan import BlockSpans, LayerSpans, TransferPlan
from moriiod.engines.base import RegionHandle
from moriiod.memory.held import HeldRegion
from tests.support.caches import cache
from tests.support.daemon_parts import GENERATION, ROUTE, assemble, attach, counted

PEER = "b" * 32
LAYOUT = cache()
REMOTE = RemoteLayout(LAYOUT, "shm", (b"d",))
_ONE = np.array([0], dtype=np.int64)
PLAN = TransferPlan((LayerSpans(BlockSpans(_ONE, _ONE, _ONE + 8, 8), 0, 0, 0, 0),), 8)
EVENT = req.TransferEnded("t1", "pull", "received", "acked")

#: Every order, and the calls it leads to.
ORDERS: list[tuple[ef.Effect, list[tuple[str, Any]]]] = [
    (
        reply := ef.ReplyToClient(ROUTE, 1, req.Done()),
        [("send", reply)],
    ),
    (event := ef.SendEvent(ROUTE, 1, EVENT), [("send", event)]),
    (ef.DisconnectWorker(GENERATION), [("disconnect", GENERATION)]),
    (
        ef.RegisterMemory(LAYOUT),
        [
            ("hold", LAYOUT.generation),
            ("register", (LAYOUT, (RegionHandle("memfd", 7, 4096),))),
        ],
    ),
    (ef.ReleaseMemory(GENERATION), [("release", GENERATION)]),
    (route := ef.OpenRoute("d:1", "h", 1), [("open_route", route)]),
    (closed := ef.CloseRoute("d:1"), [("close_route", closed)]),
    (message := ef.SendToPeer("d:1", Goodbye()), [("send", message)]),
    (
        ef.OpenSession(1, PEER, GENERATION, REMOTE),
        [("open_session", (1, PEER, GENERATION, REMOTE))],
    ),
    (ef.CloseSession(1), [("close_session", 1)]),
    (ef.PostOp(1, 2, "read", PLAN), [("post", (1, 2, "read", PLAN))]),
    (ef.CancelOp(1), [("cancel", 1)]),
    (ef.FencePeer(PEER), [("fence", PEER)]),
    (ef.ReadmitPeer(PEER), [("readmit", PEER)]),
    (ef.Transition("t", "pull", "a", "b"), []),
    (ef.CountProblem("kind", "detail"), []),
    (ef.DrainEnded(clean=True), []),
]


def test_every_order_of_the_core_is_in_the_table() -> None:
    assert {type(order) for order, _ in ORDERS} == set(get_args(ef.Effect))


@pytest.mark.parametrize(
    ("order", "calls"), ORDERS, ids=[type(order).__name__ for order, _ in ORDERS]
)
def test_order_reaches_its_shell(order: ef.Effect, calls: list[tuple[str, Any]]) -> None:
    dispatchers: list[Any] = []
    assembly = assemble(wrap=lambda inner: dispatchers.append(inner) or inner)
    assembly.shells.held = (HeldRegion("memfd", 7, 4096),)
    dispatchers[0].dispatch(order)
    assert assembly.shells.calls == calls
    assert assembly.drained == ([True] if isinstance(order, ef.DrainEnded) else [])


def test_Z5_event_that_was_not_delivered_is_sent_again_when_the_client_speaks() -> None:
    assembly = assemble()
    attach(assembly)
    assembly.request(3, req.Publish("t1", (b"\0" * 4,), 30.0))
    assembly.shells.delivers = False
    assembly.request(4, req.Abort("t1", "publish"))
    assert [event.sequence for event in assembly.shells.events()] == [1]
    assembly.shells.delivers = True
    assembly.request(5, req.Seal("nothing", 1))
    assert [event.sequence for event in assembly.shells.events()] == [1, 1]
    assembly.request(6, req.Seal("nothing", 1))
    assert len(assembly.shells.events()) == 2
    assert counted(assembly.metrics, "moriiod_events_sent_total") == {("first",): 1}
    problems = counted(assembly.metrics, "moriiod_protocol_problems_total")
    assert problems == {("ipc_event_undelivered",): 1, ("ipc_reply_undelivered",): 1}


def test_memory_is_released_before_the_worker_is_let_go() -> None:
    assembly = assemble()
    attach(assembly)
    assembly.driver.handle(ev.WorkerDied(GENERATION))
    assert assembly.shells.names[-1] == "release"
    assembly.driver.handle(ev.MemoryReleased(GENERATION))
    assert assembly.shells.names[-1] == "disconnect"
