"""The control endpoint: peers reach each other, and strangers disturb nobody."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import pytest_asyncio
import zmq

from moriiod.control.endpoint import (
    MALFORMED_MESSAGE,
    OVERSIZED_MESSAGE,
    PEER_MUTED,
    ControlEndpoint,
    ControlSettings,
)
from moriiod.control.offences import MAX_IN_A_ROW
from moriiod.core.address import Endpoint, format_tcp
from moriiod.core.effects import CloseRoute, OpenRoute, SendToPeer
from moriiod.core.events import Event, LegacyAckReceived, PeerMessageReceived, RouteFailed
from moriiod.core.fanin import TransferAck
from moriiod.core.messages import Claim, Goodbye, Heartbeat, Hello, UnknownEpoch
from moriiod.errors import (
    AddressInUse,
    Busy,
    ConfigError,
    InvalidAddress,
    PeerUnreachable,
    UnknownMessage,
)
from moriiod.wire.frames import Kind, header
from moriiod.wire.peer import PeerFrame, decode_peer, encode_peer
from tests.support.samples import ATTEMPT, IDENTITY, OLD_EPOCH, packed
from tests.support.shell import RawClient, Recorder

Context = zmq.Context[zmq.Socket[bytes]]
Open = Callable[..., "Daemon"]

HELLO = Hello(ATTEMPT, (1,), IDENTITY, ("shm",))
HERE = ControlSettings("127.0.0.1", 0)


class Daemon:
    """One endpoint and what its driver was told."""

    def __init__(self, context: Context, settings: ControlSettings, epoch: str) -> None:
        self.recorder = Recorder()
        self.endpoint = ControlEndpoint(context, settings, epoch, self.recorder.hooks)

    @property
    def port(self) -> int:
        return self.endpoint.address.port

    def dial(self, other: Daemon, route: str = "d:1") -> str:
        address = other.endpoint.address
        self.endpoint.open_route(OpenRoute(route, address.host, address.port))
        return route

    async def message(self, n: int = 1) -> PeerMessageReceived:
        return await self.recorder.first(PeerMessageReceived, n)

    async def failure(self) -> RouteFailed:
        return await self.recorder.first(RouteFailed)


@pytest_asyncio.fixture
async def opened(context: Context) -> AsyncIterator[Open]:
    daemons: list[Daemon] = []

    def make(settings: ControlSettings = HERE) -> Daemon:
        daemons.append(Daemon(context, settings, f"{len(daemons):032x}"))
        daemons[-1].endpoint.open()
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.endpoint.close()


@pytest.fixture
def raw(context: Context) -> AsyncIterator[Callable[[Daemon], RawClient]]:
    clients: list[RawClient] = []

    def make(daemon: Daemon) -> RawClient:
        clients.append(RawClient(context, format_tcp("127.0.0.1", daemon.port)))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


# --- Peers ------------------------------------------------------------------------------------


async def test_message_arrives_with_its_epoch_and_is_answered_on_its_route(opened: Open) -> None:
    listener, dialler = opened(), opened()
    route = dialler.dial(listener)
    assert dialler.endpoint.send(SendToPeer(route, HELLO))
    came = await listener.message()
    assert (came.epoch, came.body) == (f"{1:032x}", HELLO)
    assert came.route.startswith("a:")
    assert listener.endpoint.send(SendToPeer(came.route, UnknownEpoch(OLD_EPOCH)))
    answer = await dialler.message()
    assert answer == PeerMessageReceived(route, f"{0:032x}", UnknownEpoch(OLD_EPOCH))


async def test_first_message_need_not_wait_for_a_repeat(opened: Open) -> None:
    """It was sent before the connection was up; only the newest one is kept for that moment."""
    listener, dialler = opened(), opened()
    route = "d:1"
    # A name takes a turn of the loop to be looked up, so nothing can be connected before.
    dialler.endpoint.open_route(OpenRoute(route, "localhost", listener.port))
    for sequence in range(3):
        assert dialler.endpoint.send(SendToPeer(route, Heartbeat(sequence, ())))
    came = await listener.message()
    assert came.body == Heartbeat(2, ())
    assert dialler.endpoint.send(SendToPeer(route, Heartbeat(3, ())))
    assert (await listener.message(2)).body == Heartbeat(3, ())


async def test_two_routes_to_one_peer_are_told_apart(opened: Open) -> None:
    listener, dialler = opened(), opened()
    for name in ("d:1", "d:2"):
        dialler.endpoint.send(SendToPeer(dialler.dial(listener, name), HELLO))
    routes = {(await listener.message(n)).route for n in (1, 2)}
    assert len(routes) == 2
    assert dialler.endpoint.n_dialled == 2


async def test_closed_route_is_gone_on_both_sides(opened: Open) -> None:
    listener, dialler = opened(), opened()
    route = dialler.dial(listener)
    dialler.endpoint.send(SendToPeer(route, HELLO))
    accepted = (await listener.message()).route
    dialler.endpoint.close_route(CloseRoute(route))
    dialler.endpoint.close_route(CloseRoute(route))
    assert dialler.endpoint.send(SendToPeer(route, HELLO)) is False
    # The listener learns of the end from its kernel, so it may take one turn or a few.
    loop = asyncio.get_running_loop()
    turn = asyncio.Event()
    while listener.endpoint.send(SendToPeer(accepted, Goodbye())):
        turn.clear()
        loop.call_later(0.001, turn.set)
        await turn.wait()


async def test_route_opened_again_under_its_name_is_a_new_connection(opened: Open) -> None:
    listener, dialler = opened(), opened()
    for n in (1, 2):
        dialler.endpoint.send(SendToPeer(dialler.dial(listener), HELLO))
        await listener.message(n)
    first, second = listener.recorder.of(PeerMessageReceived)
    assert first.route != second.route
    assert dialler.endpoint.n_dialled == 1


async def test_peer_that_restarts_at_its_address_is_reached_on_the_same_route(
    context: Context, opened: Open
) -> None:
    dialler = opened()
    old = Daemon(context, HERE, f"{7:032x}")
    old.endpoint.open()
    route = dialler.dial(old)
    dialler.endpoint.send(SendToPeer(route, HELLO))
    await old.message()
    old.endpoint.close()
    new = Daemon(context, HERE, f"{8:032x}")
    new.endpoint = ControlEndpoint(
        context, replace(HERE, port=old.port), f"{8:032x}", new.recorder.hooks
    )
    await open_when_free(new.endpoint)
    loop = asyncio.get_running_loop()

    def repeat() -> None:  # as the core does
        dialler.endpoint.send(SendToPeer(route, HELLO))
        if not new.recorder.events:
            loop.call_later(0.02, repeat)

    repeat()
    came = await new.message()
    assert came.body == HELLO
    new.endpoint.close()


async def open_when_free(endpoint: ControlEndpoint) -> None:
    """libzmq gives a port back a moment after its socket was closed."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            endpoint.open()
            return
        except AddressInUse:
            turn = asyncio.Event()
            loop.call_later(0.001, turn.set)
            await turn.wait()


