"""The pages, and everything a stranger may send instead of asking for one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from moriiod.errors import AddressInUse, ConfigError
from moriiod.telemetry.http import (
    MAX_CONNECTIONS,
    MAX_REQUEST_BYTES,
    Health,
    HttpSources,
    TelemetryServer,
)
from tests.support.loops import LOOPS

HOST = "127.0.0.1"


class Daemon:
    """What the pages show in these tests."""

    def __init__(self) -> None:
        self.health = Health(True)
        self.readiness = Health(False, "starting")
        self.body = b"moriiod_info 1\n"

    def sources(self) -> HttpSources:
        return HttpSources(lambda: self.body, lambda: self.health, lambda: self.readiness)


async def exchange(port: int, request: bytes, close_early: bool = False) -> tuple[str, bytes]:
    """Send bytes, return the status line and the body; ("", b"") if there was no answer."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(request)
        if close_early:
            writer.write_eof()
        answer = await reader.read()
    except ConnectionResetError:
        answer = b""
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0].decode(), body


async def get(port: int, path: str, method: str = "GET") -> tuple[str, bytes]:
    return await exchange(port, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


async def served(
    body: Callable[[Daemon, TelemetryServer], Awaitable[None]], deadline_s: float = 10.0
) -> None:
    daemon = Daemon()
    server = TelemetryServer(daemon.sources(), deadline_s=deadline_s)
    await server.start(HOST, 0)
    try:
        async with asyncio.timeout(20):
            await body(daemon, server)
    finally:
        await server.close()


def run(
    loop: str,
    body: Callable[[Daemon, TelemetryServer], Awaitable[None]],
    deadline_s: float = 10.0,
) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(served(body, deadline_s))


on_both_loops = pytest.mark.parametrize("loop", sorted(LOOPS))


@on_both_loops
def test_the_three_pages_answer(loop: str) -> None:
    async def body(daemon: Daemon, server: TelemetryServer) -> None:
        assert await get(server.port, "/metrics") == ("HTTP/1.1 200 OK", daemon.body)
        assert await get(server.port, "/metrics?x=1") == ("HTTP/1.1 200 OK", daemon.body)
        assert await get(server.port, "/healthz") == ("HTTP/1.1 200 OK", b"ok\n")
        status, text = await get(server.port, "/readyz")
        assert (status, text) == ("HTTP/1.1 503 Service Unavailable", b"starting\n")
        daemon.readiness, daemon.health = Health(True), Health(False, "loop stuck")
        assert (await get(server.port, "/readyz"))[0] == "HTTP/1.1 200 OK"
        assert await get(server.port, "/healthz") == (
            "HTTP/1.1 503 Service Unavailable",
            b"loop stuck\n",
        )
        assert await get(server.port, "/metrics", "HEAD") == ("HTTP/1.1 200 OK", b"")

    run(loop, body)


@on_both_loops
@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /nope HTTP/1.1\r\n\r\n", "404"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", "405"),
        (b"GET /metrics\r\n\r\n", "400"),
        (b"GET /metrics SPDY/9\r\n\r\n", "400"),
        (b"\r\n\r\n", "400"),
        (b"\x16\x03\x01\x02\x00\x01\xfc\r\n\r\n", "400"),
        (b"GET /" + b"a" * MAX_REQUEST_BYTES, "431"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * MAX_REQUEST_BYTES + b"\r\n\r\n", "431"),
        (b"GET \xff\xfe HTTP/1.1\r\n\r\n", "404"),
        (b"GET /metrics HTTP/1.1\r\n\r\nGET /healthz HTTP/1.1\r\n\r\n", "200"),
    ],
)
def test_whatever_is_sent_gets_one_bounded_answer_and_the_next_is_served(
    loop: str, request_bytes: bytes, status: str
) -> None:
    async def body(daemon: Daemon, server: TelemetryServer) -> None:
        line, _ = await exchange(server.port, request_bytes)
        assert line.split()[1] == status
        assert (await get(server.port, "/metrics"))[0].endswith("200 OK")

    run(loop, body)


@on_both_loops
def test_half_a_request_and_none_end_without_harm(loop: str) -> None:
    async def body(daemon: Daemon, server: TelemetryServer) -> None:
        assert await exchange(server.port, b"GET /met", close_early=True) == ("", b"")
        assert await exchange(server.port, b"", close_early=True) == ("", b"")
        in_pieces = b"GET /metrics HTTP/1.1\r\n\r\n"
        reader, writer = await asyncio.open_connection(HOST, server.port)
        for byte in in_pieces:
            writer.write(bytes([byte]))
            await writer.drain()
        assert (await reader.read()).endswith(daemon.body)
        writer.close()

    run(loop, body)


@on_both_loops
def test_connections_are_limited_and_room_comes_back(loop: str) -> None:
    async def body(daemon: Daemon, server: TelemetryServer) -> None:
        idle = [await asyncio.open_connection(HOST, server.port) for _ in range(MAX_CONNECTIONS)]
        line, text = await get(server.port, "/metrics")
        assert (line.split()[1], text) == ("503", b"too many connections\n")
        for _, writer in idle:
            writer.close()
        while (await get(server.port, "/metrics"))[0].split()[1] == "503":
            pass
        assert (await get(server.port, "/metrics"))[0].endswith("200 OK")

    run(loop, body)


@on_both_loops
def test_a_connection_that_says_nothing_is_cut(loop: str) -> None:
    async def body(daemon: Daemon, server: TelemetryServer) -> None:
        assert await exchange(server.port, b"GET /metrics HTTP/1.1\r\n") == ("", b"")

    run(loop, body, deadline_s=0.05)


@on_both_loops
def test_close_cuts_what_is_open_and_frees_the_port(loop: str) -> None:
    async def body(daemon: Daemon, server: TelemetryServer) -> None:
        port = server.port
        reader, writer = await asyncio.open_connection(HOST, port)
        # One exchange makes sure that the idle connection has been accepted before it.
        await get(port, "/healthz")
        await server.close()
        try:
            assert await reader.read() == b""
        except ConnectionResetError:
            pass
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, port)
        assert server.port == 0

    run(loop, body)


@on_both_loops
def test_P2_a_port_that_is_held_is_a_typed_error_with_the_port_in_it(loop: str) -> None:
    async def body(daemon: Daemon, server: TelemetryServer) -> None:
        second = TelemetryServer(daemon.sources())
        with pytest.raises(AddressInUse, match=str(server.port)):
            await second.start(HOST, server.port)
        await second.close()

    run(loop, body)


@on_both_loops
def test_P4_an_address_of_another_machine_is_a_typed_error(loop: str) -> None:
    async def body(daemon: Daemon, server: TelemetryServer) -> None:
        second = TelemetryServer(daemon.sources())
        with pytest.raises(ConfigError, match=r"192\.0\.2\.1") as caught:
            await second.start("192.0.2.1", 0)
        assert caught.value.fields["key"] == "telemetry.metrics_host"
        assert "Cannot assign" in caught.value.message

    run(loop, body)


def test_P5_an_ipv6_literal_is_listened_on() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")

    async def body() -> None:
        server = TelemetryServer(Daemon().sources())
        try:
            await server.start("::1", 0)
        except ConfigError:
            pytest.skip("no IPv6 here")
        reader, writer = await asyncio.open_connection("::1", server.port)
        writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert (await reader.read()).endswith(b"ok\n")
        writer.close()
        await server.close()

    asyncio.run(body())
