"""A small HTTP server for /metrics, /healthz and /readyz, on the daemon's own loop.

Only callbacks: no thread, no task, and nothing a stranger sends can hold it. A connection has one
request, a size, and a deadline; there are only so many connections; everything else is refused.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from moriiod.errors import AddressInUse, ConfigError
from moriiod.telemetry.metrics import CONTENT_TYPE

MAX_REQUEST_BYTES: Final = 8192
MAX_CONNECTIONS: Final = 32
DEADLINE_S: Final = 10.0
_END_OF_HEAD: Final = b"\r\n\r\n"
_PLAIN: Final = "text/plain; charset=utf-8"
_BAD_ADDRESS: Final = frozenset({errno.EADDRNOTAVAIL, errno.EACCES, errno.EAFNOSUPPORT})


@dataclass(frozen=True, slots=True)
class Health:
    """Whether something is as it should be, and if not, why."""

    is_ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class HttpSources:
    """What the pages show; each is called for every request, on the loop's thread.

    Attributes:
        render_metrics: The body of /metrics.
        health: Whether the daemon works at all; a supervisor restarts it if not.
        readiness: Whether it takes new transfers now.
    """

    render_metrics: Callable[[], bytes]
    health: Callable[[], Health]
    readiness: Callable[[], Health]


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    reason: str
    content_type: str
    body: bytes
    allow: str = ""

    def encode(self, has_body: bool) -> bytes:
        head = [
            f"HTTP/1.1 {self.status} {self.reason}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
        ]
        if self.allow:
            head.append(f"Allow: {self.allow}")
        text = "\r\n".join(head).encode("ascii") + _END_OF_HEAD
        return text + self.body if has_body else text


def _plain(status: int, reason: str, text: str = "") -> _Response:
    return _Response(status, reason, _PLAIN, f"{text or reason.lower()}\n".encode())


class TelemetryServer:
    """Serves the three pages on one address.

    Args:
        sources: What the pages show.
        max_connections: More are answered 503 and closed.
        deadline_s: A connection that is not done by then is cut.
    """

    def __init__(
        self,
        sources: HttpSources,
        max_connections: int = MAX_CONNECTIONS,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._sources: Final = sources
        self._max_connections: Final = max_connections
        self.deadline_s: Final = deadline_s
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Args:
            host: Address or name, without brackets.
            port: 0 lets the kernel choose; see ``port``.

        Raises:
            AddressInUse: Somebody else listens there.
            ConfigError: The address is not of this machine, or may not be used.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: _Connection(self), host, port)
        except OSError as error:
            raise _bind_error(host, port, error) from error

    @property
    def port(self) -> int:
        """The port it listens on; 0 if it does not."""
        if self._server is None or not self._server.sockets:
            return 0
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and cut what is still open."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.cut()
        await self._server.wait_closed()
        self._server = None

    def respond(self, method: str, target: str) -> _Response:
        """Return the answer to a request."""
        path = target.partition("?")[0]
        pages: dict[str, Callable[[], _Response]] = {
            "/metrics": self._metrics,
            "/healthz": lambda: _health_page(self._sources.health()),
            "/readyz": lambda: _health_page(self._sources.readiness()),
        }
        page = pages.get(path)
        if page is None:
            return _plain(404, "Not Found", "try /metrics, /healthz or /readyz")
        if method not in ("GET", "HEAD"):
            return _Response(405, "Method Not Allowed", _PLAIN, b"only GET and HEAD\n", "GET, HEAD")
        return page()

    def _metrics(self) -> _Response:
        return _Response(200, "OK", CONTENT_TYPE, self._sources.render_metrics())

    def admit(self, connection: _Connection) -> bool:
        """Return whether there is room for one more."""
        if len(self._connections) >= self._max_connections:
            return False
        self._connections.add(connection)
        return True

    def forget(self, connection: _Connection) -> None:
        """Take note that a connection has ended."""
        self._connections.discard(connection)


def _health_page(health: Health) -> _Response:
    if health.is_ok:
        return _plain(200, "OK", health.detail or "ok")
    return _plain(503, "Service Unavailable", health.detail)


class _Connection(asyncio.Protocol):
    """One connection: collects the head of one request, answers it, closes."""

    def __init__(self, server: TelemetryServer) -> None:
        self._owner: Final = server
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._head = bytearray()
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports are of no asyncio class.
        self._transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._owner.deadline_s, self.cut)
        if not self._owner.admit(self):
            self._answer(_plain(503, "Service Unavailable", "too many connections"))

    def data_received(self, data: bytes) -> None:
        if self._is_answered:
            return
        self._head += data
        end = self._head.find(_END_OF_HEAD)
        if end < 0 and len(self._head) <= MAX_REQUEST_BYTES:
            return
        if not 0 <= end <= MAX_REQUEST_BYTES:
            self._answer(_plain(431, "Request Header Fields Too Large"))
            return
        words = bytes(self._head[:end]).split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            self._answer(_plain(400, "Bad Request"))
            return
        method, target = (word.decode("latin-1") for word in words[:2])
        self._answer(self._owner.respond(method, target), has_body=method != "HEAD")

    def eof_received(self) -> bool:
        # True keeps the transport open for the answer; close() in _answer ends it.
        return self._is_answered

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._owner.forget(self)
        self._transport = None

    def cut(self) -> None:
        """End the connection at once, whatever is still to be sent."""
        if self._transport is not None:
            self._transport.abort()

    def _answer(self, response: _Response, has_body: bool = True) -> None:
        self._is_answered = True
        self._head.clear()
        if self._transport is not None:
            self._transport.write(response.encode(has_body))
            self._transport.close()


def _bind_error(host: str, port: int, error: OSError) -> AddressInUse | ConfigError:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(
            f"metrics port {where} is held by another process", host=host, port=port
        )
    # asyncio's own text repeats the address; a resolver's error has a number of its own kind.
    number = None if isinstance(error, socket.gaierror) else error.errno
    reason = str(error) if number is None else os.strerror(number)
    if error.errno in _BAD_ADDRESS or isinstance(error, socket.gaierror):
        key = "telemetry.metrics_host"
        return ConfigError(f"{key} = {host}: cannot listen on {where}: {reason}", key=key)
    return ConfigError(f"cannot listen on {where}: {reason}", key="telemetry.metrics_base_port")
