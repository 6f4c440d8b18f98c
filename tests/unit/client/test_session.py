"""The client's protocol: attach, loss, restart, registration. No sockets, no clock."""

from __future__ import annotations

import pytest

from moriiod.client.registration import SendPacket, SendRequest
from moriiod.client.session import CloseChannel, OpenChannel, Phase
from moriiod.client.types import ClientSettings, ClientState
from moriiod.core.requests import (
    Attach,
    Detach,
    Done,
    Orphan,
    Ping,
    Publish,
    Pull,
    Push,
    Refused,
    RegisterCaches,
    Reserve,
)
from moriiod.errors import (
    Busy,
    DaemonLost,
    Draining,
    InvalidGeometry,
    TransferConflict,
    VersionMismatch,
)
from moriiod.wire.fdsocket import FdRefused, OfferRegion, RegionTaken, WorkerHello, WorkerWelcome
from tests.support.client_protocol import (
    ATTACHED,
    EPOCHS,
    PEER,
    Shell,
    ended,
    registration,
)


@pytest.fixture
def shell() -> Shell:
    """A client that is attached, without memory."""
    shell = Shell()
    shell.attach()
    return shell


@pytest.fixture
def registered(shell: Shell) -> Shell:
    """A client that is attached and has memory registered."""
    shell.register(registration())
    assert shell.protocol.caches.take_outcome() is True
    return shell


def open_four(shell: Shell) -> None:
    shell.submit(Publish("p", (b"",)))
    shell.submit(Pull("l", PEER, (b"",), (b"",)))
    shell.submit(Push("s", (b"",)))
    shell.submit(Reserve("r", PEER, (b"",)))


# --- attach ---------------------------------------------------------------------------------------


def test_first_attach_introduces_itself_before_it_attaches() -> None:
    shell = Shell()
    protocol = shell.protocol
    assert protocol.state is ClientState.RECONNECTING
    protocol.start()
    assert shell.next_order() == OpenChannel()
    protocol.opened(shell.now)
    generation = protocol.generation
    assert shell.next_order() == SendPacket(WorkerHello(generation))
    assert not protocol.orders, "nothing is sent before the daemon has answered"
    protocol.packet_received(WorkerWelcome(EPOCHS[0]), shell.now)
    assert shell.next_order() == SendRequest(Attach(generation, "w"))
    assert protocol.state is ClientState.RECONNECTING
    shell.reply(shell.sent[-1][0], ATTACHED)
    assert protocol.state is ClientState.CONNECTED
    assert protocol.identity == ATTACHED
    assert protocol.epoch == EPOCHS[0]
    assert protocol.deadline is None


def test_attach_with_no_daemon_there_tries_again_ever_more_slowly() -> None:
    shell = Shell(ClientSettings(backoff_first_s=0.1, backoff_max_s=0.35))
    shell.protocol.start()
    pauses = []
    for _ in range(4):
        shell.next_order()
        shell.protocol.failed(DaemonLost("nobody"), shell.now)
        shell.next_order()
        assert shell.protocol.deadline is not None
        pauses.append(round(shell.protocol.deadline - shell.now, 6))
        shell.protocol.timer(shell.protocol.deadline - 0.01)
        assert not shell.protocol.orders, "not before its time"
        shell.now = shell.protocol.deadline
        shell.protocol.timer(shell.now)
    assert pauses == [0.1, 0.2, 0.35, 0.35]
    assert shell.protocol.ledger.take_problems() == []


def test_each_try_to_attach_has_a_generation_of_its_own() -> None:
    shell = Shell()
    shell.protocol.start()
    first = shell.protocol.generation
    shell.next_order()
    shell.protocol.failed(DaemonLost("nobody"), shell.now)
    shell.now += 10
    shell.protocol.timer(shell.now)
    assert shell.protocol.generation != first


def test_attach_that_is_not_answered_is_given_up() -> None:
    shell = Shell(ClientSettings(step_timeout_s=5.0))
    shell.protocol.start()
    shell.next_order()
    shell.protocol.opened(shell.now)
    assert shell.protocol.deadline == shell.now + 5.0
    shell.protocol.timer(shell.now + 5.0)
    assert shell.protocol.phase is Phase.BACKOFF
    assert isinstance(shell.protocol.attach_error, DaemonLost)


