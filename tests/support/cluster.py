"""A prefill and a decode instance of real processes, transfers between them, and all the checks.

What the tests with faults rest on: every worker that lives is told exactly one end of every
transfer it takes part in, no received byte is wrong, nothing is written to a block that was given
back, and after a while no daemon holds anything any more.
"""

from __future__ import annotations

import random
import select
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from tests.support.children import take_ports, until
from tests.support.kv_cache import CacheShape
from tests.support.nursery import Nursery
from tests.support.processes import Daemon, End, WorkerProcess

Mode = Literal["read", "write"]

#: Short times, so that a fault is over soon; what runs long under load only fails, and may.
FAST_SETTINGS: Final[Mapping[str, str]] = {
    "control.heartbeat_interval_s": "0.2",
    "control.link_timeout_s": "1.2",
    "control.connect_timeout_s": "2",
    "control.peer_forget_s": "5",
    "transfer.lease_s": "2",
    "transfer.pull_timeout_s": "4",
    "transfer.write_timeout_s": "4",
    "transfer.early_ttl_s": "2",
    "transfer.resend_first_s": "0.05",
    "transfer.resend_max_s": "0.4",
    "daemon.drain_timeout_s": "1",
    # With the faulty engine, half a millisecond for each 4 KiB: there is time to die in between.
    "engine.shm_chunk_bytes": "4096",
    # One line for each change of a transfer: shown when a test fails.
    "telemetry.log_level": "debug",
}
_SIDES: Final = ("P", "D")
_ROLES: Final[Mapping[Mode, Mapping[str, str]]] = {
    "read": {"P": "publish", "D": "pull"},
    "write": {"P": "push", "D": "reserve"},
}


@dataclass(eq=False)
class Rank:
    """One daemon and its worker."""

    side: str
    tp_rank: int
    daemon: Daemon
    worker: WorkerProcess | None = None

    @property
    def name(self) -> str:
        """``P0``, ``D3``."""
        return f"{self.side}{self.tp_rank}"

    @property
    def is_worker_alive(self) -> bool:
        """Whether somebody is there to be told of an end."""
        return self.worker is not None and self.worker.process.is_running


@dataclass(eq=False)
class Sent:
    """One transfer between all ranks of both instances.

    Attributes:
        blocks: Of each side.
        ends: What each rank was told; None if its worker died before.
    """

    transfer_id: str
    mode: Mode
    blocks: Mapping[str, list[int]]
    ends: dict[str, End | None] = field(default_factory=dict)

    def outcomes(self, side: str) -> list[str]:
        """Return how it ended on one side, a word for each rank."""
        ends = [end for name, end in sorted(self.ends.items()) if name[0] == side]
        return ["lost" if end is None else end.outcome for end in ends]


