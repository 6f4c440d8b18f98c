"""Dialling, handshakes, heartbeats. Cases R1 R6 T6 P3 as far as they are the link's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core.address import Endpoint
from moriiod.core.links import Expected
from moriiod.core.peers import Peer, rank_key
from moriiod.errors import InvalidAddress, MoriiodError
from tests.support.lone import HOST, SETTINGS, FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import BASE_PORT

AT = Endpoint(HOST, BASE_PORT)
ANYBODY = Expected(0, 0, 1)


class Waiter:
    """Someone who waits for a link."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.errors: list[MoriiodError] = []

    def link_up(self, peer: Peer) -> None:
        self.peers.append(peer)

    def link_failed(self, error: MoriiodError) -> None:
        self.errors.append(error)

    @property
    def codes(self) -> list[str]:
        return [error.code for error in self.errors]

    def peer_lost(self, error: MoriiodError) -> None:
        self.errors.append(error)

    def peer_fenced(self) -> None: ...

    def peer_forgotten(self) -> None: ...


class Dialler(Lone):
    """A lone machine of which only the links are used."""

    def connect(self, waiter: Waiter, at: Endpoint = AT, who: Expected = ANYBODY) -> None:
        self.machine.ctx.now = self.now
        self.machine.links.connect(at, who, waiter)
        self.flush()

    def flush(self) -> None:
        self.machine.ctx.run_deferred()
        self.effects = self.machine.ctx.take_effects()
        self.log += self.effects

    @property
    def hellos(self) -> list[msg.Hello]:
        return [body for body in self.sent if isinstance(body, msg.Hello)]


@pytest.fixture
def lone() -> Dialler:
    return Dialler(instance="D")


@pytest.fixture
def peer(lone: Dialler) -> FarPeer:
    return FarPeer(lone, instance="P")


# --- Dialling -------------------------------------------------------------------------------------


def test_endpoint_is_dialled_once_whoever_asks_and_all_are_told(lone, peer):
    first, second = Waiter(), Waiter()
    lone.connect(first)
    (opened,) = lone.of(ef.OpenRoute)
    assert (opened.host, opened.port) == (HOST, BASE_PORT)
    (hello,) = lone.hellos
    assert (hello.versions, hello.identity, hello.engines) == ((1,), lone.identity, ("shm",))
    lone.connect(second)
    assert lone.effects == ()
    peer.welcome()
    assert [p.epoch for p in first.peers + second.peers] == [peer.epoch, peer.epoch]
    assert peer.heard(msg.Heartbeat)
    third = Waiter()
    lone.connect(third)
    assert lone.effects == ()
    assert third.peers == first.peers


def test_hello_is_repeated_with_one_nonce_until_the_time_is_over(lone):
    waiter = Waiter()
    lone.connect(waiter)
    (hello,) = lone.hellos
    lone.wait(4.9)
    assert lone.hellos == [hello] * 4
    assert waiter.errors == []
    lone.wait(0.1)
    assert waiter.codes == ["PEER_UNREACHABLE"]
    assert waiter.errors[0].fields == {"endpoint": str(AT), "waited_s": 5.0}
    assert lone.one(ef.CloseRoute)
    assert len(lone.machine.links) == 0
    assert lone.machine.next_deadline() is None


def test_links_can_be_looked_at(lone, peer):
    lone.connect(Waiter())
    (link,) = lone.machine.links
    assert (link.endpoint, link.is_up, link.peer) == (AT, False, None)
    peer.welcome()
    assert link.is_up


def test_route_that_cannot_be_opened_fails_its_waiters_at_once(lone):
    waiter = Waiter()
    lone.connect(waiter)
    (opened,) = lone.of(ef.OpenRoute)
    lone.step(ev.RouteFailed(opened.route, InvalidAddress("no such host")))
    assert waiter.codes == ["INVALID_ADDRESS"]
    assert lone.effects == (ef.CloseRoute(opened.route),)
    lone.step(ev.RouteFailed(opened.route, InvalidAddress("no such host")))
    assert lone.effects == ()


