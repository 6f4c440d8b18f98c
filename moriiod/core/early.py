"""Messages that came before their transfer: kept for a while, bounded, then given up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from moriiod.core.context import Context
from moriiod.core.ids import AttemptId, Epoch, TransferId
from moriiod.core.peers import Peer

#: Most bytes of block ids that one buffer keeps.
MAX_EARLY_BYTES = 64 << 20


BodyT = TypeVar("BodyT")


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[BodyT]):
    peer: Peer
    body: BodyT
    deadline: float
    n_bytes: int


_Key = tuple[Epoch, AttemptId]


class Early(Generic[BodyT]):
    """Early messages by transfer id. A repeat of the same attempt counts once.

    Args:
        name: Distinguishes this buffer's timer.
        give_up: Called with what has waited too long.
    """

    def __init__(self, ctx: Context, name: str, give_up: Callable[[Peer, BodyT], None]) -> None:
        self._ctx = ctx
        self._timer = ("early", name)
        self._give_up = give_up
        #: In the order of arrival, which is the order of the deadlines.
        self._waiting: OrderedDict[tuple[TransferId, _Key], _Waiting[BodyT]] = OrderedDict()
        self._by_transfer: dict[TransferId, dict[_Key, None]] = {}
        #: Block ids of all that waits; the rest of a message is small.
        self._n_bytes = 0
        #: Messages that were given up since the start: too many, or too old.
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(
        self,
        transfer_id: TransferId,
        attempt: AttemptId,
        peer: Peer,
        body: BodyT,
        n_bytes: int = 0,
    ) -> bool:
        """Keep a message of that size until ``take`` or its deadline; False if there is no room."""
        key = (transfer_id, (peer.epoch, attempt))
        if key in self._waiting:
            return True
        total = self._n_bytes + n_bytes
        if len(self._waiting) >= self._ctx.settings.max_early or total > MAX_EARLY_BYTES:
            self._ctx.problem("early_buffer_full", transfer_id)
            self.dropped += 1
            return False
        deadline = self._ctx.now + self._ctx.settings.early_ttl_s
        self._waiting[key] = _Waiting(peer, body, deadline, n_bytes)
        self._n_bytes = total
        self._by_transfer.setdefault(transfer_id, {})[key[1]] = None
        self._arm()
        return True

    def take(self, transfer_id: TransferId) -> list[tuple[Peer, BodyT]]:
        """Return and forget what waits for a transfer, oldest first."""
        keys = self._by_transfer.pop(transfer_id, {})
        taken = [self._waiting.pop((transfer_id, key)) for key in keys]
        self._n_bytes -= sum(waiting.n_bytes for waiting in taken)
        self._arm()
        return [(waiting.peer, waiting.body) for waiting in taken if not waiting.peer.is_void]

    def discard(self, transfer_id: TransferId, attempt: AttemptId, peer: Peer) -> bool:
        """Forget one message; returns whether it was there."""
        key = (peer.epoch, attempt)
        waiting = self._waiting.pop((transfer_id, key), None)
        if waiting is None:
            return False
        self._n_bytes -= waiting.n_bytes
        of_transfer = self._by_transfer[transfer_id]
        del of_transfer[key]
        if not of_transfer:
            del self._by_transfer[transfer_id]
        self._arm()
        return True

    def _arm(self) -> None:
        if self._waiting:
            oldest = next(iter(self._waiting.values()))
            self._ctx.timers.set(self._timer, oldest.deadline, self._expire)
        else:
            self._ctx.timers.cancel(self._timer)

    def _expire(self) -> None:
        while self._waiting:
            (transfer_id, (_, attempt)), oldest = next(iter(self._waiting.items()))
            if oldest.deadline > self._ctx.now:
                break
            self.discard(transfer_id, attempt, oldest.peer)
            self.dropped += 1
            if not oldest.peer.is_void:
                self._give_up(oldest.peer, oldest.body)
        self._arm()
