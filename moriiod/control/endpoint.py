"""The control endpoint: where peers reach this daemon, and how it reaches them.

Does I/O and decides nothing. Routes that peers opened are named ``a:`` and the routing id in
hexadecimal; routes that this daemon dials have the names the core gives them.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from dataclasses import dataclass
from typing import Final

import zmq

from moriiod.control.dialler import Dialler
from moriiod.control.monitor import ListenerMonitor
from moriiod.control.offences import Offences
from moriiod.control.resolver import look_up_within
from moriiod.core.address import Endpoint, is_wildcard_host, normalise_host
from moriiod.core.effects import CloseRoute, OpenRoute, SendToPeer
from moriiod.core.events import LegacyAckReceived, PeerMessageReceived, RouteFailed
from moriiod.core.ids import Epoch, PeerRoute
from moriiod.errors import AddressInUse, ConfigError, InvalidAddress, MoriiodError
from moriiod.wire.frames import MAX_BODY_BYTES, MAX_FRAMES
from moriiod.wire.legacy import decode_legacy_ack
from moriiod.wire.peer import PeerFrame, decode_peer, encode_peer
from moriiod.zmqio.hooks import ShellHooks
from moriiod.zmqio.loopsocket import LoopSocket, SocketCounters
from moriiod.zmqio.options import SocketLimits, new_router

#: Kinds of problems this shell counts, with ``monitor.HANDSHAKE_FAILED``.
MALFORMED_MESSAGE: Final = "control_malformed_message"
PEER_MUTED: Final = "control_peer_muted"
OVERSIZED_MESSAGE: Final = "control_oversized_message"

_ACCEPTED: Final = "a:"
_RESOLVE_TIMEOUT_S: Final = 1.5


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Where the endpoint is and what it takes.

    Attributes:
        host: Address to listen on: an IP literal, ``*``, or a name of this machine.
        port: 0 lets the kernel choose.
        advertise: Host that peers are told; None = ``host``.
        accept_legacy_acks: Take the single-frame ACKs of peers without our protocol.
        max_message_bytes: Largest body, in either direction.
        max_queued_messages: High-water mark for one peer, in each direction.
        max_routes: Most routes dialled at once.
        handshake_s: A connection that has not finished ZMQ's handshake by then is cut.
        heartbeat_s: Seconds between ZMQ pings; three without an answer cut the connection.
    """

    host: str
    port: int
    advertise: str | None = None
    accept_legacy_acks: bool = True
    max_message_bytes: int = MAX_BODY_BYTES
    max_queued_messages: int = 4096
    max_routes: int = 1024
    handshake_s: float = 5.0
    heartbeat_s: float = 2.0


