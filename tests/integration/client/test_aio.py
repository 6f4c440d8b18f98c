"""The asyncio client against a scripted daemon, on both event loops."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from moriiod.client import (
    AsyncClient,
    ClientSettings,
    ClientState,
    MemoryRegion,
    PeerAddress,
    TransferEnded,
)
from moriiod.core.requests import (
    Attach,
    ConfirmEvents,
    Done,
    GetStatus,
    Orphan,
    Ping,
    Pull,
    Refused,
    RegisterCaches,
    Reserve,
    UnregisterCaches,
)
from moriiod.errors import ClientUnusable, DaemonLost, InvalidGeometry, VersionMismatch
from moriiod.wire.memfd import create_sealed_memfd
from tests.support.caches import group
from tests.support.fake_daemon import FakeDaemon

PEER = PeerAddress("10.0.0.1", 6301, 4)
SETTINGS = ClientSettings(step_timeout_s=5.0, backoff_first_s=0.005, backoff_max_s=0.02)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "rank3.sock")


@pytest.fixture
def daemon(path: str) -> Iterator[FakeDaemon]:
    with FakeDaemon(path) as running:
        yield running


@pytest_asyncio.fixture
async def client(daemon: FakeDaemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.path, "worker-a", SETTINGS) as connected:
        yield connected


@pytest.fixture
def region() -> Iterator[MemoryRegion]:
    fd = create_sealed_memfd("test", 1 << 20)
    yield MemoryRegion(fd, 1 << 20)
    os.close(fd)


def ended(transfer_id: str) -> TransferEnded:
    return TransferEnded(transfer_id, "pull", "received", "done")


async def test_client_attaches_and_asks(client: AsyncClient, daemon: FakeDaemon) -> None:
    assert client.state is ClientState.CONNECTED
    assert await client.ping() == daemon.epoch
    assert await client.status() == '{"fake": true}'
    assert daemon.wait_for(Attach)[0].name == "worker-a"


async def test_ended_transfer_wakes_who_waits(client: AsyncClient, daemon: FakeDaemon) -> None:
    async with asyncio.TaskGroup() as group_:
        waiting = group_.create_task(client.wait(5))
        client.pull("a", PEER, [[1]], [[1]])
        daemon.wait_for(Pull)
        daemon.tell(ended("a"))
    assert [event.transfer_id for event in waiting.result()] == ["a"]
    await client.ping()
    assert daemon.wait_for(ConfirmEvents) == [ConfirmEvents(1)]


async def test_two_who_wait_share_what_comes(client: AsyncClient, daemon: FakeDaemon) -> None:
    for name in "ab":
        client.pull(name, PEER, [[1]], [[1]])
    daemon.wait_for(Pull, 2)
    async with asyncio.TaskGroup() as group_:
        first = group_.create_task(client.wait(5))
        second = group_.create_task(client.wait(5))
        daemon.tell(ended("a"))
        done, _ = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        daemon.tell(ended("b"))
    found = first.result() + second.result()
    assert sorted(event.transfer_id for event in found) == ["a", "b"]


async def test_wait_ends_with_its_time(client: AsyncClient) -> None:
    assert await client.wait(0.01) == []
    assert await client.wait(0) == []


async def test_cancelled_wait_loses_nothing(client: AsyncClient, daemon: FakeDaemon) -> None:
    for number in range(50):
        client.pull(f"t{number}", PEER, [[1]], [[1]])
        daemon.wait_for(Pull, number + 1)
        async with asyncio.TaskGroup() as group_:
            waiting = group_.create_task(client.wait(5))
            await asyncio.wait([waiting], timeout=0)
            daemon.tell(ended(f"t{number}"))
            waiting.cancel()
        events = [] if waiting.cancelled() else waiting.result()
        events += [] if events else await client.wait(5)
        assert [event.transfer_id for event in events] == [f"t{number}"]


async def test_event_that_came_with_an_answer_wakes_who_waits(
    client: AsyncClient, daemon: FakeDaemon
) -> None:
    client.pull("a", PEER, [[1]], [[1]])
    daemon.wait_for(Pull)
    daemon.tell(ended("a"))
    await client.ping()
    assert [event.transfer_id for event in await client.wait(5)] == ["a"]


async def test_refused_attach_raises_and_leaves_nothing_behind(daemon: FakeDaemon) -> None:
    daemon.answer(Attach, Refused("VERSION_MISMATCH", "speak 2", False))
    with pytest.raises(VersionMismatch):
        async with AsyncClient(daemon.path, settings=SETTINGS):
            pass


async def test_connect_waits_for_a_daemon_that_starts_later(path: str) -> None:
    client = AsyncClient(path, settings=SETTINGS)
    with pytest.raises(DaemonLost):
        await client.connect(timeout_s=0.02)
    with FakeDaemon(path):
        await client.connect()
        assert client.state is ClientState.CONNECTED
        assert await client.close() is True


async def test_unanswered_question_raises_after_its_time(
    client: AsyncClient, daemon: FakeDaemon
) -> None:
    daemon.answer(GetStatus, None)
    with pytest.raises(DaemonLost):
        await client.status(timeout_s=0.02)


async def test_cancelled_question_is_forgotten(client: AsyncClient, daemon: FakeDaemon) -> None:
    daemon.answer(Ping, None)
    async with asyncio.TaskGroup() as group_:
        asking = group_.create_task(client.ping())
        await asyncio.wait([asking], timeout=0)
        daemon.wait_for(Ping)
        asking.cancel()
    assert asking.cancelled()
    assert await client.status() == '{"fake": true}'


@pytest.mark.parametrize("call", ["poll", "publish"])
async def test_answer_taken_in_by_a_plain_call_reaches_who_waits_for_it(
    client: AsyncClient, daemon: FakeDaemon, call: str
) -> None:
    async with asyncio.TaskGroup() as group_:
        asking = group_.create_task(client.ping())
        await asyncio.wait([asking], timeout=0)
        daemon.wait_for(Ping)
        daemon.answer(GetStatus, None)
        if call == "poll":
            client.poll()
        else:
            client.publish("p", [])
        done, _ = await asyncio.wait([asking], timeout=5)
        assert done == {asking}


async def test_loss_noticed_by_a_plain_call_is_repaired_in_the_background(
    path: str, client: AsyncClient, daemon: FakeDaemon
) -> None:
    daemon.stop()
    while client.state is ClientState.CONNECTED:
        client.poll()
    with FakeDaemon(path) as second:
        await client.wait(0.0)
        await client.connect()
        assert client.epoch == second.epoch


async def test_cancelled_registration_is_given_up(
    client: AsyncClient, daemon: FakeDaemon, region: MemoryRegion
) -> None:
    daemon.answer(RegisterCaches, None)
    async with asyncio.TaskGroup() as group_:
        registering = group_.create_task(client.register_regions([group()], [region]))
        await asyncio.wait([registering], timeout=0)
        registering.cancel()
    assert registering.cancelled()
    daemon.answer(RegisterCaches, Done())
    await client.connect()
    await client.register_regions([group()], [region])


async def test_M1_registered_twice_takes_two_to_unregister(
    client: AsyncClient, daemon: FakeDaemon, region: MemoryRegion
) -> None:
    await client.register_regions([group()], [region])
    await client.register_regions([group()], [region])
    await client.unregister_kv_caches()
    await client.unregister_kv_caches()
    assert len(daemon.wait_for(UnregisterCaches, 2)) == 2


async def test_refused_registration_raises(
    client: AsyncClient, daemon: FakeDaemon, region: MemoryRegion
) -> None:
    daemon.answer(RegisterCaches, Refused("INVALID_GEOMETRY", "no", False))
    with pytest.raises(InvalidGeometry):
        await client.register_regions([group()], [region])
    daemon.answer(RegisterCaches, Done())
    await client.register_regions([group()], [region])


async def test_M9_client_reconnects_while_nobody_calls_it(
    path: str, client: AsyncClient, daemon: FakeDaemon, region: MemoryRegion
) -> None:
    await client.register_regions([group()], [region])
    client.pull("l", PEER, [[1]], [[1]])
    client.reserve("r", PEER, [[1]])
    daemon.wait_for(Reserve)
    daemon.stop()
    (event,) = await client.wait(5)
    assert (event.transfer_id, event.reason) == ("l", "DAEMON_LOST")
    with pytest.raises(DaemonLost):
        client.pull("m", PEER, [[1]], [[1]])
    with FakeDaemon(path) as second:
        (event,) = await client.wait(5)
        assert (event.transfer_id, event.reason) == ("r", "DAEMON_LOST")
        assert second.wait_for(Attach)[0].orphans == (Orphan("r", PEER, daemon.epoch),)
        await client.connect()
        assert second.workers[0].regions == {0: 1 << 20}
        assert await client.ping() == second.epoch


async def test_closed_client_is_closed(daemon: FakeDaemon) -> None:
    client = AsyncClient(daemon.path, settings=SETTINGS)
    await client.connect()
    client.pull("a", PEER, [[1]], [[1]])
    assert await client.close() is True
    assert await client.close() is True
    with pytest.raises(ClientUnusable):
        await client.ping()
    with pytest.raises(ClientUnusable):
        client.poll()


async def test_client_that_never_connected_can_be_closed(path: str) -> None:
    assert await AsyncClient(path).close() is True