def test_waiter_that_was_forgotten_is_not_told(lone, peer):
    waiter = Waiter()
    lone.connect(waiter)
    lone.machine.links.forget(waiter, AT)
    lone.machine.links.forget(waiter, Endpoint(HOST, 1))
    peer.welcome()
    assert waiter.peers == []


def test_more_endpoints_than_the_limit_are_busy():
    lone = Dialler(settings=replace(SETTINGS, max_peers=1))
    first, second = Waiter(), Waiter()
    lone.connect(first)
    lone.connect(second, Endpoint(HOST, BASE_PORT + 1))
    assert second.codes == ["BUSY"]
    assert lone.of(ef.OpenRoute) == []


@pytest.mark.parametrize(
    ("expected", "code"),
    [
        (Expected(0, 0, 1), "TOPOLOGY_MISMATCH"),
        (Expected(0, 1, 8), "WRONG_PEER"),
        (Expected(1, 0, 8), "WRONG_PEER"),
        (Expected(2, 0, 8), "INVALID_TOPOLOGY"),
    ],
)
def test_R1_who_answers_must_be_who_was_meant(lone, expected, code):
    peer, waiter = FarPeer(lone, 0, 8, instance="P", dp=(0, 2)), Waiter()
    lone.connect(waiter, who=expected)
    peer.welcome()
    assert waiter.codes == [code]
    again = Waiter()
    lone.connect(again, who=expected)
    assert again.codes == [code]
    right = Waiter()
    lone.connect(right, who=Expected(0, 0, 8))
    assert [p.epoch for p in right.peers] == [peer.epoch]


# --- Handshake, dialling side ---------------------------------------------------------------------


def test_T6_answer_to_an_older_hello_is_ignored(lone, peer):
    waiter = Waiter()
    lone.connect(waiter)
    (opened,) = lone.of(ef.OpenRoute)
    (old,) = lone.hellos
    peer.route = opened.route
    lone.wait(5.0)
    assert waiter.codes == ["PEER_UNREACHABLE"]
    late = msg.Welcome(old.nonce, 1, peer.identity, ("shm",))
    peer.say(late)
    assert lone.effects == (ef.CountProblem("stale_handshake", opened.route),)
    lone.connect(waiter)
    peer.say(late)
    assert lone.problems == ["stale_handshake"]
    (opened,) = lone.ever(ef.OpenRoute)[1:]
    peer.route = opened.route
    peer.say(late)
    assert lone.effects == (ef.CountProblem("stale_handshake", opened.route),)
    assert waiter.peers == []
    peer.welcome()
    assert [p.epoch for p in waiter.peers] == [peer.epoch]


def test_welcome_whose_identity_and_envelope_disagree_is_ignored(lone, peer):
    waiter = Waiter()
    lone.connect(waiter)
    peer.route = lone.one(ef.OpenRoute).route
    (hello,) = lone.hellos
    peer.say(msg.Welcome(hello.nonce, 1, replace(peer.identity, epoch=new_id()), ("shm",)))
    assert lone.problems == ["stale_handshake"]
    assert waiter.peers == waiter.errors == []


def test_P3_answer_with_our_own_epoch_is_a_self_connect(lone, peer):
    waiter = Waiter()
    lone.connect(waiter)
    route = lone.one(ef.OpenRoute).route
    (hello,) = lone.hellos
    mirror = msg.Welcome(hello.nonce, 1, lone.identity, ("shm",))
    lone.step(ev.PeerMessageReceived(route, lone.identity.epoch, mirror))
    assert waiter.codes == ["SELF_CONNECT"]
    assert lone.effects == (ef.CloseRoute(route),)


def test_rule_S7_welcome_of_an_epoch_that_is_over_is_ignored(lone, peer):
    lone.machine.peers.mark_void(peer.epoch, rank_key(peer.identity))
    waiter = Waiter()
    lone.connect(waiter)
    peer.welcome()
    assert lone.problems == ["stale_epoch"]
    assert waiter.peers == []


