"""A consumer that takes its grant back when everything was written, and was not told (case T4)."""

from __future__ import annotations

from moriiod.core import messages as msg
from moriiod.core import requests as req
from tests.support.lone import FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import pack

GRANT = new_id()


def written() -> tuple[Lone, FarPeer]:
    """Return a producer that has written everything and says so."""
    lone = Lone()
    worker = LoneWorker(lone)
    peer = FarPeer(lone).dial()
    worker.send(req.Push("t", (pack(),)))
    worker.send(req.Seal("t", 0))
    peer.say(msg.Grant("t", GRANT, peer.generation, False, (), ()))
    assert lone.ended == [("push", "t", "released", "acked")]
    assert peer.got(msg.WriteDone).grant_id == GRANT
    return lone, peer


def test_T4_revocation_after_the_last_write_is_answered_by_another_message_than_the_lost_one() -> (
    None
):
    lone, peer = written()
    peer.say(msg.RevokeGrant("t", GRANT))
    failed = peer.got(msg.WriteFailed)
    assert (failed.grant_id, failed.error.code) == (GRANT, "ABORTED")
    # From now on it is what is repeated, and what a repeated grant is told.
    lone.wait(1.0)
    assert {type(body) for body in lone.sent if "Write" in type(body).__name__} <= {msg.WriteFailed}
    peer.say(msg.Grant("t", GRANT, peer.generation, False, (), ()))
    assert peer.got(msg.WriteFailed) == failed
    peer.say(msg.WriteConfirmed("t", GRANT))
    assert lone.machine.peers.outbox.count() == 0
    assert lone.ended == []


def test_repeated_revocation_is_answered_as_the_first_one() -> None:
    _, peer = written()
    peer.say(msg.RevokeGrant("t", GRANT))
    first = peer.got(msg.WriteFailed)
    peer.say(msg.RevokeGrant("t", GRANT))
    assert peer.got(msg.WriteFailed) == first
