"""Whole transfers through two daemons and two workers in one process; every byte compared."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from tests.support.daemons import address_of, attached_worker, running_daemon


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
