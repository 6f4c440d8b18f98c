"""Every request gets exactly one reply; a refusal changes nothing."""

from __future__ import annotations

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import requests as req
from moriiod.errors import InvariantViolation
from tests.support.lone import FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import pack

PEER = req.PeerAddress("127.0.0.1", 6301)


@pytest.fixture
def lone() -> Lone:
    return Lone()


def ask(lone: Lone, body: req.Request, route: bytes = b"stranger") -> req.Reply:
    lone.step(ev.RequestReceived(route, 7, body))
    reply = lone.one(ef.ReplyToClient)
    assert (reply.route, reply.sequence) == (route, 7)
    return reply.body


def test_M9_ping_needs_no_attach(lone):
    assert ask(lone, req.Ping()) == req.Done()


def test_status_is_answered_by_the_driver_and_not_by_the_core(lone):
    reply = ask(lone, req.GetStatus())
    assert isinstance(reply, req.Refused)
    assert reply.code == "UNEXPECTED_MESSAGE"


@pytest.mark.parametrize(
    "body",
    [
        req.Publish("t", (pack(1),)),
        req.Pull("t", PEER, (pack(1),), (pack(1),)),
        req.Push("t", (pack(1),)),
        req.Reserve("t", PEER, (pack(1),)),
        req.LayerReady("t", (0,)),
        req.Seal("t", 2),
        req.Reject("t", PEER),
        req.Abort("t", "pull"),
        req.RegisterCaches((), ()),
        req.UnregisterCaches(),
        req.ConfirmEvents(1),
        req.Detach(),
    ],
    ids=lambda body: type(body).__name__,
)
def test_M9_who_is_not_attached_is_told_so_whatever_it_asks(lone, body):
    reply = ask(lone, body)
    assert isinstance(reply, req.Refused)
    assert reply.code == "NOT_REGISTERED"
    assert lone.machine.is_quiet


@pytest.mark.parametrize("role", ["publish", "pull", "push", "reserve"])
def test_abort_of_what_is_not_there_or_not_ours_is_unknown(lone, role):
    owner, other = LoneWorker(lone, name="owner"), LoneWorker(lone, name="other")
    assert owner.refusal(req.Abort("t", role)).code == "UNKNOWN_TRANSFER"
    owner.send(
        {
            "publish": req.Publish("t", (pack(1),)),
            "pull": req.Pull("t", PEER, (pack(1),), (pack(1),)),
            "push": req.Push("t", (pack(1),)),
            "reserve": req.Reserve("t", PEER, (pack(1),)),
        }[role]
    )
    assert other.refusal(req.Abort("t", role)).code == "UNKNOWN_TRANSFER"
    assert owner.ask(req.Abort("t", role)) == req.Done()
    assert lone.ended == [
        (
            role,
            "t",
            "released" if role == "publish" else "failed",
            "aborted" if role == "publish" else "ABORTED",
        )
    ]


def test_L9_daemon_that_drains_takes_neither_workers_nor_transfers(lone):
    worker = LoneWorker(lone)
    generation = new_id()
    lone.step(ev.WorkerConnected(generation, 2, 0))
    lone.step(ev.DrainRequested(5.0))
    reply = ask(lone, req.Attach(generation, "late"))
    assert isinstance(reply, req.Refused)
    assert (reply.code, reply.retryable) == ("DRAINING", True)
    for body in (
        req.Publish("t", (pack(1),)),
        req.Pull("t", PEER, (pack(1),), (pack(1),)),
        req.Push("t", (pack(1),)),
        req.Reserve("t", PEER, (pack(1),)),
        req.Reject("t", PEER),
    ):
        assert worker.refusal(body).code == "DRAINING"


def test_request_that_never_goes_to_the_core_is_unexpected(lone):
    worker = LoneWorker(lone)
    assert worker.refusal(req.Done()).code == "UNEXPECTED_MESSAGE"  # type: ignore[arg-type]


def test_bug_met_while_serving_is_no_refusal(lone, monkeypatch):
    worker = LoneWorker(lone)

    def publish(*_: object) -> None:
        raise InvariantViolation("broken")

    monkeypatch.setattr(lone.machine.leases, "publish", publish)
    with pytest.raises(InvariantViolation):
        worker.send(req.Publish("t", (pack(1),)))


def test_attach_that_is_repeated_adopts_its_orphans_once(lone):
    generation = new_id()
    lone.step(ev.WorkerConnected(generation, 1, 0))
    attach = req.Attach(generation, "w", new_id(), (req.Orphan("t", PEER),))
    for _ in range(2):
        assert isinstance(ask(lone, attach, b"w"), req.Attached)
        assert len(lone.machine.orphans) == 1
    assert lone.of(ef.OpenRoute) == []


def test_accepted_request_is_answered_done_once(lone):
    worker = LoneWorker(lone)
    peer = FarPeer(lone, instance="P")
    worker.ask(req.Pull("t", peer.address, (pack(1),), (pack(1),)))
    assert [type(effect) for effect in lone.effects].count(ef.ReplyToClient) == 1
