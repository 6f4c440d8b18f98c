"""Pairing local and remote memory: asked for once, checked, opened, closed. Cases G7 G8 T7."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core.geometry import RemoteLayout
from moriiod.core.sessions import PeerSession
from moriiod.errors import MoriiodError, SessionFailed
from tests.support.lone import FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import make_groups


class Waiter:
    """Someone who waits for a session."""

    def __init__(self) -> None:
        self.sessions: list[PeerSession] = []
        self.errors: list[MoriiodError] = []

    def session_ready(self, session: PeerSession) -> None:
        self.sessions.append(session)

    def session_failed(self, error: MoriiodError) -> None:
        self.errors.append(error)

    @property
    def codes(self) -> list[str]:
        return [error.code for error in self.errors]


class Pair:
    """A machine with a worker, and a peer with another."""

    def __init__(self) -> None:
        self.lone = Lone()
        self.worker = LoneWorker(self.lone)
        self.peer = FarPeer(self.lone).dial()

    def ensure(self, waiter: Waiter, remote: str | None = None) -> None:
        known = self.lone.machine.peers.get(self.peer.epoch)
        assert known is not None
        self.lone.machine.sessions.ensure(
            known, self.worker.layout, remote or self.peer.generation, waiter
        )
        self.flush()

    def flush(self) -> None:
        machine = self.lone.machine
        machine.ctx.run_deferred()
        self.lone.effects = machine.ctx.take_effects()
        self.lone.log += self.lone.effects

    def reply(self, layout: RemoteLayout | None, generation: str | None = None) -> None:
        self.peer.say(msg.LayoutReply(generation or self.peer.generation, layout))


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_session_is_asked_for_once_checked_and_opened(pair):
    first, second = Waiter(), Waiter()
    pair.ensure(first)
    assert pair.peer.got(msg.LayoutRequest).generation == pair.peer.generation
    pair.ensure(second)
    assert pair.lone.effects == ()
    pair.reply(pair.peer.remote_layout)
    opened = pair.lone.one(ef.OpenSession)
    assert (opened.peer, opened.local_generation) == (pair.peer.epoch, pair.worker.generation)
    assert opened.remote == pair.peer.remote_layout
    pair.ensure(Waiter())
    pair.lone.step(ev.SessionOpened(opened.session))
    assert first.sessions == second.sessions
    assert first.sessions[0].remote_layout == pair.peer.layout
    third = Waiter()
    pair.ensure(third)
    assert third.sessions == first.sessions
    assert pair.lone.effects == ()


def test_question_about_a_layout_is_repeated_until_answered(pair):
    pair.ensure(Waiter())
    pair.lone.wait(0.25)
    assert pair.peer.heard(msg.LayoutRequest)
    pair.reply(pair.peer.remote_layout)
    pair.lone.wait(2.0)
    assert pair.peer.heard(msg.LayoutRequest) == []


def test_answer_about_another_generation_or_a_second_answer_changes_nothing(pair):
    waiter = Waiter()
    pair.ensure(waiter)
    pair.reply(None, generation=new_id())
    assert waiter.errors == []
    pair.reply(pair.peer.remote_layout)
    pair.lone.open_sessions()
    pair.reply(None)
    assert waiter.errors == []
    assert len(pair.lone.machine.sessions) == 1


def test_session_that_is_not_open_has_no_remote_layout(pair):
    waiter = Waiter()
    pair.ensure(waiter)
    (session,) = pair.lone.machine.sessions._by_id.values()
    with pytest.raises(SessionFailed):
        session.remote_layout  # noqa: B018


# --- What is refused ------------------------------------------------------------------------------


def changed(layout: RemoteLayout, /, **of_group: object) -> RemoteLayout:
    group = replace(layout.layout.groups[0], **of_group)  # type: ignore[arg-type]
    return replace(layout, layout=replace(layout.layout, groups=(group,)))


def with_layers(layout: RemoteLayout, n: int) -> RemoteLayout:
    groups = make_groups(12, n)
    return replace(layout, layout=replace(layout.layout, groups=groups, region_bytes=(12 * 8 * n,)))


@pytest.mark.parametrize(
    ("change", "field", "ours", "theirs"),
    [
        (lambda r: changed(r, dtype="float8_e4m3fn"), "dtype", "uint8", "float8_e4m3fn"),
        (lambda r: changed(r, head_order="HND"), "head_order", "NHD", "HND"),
        (lambda r: changed(r, layout="fused"), "layout", "mla", "fused"),
        (lambda r: changed(r, total_kv_heads=2), "total_kv_heads", 1, 2),
        (lambda r: changed(r, head_size=16), "head_size", 8, 16),
        (lambda r: changed(r, content="packed"), "content", "", "packed"),
        (lambda r: with_layers(r, 3), "layers", 2, 3),
    ],
)
def test_G7_G8_what_cannot_be_bridged_is_refused_naming_both_values(
    pair, change, field, ours, theirs
):
    waiter = Waiter()
    pair.ensure(waiter)
    pair.reply(change(pair.peer.remote_layout))
    assert waiter.codes == ["GEOMETRY_MISMATCH"]
    assert waiter.errors[0].fields["field"] == field
    assert (waiter.errors[0].fields["local"], waiter.errors[0].fields["remote"]) == (ours, theirs)
    assert pair.lone.of(ef.OpenSession) == []
    assert len(pair.lone.machine.sessions) == 0


def test_G8_other_number_of_blocks_is_fine(pair):
    waiter = Waiter()
    pair.ensure(waiter)
    groups = make_groups(20)
    layout = replace(pair.peer.layout, groups=groups, region_bytes=(320,))
    pair.reply(RemoteLayout(layout, "shm", (b"",)))
    pair.lone.open_sessions()
    assert waiter.sessions[0].remote_layout == layout


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda r: None, "NOT_REGISTERED"),
        (lambda r: replace(r, engine="mori"), "ENGINE_MISMATCH"),
        (lambda r: replace(r, descriptors=()), "INVALID_GEOMETRY"),
        (lambda r: replace(r, layout=replace(r.layout, generation=new_id())), "INVALID_GEOMETRY"),
        (lambda r: replace(r, layout=replace(r.layout, region_bytes=(8,))), "INVALID_GEOMETRY"),
    ],
)
def test_rule_S5_description_that_cannot_be_used_is_refused(pair, change, code):
    waiter = Waiter()
    pair.ensure(waiter)
    pair.reply(change(pair.peer.remote_layout))
    assert waiter.codes == [code]


def test_T7_session_that_failed_is_tried_again_by_the_next_transfer(pair):
    waiter = Waiter()
    pair.ensure(waiter)
    pair.reply(pair.peer.remote_layout)
    first = pair.lone.one(ef.OpenSession).session
    pair.lone.step(ev.SessionRefused(first, SessionFailed("this once")))
    assert waiter.codes == ["SESSION_FAILED"]
    pair.lone.step(ev.SessionRefused(first, SessionFailed("and again")))
    assert waiter.codes == ["SESSION_FAILED"]
    again = Waiter()
    pair.ensure(again)
    pair.peer.describe()
    assert len(again.sessions) == 1
    assert again.sessions[0].session != first


# --- Closing --------------------------------------------------------------------------------------


def opened(pair: Pair) -> PeerSession:
    waiter = Waiter()
    pair.ensure(waiter)
    pair.peer.describe()
    return waiter.sessions[0]


def test_session_of_a_generation_closes_with_it(pair):
    session = opened(pair)
    pair.lone.step(ev.WorkerDied(pair.worker.generation))
    assert pair.lone.effects == (
        ef.CloseSession(session.session),
        ef.ReleaseMemory(pair.worker.generation),
    )


def test_session_in_use_is_closed_by_its_last_user(pair):
    session = opened(pair)
    session.acquire()
    session.acquire()
    pair.peer.restarted().dial()
    assert pair.lone.of(ef.CloseSession) == []
    session.release()
    pair.flush()
    assert pair.lone.effects == ()
    session.release()
    pair.flush()
    assert pair.lone.effects == (ef.CloseSession(session.session),)


def test_release_of_a_session_that_stays_closes_nothing(pair):
    session = opened(pair)
    session.acquire()
    session.release()
    pair.flush()
    assert pair.lone.effects == ()


def test_question_is_not_repeated_for_a_session_that_was_closed_before_its_answer(pair):
    waiter = Waiter()
    pair.ensure(waiter)
    pair.lone.machine.sessions.close_of_generation(pair.worker.generation)
    pair.flush()
    assert waiter.codes == ["PEER_LOST"]
    assert pair.lone.of(ef.CloseSession) == []
    assert pair.lone.machine.peers.outbox.count() == 0


def test_session_that_opens_after_it_was_closed_is_nobodys(pair):
    waiter = Waiter()
    pair.ensure(waiter)
    pair.reply(pair.peer.remote_layout)
    session = pair.lone.one(ef.OpenSession).session
    pair.lone.machine.sessions.close_of_generation(pair.worker.generation)
    pair.flush()
    assert pair.lone.effects == (ef.CloseSession(session),)
    assert waiter.codes == ["PEER_LOST"]
    pair.lone.step(ev.SessionOpened(session))
    assert waiter.sessions == []
    assert len(pair.lone.machine.sessions) == 0


def test_idle_sessions_with_generations_that_a_peer_no_longer_has_are_closed(pair):
    session = opened(pair)
    pair.peer.beat()
    assert pair.lone.of(ef.CloseSession) == []
    session.acquire()
    pair.peer.generation = new_id()
    pair.peer.beat()
    assert pair.lone.of(ef.CloseSession) == []
    session.release()
    pair.peer.reply_beat()
    assert pair.lone.of(ef.CloseSession) == [ef.CloseSession(session.session)]


def test_waiter_that_was_forgotten_is_not_told(pair):
    waiter, other = Waiter(), Waiter()
    pair.ensure(waiter)
    pair.ensure(other)
    pair.lone.machine.sessions.forget(waiter)
    pair.peer.describe()
    assert waiter.sessions == []
    assert len(other.sessions) == 1
