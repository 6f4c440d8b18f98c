"""What time it is, and being called when it is later. The only place in the daemon that asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """One call that is due."""

    def cancel(self) -> None:
        """Do not call any more; a timer that has fired is ignored."""
        ...


class Clock(Protocol):
    """Local monotonic time in seconds; only differences mean anything."""

    def now(self) -> float:
        """Return the time."""
        ...

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back at this time. It may be a little early: timers have a resolution."""
        ...


class LoopClock:
    """The clock of an event loop.

    Both loops count as ``time.monotonic`` does. It is asked itself, because uvloop's ``time()`` is
    as old as the present turn of the loop, and whole milliseconds.

    Args:
        loop: Where callbacks run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """See ``Clock``."""
        return self._loop.call_at(when, callback)


class Every:
    """Calls back again and again, and says how late each call is.

    Args:
        clock: Keeps the time.
        interval_s: Pause between two calls.
        callback: Takes the seconds by which the call is late.
    """

    def __init__(self, clock: Clock, interval_s: float, callback: Callable[[float], None]) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._callback = callback
        self._due = 0.0
        self._timer: Timer | None = None

    def start(self) -> None:
        """Call for the first time one interval from now."""
        self._due = self._clock.now() + self._interval_s
        self._timer = self._clock.call_at(self._due, self._fire)

    def stop(self) -> None:
        """Do not call any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        late_s = max(0.0, self._clock.now() - self._due)
        self.start()
        self._callback(late_s)
