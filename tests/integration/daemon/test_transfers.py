"""Whole transfers through two daemons and two workers in one process; every byte compared."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from moriiod.core.requests import PeerAddress
from tests.support.daemons import (
    HOST,
    N_BLOCKS,
    Worker,
    address_of,
    attached_worker,
    free_base_port,
    make_daemon,
    running_daemon,
)


async def test_read_moves_the_bytes_and_frees_the_producer_once(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(running_daemon(tmp_path / "p"))
        decode = await enter(running_daemon(tmp_path / "d"))
        producer = await enter(attached_worker(prefill.config.socket_path, seed=1))
        consumer = await enter(attached_worker(decode.config.socket_path, seed=2))
        before = consumer.cache.copy()

        producer.client.publish("t1", [[3, 1, 8]])
        consumer.client.pull("t1", address_of(prefill), [[3, 1, 8]], [[5, 6, 7]])

        received = await consumer.end_of("t1", "pull")
        released = await producer.end_of("t1", "publish")
        assert (received.outcome, received.reason) == ("received", "acked")
        assert (released.outcome, released.reason) == ("released", "acked")
        assert received.n_bytes == 3 * 3 * 4096
        assert np.array_equal(consumer.blocks([5, 6, 7]), producer.blocks([3, 1, 8]))
        untouched = [b for b in range(16) if b not in (5, 6, 7)]
        assert np.array_equal(consumer.blocks(untouched), before[:, untouched])


async def test_write_fills_the_consumer_layer_by_layer(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(running_daemon(tmp_path / "p"))
        decode = await enter(running_daemon(tmp_path / "d"))
        producer = await enter(attached_worker(prefill.config.socket_path, seed=1))
        consumer = await enter(attached_worker(decode.config.socket_path, seed=2))

        consumer.client.reserve("t1", address_of(prefill), [[9, 2]])
        producer.client.push("t1", [[0, 15]])
        for layer in range(3):
            producer.client.layer_ready("t1", layer)
        producer.client.seal("t1", 3)

        released = await producer.end_of("t1", "push")
        received = await consumer.end_of("t1", "reserve")
        assert released.outcome == "released"
        assert (received.outcome, received.n_bytes, received.n_layers) == (
            "received",
            3 * 2 * 4096,
            3,
        )
        assert np.array_equal(consumer.blocks([9, 2]), producer.blocks([0, 15]))


@asynccontextmanager
async def groups(
    folder: Path, prefill_tp: int, decode_tp: int
) -> AsyncIterator[tuple[list[Worker], list[Worker], PeerAddress]]:
    """Give the workers of a prefill and a decode group, and how a router names the first."""
    base = free_base_port(prefill_tp + decode_tp)
    async with AsyncExitStack() as stack:
        workers: list[Worker] = []
        for name, size, port in (("P", prefill_tp, base), ("D", decode_tp, base + prefill_tp)):
            for rank in range(size):
                more = {
                    "daemon.tp_rank": str(rank),
                    "daemon.tp_size": str(size),
                    "control.base_port": str(port),
                }
                daemon = await stack.enter_async_context(running_daemon(folder / name, more))
                path = daemon.config.socket_path
                seed = len(workers) + 1
                workers.append(await stack.enter_async_context(attached_worker(path, seed)))
        yield workers[:prefill_tp], workers[prefill_tp:], PeerAddress(HOST, base, prefill_tp)


async def test_A1_producer_is_released_when_both_consumer_ranks_have_read(tmp_path: Path) -> None:
    async with groups(tmp_path, 1, 2) as ((producer,), consumers, address):
        producer.client.publish("t1", [[3, 4]], remote_tp_size=2)
        consumers[0].client.pull("t1", address, [[3, 4]], [[1, 2]])
        assert (await consumers[0].end_of("t1", "pull")).outcome == "received"
        status = json.loads(await producer.client.status())
        (row,) = status["transfers"]["rows"]
        assert (row["state"], row["pending_ack_ranks"]) == ("open", [1])
        assert producer.client.poll() == []
        consumers[1].client.pull("t1", address, [[3, 4]], [[7, 8]])
        assert (await consumers[1].end_of("t1", "pull")).outcome == "received"
        assert (await producer.end_of("t1", "publish")).outcome == "released"
        assert np.array_equal(consumers[0].blocks([1, 2]), producer.blocks([3, 4]))
        assert np.array_equal(consumers[1].blocks([7, 8]), producer.blocks([3, 4]))


async def test_R7_one_producer_rank_fills_both_consumer_ranks(tmp_path: Path) -> None:
    async with groups(tmp_path, 1, 2) as ((producer,), consumers, address):
        producer.client.push("t1", [[3]], remote_tp_size=2)
        producer.client.layer_ready("t1", [0, 1, 2])
        producer.client.seal("t1", 3)
        for consumer in consumers:
            consumer.client.reserve("t1", address, [[5]])
        for consumer in consumers:
            assert (await consumer.end_of("t1", "reserve")).outcome == "received"
            assert np.array_equal(consumer.blocks([5]), producer.blocks([3]))
        assert (await producer.end_of("t1", "push")).outcome == "released"
        assert len(producer.ended) == 1


async def test_producer_rank_that_nobody_reads_is_released_as_well(tmp_path: Path) -> None:
    async with groups(tmp_path, 2, 1) as (producers, (consumer,), address):
        for producer in producers:
            producer.client.publish("t1", [[3]], remote_tp_size=1)
        consumer.client.pull("t1", address, [[3]], [[5]])
        assert (await consumer.end_of("t1", "pull")).outcome == "received"
        for producer in producers:
            assert (await producer.end_of("t1", "publish")).outcome == "released"
        assert np.array_equal(consumer.blocks([5]), producers[0].blocks([3]))


async def test_many_transfers_at_once_all_arrive(tmp_path: Path) -> None:
    async with groups(tmp_path, 1, 1) as ((producer,), (consumer,), address):
        for block in range(N_BLOCKS):
            producer.client.publish(f"t{block}", [[block]])
            consumer.client.pull(f"t{block}", address, [[block]], [[N_BLOCKS - 1 - block]])
        for block in range(N_BLOCKS):
            assert (await consumer.end_of(f"t{block}", "pull")).outcome == "received"
            assert (await producer.end_of(f"t{block}", "publish")).outcome == "released"
        order = list(range(N_BLOCKS))
        assert np.array_equal(consumer.blocks(order[::-1]), producer.blocks(order))


async def test_producer_that_restarted_is_a_new_peer_and_serves_again(tmp_path: Path) -> None:
    more = {"control.base_port": str(free_base_port(1))}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        decode = await enter(running_daemon(tmp_path / "d"))
        consumer = await enter(attached_worker(decode.config.socket_path, seed=2))
        first = make_daemon(tmp_path / "p", more)
        await first.start()
        producer = await enter(attached_worker(first.config.socket_path, seed=1))
        address = address_of(first)
        producer.client.publish("t1", [[3]])
        consumer.client.pull("t1", address, [[3]], [[5]])
        assert (await consumer.end_of("t1", "pull")).outcome == "received"
        assert (await producer.end_of("t1", "publish")).outcome == "released"
        await first.close()

        second = await enter(running_daemon(tmp_path / "p", more))
        await producer.is_connected_to(second.epoch)
        producer.client.publish("t2", [[4]])
        consumer.client.pull("t2", address, [[4]], [[6]])
        # The link still led to the first start; the claim is made anew at the second.
        assert (await consumer.end_of("t2", "pull")).outcome == "received"
        assert (await producer.end_of("t2", "publish")).outcome == "released"
        assert np.array_equal(consumer.blocks([5, 6]), producer.blocks([3, 4]))


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_P5_peers_reach_each_other_over_ipv6(tmp_path: Path) -> None:
    more = {"control.host": "[::1]"}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(running_daemon(tmp_path / "p", more))
        decode = await enter(running_daemon(tmp_path / "d", more))
        assert prefill.addresses.control == f"[::1]:{prefill.control_port}"
        producer = await enter(attached_worker(prefill.config.socket_path, seed=1))
        consumer = await enter(attached_worker(decode.config.socket_path, seed=2))
        producer.client.publish("t1", [[3]])
        consumer.client.pull("t1", PeerAddress("::1", prefill.control_port, 1), [[3]], [[5]])
        assert (await consumer.end_of("t1", "pull")).outcome == "received"
        assert np.array_equal(consumer.blocks([5]), producer.blocks([3]))


async def test_P3_daemon_that_is_told_to_pull_from_itself_says_so(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "p") as daemon:
        async with attached_worker(daemon.config.socket_path) as worker:
            worker.client.pull("t1", address_of(daemon), [[3]], [[5]])
            event = await worker.end_of("t1", "pull")
            assert (event.outcome, event.reason) == ("failed", "SELF_CONNECT")
