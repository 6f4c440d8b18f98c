"""A clock that a test moves by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class FakeTimer:
    """One call that is due at ``when``."""

    when: float
    callback: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Do not call any more."""
        self.is_cancelled = True


@dataclass
class FakeClock:
    """Implements ``daemon.clock.Clock``.

    Attributes:
        time: What ``now`` returns.
        timers: Every timer that was ever set.
    """

    time: float = 100.0
    timers: list[FakeTimer] = field(default_factory=list)

    def now(self) -> float:
        """Return the time."""
        return self.time

    def call_at(self, when: float, callback: Callable[[], None]) -> FakeTimer:
        """Remember a call."""
        timer = FakeTimer(when, callback)
        self.timers.append(timer)
        return timer

    @property
    def armed(self) -> list[FakeTimer]:
        """Timers that have neither fired nor been cancelled."""
        return [timer for timer in self.timers if not timer.is_cancelled]

    def fire(self, *, early_s: float = 0.0) -> None:
        """Let time pass until the earliest timer fires, a little early if asked."""
        timer = min(self.armed, key=lambda one: one.when)
        self.time = max(self.time, timer.when - early_s)
        timer.is_cancelled = True
        timer.callback()
