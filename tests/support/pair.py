"""A prefill and a decode daemon of one rank each, with their workers: for tests of one transfer."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moriiod.core.requests import PeerAddress
from tests.support.children import until
from tests.support.processes import Daemon, End, WorkerProcess


@dataclass(eq=False)
class Pair:
    """Two daemons and their workers.

    Attributes:
        address: How the consumer's requests name the producer's instance; None = where it is.
    """

    prefill: Daemon
    decode: Daemon
    producer: WorkerProcess
    consumer: WorkerProcess
    address: PeerAddress | None = None

    @property
    def peer(self) -> dict[str, Any]:
        """How a router names the producer's instance."""
        return asdict(self.address or self.prefill.address)

    # --- Requests -----------------------------------------------------------------------------

    def publish(self, transfer_id: str, blocks: Sequence[int] = (1, 2), **more: Any) -> None:
        """READ, producer."""
        self.producer.order("publish", transfer_id=transfer_id, blocks=list(blocks), **more)

    def pull(
        self,
        transfer_id: str,
        remote: Sequence[int] = (1, 2),
        blocks: Sequence[int] = (5, 6),
        **more: Any,
    ) -> None:
        """READ, consumer."""
        arguments = {"remote": list(remote), "blocks": list(blocks), "source": 0, **more}
        self.consumer.order("pull", transfer_id=transfer_id, peer=self.peer, **arguments)

    def push(self, transfer_id: str, blocks: Sequence[int] = (1, 2), **more: Any) -> None:
        """WRITE, producer."""
        self.producer.order("push", transfer_id=transfer_id, blocks=list(blocks), **more)

    def reserve(self, transfer_id: str, blocks: Sequence[int] = (5, 6), **more: Any) -> None:
        """WRITE, consumer."""
        arguments = {"blocks": list(blocks), "source": 0, **more}
        self.consumer.order("reserve", transfer_id=transfer_id, peer=self.peer, **arguments)

    def read(self, transfer_id: str, **pull: Any) -> None:
        """Start a READ on both sides."""
        self.publish(transfer_id)
        self.pull(transfer_id, **pull)

    def write(self, transfer_id: str) -> None:
        """Start a WRITE on both sides."""
        self.reserve(transfer_id)
        self.push(transfer_id)

    # --- Ends ---------------------------------------------------------------------------------

    def read_ends(self, transfer_id: str) -> tuple[End, End]:
        """Wait for the ends of a READ: (producer's, consumer's)."""
        consumer = self.consumer.wait_end("pull", transfer_id)
        return self.producer.wait_end("publish", transfer_id), consumer

    def write_ends(self, transfer_id: str) -> tuple[End, End]:
        """Wait for the ends of a WRITE: (producer's, consumer's)."""
        consumer = self.consumer.wait_end("reserve", transfer_id)
        return self.producer.wait_end("push", transfer_id), consumer

    def check_works(self, transfer_id: str = "works") -> None:
        """Read and write once, and insist that both go well."""
        self.read(transfer_id)
        self.check_good(self.read_ends(transfer_id))
        self.write(transfer_id)
        self.check_good(self.write_ends(transfer_id))

    @staticmethod
    def check_good(ends: tuple[End, End]) -> None:
        """Fail unless both ends are successes and the bytes are right."""
        outcomes = [(end.outcome, end.wrong) for end in ends]
        assert outcomes == [("released", ""), ("received", "")], ends

    def check_untouched(self) -> None:
        """Fail if anything was written to blocks that are not in use."""
        for worker in (self.producer, self.consumer):
            if worker.process.is_running:
                assert worker.ask("sweep")["touched"] == ""


def wait_in_flight(daemon: Daemon, n_ops: int = 1) -> None:
    """Wait until the engine of a daemon has so many operations or more.

    A push may be one operation, or one for each layer.
    """
    until(
        lambda: daemon.status()["counters"]["shells"]["engine_ops"] >= n_ops,
        f"{n_ops} operations in {daemon.name}",
    )


def open_gate(daemon: Daemon) -> None:
    """Let held and late operations of its faulty engine go on."""
    daemon.process.send_signal(signal.SIGUSR1)