def test_refused_attach_is_kept_as_the_reason_and_as_a_problem() -> None:
    shell = Shell()
    shell.protocol.start()
    shell.next_order()
    shell.protocol.opened(shell.now)
    shell.next_order()
    shell.protocol.packet_received(WorkerWelcome(EPOCHS[0]), shell.now)
    shell.next_order()
    shell.reply(shell.sent[-1][0], Refused("DRAINING", "stopping", True))
    assert isinstance(shell.protocol.attach_error, Draining)
    assert shell.protocol.phase is Phase.BACKOFF
    (problem,) = shell.protocol.ledger.take_problems()
    assert (problem.request, problem.code, problem.retryable) == ("Attach", "DRAINING", True)


def test_fd_socket_that_refuses_hello_fails_the_attach_with_its_code() -> None:
    shell = Shell()
    shell.protocol.start()
    shell.next_order()
    shell.protocol.opened(shell.now)
    shell.next_order()
    shell.protocol.packet_received(FdRefused("BUSY", "too many workers"), shell.now)
    assert isinstance(shell.protocol.attach_error, Busy)


def test_daemon_that_restarts_between_hello_and_attach_is_attached_anew() -> None:
    shell = Shell()
    shell.protocol.start()
    shell.next_order()
    shell.protocol.opened(shell.now)
    shell.next_order()
    shell.protocol.packet_received(WorkerWelcome(EPOCHS[0]), shell.now)
    shell.next_order()
    shell.epoch = EPOCHS[1]
    shell.reply(shell.sent[-1][0], ATTACHED)
    assert shell.protocol.state is ClientState.RECONNECTING
    shell.next_order()
    shell.now += 1
    assert shell.attach(EPOCHS[1]).lost_epoch is None
    assert shell.protocol.state is ClientState.CONNECTED


def test_answer_of_another_version_while_attaching_is_the_reason() -> None:
    shell = Shell()
    shell.protocol.start()
    shell.next_order()
    shell.protocol.opened(shell.now)
    shell.protocol.frame_refused(VersionMismatch("2, not 1"), shell.now)
    assert isinstance(shell.protocol.attach_error, VersionMismatch)


def test_garbage_from_the_daemon_when_attached_is_a_problem_and_nothing_else(
    shell: Shell,
) -> None:
    shell.protocol.frame_refused(VersionMismatch("2, not 1"), shell.now)
    assert shell.protocol.state is ClientState.CONNECTED
    assert [p.code for p in shell.protocol.ledger.take_problems()] == ["VERSION_MISMATCH"]


def test_packet_out_of_turn_ends_the_attach(shell: Shell) -> None:
    shell.protocol.packet_received(RegionTaken(0), shell.now)
    assert shell.protocol.state is ClientState.RECONNECTING
    assert shell.next_order() == CloseChannel(EPOCHS[0])


# --- loss -----------------------------------------------------------------------------------------


def test_M9_lost_daemon_ends_what_ended_with_it_and_holds_back_reservations(
    registered: Shell,
) -> None:
    open_four(registered)
    registered.lose_daemon(is_dead=False)
    ledger = registered.protocol.ledger
    assert ledger.take_events() == [], "its process may still be copying"
    registered.protocol.daemon_gone(EPOCHS[0])
    events = ledger.take_events()
    assert [(e.role, e.transfer_id) for e in events] == [
        ("publish", "p"),
        ("pull", "l"),
        ("push", "s"),
    ]
    assert {(e.outcome, e.reason, e.retryable) for e in events} == {("failed", "DAEMON_LOST", True)}
    assert ("reserve", "r") in ledger.table


def test_M9_new_daemon_is_told_of_orphans_and_ends_them(registered: Shell) -> None:
    open_four(registered)
    registered.lose_daemon()
    registered.protocol.ledger.take_events()
    asked = registered.attach(EPOCHS[1])
    assert asked.lost_epoch == EPOCHS[0]
    assert asked.orphans == (Orphan("r", PEER, EPOCHS[0]),)
    registered.event(1, ended("r", "reserve", "failed", "DAEMON_LOST"))
    (event,) = registered.protocol.ledger.take_events()
    assert (event.role, event.transfer_id) == ("reserve", "r")
    assert len(registered.protocol.ledger.table) == 0


def test_orphans_of_a_daemon_before_the_last_keep_its_epoch(registered: Shell) -> None:
    registered.submit(Reserve("old", PEER, (b"",)))
    registered.lose_daemon()
    registered.attach(EPOCHS[1])
    registered.submit(Reserve("new", PEER, (b"",)))
    registered.lose_daemon()
    asked = registered.attach(EPOCHS[2])
    assert asked.lost_epoch == EPOCHS[1]
    assert set(asked.orphans) == {Orphan("old", PEER, EPOCHS[0]), Orphan("new", PEER, EPOCHS[1])}


