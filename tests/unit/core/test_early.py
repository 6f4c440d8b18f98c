"""Messages that came before their transfer: bounded in number and in time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core.context import Context
from moriiod.core.early import Early
from moriiod.core.effects import CountProblem
from moriiod.core.messages import Identity
from moriiod.core.peers import Peer
from tests.support.lone import SETTINGS, new_id

TTL_S = SETTINGS.early_ttl_s


def make_peer() -> Peer:
    return Peer(Identity("D", 0, 1, 0, 1, new_id()), "a:1", 0.0)


class Buffer:
    """An early buffer of three messages, with its clock."""

    def __init__(self) -> None:
        settings = replace(SETTINGS, max_early=3)
        self.ctx = Context(Identity("P", 0, 1, 0, 1, new_id()), settings)
        self.given_up: list[str] = []
        self.early: Early[str] = Early(
            self.ctx, "claim", lambda peer, body: self.given_up.append(body)
        )

    def wait(self, until: float) -> None:
        while (when := self.ctx.timers.next_deadline()) is not None and when <= until:
            self.ctx.now = when
            action = self.ctx.timers.pop_due(when)
            assert action is not None
            action()
        self.ctx.now = until


@pytest.fixture
def buffer() -> Buffer:
    return Buffer()


def test_messages_of_a_transfer_are_taken_once_and_oldest_first(buffer):
    peer, other = make_peer(), make_peer()
    assert buffer.early.put("t", "1", peer, "a")
    assert buffer.early.put("t", "1", other, "b")
    assert buffer.early.put("u", "2", peer, "c")
    assert buffer.early.take("t") == [(peer, "a"), (other, "b")]
    assert buffer.early.take("t") == []
    assert len(buffer.early) == 1
    buffer.wait(60.0)
    assert buffer.given_up == ["c"]


def test_A4_repeat_of_an_attempt_counts_once_and_waits_no_longer(buffer):
    peer = make_peer()
    buffer.early.put("t", "1", peer, "a")
    buffer.wait(5.0)
    assert buffer.early.put("t", "1", peer, "a again")
    assert len(buffer.early) == 1
    buffer.wait(TTL_S)
    assert buffer.given_up == ["a"]
    assert buffer.early.dropped == 1


def test_A5_full_buffer_refuses_counts_and_keeps_what_it_has(buffer):
    peer = make_peer()
    for name in "abc":
        assert buffer.early.put(name, "1", peer, name)
    assert not buffer.early.put("d", "1", peer, "d")
    assert buffer.early.dropped == 1
    assert buffer.ctx.take_effects() == (CountProblem("early_buffer_full", "d"),)
    assert buffer.early.take("a") == [(peer, "a")]
    assert buffer.early.put("d", "1", peer, "d")


def test_each_message_is_given_up_at_its_own_time(buffer):
    peer = make_peer()
    for name in "abc":
        buffer.early.put(name, "1", peer, name)
        buffer.wait(buffer.ctx.now + 1.0)
    buffer.wait(TTL_S)
    assert buffer.given_up == ["a"]
    buffer.wait(TTL_S + 1.5)
    assert buffer.given_up == ["a", "b"]
    buffer.wait(TTL_S + 2.0)
    assert buffer.given_up == ["a", "b", "c"]
    assert len(buffer.ctx.timers) == 0


def test_message_of_a_peer_whose_epoch_is_over_is_neither_taken_nor_answered(buffer):
    peer, living = make_peer(), make_peer()
    buffer.early.put("t", "1", peer, "dead")
    buffer.early.put("t", "1", living, "living")
    buffer.early.put("u", "1", peer, "late")
    peer.is_void = True
    assert buffer.early.take("t") == [(living, "living")]
    buffer.wait(TTL_S)
    assert buffer.given_up == []
    assert len(buffer.early) == 0


def test_discarded_message_leaves_the_others_of_its_transfer(buffer):
    peer = make_peer()
    buffer.early.put("t", "1", peer, "a")
    buffer.early.put("t", "2", peer, "b")
    assert buffer.early.discard("t", "1", peer)
    assert not buffer.early.discard("t", "1", peer)
    assert buffer.early.discard("t", "2", peer)
    assert not buffer.early.discard("t", "2", peer)
    assert len(buffer.early) == 0
    assert len(buffer.ctx.timers) == 0
    assert buffer.early.take("t") == []
