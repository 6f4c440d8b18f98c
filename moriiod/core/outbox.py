"""Messages to peers that must arrive: repeated until answered, dropped with the peer.

The wire may lose, repeat and reorder; the answer to a message is what confirms it. Repeats slow
down exponentially, so a peer that is away costs little and is told as soon as it is back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from moriiod.core.context import Context
from moriiod.core.ids import Epoch
from moriiod.core.messages import PeerBody

#: (kind, id): what the message is, and of which attempt.
Key = tuple[str, str]


@dataclass(slots=True)
class _Pending:
    body: PeerBody
    first_sent: float
    pause_s: float


class Outbox:
    """At-least-once delivery to peer epochs.

    Args:
        send: Sends once to an epoch; it may be lost, and returns nothing.
    """

    def __init__(self, ctx: Context, send: Callable[[Epoch, PeerBody], None]) -> None:
        self._ctx = ctx
        self._send = send
        self._pending: dict[Epoch, dict[Key, _Pending]] = {}

    def post(self, peer: Epoch, key: Key, body: PeerBody) -> None:
        """Send now and again until ``confirm``; a message under the same key is replaced."""
        pending = _Pending(body, self._ctx.now, self._ctx.settings.resend_first_s)
        self._pending.setdefault(peer, {})[key] = pending
        self._transmit(peer, key, pending)

    def confirm(self, peer: Epoch, key: Key) -> bool:
        """Stop repeating. Returns whether the message was still waiting."""
        waiting = self._pending.get(peer)
        if waiting is None or waiting.pop(key, None) is None:
            return False
        if not waiting:
            del self._pending[peer]
        self._ctx.timers.cancel(("resend", peer, key))
        return True

    def first_sent(self, peer: Epoch, key: Key) -> float | None:
        """When the waiting message was sent for the first time, None if none waits."""
        pending = self._pending.get(peer, {}).get(key)
        return None if pending is None else pending.first_sent

    def is_any_waiting(self, peer: Epoch, kinds: Collection[str]) -> bool:
        """Whether a message of one of these kinds waits for its answer."""
        return any(kind in kinds for kind, _ in self._pending.get(peer, {}))

    def count(self, peer: Epoch | None = None) -> int:
        """Number of messages that wait for an answer, of one peer or of all."""
        if peer is not None:
            return len(self._pending.get(peer, {}))
        return sum(len(waiting) for waiting in self._pending.values())

    def drop_peer(self, peer: Epoch) -> None:
        """Forget everything that waits for a peer that will never answer."""
        for key in self._pending.pop(peer, {}):
            self._ctx.timers.cancel(("resend", peer, key))

    def _transmit(self, peer: Epoch, key: Key, pending: _Pending) -> None:
        self._send(peer, pending.body)
        self._ctx.timers.set(
            ("resend", peer, key),
            self._ctx.now + pending.pause_s,
            lambda: self._transmit(peer, key, pending),
        )
        pending.pause_s = min(2 * pending.pause_s, self._ctx.settings.resend_max_s)