def test_version_that_we_did_not_offer_is_a_mismatch_that_names_both(lone, peer):
    waiter = Waiter()
    lone.connect(waiter)
    peer.route = lone.one(ef.OpenRoute).route
    (hello,) = lone.hellos
    peer.say(msg.Welcome(hello.nonce, 99, peer.identity, ("shm",)))
    assert waiter.codes == ["VERSION_MISMATCH"]
    assert waiter.errors[0].fields == {"ours": "1", "theirs": "99"}


def test_refused_hello_fails_its_waiters_with_the_listeners_reason(lone, peer):
    waiter = Waiter()
    lone.connect(waiter)
    peer.route = lone.one(ef.OpenRoute).route
    (hello,) = lone.hellos
    error = msg.WireError("VERSION_MISMATCH", "no", False, {})
    peer.say(msg.HelloRefused(new_id(), error))
    assert lone.problems == ["stale_handshake"]
    assert waiter.errors == []
    peer.say(msg.HelloRefused(hello.nonce, error))
    assert waiter.codes == ["VERSION_MISMATCH"]
    assert lone.of(ef.CloseRoute)


def test_refusal_does_not_close_a_link_whose_peer_is_in_use(lone, peer):
    waiter = Waiter()
    lone.connect(waiter)
    peer.welcome()
    lone.machine.peers.use(waiter.peers[0], waiter)
    peer.say(msg.UnknownEpoch(lone.identity.epoch))
    (hello,) = lone.hellos
    peer.say(msg.HelloRefused(hello.nonce, msg.WireError("BUSY", "full", True, {})))
    assert lone.of(ef.CloseRoute) == []
    lone.wait(0.25)
    assert lone.hellos == [hello]
    peer.welcome()
    lone.wait(0.9)
    assert lone.hellos == []


def test_time_out_does_not_close_a_link_whose_peer_is_in_use(lone, peer):
    waiter, late = Waiter(), Waiter()
    lone.connect(waiter)
    peer.welcome()
    lone.machine.peers.use(waiter.peers[0], waiter)
    lone.wait(4.5)
    assert waiter.codes == ["PEER_LOST"]
    lone.connect(late)
    lone.wait(6.0)
    assert late.codes == ["PEER_UNREACHABLE"]
    assert lone.of(ef.CloseRoute) == []
    assert lone.hellos
    peer.welcome()
    third = Waiter()
    lone.connect(third)
    assert [p.epoch for p in third.peers] == [peer.epoch]


def test_listener_that_forgot_us_is_greeted_again(lone, peer):
    lone.connect(Waiter())
    peer.welcome()
    peer.say(msg.UnknownEpoch(new_id()))  # of another daemon of ours, long gone
    assert lone.hellos == []
    peer.say(msg.UnknownEpoch(lone.identity.epoch))
    assert len(lone.hellos) == 1
    peer.say(msg.UnknownEpoch(lone.identity.epoch))
    assert lone.hellos == []
    peer.welcome()
    assert lone.of(ef.SendToPeer) == []  # the heartbeat goes on as it was
    lone.step(ev.PeerMessageReceived("d:99", peer.epoch, msg.UnknownEpoch(lone.identity.epoch)))
    assert lone.effects == ()


def test_rule_S7_other_epoch_at_the_same_endpoint_ends_the_old_one(lone, peer):
    waiter = Waiter()
    lone.connect(waiter)
    peer.welcome()
    lone.machine.peers.use(waiter.peers[0], waiter)
    other = FarPeer(lone, 0, 1, instance="another")
    other.route = peer.route
    other.say(msg.UnknownEpoch(lone.identity.epoch))
    other.welcome()
    assert waiter.codes == ["PEER_RESTARTED"]
    assert waiter.errors[0].fields == {"old_epoch": peer.epoch, "new_epoch": other.epoch}
    assert [p.epoch for p in lone.machine.peers] == [other.epoch]


# --- Handshake, listening side --------------------------------------------------------------------


def hello_of(peer: FarPeer, **changes: object) -> msg.Hello:
    hello = msg.Hello(new_id(), (1,), peer.identity, ("shm",))
    return replace(hello, **changes)  # type: ignore[arg-type]


