"""Real daemons and real workers on the test's own loop: real sockets, memory and engine threads."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from moriiod.client.aio import AsyncClient
from moriiod.client.types import MemoryRegion
from moriiod.config.load import load
from moriiod.config.schema import Config
from moriiod.core.geometry import KvGroup, KvLayer
from moriiod.core.ids import Epoch
from moriiod.core.requests import PeerAddress, TransferEnded
from moriiod.daemon.app import Daemon, EngineMaker
from tests.support.engines import WorkerMemory

N_LAYERS: Final = 3
N_BLOCKS: Final = 16
BLOCK_BYTES: Final = 4096
HOST: Final = "127.0.0.1"
#: Below the range the kernel gives to outgoing connections.
_PORTS: Final = range(20000, 32000, 64)


def make_config(folder: Path, more: Mapping[str, str] | None = None) -> Config:
    """Return a configuration as the command line would make it; port 0 unless told otherwise."""
    values = {
        "daemon.tp_rank": "0",
        "daemon.tp_size": "1",
        "daemon.runtime_dir": str(folder),
        "daemon.instance": folder.name,
        "control.base_port": "0",
    }
    return load({**values, **(more or {})}, {}).config


def make_daemon(
    folder: Path, more: Mapping[str, str] | None = None, make: EngineMaker | None = None
) -> Daemon:
    """Return a daemon that is not started."""
    return Daemon(make_config(folder, more), make)


@asynccontextmanager
async def running_daemon(
    folder: Path, more: Mapping[str, str] | None = None, make: EngineMaker | None = None
) -> AsyncIterator[Daemon]:
    """Give a daemon that is ready; close it at the end."""
    daemon = make_daemon(folder, more, make)
    await daemon.start()
    try:
        yield daemon
    finally:
        await daemon.close()


def address_of(daemon: Daemon) -> PeerAddress:
    """Return how a router names the instance of a daemon."""
    config = daemon.config
    base_port = daemon.control_port - config.rank_offset
    return PeerAddress(HOST, base_port, config.daemon.tp_size)


def free_base_port(count: int) -> int:
    """Return the first of ``count`` ports in a row that nobody listens on now."""
    # Each test process begins elsewhere: between the look and the use of a port there is a gap.
    turn = os.getpid() % len(_PORTS)
    bases: list[int] = [*_PORTS[turn:], *_PORTS[:turn]]
    for base in bases:
        if all(_is_free(base + offset) for offset in range(count)):
            return base
    raise AssertionError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def mla_group(n_layers: int = N_LAYERS, n_blocks: int = N_BLOCKS) -> KvGroup:
    """Return a group that every rank holds all of, so that any pair of TP sizes works."""
    layer_bytes = n_blocks * BLOCK_BYTES
    layers = tuple(
        KvLayer(f"layer.{i}", 0, i * layer_bytes, BLOCK_BYTES, 0, BLOCK_BYTES)
        for i in range(n_layers)
    )
    return KvGroup("kv", "mla", "NHD", "uint8", 1, n_blocks, 1, BLOCK_BYTES, layers)


@dataclass(eq=False)
class Worker:
    """One inference worker: a client, and KV memory of its own.

    Attributes:
        cache: The bytes, uint8 [layers, blocks, BLOCK_BYTES].
        ended: Every event so far.
    """

    client: AsyncClient
    memory: WorkerMemory
    cache: npt.NDArray[np.uint8]
    ended: list[TransferEnded] = field(default_factory=list)

    async def end_of(self, transfer_id: str, role: str) -> TransferEnded:
        """Wait for the end of a transfer."""
        while True:
            for event in self.ended:
                if (event.transfer_id, event.role) == (transfer_id, role):
                    return event
            self.ended += await self.client.wait(20.0)

    async def is_connected_to(self, epoch: Epoch) -> None:
        """Wait until the client is attached to this daemon start, with its cache registered."""
        while self.client.epoch != epoch:
            self.ended += await self.client.wait(0.02)

    def blocks(self, ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return a copy of these blocks of all layers."""
        return self.cache[:, list(ids)].copy()


@asynccontextmanager
async def attached_worker(socket_path: str, seed: int = 0) -> AsyncIterator[Worker]:
    """Give a worker that has registered its cache; seed 0 fills it with zeros."""
    n_bytes = N_LAYERS * N_BLOCKS * BLOCK_BYTES
    async with AsyncExitStack() as stack:
        memory = WorkerMemory(n_bytes)
        stack.callback(memory.close)
        if seed:
            memory.fill(seed)
        client = await stack.enter_async_context(AsyncClient(socket_path))
        await client.register_regions((mla_group(),), (MemoryRegion(memory.fd, n_bytes),))
        cache = memory.bytes.reshape(N_LAYERS, N_BLOCKS, BLOCK_BYTES)
        worker = Worker(client, memory, cache)
        del cache
        yield worker
        # The memory is unmapped next; a view of it would keep it mapped.
        worker.cache = np.empty((0,), dtype=np.uint8)
