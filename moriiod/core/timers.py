"""Deadlines without a clock: named timers that fire when the shell says what time it is."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from dataclasses import dataclass

Action = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Armed:
    when: float
    ticket: int
    action: Action


class Timers:
    """A set of timers, at most one for each key. Setting a key again moves it."""

    def __init__(self) -> None:
        self._armed: dict[Hashable, _Armed] = {}
        #: (when, ticket, key); entries whose ticket is not the armed one are stale.
        self._heap: list[tuple[float, int, Hashable]] = []
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._armed)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._armed

    def set(self, key: Hashable, when: float, action: Action) -> None:
        """Run ``action`` at the first ``pop_due`` at or after ``when``."""
        self._tickets += 1
        self._armed[key] = _Armed(when, self._tickets, action)
        heapq.heappush(self._heap, (when, self._tickets, key))
        if len(self._heap) > 2 * len(self._armed) + 64:
            self._heap = [(a.when, a.ticket, k) for k, a in self._armed.items()]
            heapq.heapify(self._heap)

    def cancel(self, key: Hashable) -> None:
        """Forget a timer; unknown keys are ignored."""
        self._armed.pop(key, None)

    def next_deadline(self) -> float | None:
        """When the earliest timer is due, None if there is none."""
        while self._heap:
            when, ticket, key = self._heap[0]
            armed = self._armed.get(key)
            if armed is not None and armed.ticket == ticket:
                return when
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: float) -> Action | None:
        """Take the earliest timer that is due; None if there is none.

        Due timers are taken one by one, so that an action can still cancel the next one.
        """
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        return self._armed.pop(key).action
