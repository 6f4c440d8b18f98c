"""A world whose messages are written down and moved one by one, for written-out scenarios."""

from __future__ import annotations

from collections.abc import Callable

from moriiod.core import effects as ef
from moriiod.core.messages import PeerBody
from moriiod.core.settings import CoreSettings
from tests.support.sim import N_BLOCKS, SETTINGS, Daemon, InFlight, Worker, World

#: Messages that keep links up; they say nothing about a transfer.
_CHATTER = frozenset({"Heartbeat", "HeartbeatReply"})


def name_of(daemon: Daemon) -> str:
    """Return what transcripts call a daemon: ``P0``, ``D3``."""
    return f"{daemon.instance}{daemon.rank}"


class Story(World):
    """A world with a transcript.

    Attributes:
        said: ``"D1>P0 Claim"`` for everything that was put on the wire, but for heartbeats.
    """

    def __init__(
        self,
        prefill_tp: int = 1,
        decode_tp: int = 1,
        *,
        seed: int = 0,
        settings: CoreSettings = SETTINGS,
        n_blocks: int = N_BLOCKS,
    ) -> None:
        self.said: list[str] = []
        super().__init__(prefill_tp, decode_tp, seed=seed, settings=settings, n_blocks=n_blocks)

    @property
    def p(self) -> Worker:
        """The first prefill worker."""
        return self.p_workers[0]

    @property
    def d(self) -> Worker:
        """The first decode worker."""
        return self.d_workers[0]

    # --- Transcript -----------------------------------------------------------------------------

    def transmit(self, source: Daemon, effect: ef.SendToPeer) -> None:
        """Put a message on the wire and write it down."""
        before = len(self.net)
        super().transmit(source, effect)
        kind = type(effect.body).__name__
        for message in self.net[before:]:
            if kind not in _CHATTER:
                target = self.by_epoch[message.target]
                self.said.append(f"{name_of(source)}>{name_of(target)} {kind}")

    def said_with(self, one: str, other: str) -> list[str]:
        """What two daemons said to each other, in order."""
        return [
            line for line in self.said if line.startswith((f"{one}>{other} ", f"{other}>{one} "))
        ]

    def times_said(self, kind: type[PeerBody]) -> int:
        """How often messages of one kind were put on the wire."""
        return sum(line.endswith(f" {kind.__name__}") for line in self.said)

    # --- Single messages ------------------------------------------------------------------------

    def find(self, *kinds: type[PeerBody]) -> list[int]:
        """Where messages of these kinds are on the wire, oldest first."""
        return [i for i, message in enumerate(self.net) if isinstance(message.body, kinds)]

    def deliver_one(self, *kinds: type[PeerBody], keep: bool = False) -> None:
        """Deliver the oldest message of these kinds; with ``keep`` a copy stays on the wire."""
        self.deliver(self.find(*kinds)[0], keep=keep)

    def lose_all(self, *kinds: type[PeerBody]) -> int:
        """Lose every message of these kinds that is on the wire; return how many there were."""
        found = self.find(*kinds)
        for index in reversed(found):
            self.lose(index)
        return len(found)

    def run_but(self, *kinds: type[PeerBody], copies: bool = True) -> None:
        """Like ``run``, but messages of these kinds stay where they are."""
        self.run_where(lambda message: not isinstance(message.body, kinds), copies=copies)

    def run_where(self, moves: Callable[[InFlight], bool], *, copies: bool = True) -> None:
        """Like ``run``, but only messages that ``moves`` picks are delivered."""
        for _ in range(20000):
            if self.local_step():
                continue
            index = next((i for i, message in enumerate(self.net) if moves(message)), None)
            if index is not None:
                self.deliver(index)
            elif self.ops and copies:
                self.copy(next(iter(self.ops.values())), spans=1000)
            else:
                return
        raise AssertionError("the world does not come to rest")

    def live_for(self, seconds: float, *lost: type[PeerBody], copies: bool = True) -> None:
        """Let time pass in small steps; messages of the given kinds are always lost."""
        end = self.now + seconds
        while self.now < end - 1e-6:
            self.run_but(*lost, copies=copies)
            self.lose_all(*lost)
            self.pass_time(min(0.05, end - self.now))
        self.pass_time(end - self.now)  # what rounding has left
        self.run_but(*lost, copies=copies)
        self.lose_all(*lost)

    def settle_quietly(self, seconds: float) -> None:
        """Like ``settle``, but every copy stays where it is."""
        end = self.now + seconds
        while self.now < end:
            self.run(copies=False)
            self.pass_time(min(0.5, end - self.now))
        self.run(copies=False)

    # --- Engine ---------------------------------------------------------------------------------

    def finish_ops(self) -> None:
        """Let every copy in flight come to its end."""
        while self.ops:
            self.copy(next(iter(self.ops.values())), spans=1000)

    # --- Looking at it --------------------------------------------------------------------------

    def ends(self, *workers: Worker) -> list[tuple[str, str, str, str]]:
        """(role, transfer id, outcome, reason) of everything that ended at these workers."""
        return [
            (e.role, e.transfer_id, e.outcome, e.reason)
            for worker in workers or self.workers
            for e in worker.ended
        ]

    def outcomes_of(self, *workers: Worker) -> list[tuple[str, str]]:
        """(outcome, reason) of everything that ended at these workers."""
        return [(outcome, reason) for _, _, outcome, reason in self.ends(*workers)]

    def bytes_of(self, worker: Worker, *blocks: int) -> bytes:
        """What is in these blocks of a worker now, layer by layer."""
        return worker.memory[:, list(blocks)].tobytes()