def test_hello_is_answered_and_changes_nothing_until_its_sender_speaks(lone, peer):
    hello = hello_of(peer, versions=(7, 1), engines=("mori", "shm"))
    peer.say(hello, to="0" * 32)
    assert peer.got(msg.Welcome) == msg.Welcome(hello.nonce, 1, lone.identity, ("shm",))
    assert len(lone.machine.peers) == 0
    peer.say(hello, to="0" * 32)
    assert peer.got(msg.Welcome).nonce == hello.nonce
    peer.beat()
    assert peer.heard(msg.HeartbeatReply)
    assert [p.epoch for p in lone.machine.peers] == [peer.epoch]
    peer.say(hello, to="0" * 32)
    assert peer.got(msg.Welcome).nonce == hello.nonce


def test_rule_S7_late_hello_of_a_dead_daemon_does_not_end_its_successor(lone, peer):
    peer.dial()
    fresh = peer.restarted().dial()
    peer.say(hello_of(peer), to="0" * 32)
    assert isinstance(lone.sent[0], msg.HelloRefused)
    assert lone.sent[0].error.code == "PEER_RESTARTED"
    assert [p.epoch for p in lone.machine.peers] == [fresh.epoch]


def test_rule_S7_hello_before_its_epoch_was_over_admits_nobody(lone, peer):
    peer.say(hello_of(peer), to="0" * 32)
    lone.machine.peers.mark_void(peer.epoch, rank_key(peer.identity))
    peer.beat()
    assert lone.problems == ["stale_epoch"]
    assert lone.sent == []
    assert len(lone.machine.peers) == 0


def test_P3_hello_of_ourselves_is_refused(lone, peer):
    mirror = msg.Hello(new_id(), (1,), lone.identity, ("shm",))
    lone.step(ev.PeerMessageReceived("a:me", lone.identity.epoch, mirror))
    (refused,) = lone.sent
    assert isinstance(refused, msg.HelloRefused)
    assert (refused.nonce, refused.error.code) == (mirror.nonce, "SELF_CONNECT")
    assert lone.problems == ["hello_refused"]


@pytest.mark.parametrize(
    ("changes", "code", "fields"),
    [
        ({"versions": (2, 3)}, "VERSION_MISMATCH", {"ours": "1", "theirs": "2, 3"}),
        ({"engines": ("mori",)}, "ENGINE_MISMATCH", {"ours": "shm", "theirs": "mori"}),
    ],
)
def test_hello_that_cannot_be_is_refused_naming_both(lone, peer, changes, code, fields):
    peer.say(hello_of(peer, **changes), to="0" * 32)
    (refused,) = lone.sent
    assert isinstance(refused, msg.HelloRefused)
    assert (refused.error.code, refused.error.fields) == (code, fields)
    peer.beat()
    assert lone.problems == ["unknown_epoch"]


@pytest.mark.parametrize(("rank", "size", "dp"), [(8, 8, (0, 1)), (0, 1, (1, 1))])
def test_R6_rank_that_is_not_within_its_size_is_a_wrong_peer(lone, rank, size, dp):
    peer = FarPeer(lone, rank, size, dp=dp)
    peer.say(hello_of(peer), to="0" * 32)
    (refused,) = lone.sent
    assert isinstance(refused, msg.HelloRefused)
    assert refused.error.code == "WRONG_PEER"


def test_rule_S7_hello_in_the_envelope_of_another_epoch_is_refused(lone, peer):
    peer.say(hello_of(peer, identity=replace(peer.identity, epoch=new_id())), to="0" * 32)
    (refused,) = lone.sent
    assert isinstance(refused, msg.HelloRefused)
    assert refused.error.code == "PEER_RESTARTED"


def test_more_peers_than_the_limit_are_busy_and_known_ones_are_not():
    lone = Dialler(settings=replace(SETTINGS, max_peers=1))
    known, extra = FarPeer(lone, 0, 2), FarPeer(lone, 1, 2)
    known.dial()
    extra.say(hello_of(extra), to="0" * 32)
    (refused,) = lone.sent
    assert isinstance(refused, msg.HelloRefused)
    assert (refused.error.code, refused.error.retryable) == ("BUSY", True)
    known.say(hello_of(known), to="0" * 32)
    assert known.heard(msg.Welcome)