def test_connection_lost_to_a_daemon_that_lives_on_reports_nothing(registered: Shell) -> None:
    open_four(registered)
    registered.lose_daemon(is_dead=False)
    asked = registered.attach(EPOCHS[0])
    assert asked.orphans == ()
    assert asked.lost_epoch is None
    assert registered.protocol.ledger.take_events() == []
    assert registered.protocol.ledger.table.lost_epochs() == {EPOCHS[0]}


def test_lost_client_registers_again_as_often_as_before(registered: Shell) -> None:
    registered.register(registration())
    assert registered.protocol.caches.references == 2
    registered.sent.clear()
    registered.lose_daemon()
    registered.attach(EPOCHS[1])
    bodies = [type(body) for _, body in registered.sent]
    assert bodies == [Attach, RegisterCaches, RegisterCaches]
    assert registered.protocol.state is ClientState.CONNECTED


def test_lost_client_tries_at_once(shell: Shell) -> None:
    shell.lose_daemon()
    assert shell.protocol.deadline == shell.now
    shell.protocol.timer(shell.now)
    assert shell.next_order() == OpenChannel()


def test_new_requests_while_reconnecting_are_refused_as_retryable(shell: Shell) -> None:
    shell.lose_daemon()
    with pytest.raises(DaemonLost) as raised:
        shell.submit(Publish("t", (b"",)))
    assert raised.value.retryable
    assert len(shell.protocol.ledger.table) == 0


def test_call_that_waits_learns_of_the_loss(shell: Shell) -> None:
    number = shell.submit(Ping(), is_waited_for=True)
    shell.lose_daemon()
    assert isinstance(shell.protocol.ledger.take_answer(number), DaemonLost)


@pytest.mark.parametrize("kind", ["reply", "event"])
def test_anything_of_another_epoch_is_the_end_of_the_attach(registered: Shell, kind: str) -> None:
    open_four(registered)
    registered.epoch = EPOCHS[1]
    if kind == "reply":
        registered.reply(registered.sent[-1][0])
    else:
        registered.event(1, ended("l"))
    assert registered.protocol.state is ClientState.RECONNECTING
    assert registered.next_order() == CloseChannel(EPOCHS[0])
    assert registered.protocol.ledger.take_events() == []
    assert len(registered.protocol.ledger.table) == 4


def test_M9_daemon_that_does_not_know_us_any_more_is_attached_anew(registered: Shell) -> None:
    number = registered.submit(Publish("t", (b"",)))
    registered.reply(number, Refused("NOT_REGISTERED", "who?", False))
    (event,) = registered.protocol.ledger.take_events()
    assert (event.outcome, event.reason) == ("failed", "NOT_REGISTERED")
    assert registered.protocol.state is ClientState.RECONNECTING


def test_refusal_for_want_of_a_registration_keeps_an_attach_without_one(shell: Shell) -> None:
    number = shell.submit(Publish("t", (b"",)))
    shell.reply(number, Refused("NOT_REGISTERED", "no cache", False))
    assert shell.protocol.state is ClientState.CONNECTED


def test_closed_client_reacts_to_nothing(registered: Shell) -> None:
    registered.protocol.close()
    registered.protocol.lost(DaemonLost("gone"), registered.now)
    registered.event(1, ended())
    registered.protocol.close()
    assert registered.protocol.state is ClientState.CLOSED
    assert list(registered.protocol.orders) == [CloseChannel(EPOCHS[0])]


# --- registration ---------------------------------------------------------------------------------


def test_regions_are_offered_one_by_one_before_they_are_described(shell: Shell) -> None:
    wanted = registration(n_regions=2)
    shell.protocol.register(wanted, shell.now)
    for index in range(2):
        assert shell.next_order() == SendPacket(OfferRegion(index, 1 << 20), 100 + index)
        assert not shell.protocol.orders
        shell.protocol.packet_received(RegionTaken(index), shell.now)
    assert shell.next_order() == SendRequest(RegisterCaches(wanted.groups, wanted.region_bytes))
    assert shell.protocol.caches.take_outcome() is None
    assert shell.protocol.deadline == shell.now + ClientSettings().register_timeout_s
    shell.reply(shell.sent[-1][0])
    assert shell.protocol.caches.take_outcome() is True
    assert shell.protocol.state is ClientState.CONNECTED
    assert shell.protocol.deadline is None


