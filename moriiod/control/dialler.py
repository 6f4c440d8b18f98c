"""Routes to peers that this daemon dialled: one DEALER for each, under the core's names."""

from __future__ import annotations

import asyncio
import errno
import functools
import ipaddress
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

from moriiod.control.resolver import Resolved, Resolver
from moriiod.core.address import format_tcp, is_wildcard_host, normalise_host
from moriiod.core.effects import OpenRoute
from moriiod.core.events import RouteFailed
from moriiod.core.ids import PeerRoute
from moriiod.errors import Busy, InvalidAddress, MoriiodError
from moriiod.wire.frames import MAX_FRAMES
from moriiod.zmqio.hooks import ShellHooks
from moriiod.zmqio.loopsocket import LoopSocket
from moriiod.zmqio.options import SocketLimits, new_dealer

#: Routing ids that start with a zero byte are libzmq's own.
_ROUTING_ID_PREFIX: Final = b"m"


@dataclass(slots=True)
class _Route:
    """One dialled endpoint.

    Attributes:
        socket: None while the host name is looked up.
        parked: The newest message that was sent before the first connection; goes out with it,
            so that a handshake need not wait for the core to repeat it.
        was_connected: Whether there has been a connection; from then on nothing is parked.
    """

    socket: LoopSocket | None = None
    parked: list[bytes] | None = None
    was_connected: bool = False


class Dialler:
    """Owns the dialled routes.

    Args:
        context: Of the daemon.
        limits: Bounds of each socket.
        max_routes: Most routes at once.
        family: Address family to prefer for host names.
        on_message: Takes (route, frames) of every message that comes in.
        hooks: The driver.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        limits: SocketLimits,
        max_routes: int,
        family: socket.AddressFamily,
        on_message: Callable[[PeerRoute, list[bytes]], None],
        hooks: ShellHooks,
    ) -> None:
        self._context = context
        self._limits = limits
        self._max_routes = max_routes
        self._on_message = on_message
        self._hooks = hooks
        self._loop = asyncio.get_running_loop()
        self._resolver = Resolver(self._loop, family)
        self._routes: dict[PeerRoute, _Route] = {}

    def __len__(self) -> int:
        return len(self._routes)

    def open(self, effect: OpenRoute) -> None:
        """Start connecting; what goes wrong at once or later is emitted as ``RouteFailed``.

        A route of the same name is closed first.
        """
        self.close(effect.route)
        try:
            host = self._checked_host(effect)
        except MoriiodError as error:
            self._hooks.emit(RouteFailed(effect.route, error))
            return
        route = self._routes[effect.route] = _Route()
        if _is_literal(host):
            self._connect(effect, route, host)
            return
        try:
            self._resolver.resolve(host, functools.partial(self._connect, effect, route))
        except Busy as error:
            self._fail(effect.route, error)

    def close(self, name: PeerRoute, linger_s: float = 0.0) -> None:
        """Forget a route; unknown names are ignored.

        Args:
            name: Of the route.
            linger_s: How long what is queued for it may still go out.
        """
        route = self._routes.pop(name, None)
        if route is not None and route.socket is not None:
            route.socket.close(linger_s)

    def close_all(self, linger_s: float = 0.0) -> None:
        """Close every route and stop looking up names."""
        self._resolver.close()
        for name in list(self._routes):
            self.close(name, linger_s)

    def send(self, name: PeerRoute, frames: list[bytes]) -> bool:
        """Send, or park the message until the first connection.

        Returns:
            False: There is no such route, it lost its connection, or its queue is full.
        """
        route = self._routes.get(name)
        if route is None:
            return False
        if route.socket is not None and route.socket.send_nowait(frames):
            route.was_connected, route.parked = True, None
            return True
        if route.was_connected:
            return False
        route.parked = frames
        return True

    def _checked_host(self, effect: OpenRoute) -> str:
        if len(self._routes) >= self._max_routes:
            raise Busy(
                f"{len(self._routes)} control endpoints are dialled",
                limit="max_routes",
                value=self._max_routes,
            )
        if is_wildcard_host(effect.host):
            raise InvalidAddress(
                f"{effect.host!r} is a wildcard and names no peer", host=effect.host
            )
        host = normalise_host(effect.host)
        format_tcp(host, effect.port)
        return host

    def _connect(self, effect: OpenRoute, route: _Route, address: Resolved) -> None:
        """Go on once the address is known, unless the route was closed meanwhile."""
        if self._routes.get(effect.route) is not route:
            return
        if isinstance(address, MoriiodError):
            self._fail(effect.route, address)
            return
        try:
            dealer = self._new_socket(address, effect.port)
        except zmq.ZMQError as error:
            self._fail(effect.route, _connect_error(effect, error))
            return
        route.socket = LoopSocket(
            dealer,
            self._loop,
            functools.partial(self._on_message, effect.route),
            self._hooks.on_bug,
            MAX_FRAMES,
            self._limits.max_frame_bytes,
        )
        route.socket.when_writable(functools.partial(self._on_connected, route))

    def _new_socket(self, address: str, port: int) -> zmq.Socket[bytes]:
        dealer = new_dealer(self._context, self._limits, _ROUTING_ID_PREFIX + uuid.uuid4().bytes)
        try:
            dealer.setsockopt(zmq.IPV6, int(":" in address))
            dealer.connect(format_tcp(address, port))
        except BaseException:
            dealer.close(linger=0)
            raise
        return dealer

    def _on_connected(self, route: _Route) -> None:
        route.was_connected = True
        frames, route.parked = route.parked, None
        if frames is not None and route.socket is not None:
            route.socket.send_nowait(frames)

    def _fail(self, name: PeerRoute, error: MoriiodError) -> None:
        self.close(name)
        self._hooks.emit(RouteFailed(name, error))


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _connect_error(effect: OpenRoute, error: zmq.ZMQError) -> MoriiodError:
    if error.errno == errno.EMFILE:
        return Busy("no socket is left for another control link", limit="max_sockets")
    return InvalidAddress(
        f"{effect.host} port {effect.port} cannot be dialled: {error.strerror}",
        host=effect.host,
        port=effect.port,
    )