async def test_unknown_accepted_route_is_refused(opened: Open) -> None:
    assert opened().endpoint.send(SendToPeer("a:00ff", HELLO)) is False


async def test_send_before_open_is_refused(context: Context, recorder: Recorder) -> None:
    endpoint = ControlEndpoint(context, HERE, OLD_EPOCH, recorder.hooks)
    assert endpoint.send(SendToPeer("d:1", HELLO)) is False
    assert not endpoint.is_open
    assert endpoint.n_dialled == 0
    assert endpoint.counters.received == 0
    endpoint.open_route(OpenRoute("d:1", "127.0.0.1", 1))
    endpoint.close_route(CloseRoute("d:1"))
    endpoint.close()
    with pytest.raises(ConfigError):
        _ = endpoint.address


async def test_message_over_the_limit_is_counted_and_not_sent(opened: Open) -> None:
    listener, dialler = opened(), opened(replace(HERE, max_message_bytes=65536))
    route = dialler.dial(listener)
    claim = Claim("t", ATTEMPT, True, (packed(*range(20_000)),))
    assert dialler.endpoint.send(SendToPeer(route, claim)) is False
    assert dialler.recorder.kinds == [OVERSIZED_MESSAGE]


async def test_Z9_thousand_handshakes_all_end_while_garbage_is_collected(opened: Open) -> None:
    listener, dialler = opened(), opened(replace(HERE, max_routes=1000))
    n = 1000

    def answer(event: Event) -> None:
        assert isinstance(event, PeerMessageReceived)
        listener.endpoint.send(SendToPeer(event.route, UnknownEpoch(OLD_EPOCH)))

    def done(event: Event) -> None:
        assert isinstance(event, PeerMessageReceived)
        dialler.endpoint.close_route(CloseRoute(event.route))
        if len(dialler.recorder.events) % 50 == 0:
            gc.collect()

    listener.recorder.on_event = answer
    dialler.recorder.on_event = done
    for i in range(n):
        route = dialler.dial(listener, f"d:{i}")
        assert dialler.endpoint.send(SendToPeer(route, HELLO))
        if i % 50 == 49:  # a daemon has not as many descriptors as that
            await dialler.recorder.until(lambda: dialler.endpoint.n_dialled == 0)
    assert len({event.route for event in dialler.recorder.of(PeerMessageReceived)}) == n
    assert not dialler.recorder.bugs