class ControlEndpoint:
    """The listener and the dialled routes of one daemon.

    Args:
        context: Of the daemon; ``zmqio.options.new_context`` makes room for the routes.
        settings: Where and how large.
        epoch: Of this daemon start; goes into every message.
        hooks: The driver.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: ControlSettings,
        epoch: Epoch,
        hooks: ShellHooks,
    ) -> None:
        self._context = context
        self._settings = settings
        self._epoch = epoch
        self._hooks = hooks
        self._limits = SocketLimits(
            max_frame_bytes=settings.max_message_bytes,
            send_hwm=settings.max_queued_messages,
            recv_hwm=settings.max_queued_messages,
            handshake_s=settings.handshake_s,
            heartbeat_s=settings.heartbeat_s,
        )
        self._offences = Offences()
        self._listener: LoopSocket | None = None
        self._monitor: ListenerMonitor | None = None
        self._dialler: Dialler | None = None
        self._bound: Endpoint | None = None

    def open(self) -> None:
        """Bind and serve on the running loop. Takes at most two seconds.

        Raises:
            AddressInUse: The port is held by another socket; the text names it.
            ConfigError: The host is no address of this machine, or nobody could dial what would
                be advertised.
        """
        loop = asyncio.get_running_loop()
        host = _bind_host(self._settings.host)
        advertised = _advertised_host(self._settings, host)
        router = new_router(self._context, self._limits)
        try:
            port = _bind(router, host, self._settings.port)
            self._monitor = ListenerMonitor(router, loop, self._hooks)
        except BaseException:
            router.close(linger=0)
            raise
        self._bound = Endpoint(advertised, port)
        self._listener = LoopSocket(
            router,
            loop,
            self._on_listener,
            self._hooks.on_bug,
            1 + MAX_FRAMES,
            self._settings.max_message_bytes,
        )
        self._dialler = Dialler(
            self._context,
            self._limits,
            self._settings.max_routes,
            socket.AF_INET6 if ":" in host else socket.AF_INET,
            self._on_message,
            self._hooks,
        )

    @property
    def address(self) -> Endpoint:
        """What peers are told: the advertised host and the port that is really bound.

        Raises:
            ConfigError: The endpoint is not open.
        """
        if self._bound is None:
            raise ConfigError("the control endpoint is not open")
        return self._bound

    @property
    def is_open(self) -> bool:
        """Whether peers are being served."""
        return self._listener is not None and not self._listener.is_closed

    @property
    def counters(self) -> SocketCounters:
        """Messages that went through the listener; all zero before ``open``."""
        return self._listener.counters if self._listener else SocketCounters()

    @property
    def n_dialled(self) -> int:
        """Dialled routes, connected or not."""
        return len(self._dialler) if self._dialler else 0

    def open_route(self, effect: OpenRoute) -> None:
        """Start connecting to a peer; ``RouteFailed`` is emitted if that cannot work."""
        if self._dialler is not None:
            self._dialler.open(effect)

    def close_route(self, effect: CloseRoute) -> None:
        """Forget a dialled route; a peer's own route ends with its connection."""
        self._offences.forgive(effect.route)
        if self._dialler is not None:
            self._dialler.close(effect.route)

    def send(self, effect: SendToPeer) -> bool:
        """Send on a route; never waits.

        Returns:
            False: It is lost: the peer is not connected, does not read, or the message is over
            the limit. The core repeats what must arrive.
        """
        if self._listener is None or self._dialler is None:
            return False
        try:
            frame = PeerFrame(self._epoch, effect.body, effect.to)
            frames = encode_peer(frame, self._settings.max_message_bytes)
        except MoriiodError as error:
            self._hooks.count_problem(OVERSIZED_MESSAGE, f"{error.code}: {error.message}")
            return False
        if effect.route.startswith(_ACCEPTED):
            routing_id = bytes.fromhex(effect.route.removeprefix(_ACCEPTED))
            return self._listener.send_nowait([routing_id, *frames])
        return self._dialler.send(effect.route, frames)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the listener and every route. Idempotent.

        Args:
            linger_s: How long messages that are queued may still go out.
        """
        if self._dialler is not None:
            self._dialler.close_all(linger_s)
        if self._monitor is not None:
            self._monitor.close()
        if self._listener is not None:
            self._listener.close(linger_s)

    def _on_listener(self, frames: list[bytes]) -> None:
        self._on_message(_ACCEPTED + frames[0].hex(), frames[1:])

    def _on_message(self, route: PeerRoute, frames: list[bytes]) -> None:
        if self._offences.is_muted(route):
            return
        try:
            event = self._decode(route, frames)
        except MoriiodError as error:
            self._on_malformed(route, error)
            return
        self._offences.forgive(route)
        self._hooks.emit(event)

    def _decode(
        self, route: PeerRoute, frames: list[bytes]
    ) -> PeerMessageReceived | LegacyAckReceived:
        is_legacy = len(frames) == 1 and self._settings.accept_legacy_acks
        if is_legacy and route.startswith(_ACCEPTED):
            return LegacyAckReceived(decode_legacy_ack(frames[0], route))
        frame = decode_peer(frames, self._settings.max_message_bytes)
        return PeerMessageReceived(route, frame.epoch, frame.body, frame.to)

    def _on_malformed(self, route: PeerRoute, error: MoriiodError) -> None:
        self._hooks.count_problem(MALFORMED_MESSAGE, f"{route}: {error.code}: {error.message}")
        if not self._offences.add(route):
            return
        self._hooks.count_problem(PEER_MUTED, route)
        if not route.startswith(_ACCEPTED) and self._dialler is not None:
            self._dialler.close(route)
            self._offences.forgive(route)
            self._hooks.emit(RouteFailed(route, error))


def _bind_host(host: str) -> str:
    """Return the literal to listen on."""
    if host == "*":
        return "0.0.0.0"
    try:
        name = normalise_host(host)
    except InvalidAddress as error:
        raise ConfigError(f"cannot listen on {host!r}: {error.message}", host=host) from error
    is_literal = ":" in name or name.replace(".", "").isdecimal()
    return name if is_literal else look_up_within(name, _RESOLVE_TIMEOUT_S)


def _advertised_host(settings: ControlSettings, bind_host: str) -> str:
    host = bind_host if settings.advertise is None else settings.advertise
    if is_wildcard_host(host):
        raise ConfigError(
            f"{host!r} is a wildcard and cannot be advertised: peers would dial themselves",
            key="control.advertise",
            host=host,
        )
    try:
        return normalise_host(host)
    except InvalidAddress as error:
        raise ConfigError(error.message, key="control.advertise", host=host) from error


def _bind(router: zmq.Socket[bytes], host: str, port: int) -> int:
    """Bind and return the port."""
    router.setsockopt(zmq.IPV6, int(":" in host))
    shown = f"[{host}]" if ":" in host else host
    try:
        router.bind(f"tcp://{shown}:{port}")
    except zmq.ZMQError as error:
        raise _bind_error(host, port, error) from error
    last = router.getsockopt(zmq.LAST_ENDPOINT)
    return int(bytes(last).rstrip(b"\0").rpartition(b":")[2]) if isinstance(last, bytes) else port


def _bind_error(host: str, port: int, error: zmq.ZMQError) -> MoriiodError:
    number = error.errno or 0
    if number == errno.EADDRINUSE:
        return AddressInUse(f"control port {port} on {host} is in use", host=host, port=port)
    reasons = {
        errno.EADDRNOTAVAIL: "it is no address of this machine",
        errno.ENODEV: "it is no address of this machine, or this machine has no IPv6",
        errno.EAFNOSUPPORT: "this machine has no IPv6",
        errno.EACCES: "the port needs privileges",
    }
    reason = reasons.get(number, error.strerror)
    return ConfigError(
        f"cannot listen on {host} port {port}: {reason} (error {number})",
        host=host,
        port=port,
        errno=number,
    )