def test_A5_hellos_that_nothing_follows_take_bounded_room():
    lone = Dialler(settings=replace(SETTINGS, max_peers=4))
    peers = [FarPeer(lone, 0, 1, instance=f"i{i}") for i in range(20)]
    for peer in peers:
        peer.say(hello_of(peer), to="0" * 32)
        assert peer.heard(msg.Welcome)
    assert len(lone.machine.links._welcomed) == 4
    peers[0].beat()
    assert lone.problems == ["unknown_epoch"]
    peers[-1].beat()
    assert lone.problems == []


# --- Heartbeats -----------------------------------------------------------------------------------


def test_heartbeats_go_both_ways_and_name_the_registered_generations(lone, peer):
    lone.connect(Waiter())
    peer.welcome()
    assert peer.got(msg.Heartbeat).generations == ()
    worker = LoneWorker(lone)
    lone.wait(1.0)
    beat = peer.got(msg.Heartbeat)
    assert beat.generations == (worker.generation,)
    other = FarPeer(lone, 0, 1, instance="other").dial()
    reply = other.got(msg.HeartbeatReply)
    assert reply.generations == (worker.generation,)
    assert reply.sequence > beat.sequence


def test_late_heartbeat_does_not_bring_back_what_a_newer_one_said(lone, peer):
    peer.dial()
    (known,) = lone.machine.peers
    new, old = new_id(), new_id()
    peer.say(msg.Heartbeat(9, (new,)))
    peer.say(msg.Heartbeat(8, (old,)))
    peer.say(msg.Heartbeat(9, (old,)))
    assert known.generations == {new}


def test_idle_link_is_closed_and_one_in_use_is_not(lone, peer):
    waiter = Waiter()
    lone.connect(waiter)
    peer.welcome()
    lone.machine.peers.use(waiter.peers[0], waiter)
    for _ in range(70):
        lone.wait(1.0)
        peer.reply_beat()
    assert lone.ever(ef.CloseRoute) == []
    lone.machine.peers.unuse(waiter.peers[0], waiter)
    for _ in range(60):
        assert lone.ever(ef.CloseRoute) == []
        lone.wait(1.0)
        peer.reply_beat()
    lone.wait(1.0)
    assert len(lone.ever(ef.CloseRoute)) == 1
    assert len(lone.machine.links) == 0


def test_idle_link_stays_as_long_as_its_peer_has_not_confirmed_something(lone, peer):
    waiter = Waiter()
    lone.connect(waiter)
    peer.welcome()
    lone.machine.peers.post(waiter.peers[0], ("ack", "1"), msg.Goodbye())
    for _ in range(80):
        lone.wait(1.0)
        peer.reply_beat()
    assert lone.ever(ef.CloseRoute) == []
    lone.machine.peers.outbox.confirm(peer.epoch, ("ack", "1"))
    lone.wait(1.0)
    assert len(lone.ever(ef.CloseRoute)) == 1


def test_silent_peer_that_nobody_uses_is_not_looked_for(lone, peer):
    lone.connect(Waiter())
    peer.welcome()
    lone.wait(5.0)
    assert len(lone.ever(ef.CloseRoute)) == 1
    assert len(lone.ever_sent(msg.Hello)) == 1


def test_silent_peer_that_is_in_use_is_said_hello_until_it_is_back(lone, peer):
    waiter = Waiter()
    lone.connect(waiter)
    peer.welcome()
    lone.machine.peers.use(waiter.peers[0], waiter)
    lone.wait(4.5)
    assert waiter.codes == ["PEER_LOST"]
    first, *_ = lone.hellos
    lone.wait(2.0)
    assert set(lone.hellos) == {first}
    peer.welcome()
    assert waiter.peers[0].is_up
    lone.wait(1.0)
    assert lone.hellos == []
    assert peer.heard(msg.Heartbeat)