# --- Dialling what cannot be dialled ------------------------------------------------------------


async def test_P4_unresolvable_host_fails_its_route_and_names_the_host(opened: Open) -> None:
    dialler = opened()
    dialler.endpoint.open_route(OpenRoute("d:1", "no-such-host.invalid", 6301))
    assert dialler.endpoint.send(SendToPeer("d:1", HELLO)), "parked until the name is known"
    failure = await dialler.failure()
    assert failure.route == "d:1"
    assert isinstance(failure.error, PeerUnreachable)
    assert failure.error.fields["host"] == "no-such-host.invalid"
    assert dialler.endpoint.send(SendToPeer("d:1", HELLO)) is False


async def test_P4_host_name_is_resolved_and_dialled(opened: Open) -> None:
    listener, dialler = opened(), opened()
    dialler.endpoint.open_route(OpenRoute("d:1", "localhost", listener.port))
    dialler.endpoint.send(SendToPeer("d:1", HELLO))
    assert (await listener.message()).body == HELLO


async def test_route_closed_while_its_name_is_looked_up_stays_closed(opened: Open) -> None:
    listener, dialler = opened(), opened()
    for name in ("d:1", "d:2"):
        dialler.endpoint.open_route(OpenRoute(name, "localhost", listener.port))
        dialler.endpoint.send(SendToPeer(name, Heartbeat(int(name[-1]), ())))
    dialler.endpoint.close_route(CloseRoute("d:1"))
    assert (await listener.message()).body == Heartbeat(2, ())
    assert dialler.endpoint.n_dialled == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*", "", "a b", "1.2.3", "h:6301"])
async def test_P3_wildcard_or_malformed_host_fails_its_route(opened: Open, host: str) -> None:
    dialler = opened()
    dialler.endpoint.open_route(OpenRoute("d:1", host, 6301))
    failure = await dialler.failure()
    assert isinstance(failure.error, InvalidAddress)
    assert dialler.endpoint.n_dialled == 0


@pytest.mark.parametrize("port", [0, -1, 65536])
async def test_port_that_is_none_fails_its_route(opened: Open, port: int) -> None:
    dialler = opened()
    dialler.endpoint.open_route(OpenRoute("d:1", "127.0.0.1", port))
    assert isinstance((await dialler.failure()).error, InvalidAddress)