def test_M1_same_registration_again_counts_and_offers_nothing(registered: Shell) -> None:
    registered.protocol.register(registration(), registered.now)
    assert isinstance(registered.next_order(), SendRequest)
    registered.reply(registered.sent[-1][0])
    caches = registered.protocol.caches
    assert caches.references == 2
    caches.unregistered()
    assert caches.held == registration()
    caches.unregistered()
    assert caches.held is None


def test_other_memory_beside_the_registered_one_is_refused(registered: Shell) -> None:
    with pytest.raises(TransferConflict):
        registered.protocol.register(registration(inode=7), registered.now)
    assert registered.protocol.state is ClientState.CONNECTED


def test_M8_other_memory_after_unregistering_gets_a_generation_of_its_own(
    registered: Shell,
) -> None:
    old = registered.protocol.generation
    registered.protocol.caches.unregistered()
    registered.protocol.register(registration(inode=7), registered.now)
    assert registered.next_order() == SendRequest(Detach())
    assert registered.protocol.state is ClientState.RECONNECTING
    registered.reply(registered.sent[-1][0])
    assert registered.next_order() == CloseChannel(EPOCHS[0])
    registered.finish_steps()
    assert registered.protocol.caches.take_outcome() is True
    assert registered.protocol.state is ClientState.CONNECTED
    assert registered.protocol.generation != old


def test_M8_other_memory_waits_for_transfers_of_the_old_one(registered: Shell) -> None:
    open_four(registered)
    registered.protocol.caches.unregistered()
    with pytest.raises(Busy):
        registered.protocol.register(registration(inode=7), registered.now)


def test_detach_that_is_not_answered_does_not_hold_up_the_new_attach(registered: Shell) -> None:
    registered.protocol.caches.unregistered()
    registered.protocol.register(registration(inode=7), registered.now)
    registered.next_order()
    registered.now += ClientSettings().step_timeout_s
    registered.protocol.timer(registered.now)
    assert list(registered.protocol.orders) == [CloseChannel(EPOCHS[0]), OpenChannel()]


def test_refused_registration_is_told_and_the_client_stays_attached(shell: Shell) -> None:
    shell.protocol.register(registration(), shell.now)
    shell.next_order()
    shell.protocol.packet_received(RegionTaken(0), shell.now)
    shell.next_order()
    shell.reply(shell.sent[-1][0], Refused("INVALID_GEOMETRY", "too small", False))
    assert isinstance(shell.protocol.caches.take_outcome(), InvalidGeometry)
    assert shell.protocol.state is ClientState.CONNECTED
    assert shell.protocol.caches.held is None


def test_region_refused_on_the_fd_socket_is_told_and_the_client_attaches_anew(
    shell: Shell,
) -> None:
    shell.protocol.register(registration(), shell.now)
    shell.next_order()
    shell.protocol.packet_received(FdRefused("REGISTRATION_FAILED", "not sealed"), shell.now)
    outcome = shell.protocol.caches.take_outcome()
    assert getattr(outcome, "code", None) == "REGISTRATION_FAILED"
    shell.next_order()
    shell.attach(EPOCHS[0])
    assert shell.protocol.state is ClientState.CONNECTED


def test_second_registration_while_one_is_under_way_is_refused(shell: Shell) -> None:
    shell.protocol.register(registration(), shell.now)
    with pytest.raises(Busy):
        shell.protocol.register(registration(), shell.now)


def test_daemon_lost_while_registering_the_new_one_gets_the_memory(shell: Shell) -> None:
    shell.protocol.register(registration(), shell.now)
    shell.next_order()
    shell.lose_daemon()
    shell.attach(EPOCHS[1])
    assert shell.protocol.caches.take_outcome() is True
    assert shell.protocol.caches.references == 1


def test_abandoned_registration_leaves_nothing_registered(shell: Shell) -> None:
    shell.protocol.register(registration(), shell.now)
    shell.next_order()
    shell.protocol.abandon_registration()
    assert list(shell.protocol.orders) == [CloseChannel(EPOCHS[0]), OpenChannel()]
    shell.sent.clear()
    shell.finish_steps()
    assert [type(body) for _, body in shell.sent] == [Attach]
    assert shell.protocol.state is ClientState.CONNECTED


