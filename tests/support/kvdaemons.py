"""The oracle's cases through real daemons: every rank a daemon and a worker, on the test's loop."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moriiod.client.aio import AsyncClient
from moriiod.client.types import MemoryRegion
from moriiod.core.requests import PeerAddress, TransferEnded
from moriiod.daemon.app import Daemon
from tests.support.daemons import HOST, free_base_port, running_daemon
from tests.support.engines import WorkerMemory
from tests.support.kvmodel import Case, Rank, Side, capacity, logical, make_rank, write


@dataclass(eq=False)
class KvWorker:
    """One rank's worker: its client, its memory, and what the oracle says the memory holds."""

    client: AsyncClient
    daemon: Daemon
    side: Side
    rank: Rank
    memory: list[WorkerMemory]
    ended: list[TransferEnded] = field(default_factory=list)

    @property
    def blocks(self) -> list[list[int]]:
        return [list(held.table) for held in self.side.groups]

    @property
    def first(self) -> list[int]:
        return [held.first for held in self.side.groups]

    @property
    def n_layers(self) -> int:
        return sum(len(group.layers) for group in self.rank.layout.groups)

    async def end_of(self, transfer_id: str, role: str) -> TransferEnded:
        """Wait for the end of a transfer."""
        while True:
            for event in self.ended:
                if (event.transfer_id, event.role) == (transfer_id, role):
                    return event
            self.ended += await self.client.wait(20.0)

    def check(self, wanted: Rank) -> None:
        """Compare every byte of every region."""
        hole = self.side.hole
        for memory, region in zip(self.memory, wanted.regions, strict=True):
            np.testing.assert_array_equal(memory.bytes[hole:], region[hole:])
            if hole:
                held = 512 * os.fstat(memory.fd).st_blocks
                assert held < hole, "somebody wrote, or read, in front of the layers"


@dataclass(eq=False)
class KvWorld:
    """Both instances of a case."""

    case: Case
    producers: list[KvWorker]
    consumers: list[KvWorker]
    address: PeerAddress

    def start(self, transfer_id: str, *, reads: bool) -> None:
        """Ask for the case's request on every rank."""
        for worker in self.producers:
            if reads:
                worker.client.publish(transfer_id, worker.blocks, remote_tp_size=self.decode_tp)
                continue
            worker.client.push(
                transfer_id, worker.blocks, first=worker.first, remote_tp_size=self.decode_tp
            )
            worker.client.layer_ready(transfer_id, range(worker.n_layers))
            worker.client.seal(transfer_id, worker.n_layers)
        for worker in self.consumers:
            if reads:
                worker.client.pull(
                    transfer_id,
                    self.address,
                    self.producers[0].blocks,
                    worker.blocks,
                    local_first=worker.first,
                    remote_first=self.producers[0].first,
                    remote_block_tokens=[g.block_tokens for g in self.case.producer.groups],
                )
            else:
                worker.client.reserve(transfer_id, self.address, worker.blocks, first=worker.first)

    @property
    def decode_tp(self) -> int:
        return self.case.consumer.tp

    async def ends(self, transfer_id: str, *, reads: bool) -> list[tuple[str, str]]:
        """Wait for all of it; return (outcome, reason) of the consumers, then the producers."""
        roles = ("pull", "publish") if reads else ("reserve", "push")
        found = [await worker.end_of(transfer_id, roles[0]) for worker in self.consumers]
        found += [await worker.end_of(transfer_id, roles[1]) for worker in self.producers]
        return [(end.outcome, end.reason) for end in found]

    def check_bytes(self) -> None:
        """Compare every rank's memory with the oracle, canaries included."""
        case = self.case
        most = max(capacity(held) for held in (*case.producer.groups, *case.consumer.groups))
        content = logical(case.model, most, seed=7)
        ends = [
            min(capacity(a), capacity(b))
            for a, b in zip(case.producer.groups, case.consumer.groups, strict=True)
        ]
        for number, worker in enumerate(self.consumers):
            wanted = make_rank(case.model, case.consumer, number, 2)
            write(wanted, number, case.model, case.consumer, content, ends)
            worker.check(wanted)
        for worker in self.producers:
            worker.check(worker.rank)


@asynccontextmanager
async def kv_world(
    folder: Path,
    case: Case,
    prefill: Mapping[str, str] | None = None,
    decode: Mapping[str, str] | None = None,
) -> AsyncIterator[KvWorld]:
    """Give both instances of a case; producers hold the model's bytes, consumers noise."""
    base = free_base_port(case.producer.tp + case.consumer.tp)
    most = max(capacity(held) for held in (*case.producer.groups, *case.consumer.groups))
    content = logical(case.model, most, seed=7)
    async with AsyncExitStack() as stack:
        groups: list[list[KvWorker]] = []
        for name, side, port, more in (
            ("P", case.producer, base, prefill),
            ("D", case.consumer, base + case.producer.tp, decode),
        ):
            workers = []
            for number in range(side.tp):
                rank = make_rank(case.model, side, number, 1 if name == "P" else 2)
                if name == "P":
                    write(rank, number, case.model, side, content, [most] * len(case.model))
                settings = {
                    "daemon.tp_rank": str(number),
                    "daemon.tp_size": str(side.tp),
                    "control.base_port": str(port),
                    **(more or {}),
                }
                daemon = await stack.enter_async_context(running_daemon(folder / name, settings))
                workers.append(await _employ(stack, daemon, side, rank))
            groups.append(workers)
        yield KvWorld(case, groups[0], groups[1], PeerAddress(HOST, base, case.producer.tp))


async def _employ(stack: AsyncExitStack, daemon: Daemon, side: Side, rank: Rank) -> KvWorker:
    memory = [_memory(stack, region, side.hole) for region in rank.regions]
    client = await stack.enter_async_context(AsyncClient(daemon.config.socket_path))
    regions: Sequence[MemoryRegion] = [MemoryRegion(one.fd, one.n_bytes) for one in memory]
    await client.register_regions(rank.layout.groups, regions)
    return KvWorker(client, daemon, side, rank, memory)


def _memory(stack: AsyncExitStack, region: np.ndarray, hole: int) -> WorkerMemory:
    memory = WorkerMemory(len(region))
    stack.callback(memory.close)
    memory.bytes[hole:] = region[hole:]
    return memory
