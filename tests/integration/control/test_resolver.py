"""Host names: off the loop, bounded, and nobody waits for another one's name server."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from moriiod.control.resolver import Resolved, Resolver, look_up, look_up_within
from moriiod.errors import Busy, ConfigError, PeerUnreachable

V4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))
V6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0))


class NameServer:
    """Answers every name with both families; names that start with "slow" wait for the gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def getaddrinfo(self, host: str, *_args: Any, **_kwargs: Any) -> list[Any]:
        if host.startswith("slow"):
            self.gate.wait()
        return [V6, V4]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.gate.set()


class Answers:
    """Keeps answers by host and lets a test wait for one."""

    def __init__(self) -> None:
        self.by_host: dict[str, Resolved] = {}
        self._changed = asyncio.Event()

    def ask(self, resolver: Resolver, host: str) -> None:
        def take(answer: Resolved) -> None:
            self.by_host[host] = answer
            self._changed.set()

        resolver.resolve(host, take)

    async def of(self, host: str) -> Resolved:
        while host not in self.by_host:
            self._changed.clear()
            await self._changed.wait()
        return self.by_host[host]


async def test_slow_names_do_not_hold_up_another_one(names: NameServer) -> None:
    resolver, answers = Resolver(asyncio.get_running_loop(), socket.AF_INET), Answers()
    for n in range(3):
        answers.ask(resolver, f"slow-{n}.example")
    answers.ask(resolver, "fast.example")
    assert await answers.of("fast.example") == "192.0.2.1"
    assert list(answers.by_host) == ["fast.example"]
    names.gate.set()
    for n in range(3):
        assert await answers.of(f"slow-{n}.example") == "192.0.2.1"
    resolver.close()


async def test_too_many_names_at_once_are_busy(names: NameServer) -> None:
    resolver, answers = Resolver(asyncio.get_running_loop(), socket.AF_INET), Answers()
    for n in range(256):
        answers.ask(resolver, f"slow-{n}.example")
    with pytest.raises(Busy) as caught:
        answers.ask(resolver, "one-too-many.example")
    assert caught.value.fields["value"] == 256
    names.gate.set()
    await answers.of("slow-255.example")
    answers.ask(resolver, "again.example")
    await answers.of("again.example")
    resolver.close()


async def test_closed_resolver_answers_nobody(names: NameServer) -> None:
    resolver, answers = Resolver(asyncio.get_running_loop(), socket.AF_INET), Answers()
    answers.ask(resolver, "slow.example")
    resolver.close()
    names.gate.set()
    witness = Resolver(asyncio.get_running_loop(), socket.AF_INET)
    answers.ask(witness, "fast.example")
    await answers.of("fast.example")
    witness.close()
    assert "slow.example" not in answers.by_host


def test_name_that_is_found_after_the_loop_has_ended_is_dropped(names: NameServer) -> None:
    loop = asyncio.new_event_loop()
    resolver = Resolver(loop, socket.AF_INET)
    answers: list[Resolved] = []
    resolver.resolve("slow.example", answers.append)
    loop.close()
    names.gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("moriiod-resolver"):
            thread.join()
    assert answers == []


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")]
)
def test_family_we_listen_on_is_taken_first(
    names: NameServer, family: socket.AddressFamily, address: str
) -> None:
    assert look_up("both.example", family) == address


def test_P4_unresolvable_name_is_an_unreachable_peer() -> None:
    answer = look_up("no-such-host.invalid", socket.AF_INET)
    assert isinstance(answer, PeerUnreachable)
    assert answer.fields["host"] == "no-such-host.invalid"


def test_name_the_resolver_cannot_encode_is_an_unreachable_peer() -> None:
    assert isinstance(look_up("x" * 80 + ".example", socket.AF_INET), PeerUnreachable)


def test_own_name_that_takes_too_long_is_a_config_error(names: NameServer) -> None:
    with pytest.raises(ConfigError) as caught:
        look_up_within("slow.example", 0.01)
    assert "0.01 s" in caught.value.message