def test_refused_registration_after_a_restart_is_tried_again(registered: Shell) -> None:
    registered.lose_daemon()
    registered.protocol.timer(registered.now)
    registered.epoch = EPOCHS[1]
    registered.next_order()
    registered.protocol.opened(registered.now)
    registered.next_order()
    registered.protocol.packet_received(WorkerWelcome(EPOCHS[1]), registered.now)
    registered.next_order()
    registered.reply(registered.sent[-1][0], ATTACHED)
    registered.next_order()
    registered.protocol.packet_received(RegionTaken(0), registered.now)
    registered.next_order()
    registered.reply(registered.sent[-1][0], Refused("REGISTRATION_FAILED", "ENOMEM", False))
    assert registered.protocol.phase is Phase.BACKOFF
    assert [p.code for p in registered.protocol.ledger.take_problems()] == ["REGISTRATION_FAILED"]
    registered.next_order()
    registered.now += 1
    registered.attach(EPOCHS[1])
    assert registered.protocol.caches.held == registration()


# --- leaving --------------------------------------------------------------------------------------


def test_leaving_with_nothing_in_flight_ends_with_the_answer(registered: Shell) -> None:
    registered.protocol.leave(registered.now)
    assert registered.next_order() == SendRequest(Detach())
    registered.reply(registered.sent[-1][0], Done())
    assert registered.protocol.phase is Phase.CLOSED
    assert registered.protocol.has_left


def test_leaving_with_transfers_waits_until_the_daemon_lets_go(registered: Shell) -> None:
    open_four(registered)
    registered.protocol.leave(registered.now)
    registered.next_order()
    registered.reply(registered.sent[-1][0], Done())
    assert registered.protocol.phase is Phase.LEAVING
    registered.protocol.connection_ended(DaemonLost("closed"), registered.now)
    assert registered.next_order() == SendRequest(Ping()), "a dying daemon closes it as well"
    assert registered.protocol.phase is Phase.LEAVING
    registered.reply(registered.sent[-1][0], Done())
    assert registered.protocol.phase is Phase.CLOSED
    assert registered.protocol.has_left


def test_leaving_needs_an_answer_that_came_after_the_end_of_the_connection(
    registered: Shell,
) -> None:
    open_four(registered)
    registered.protocol.leave(registered.now)
    registered.next_order()
    registered.protocol.connection_ended(DaemonLost("closed"), registered.now)
    registered.reply(registered.sent[-1][0], Done())
    assert not registered.protocol.has_left, "it may have been on its way before"
    assert registered.next_order() == SendRequest(Ping())
    registered.reply(registered.sent[-1][0], Done())
    assert registered.protocol.has_left


def test_daemon_cannot_vouch_for_what_a_lost_one_left_behind(registered: Shell) -> None:
    open_four(registered)
    registered.lose_daemon()
    registered.attach(EPOCHS[1])
    registered.protocol.leave(registered.now)
    registered.next_order()
    registered.protocol.connection_ended(DaemonLost("closed"), registered.now)
    registered.reply(registered.sent[-1][0], Done())
    registered.next_order()
    registered.reply(registered.sent[-1][0], Done())
    assert registered.protocol.phase is Phase.CLOSED
    assert not registered.protocol.has_left


def test_leaving_a_daemon_that_dies_is_no_proof_that_it_let_go(registered: Shell) -> None:
    open_four(registered)
    registered.protocol.leave(registered.now)
    registered.next_order()
    registered.reply(registered.sent[-1][0], Done())
    registered.protocol.connection_ended(DaemonLost("died"), registered.now)
    registered.next_order()
    registered.protocol.lost(DaemonLost("died"), registered.now)
    assert registered.protocol.phase is Phase.CLOSED
    assert not registered.protocol.has_left


def test_daemon_that_died_before_it_heard_of_our_leaving_proves_nothing(
    registered: Shell,
) -> None:
    open_four(registered)
    registered.protocol.leave(registered.now)
    registered.protocol.connection_ended(DaemonLost("died"), registered.now)
    assert registered.protocol.phase is Phase.CLOSED
    assert not registered.protocol.has_left


def test_leaving_a_daemon_that_never_lets_go_ends_with_its_time(registered: Shell) -> None:
    open_four(registered)
    registered.protocol.leave(registered.now)
    registered.next_order()
    registered.reply(registered.sent[-1][0], Done())
    assert registered.protocol.deadline is not None
    registered.protocol.timer(registered.protocol.deadline)
    assert registered.protocol.phase is Phase.CLOSED
    assert not registered.protocol.has_left


def test_leaving_while_reconnecting_ends_at_once(shell: Shell) -> None:
    shell.lose_daemon()
    shell.protocol.leave(shell.now)
    assert shell.protocol.phase is Phase.CLOSED
