"""What every part of the core shares: the time, the effects so far, the timers, fresh ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from moriiod.core.effects import CountProblem, Effect, Transition
from moriiod.core.ids import AttemptId
from moriiod.core.messages import Identity
from moriiod.core.settings import CoreSettings
from moriiod.core.timers import Timers


class Context:
    """The core's working memory during one step.

    Parts of the core call each other back through ``later`` and never directly, so no handler
    is ever entered while it is running.
    """

    def __init__(self, identity: Identity, settings: CoreSettings) -> None:
        self.identity = identity
        self.settings = settings
        self.timers = Timers()
        #: Local monotonic time of the present step, seconds.
        self.now = 0.0
        #: Set once the daemon is asked to stop.
        self.is_draining = False
        self._effects: list[Effect] = []
        self._deferred: deque[Callable[[], None]] = deque()
        self._attempts = 0

    def emit(self, effect: Effect) -> None:
        """Order something of the shells."""
        self._effects.append(effect)

    def later(self, action: Callable[[], None]) -> None:
        """Run ``action`` within this step, after the present handler has returned."""
        self._deferred.append(action)

    def new_attempt(self) -> AttemptId:
        """Return an id that no other attempt of this or any other epoch has."""
        self._attempts += 1
        return f"{self.identity.epoch[:16]}{self._attempts:016x}"

    def problem(self, kind: str, detail: str) -> None:
        """Count something wrong that came from outside and was contained."""
        self.emit(CountProblem(kind, detail[:200]))

    def transition(self, transfer_id: str, role: str, old: str, new: str, detail: str = "") -> None:
        """Record a change of a transfer's state."""
        self.emit(Transition(transfer_id, role, old, new, detail))

    def run_deferred(self) -> None:
        """Run everything that was put off, including what that puts off."""
        while self._deferred:
            self._deferred.popleft()()

    def take_effects(self) -> tuple[Effect, ...]:
        """Return the step's effects in order and start a new list."""
        effects = tuple(self._effects)
        self._effects.clear()
        return effects