class Cluster:
    """Two instances on this machine.

    Args:
        folder: For sockets and logs; its path must be short.
        tp_sizes: Of the prefill and of the decode instance.
        shape: Of the caches; its TP size is ignored.
        settings: Of all daemons.
        faults: Of all daemons' engines; see ``Daemon``.
        nursery: Of the processes.
    """

    def __init__(
        self,
        folder: Path,
        tp_sizes: tuple[int, int] = (2, 4),
        shape: CacheShape | None = None,
        settings: Mapping[str, str] | None = None,
        faults: str | None = "",
        *,
        nursery: Nursery,
    ) -> None:
        self.tp_sizes = dict(zip(_SIDES, tp_sizes, strict=True))
        self.ranks: list[Rank] = []
        #: Transfers that somebody was not told the end of, by id.
        self.live: dict[str, Sent] = {}
        self.done: list[Sent] = []
        #: What must not be, in words.
        self.problems: list[str] = []
        self._given_shape = shape or CacheShape()
        self._free = {side: list(range(self._given_shape.blocks)) for side in _SIDES}
        self._count = 0
        for side in _SIDES:
            base_port = take_ports(self.tp_sizes[side])
            for tp_rank in range(self.tp_sizes[side]):
                own = {
                    "daemon.tp_rank": str(tp_rank),
                    "daemon.tp_size": str(self.tp_sizes[side]),
                    "control.base_port": str(base_port),
                }
                chosen = {**FAST_SETTINGS, **(settings or {}), **own}
                daemon = Daemon(folder / side, chosen, faults, nursery)
                self.ranks.append(Rank(side, tp_rank, daemon))

    # --- Processes ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything, all processes at the same time."""
        for rank in self.ranks:
            rank.daemon.launch()
        for rank in self.ranks:
            rank.daemon.wait_ready()
            self.launch_worker(rank)
        for rank in self.ranks:
            self.worker_of(rank).wait_ready()

    def close(self) -> None:
        """Kill everything that runs."""
        for rank in self.ranks:
            if rank.worker is not None:
                rank.worker.close()
                rank.worker = None
            rank.daemon.close()

    def rank(self, name: str) -> Rank:
        """Return a rank by its name."""
        return next(rank for rank in self.ranks if rank.name == name)

    def ranks_of(self, side: str) -> list[Rank]:
        """Return the ranks of one side."""
        return [rank for rank in self.ranks if rank.side == side]

    @staticmethod
    def worker_of(rank: Rank) -> WorkerProcess:
        """Return the worker of a rank that has one."""
        assert rank.worker is not None
        return rank.worker

    def launch_worker(self, rank: Rank) -> None:
        """Start a new worker, with new memory, without waiting for it."""
        if rank.worker is not None:
            rank.worker.close()
        rank.worker = WorkerProcess(rank.daemon, self.shape(rank.side), f"kv{rank.name}")

    def kill_worker(self, rank: Rank) -> None:
        """Kill a worker; it will not be told any end any more."""
        worker = self.worker_of(rank)
        worker.process.kill()
        self._take(rank)
        for sent in list(self.live.values()):
            if rank.name not in sent.ends:
                self._note_end(sent, rank, None)

    def shape(self, side: str) -> CacheShape:
        """Return the shape of the caches of one side."""
        given = self._given_shape
        return CacheShape(
            given.layers, given.blocks, given.head_size, given.heads, self.tp_sizes[side]
        )

    # --- Transfers ----------------------------------------------------------------------------

    def source_of(self, decode_rank: int) -> int:
        """Return whose bytes a decode rank must get; written down independently of moriiod."""
        prefill, decode = self.tp_sizes["P"], self.tp_sizes["D"]
        if decode >= prefill:
            return decode_rank // (decode // prefill)
        return decode_rank * (prefill // decode)

    def submit(self, mode: Mode, n_blocks: int, dice: random.Random, **more: Any) -> Sent | None:
        """Start a transfer on every rank whose worker lives, in random order.

        Args:
            mode: Which way.
            n_blocks: Blocks of each side.
            dice: Chooses blocks and order.
            more: For the producers: ``lease_s``, ``n_layers``.

        Returns:
            None if there are not enough free blocks now.
        """
        if min(len(free) for free in self._free.values()) < n_blocks:
            return None
        self._count += 1
        blocks = {side: self._take_blocks(side, n_blocks, dice) for side in _SIDES}
        sent = Sent(f"tx-{self._count}", mode, blocks)
        self.live[sent.transfer_id] = sent
        for rank in dice.sample(self.ranks, len(self.ranks)):
            if rank.is_worker_alive:
                self._order(sent, rank, more)
            else:
                self._note_end(sent, rank, None)
        return sent

    def _take_blocks(self, side: str, n_blocks: int, dice: random.Random) -> list[int]:
        taken = dice.sample(self._free[side], n_blocks)
        self._free[side] = [block for block in self._free[side] if block not in taken]
        return taken

    def _order(self, sent: Sent, rank: Rank, more: Mapping[str, Any]) -> None:
        role = _ROLES[sent.mode][rank.side]
        arguments: dict[str, Any] = {
            "transfer_id": sent.transfer_id,
            "blocks": sent.blocks[rank.side],
        }
        if rank.side == "P":
            arguments |= {"remote_tp_size": self.tp_sizes["D"], **more}
        else:
            peer = self.rank("P0").daemon.address
            arguments |= {"peer": asdict(peer), "source": self.source_of(rank.tp_rank)}
            if sent.mode == "read":
                arguments["remote"] = sent.blocks["P"]
        self.worker_of(rank).order(role, **arguments)

    def _note_end(self, sent: Sent, rank: Rank, end: End | None) -> None:
        if rank.name in sent.ends:
            self.problems.append(f"{rank.name} {sent.transfer_id}: a second end: {end}")
        sent.ends[rank.name] = end
        if end is not None and end.wrong:
            self.problems.append(f"{rank.name} {end.role} {sent.transfer_id}: {end.wrong}")
        for side in _SIDES:
            names = {one.name for one in self.ranks_of(side)}
            if rank.side == side and names <= sent.ends.keys():
                self._free[side] += sent.blocks[side]
        if len(sent.ends) == len(self.ranks):
            del self.live[sent.transfer_id]
            self.done.append(sent)

    def _take(self, rank: Rank) -> None:
        if rank.worker is None:
            return
        for end in rank.worker.take():
            sent = self.live.get(end.transfer_id)
            if sent is None:
                self.problems.append(f"{rank.name}: an end after the end: {end}")
            else:
                self._note_end(sent, rank, end)

    def pump(self, timeout_s: float) -> None:
        """Take what workers say; wait at most so long for the first word."""
        channels = [r.worker.channel for r in self.ranks if r.worker and r.is_worker_alive]
        select.select(channels, (), (), timeout_s)
        for rank in self.ranks:
            self._take(rank)

    def pump_for(self, duration_s: float) -> None:
        """Take what workers say for so long: how a random point in time is reached."""
        give_up = time.monotonic() + duration_s
        while (left := give_up - time.monotonic()) > 0:
            self.pump(left)

    def settle(self, timeout_s: float = 30.0) -> None:
        """Wait until every worker was told every end."""
        give_up = time.monotonic() + timeout_s
        while self.live and time.monotonic() < give_up:
            self.pump(0.2)
        owed = [
            f"{sent.transfer_id} {sent.mode}: {sorted(self._names - sent.ends.keys())}"
            for sent in self.live.values()
        ]
        assert not owed, f"not told within {timeout_s:g} s: {owed}\n{self.rows()}"

    @property
    def _names(self) -> set[str]:
        return {rank.name for rank in self.ranks}

    # --- Checks -------------------------------------------------------------------------------

    def check_all_right(self) -> None:
        """Fail on any wrong byte, second end, or touched block so far."""
        for rank in self.ranks:
            if rank.is_worker_alive:
                touched = self.worker_of(rank).ask("sweep")["touched"]
                if touched:
                    self.problems.append(f"{rank.name}: {touched}")
        assert not self.problems, "\n".join(self.problems)

    def check_empty(self, timeout_s: float = 20.0, ignore: str = "") -> None:
        """Wait until no daemon holds anything of any transfer.

        Args:
            timeout_s: Fail after so long.
            ignore: What may remain; see ``remains``.
        """
        for rank in self.ranks:
            left: list[str] = []

            def is_empty(rank: Rank = rank, left: list[str] = left) -> bool:
                left[:] = remains(rank.daemon.status(), ignore)
                return not left

            try:
                until(is_empty, "empty tables", timeout_s)
            except AssertionError:
                raise AssertionError(f"{rank.name} still holds {left}\n{self.rows()}") from None

    def rows(self) -> str:
        """Return what every daemon says of its transfers and peers, for a test that fails."""
        lines = []
        for rank in self.ranks:
            if rank.daemon.process.is_running and rank.daemon.is_answering():
                status = rank.daemon.status()
                lines.append(f"{rank.name}: {remains(status)}")
                for part in ("transfers", "quarantined"):
                    lines += [f"  {part}: {row}" for row in status[part]["rows"]]
                lines += [f"  peer: {row}" for row in status["peers"]]
        return "\n".join(lines)

    def resources(self) -> dict[str, tuple[int, list[str]]]:
        """Return how many descriptors and which memfds each daemon has."""
        found = {}
        for rank in self.ranks:
            process = rank.daemon.process
            found[rank.name] = (process.n_fds(), process.memfds())
        return found

    def transfer_all(self, dice: random.Random, n_blocks: int = 2) -> None:
        """Let every pair of ranks transfer both ways, and insist that all goes well."""
        modes: tuple[Mode, ...] = ("read", "write")
        for mode in modes:
            sent = self.submit(mode, n_blocks, dice)
            assert sent is not None, "no free blocks"
            self.settle()
            outcomes = sent.outcomes("P"), sent.outcomes("D")
            wanted = ["released"] * self.tp_sizes["P"], ["received"] * self.tp_sizes["D"]
            assert outcomes == wanted, f"{sent}\n{self.rows()}"
        self.check_all_right()


def remains(status: Mapping[str, Any], ignore: str = "") -> list[str]:
    """Return what a daemon still holds that an idle one does not, in words."""
    engine, counters, limits = status["engine"], status["counters"], status["limits"]
    amounts = {
        "transfers": status["transfers"]["live"],
        "leases": status["leases"]["open"],
        "quarantined": status["quarantined"]["transfers"],
        "ops in flight": engine["ops_in_flight"],
        "ops queued": engine["ops_queued"],
        "engine ops": counters["shells"]["engine_ops"],
        "messages unanswered": counters["messages_unanswered"],
        "early messages": limits["max_early"]["used"],
        "admitted transfers": limits["max_transfers"]["used"],
        "pins": sum(row["transfers"] for row in status["clients"]),
        "unconfirmed events": sum(row["unconfirmed_events"] for row in status["clients"]),
        "clients gone": sum(row["state"] == "gone" for row in status["clients"]),
        "peers fenced": sum(row["state"] in ("fencing", "over") for row in status["peers"]),
    }
    return [f"{what}: {amount}" for what, amount in amounts.items() if amount and what != ignore]


@contextmanager
def running_cluster(folder: Path, **options: Any) -> Iterator[Cluster]:
    """Give a cluster that works; kill it at the end."""
    cluster = Cluster(folder, **options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
