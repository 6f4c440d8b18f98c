"""Daemons that go away and come back, as a process of their own and within ours."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moriiod.client import Client, ClientSettings, ClientState, MemoryRegion, PeerAddress
from moriiod.core.requests import Attach, Orphan, Ping, Publish, Refused, RegisterCaches, Reserve
from moriiod.errors import DaemonLost
from moriiod.wire.memfd import create_sealed_memfd
from tests.support.caches import group
from tests.support.fake_daemon import DaemonProcess, FakeDaemon, is_readable

PEER = PeerAddress("10.0.0.1", 6301, 4)
SETTINGS = ClientSettings(step_timeout_s=5.0, backoff_first_s=0.005, backoff_max_s=0.05)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "rank3.sock")


@pytest.fixture
def region() -> Iterator[MemoryRegion]:
    fd = create_sealed_memfd("test", 1 << 20)
    yield MemoryRegion(fd, 1 << 20)
    os.close(fd)


@pytest.fixture
def client(path: str) -> Iterator[Client]:
    """A client that is not connected yet."""
    made = Client(path, settings=SETTINGS)
    yield made
    made.close(0.0)


def open_four(client: Client) -> None:
    client.publish("p", [[1]])
    client.pull("l", PEER, [[1]], [[1]])
    client.push("s", [[1]])
    client.reserve("r", PEER, [[1]])


def until(client: Client, is_done: Callable[[], bool]) -> list[str]:
    """Poll as a worker's own loop would; return what ended, as ``role id reason``."""
    found: list[str] = []
    while not is_done():
        pause = client.next_poll_s()
        is_readable(client.fileno(), 5.0 if pause is None else pause)
        found += [f"{e.role} {e.transfer_id} {e.reason}" for e in client.poll()]
    return found


def test_M9_killed_daemon_ends_transfers_once_and_the_next_one_fences_the_rest(
    path: str, client: Client, region: MemoryRegion
) -> None:
    with DaemonProcess(path):
        client.connect()
        old = client.ping()
        client.register_regions([group()], [region])
        open_four(client)
        client.ping()
    lost = until(client, lambda: client.in_flight == 1)
    assert sorted(lost) == [
        "publish p DAEMON_LOST",
        "pull l DAEMON_LOST",
        "push s DAEMON_LOST",
    ]
    assert client.state is ClientState.RECONNECTING
    assert client.epoch is None
    with pytest.raises(DaemonLost):
        client.publish("q", [[1]])
    with DaemonProcess(path):
        assert until(client, lambda: client.in_flight == 0) == ["reserve r DAEMON_LOST"]
        client.connect()
        assert client.ping() != old
        client.publish("q", [[1]])
        assert client.in_flight == 1
        assert client.close() is True


def test_M9_daemon_that_restarts_between_two_polls_is_noticed_by_the_next_submit(
    path: str, client: Client
) -> None:
    with DaemonProcess(path):
        client.connect()
        old = client.epoch
    with DaemonProcess(path):
        with pytest.raises(DaemonLost):
            client.publish("p", [[1]])
        assert client.in_flight == 0
        client.connect()
        assert client.epoch != old
        client.publish("p", [[1]])
        client.ping()
        assert client.in_flight == 1


def test_daemon_that_closes_the_connection_and_lives_ends_nothing(
    path: str, client: Client
) -> None:
    with DaemonProcess(path) as daemon:
        client.connect()
        open_four(client)
        client.ping()
        daemon.drop_workers()
        assert until(client, lambda: client.state is ClientState.RECONNECTING) == []
        client.connect()
        assert client.poll() == []
        assert client.in_flight == 4, "what it may still be copying is not reported"
    lost = until(client, lambda: client.in_flight == 1)
    assert len(lost) == 3


def test_stopped_daemon_is_not_taken_for_dead(path: str, client: Client) -> None:
    with DaemonProcess(path) as daemon:
        client.connect()
        open_four(client)
        client.ping()
        pid = daemon.pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DaemonLost, match="no answer within"):
            client.ping(timeout_s=0.05)
        assert client.state is ClientState.CONNECTED
        assert client.poll() == []
        os.kill(pid, signal.SIGCONT)
        client.ping()


def test_new_daemon_gets_the_memory_and_is_told_of_orphans(
    path: str, client: Client, region: MemoryRegion
) -> None:
    with FakeDaemon(path) as first:
        client.connect()
        client.register_regions([group()], [region])
        client.register_regions([group()], [region])
        client.reserve("r", PEER, [[1]])
        first.wait_for(Reserve)
    client.poll()
    with FakeDaemon(path) as second:
        client.connect()
        (attach,) = second.wait_for(Attach)
        assert attach.lost_epoch == first.epoch
        assert attach.orphans == (Orphan("r", PEER, first.epoch),)
        assert attach.generation != first.wait_for(Attach)[0].generation
        assert second.workers[0].regions == {0: 1 << 20}
        assert len(second.wait_for(RegisterCaches, 2)) == 2
        (event,) = client.wait(5)
        assert (event.role, event.transfer_id) == ("reserve", "r")


def test_memory_is_given_again_although_the_worker_closed_its_descriptor(
    path: str, client: Client
) -> None:
    fd = create_sealed_memfd("test", 4096 * 8)
    with FakeDaemon(path):
        client.connect()
        client.register_regions([group()], [MemoryRegion(fd, 4096 * 8)])
    os.close(fd)
    client.poll()
    with FakeDaemon(path) as second:
        client.connect()
        assert second.workers[0].regions == {0: 4096 * 8}


def test_daemon_that_refuses_again_and_again_is_asked_again_and_again(
    path: str, client: Client
) -> None:
    with FakeDaemon(path):
        client.connect()
    client.poll()
    with FakeDaemon(path) as second:
        second.answer(Attach, Refused("DUPLICATE_CLIENT", "go away", False))
        until(client, lambda: len(second.requests) >= 3)
        assert client.state is ClientState.RECONNECTING
        assert {p.code for p in client.take_problems()} == {"DUPLICATE_CLIENT"}
        del second.answers[Attach]
        until(client, lambda: client.state is ClientState.CONNECTED)


def test_call_that_waits_for_an_answer_learns_that_the_daemon_went(
    path: str, client: Client
) -> None:
    daemon = FakeDaemon(path)
    with daemon:
        daemon.answer(Publish, None)
        client.connect()
        client.publish("p", [[1]])
        daemon.wait_for(Publish)
        daemon.answers[Ping] = lambda _request: daemon._do(daemon._drop)  # type: ignore[func-returns-value]
        with pytest.raises(DaemonLost, match="closed the connection"):
            client.ping()
    (event,) = client.wait(5)
    assert event.reason == "DAEMON_LOST"


def test_closing_while_reconnecting_ends_at_once(path: str, client: Client) -> None:
    with FakeDaemon(path) as daemon:
        client.connect()
        client.reserve("r", PEER, [[1]])
        daemon.wait_for(Reserve)
    client.poll()
    assert client.close() is False
    assert client.state is ClientState.CLOSED
