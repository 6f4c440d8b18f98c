"""Messages that must arrive: repeated until answered, slower each time."""

from __future__ import annotations

import pytest

from moriiod.core.context import Context
from moriiod.core.messages import Goodbye, Identity, LayoutRequest
from moriiod.core.outbox import Outbox
from tests.support.lone import SETTINGS, new_id

A, B = new_id(), new_id()
KEY = ("claim", "1")


class Post:
    """An outbox with its clock, and what it sent."""

    def __init__(self) -> None:
        self.ctx = Context(Identity("P", 0, 1, 0, 1, new_id()), SETTINGS)
        self.sent: list[tuple[float, str]] = []
        self.outbox = Outbox(self.ctx, lambda peer, body: self.sent.append((self.ctx.now, peer)))

    def wait(self, until: float) -> None:
        while (when := self.ctx.timers.next_deadline()) is not None and when <= until:
            self.ctx.now = when
            action = self.ctx.timers.pop_due(when)
            assert action is not None
            action()
        self.ctx.now = until


@pytest.fixture
def post() -> Post:
    return Post()


def test_message_is_repeated_with_doubling_pauses_up_to_the_longest(post):
    post.outbox.post(A, KEY, Goodbye())
    post.wait(20.0)
    assert [when for when, _ in post.sent] == [0.0, 0.25, 0.75, 1.75, 3.75, 7.75, 12.75, 17.75]


def test_confirmed_message_is_not_repeated(post):
    post.outbox.post(A, KEY, Goodbye())
    assert post.outbox.confirm(A, KEY)
    post.wait(60.0)
    assert len(post.sent) == 1
    assert len(post.ctx.timers) == 0


def test_confirming_what_does_not_wait_changes_nothing(post):
    assert not post.outbox.confirm(A, KEY)
    post.outbox.post(A, KEY, Goodbye())
    assert not post.outbox.confirm(A, ("claim", "2"))
    assert not post.outbox.confirm(B, KEY)
    assert post.outbox.count() == 1


def test_message_under_the_same_key_takes_the_place_of_the_old_one(post):
    post.outbox.post(A, KEY, Goodbye())
    post.wait(0.1)
    post.outbox.post(A, KEY, LayoutRequest(B))
    assert post.outbox.count(A) == 1
    assert post.outbox.first_sent(A, KEY) == 0.1
    post.wait(0.4)
    assert [when for when, _ in post.sent] == pytest.approx([0.0, 0.1, 0.35])


def test_first_sending_is_remembered_however_often_it_was_repeated(post):
    assert post.outbox.first_sent(A, KEY) is None
    post.outbox.post(A, KEY, Goodbye())
    post.wait(5.0)
    assert post.outbox.first_sent(A, KEY) == 0.0


def test_messages_are_counted_by_peer_and_found_by_kind(post):
    post.outbox.post(A, KEY, Goodbye())
    post.outbox.post(A, ("revoke", "1"), Goodbye())
    post.outbox.post(B, KEY, Goodbye())
    assert (post.outbox.count(), post.outbox.count(A), post.outbox.count(B)) == (3, 2, 1)
    assert post.outbox.is_any_waiting(A, {"revoke"})
    assert not post.outbox.is_any_waiting(B, {"revoke"})
    post.outbox.confirm(A, ("revoke", "1"))
    assert not post.outbox.is_any_waiting(A, {"revoke"})


def test_peer_that_will_never_answer_is_dropped_with_all_its_messages(post):
    post.outbox.post(A, KEY, Goodbye())
    post.outbox.post(A, ("ack", "1"), Goodbye())
    post.outbox.post(B, KEY, Goodbye())
    post.outbox.drop_peer(A)
    post.outbox.drop_peer(new_id())
    assert post.outbox.count() == 1
    del post.sent[:]
    post.wait(1.0)
    assert {peer for _, peer in post.sent} == {B}
