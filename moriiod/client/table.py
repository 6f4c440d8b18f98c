"""The transfers a client has in flight, and when each of them may be said to have ended.

A transfer is reported exactly once (safety rule S2), and never while something may still touch
its blocks (S1). While a daemon lives it says when that is so. When it is lost, its own operations
end with its process: ``publish``, ``pull`` and ``push`` may be reported as soon as the process is
known to be gone. A ``reserve`` may not: another daemon writes into those blocks. It stays in the
table as an orphan until the next daemon says that nobody can write any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moriiod.core.ids import Epoch, Generation, Role
from moriiod.core.requests import Orphan, PeerAddress, TransferEnded
from moriiod.errors import DaemonLost

Key = tuple[Role, str]


@dataclass(slots=True)
class InFlight:
    """A transfer that was asked for and has not ended.

    Attributes:
        sequence: Number of the request that opened it.
        epoch: The daemon start that was asked.
        generation: The attach it was asked in.
        peer: Whom a ``reserve`` lets write; None for the other roles.
        is_lost: The attach is over; this daemon will not report the end any more.
    """

    role: Role
    transfer_id: str
    sequence: int
    epoch: Epoch
    generation: Generation
    peer: PeerAddress | None = None
    is_lost: bool = False

    def ended_with_daemon(self) -> TransferEnded:
        """Return the event that says so."""
        return TransferEnded(
            transfer_id=self.transfer_id,
            role=self.role,
            outcome="failed",
            reason=DaemonLost.code,
            message="the daemon went away while the transfer was in flight",
            retryable=DaemonLost.retryable,
        )


class TransferTable:
    """In-flight transfers by (role, transfer id)."""

    def __init__(self) -> None:
        self._live: dict[Key, InFlight] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: Key) -> bool:
        return key in self._live

    def __iter__(self) -> Iterator[InFlight]:
        return iter(self._live.values())

    @property
    def has_lost(self) -> bool:
        """Whether some of them belong to an attach that is over."""
        return any(entry.is_lost for entry in self._live.values())

    def open(self, entry: InFlight) -> bool:
        """Add a transfer; False (and no change) if it is in flight already."""
        return self._live.setdefault((entry.role, entry.transfer_id), entry) is entry

    def get(self, key: Key) -> InFlight | None:
        """Return a transfer in flight."""
        return self._live.get(key)

    def close(self, key: Key) -> InFlight | None:
        """Remove a transfer; None if it is not in flight."""
        return self._live.pop(key, None)

    def lose(self, generation: Generation) -> None:
        """The attach is over: mark what was in flight in it."""
        for entry in self._live.values():
            if entry.generation == generation:
                entry.is_lost = True

    def end_with_daemon(self, epochs: Iterable[Epoch]) -> list[TransferEnded]:
        """The processes behind these epochs are gone: remove and report what ended with them."""
        gone = set(epochs)
        ended = [
            entry
            for entry in self._live.values()
            if entry.is_lost and entry.epoch in gone and entry.role != "reserve"
        ]
        for entry in ended:
            del self._live[entry.role, entry.transfer_id]
        return [entry.ended_with_daemon() for entry in ended]

    def lost_epochs(self) -> set[Epoch]:
        """Epochs whose process still has to be seen gone before something can be reported."""
        return {e.epoch for e in self._live.values() if e.is_lost and e.role != "reserve"}

    def orphans(self, new_epoch: Epoch) -> tuple[Orphan, ...]:
        """Return the lost reservations that a daemon start must take care of.

        A daemon that lives on under its old epoch took care when it saw the old attach end.
        """
        return tuple(
            Orphan(entry.transfer_id, entry.peer, entry.epoch)
            for entry in self._live.values()
            if entry.is_lost and entry.peer is not None and entry.epoch != new_epoch
        )