async def test_routes_over_the_limit_are_busy(opened: Open) -> None:
    listener, dialler = opened(), opened(replace(HERE, max_routes=2))
    for name in ("d:1", "d:2", "d:3"):
        dialler.dial(listener, name)
    failure = await dialler.failure()
    assert failure.route == "d:3"
    assert isinstance(failure.error, Busy)
    assert dialler.endpoint.n_dialled == 2


async def test_sockets_over_the_limit_of_the_context_are_busy(context: Context) -> None:
    daemon = Daemon(context, HERE, OLD_EPOCH)
    daemon.endpoint.open()
    context.set(zmq.MAX_SOCKETS, 1200)
    taken = []
    try:
        while True:
            taken.append(context.socket(zmq.PAIR))
    except zmq.ZMQError:
        pass
    daemon.endpoint.open_route(OpenRoute("d:1", "127.0.0.1", 1))
    failure = await daemon.failure()
    for item in taken:
        item.close()
    daemon.endpoint.close()
    assert isinstance(failure.error, Busy)


# --- Messages nobody can read -------------------------------------------------------------------


async def test_malformed_message_is_counted_and_the_next_one_is_read(
    opened: Open, raw: Callable[[Daemon], RawClient]
) -> None:
    listener = opened()
    client = raw(listener)
    good = encode_peer(PeerFrame(OLD_EPOCH, HELLO))
    bad = [
        [b"", b""],
        [b"\x01P", b"Goodbye", b"", b"\x80"],
        [header(2, Kind.PEER), *good[1:]],
        [*good[:3], b"\xc1"],
        [b"x"] * 40,
    ]
    for n, frames in enumerate(bad, start=1):
        client.send(frames)
        client.send(good)
        await listener.message(n)
    assert listener.recorder.kinds == [MALFORMED_MESSAGE] * len(bad)
    assert not listener.recorder.bugs


async def test_peer_that_repeats_malformed_messages_is_not_listened_to_any_more(
    opened: Open, raw: Callable[[Daemon], RawClient]
) -> None:
    listener = opened()
    offender, other = raw(listener), raw(listener)
    good = encode_peer(PeerFrame(OLD_EPOCH, HELLO))
    for _ in range(MAX_IN_A_ROW):
        offender.send([b"", b""])
    await listener.recorder.until(lambda: PEER_MUTED in listener.recorder.kinds)
    for _ in range(5):
        offender.send(good)
        offender.send([b"", b""])
    n_before = listener.endpoint.counters.received
    other.send(good)
    await listener.message()
    await turn_until(lambda: listener.endpoint.counters.received == n_before + 11)
    assert len(listener.recorder.events) == 1
    assert listener.recorder.kinds == [MALFORMED_MESSAGE] * MAX_IN_A_ROW + [PEER_MUTED]


async def turn_until(condition: Callable[[], bool]) -> None:
    """Let the loop turn; for what shows in a counter and tells nobody."""
    loop = asyncio.get_running_loop()
    while not condition():
        turn = asyncio.Event()
        loop.call_later(0.001, turn.set)
        await turn.wait()


async def test_dialled_peer_that_repeats_malformed_messages_loses_its_route(
    context: Context, opened: Open
) -> None:
    dialler = opened()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    dialler.endpoint.open_route(OpenRoute("d:1", "127.0.0.1", port))
    dialler.endpoint.send(SendToPeer("d:1", HELLO))
    await turn_until(lambda: bool(router.poll(0)))
    routing_id, *frames = router.recv_multipart()
    assert decode_peer(frames).body == HELLO
    for _ in range(MAX_IN_A_ROW):
        router.send_multipart(
            [routing_id, header(1, Kind.PEER), b"Explode", frames[2], frames[2], b"\x80"]
        )
    failure = await dialler.failure()
    router.close(linger=0)
    assert failure.route == "d:1"
    assert isinstance(failure.error, UnknownMessage)
    assert dialler.endpoint.n_dialled == 0


