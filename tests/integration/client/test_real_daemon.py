"""The client against the real daemon, both on the test's own loop."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from moriiod.client import ClientState, MemoryRegion, admin
from moriiod.core.requests import PeerAddress
from moriiod.errors import DaemonLost, InvalidGeometry, NotRegistered, TransferConflict
from tests.support.daemons import (
    BLOCK_BYTES,
    N_BLOCKS,
    N_LAYERS,
    address_of,
    attached_worker,
    mla_group,
    running_daemon,
)
from tests.support.engines import WorkerMemory

NOBODY = PeerAddress("127.0.0.1", 1, 1)


async def test_M1_transfers_work_until_the_last_reference_is_gone(tmp_path: Path) -> None:
    async with (
        running_daemon(tmp_path / "p") as daemon,
        attached_worker(daemon.config.socket_path, seed=1) as worker,
    ):
        client = worker.client
        region = MemoryRegion(worker.memory.fd, worker.memory.n_bytes)
        await client.register_regions((mla_group(),), (region,))
        await client.unregister_kv_caches()
        client.publish("a", [[1]])
        client.abort("a", "publish")
        assert (await worker.end_of("a", "publish")).reason == "aborted"
        await client.unregister_kv_caches()
        client.publish("b", [[1]])
        assert (await worker.end_of("b", "publish")).reason == "NOT_REGISTERED"
        with pytest.raises(NotRegistered):
            await client.unregister_kv_caches()
        assert client.state is ClientState.CONNECTED


async def test_M8_memory_registered_later_is_the_one_that_is_read(tmp_path: Path) -> None:
    n_bytes = N_LAYERS * N_BLOCKS * BLOCK_BYTES
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(running_daemon(tmp_path / "p"))
        decode = await enter(running_daemon(tmp_path / "d"))
        consumer = await enter(attached_worker(decode.config.socket_path))
        producer = await enter(attached_worker(prefill.config.socket_path, seed=1))
        other = WorkerMemory(2 * n_bytes)
        stack.callback(other.close)
        other.fill(7)

        async def read(name: str) -> None:
            producer.client.publish(name, [[2]])
            consumer.client.pull(name, address_of(prefill), [[2]], [[3]])
            assert (await consumer.end_of(name, "pull")).outcome == "received"
            assert (await producer.end_of(name, "publish")).outcome == "released"

        await read("first")
        assert np.array_equal(consumer.blocks([3]), producer.blocks([2]))
        with pytest.raises(TransferConflict):
            await producer.client.register_regions(
                (mla_group(),), (MemoryRegion(other.fd, n_bytes),)
            )
        await producer.client.unregister_kv_caches()
        await producer.client.register_regions((mla_group(),), (MemoryRegion(other.fd, n_bytes),))
        await read("second")
        layers = other.bytes[:n_bytes].reshape(N_LAYERS, N_BLOCKS, BLOCK_BYTES)
        assert np.array_equal(consumer.blocks([3]), layers[:, [2]])
        assert not np.array_equal(consumer.blocks([3]), producer.blocks([2]))
        del layers


async def test_Z5_worker_that_does_not_read_for_a_while_misses_nothing(tmp_path: Path) -> None:
    async with (
        running_daemon(tmp_path / "p") as daemon,
        attached_worker(daemon.config.socket_path) as worker,
    ):
        client = worker.client
        for index in range(2000):
            client.publish(f"t{index}", [[index % N_BLOCKS]])
            client.abort(f"t{index}", "publish")
        await client.ping()
        assert client.in_flight == 2000
        ended = [event.transfer_id for event in worker.ended]
        while len(ended) < 2000:
            events = await client.wait(5)
            assert events
            ended += [event.transfer_id for event in events]
        assert sorted(ended) == sorted({f"t{index}" for index in range(2000)})
        assert client.in_flight == 0
        assert client.take_problems() == []


async def test_G4_block_the_cache_does_not_have_is_refused_as_the_end(tmp_path: Path) -> None:
    async with (
        running_daemon(tmp_path / "p") as daemon,
        attached_worker(daemon.config.socket_path) as worker,
    ):
        worker.client.publish("a", [[N_BLOCKS - 1]])
        worker.client.publish("b", [[N_BLOCKS]])
        event = await worker.end_of("b", "publish")
        assert (event.outcome, event.reason) == ("failed", "OUT_OF_RANGE")
        assert worker.client.in_flight == 1


async def test_geometry_that_does_not_fit_the_memory_is_refused(tmp_path: Path) -> None:
    async with (
        running_daemon(tmp_path / "p") as daemon,
        attached_worker(daemon.config.socket_path) as worker,
    ):
        await worker.client.unregister_kv_caches()
        region = MemoryRegion(worker.memory.fd, worker.memory.n_bytes)
        with pytest.raises(InvalidGeometry):
            await worker.client.register_regions((mla_group(n_blocks=1000),), (region,))
        await worker.client.register_regions((mla_group(),), (region,))


async def test_close_returns_once_the_daemon_has_let_go(tmp_path: Path) -> None:
    async with (
        running_daemon(tmp_path / "p") as daemon,
        attached_worker(daemon.config.socket_path) as worker,
    ):
        worker.client.publish("a", [[1]])
        worker.client.push("b", [[2]])
        worker.client.reserve("c", NOBODY, [[3]])
        assert await worker.client.close(timeout_s=10.0) is True
        assert json.loads(await asyncio.to_thread(admin.fetch_status, daemon.config.socket_path))


async def test_M9_worker_survives_a_daemon_that_is_started_anew(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(running_daemon(tmp_path / "p"))
        async with running_daemon(tmp_path / "d") as decode:
            socket_path = decode.config.socket_path
            consumer = await enter(attached_worker(socket_path))
            old_epoch = consumer.client.epoch
            consumer.client.reserve("r", address_of(prefill), [[1]])
            consumer.client.publish("p", [[2]])
            await consumer.client.ping()
        assert (await consumer.end_of("p", "publish")).outcome in ("failed", "released")
        with pytest.raises(DaemonLost):
            consumer.client.publish("q", [[2]])
        await enter(running_daemon(tmp_path / "d"))
        assert (await consumer.end_of("r", "reserve")).outcome == "failed"
        await consumer.client.connect()
        assert consumer.client.epoch != old_epoch
        producer = await enter(attached_worker(prefill.config.socket_path, seed=1))
        producer.client.publish("t", [[4]])
        consumer.client.pull("t", address_of(prefill), [[4]], [[1]])
        assert (await consumer.end_of("t", "pull")).outcome == "received"
        assert np.array_equal(consumer.blocks([1]), producer.blocks([4]))


async def test_status_and_ping_need_no_attach(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "p") as daemon:
        path = daemon.config.socket_path
        status = json.loads(await asyncio.to_thread(admin.fetch_status, path))
        epoch = await asyncio.to_thread(admin.ping, f"ipc://{path}")
        assert epoch in json.dumps(status)
    with pytest.raises(DaemonLost):
        await asyncio.to_thread(admin.ping, path, 0.05)