# --- ACKs of old peers ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["tx-…", "t", "7"])
async def test_Z8_plain_string_is_an_ack_of_its_connection(
    opened: Open, raw: Callable[[Daemon], RawClient], text: str
) -> None:
    listener = opened()
    raw(listener).send([text.encode()])
    event = await listener.recorder.first(LegacyAckReceived)
    assert event.ack.source.startswith("a:")
    assert event.ack == TransferAck.plain(text, event.ack.source)


async def test_Z8_plain_string_is_malformed_where_old_peers_are_not_accepted(
    opened: Open, raw: Callable[[Daemon], RawClient]
) -> None:
    listener = opened(replace(HERE, accept_legacy_acks=False))
    raw(listener).send([b"tx-1"])
    await listener.recorder.until(lambda: bool(listener.recorder.problems))
    assert listener.recorder.kinds == [MALFORMED_MESSAGE]
    assert not listener.recorder.events


# --- Binding --------------------------------------------------------------------------------------


async def test_P2_eight_daemons_on_port_0_have_eight_ports(opened: Open) -> None:
    addresses = [opened().endpoint.address for _ in range(8)]
    assert len({address.port for address in addresses}) == 8
    assert all(address == Endpoint("127.0.0.1", address.port) for address in addresses)


async def test_P2_held_port_is_an_error_that_names_it(opened: Open) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        loop = asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(AddressInUse) as caught:
            opened(replace(HERE, port=port))
        assert loop.time() - started < 2
    assert str(port) in caught.value.message
    assert caught.value.fields["port"] == port


async def test_P4_foreign_address_is_error_99(opened: Open) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(ControlSettings("192.0.2.77", 0))
    assert caught.value.fields["errno"] == 99
    assert "192.0.2.77" in caught.value.message


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a b", "", "127.0.0.1:6301"])
async def test_P4_host_that_is_none_is_a_config_error(opened: Open, host: str) -> None:
    with pytest.raises(ConfigError):
        opened(ControlSettings(host, 0))


async def test_P4_host_name_of_this_machine_is_bound(opened: Open) -> None:
    assert opened(ControlSettings("localhost", 0)).endpoint.address.host == "127.0.0.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::"])
async def test_P3_wildcard_is_not_advertised(opened: Open, host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(ControlSettings(host, 0))
    assert caught.value.fields["key"] == "control.advertise"


@pytest.mark.parametrize("advertise", ["0.0.0.0", "::", "*", ""])
async def test_P3_wildcard_as_advertised_address_is_refused(opened: Open, advertise: str) -> None:
    with pytest.raises(ConfigError):
        opened(ControlSettings("127.0.0.1", 0, advertise=advertise))


async def test_malformed_advertised_address_is_refused(opened: Open) -> None:
    with pytest.raises(ConfigError):
        opened(ControlSettings("127.0.0.1", 0, advertise="a b"))


async def test_P3_wildcard_with_an_advertised_address_serves(opened: Open) -> None:
    listener = opened(ControlSettings("0.0.0.0", 0, advertise="[::FFFF:127.0.0.1]"))
    assert listener.endpoint.address.host == "127.0.0.1"
    dialler = opened()
    dialler.endpoint.send(SendToPeer(dialler.dial(listener), HELLO))
    await listener.message()


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_P5_ipv6_literal_with_or_without_brackets_is_bound_and_dialled(
    opened: Open, host: str
) -> None:
    if not socket.has_ipv6 or not _has_ipv6_loopback():
        pytest.skip("no IPv6 on this machine")
    listener, dialler = opened(ControlSettings(host, 0)), opened()
    assert listener.endpoint.address.host == "::1"
    dialler.endpoint.open_route(OpenRoute("d:1", host, listener.port))
    dialler.endpoint.send(SendToPeer("d:1", HELLO))
    assert (await listener.message()).body == HELLO


def _has_ipv6_loopback() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        return probe.connect_ex(("::1", 9)) != 99
