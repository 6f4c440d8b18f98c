"""The one owner of the core: events in, one step at a time, effects out, one timer.

Everything here runs on the loop's thread. An event that arises while one is handled waits its turn,
so the core is never entered twice. An exception out of a step is a bug: it is logged with the
story of the last steps, nothing is decided any more, and the daemon ends.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from moriiod.core.effects import CountProblem, Effect, ReplyToClient
from moriiod.core.events import (
    Event,
    OpEnded,
    PeerMessageReceived,
    RequestReceived,
    TimerFired,
)
from moriiod.core.faults import to_refused
from moriiod.core.machine import Machine
from moriiod.core.requests import GetStatus, Reply, StatusDocument
from moriiod.daemon.clock import Clock, Timer
from moriiod.daemon.observer import Observer
from moriiod.errors import InvariantViolation
from moriiod.zmqio.hooks import ShellHooks

#: Steps that are remembered for a bug report.
STORY_STEPS: Final = 64

_log: Final = logging.getLogger("moriiod.driver")


@dataclass(frozen=True, slots=True)
class StoryStep:
    """One step, as a bug report shows it.

    Attributes:
        now: Time of the step.
        event: What happened: its type, and its body's.
        subject: Which transfer, operation or route it was about.
        effects: What the core ordered.
    """

    now: float
    event: str
    subject: str
    effects: tuple[str, ...]


class Outlet(Protocol):
    """Where the core's orders go."""

    def dispatch(self, effect: Effect) -> None:
        """Carry out one order. Events it raises are handled after the present step."""
        ...


@dataclass(frozen=True, slots=True)
class Wiring:
    """What the driver needs once the daemon is assembled.

    Attributes:
        machine: The core; nobody else changes it.
        outlet: Takes its orders.
        observer: Sees everything.
        render_status: Returns the daemon's state as JSON text.
        on_broken: Called once, with the bug, after which nothing is handled any more.
    """

    machine: Machine
    outlet: Outlet
    observer: Observer
    render_status: Callable[[], str]
    on_broken: Callable[[Exception], None]


class Driver:
    """Feeds the core and carries its orders out.

    Events that come before ``start`` wait for it.

    Args:
        clock: Tells the core the time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wiring: Wiring | None = None
        self._queue: deque[Event] = deque()
        self._is_running = False
        self._is_retired = False
        self._is_stopped = False
        self._bug: Exception | None = None
        self._timer: Timer | None = None
        self._timer_at: float | None = None
        self._story: deque[StoryStep] = deque(maxlen=STORY_STEPS)

    @property
    def hooks(self) -> ShellHooks:
        """What to give to the shells."""
        return ShellHooks(self.handle, self.count_problem, self.on_bug)

    @property
    def bug(self) -> Exception | None:
        """What broke the driver; None as long as nothing did."""
        return self._bug

    @property
    def story(self) -> tuple[StoryStep, ...]:
        """The last steps, oldest first."""
        return tuple(self._story)

    def start(self, wiring: Wiring) -> None:
        """Take what has waited, and whatever comes from now on."""
        self._wiring = wiring
        if self._bug is not None:
            wiring.on_broken(self._bug)
        self._run()

    def retire(self) -> None:
        """Handle nothing any more but the end of operations, while the engine is being closed."""
        self._is_retired = True

    def stop(self) -> None:
        """Handle nothing any more. Idempotent."""
        self._is_stopped = True
        self._queue.clear()
        self._disarm()

    def handle(self, event: Event) -> None:
        """Take an event: at once, or after the one that is being handled."""
        if self._is_stopped or (self._is_retired and not isinstance(event, OpEnded)):
            return
        self._queue.append(event)
        if not self._is_running:
            self._run()

    def count_problem(self, kind: str, detail: str) -> None:
        """Count something wrong that came from outside and that a shell contained."""
        if self._wiring is not None:
            self._wiring.observer.problem(CountProblem(kind, detail), self._clock.now())

    def on_bug(self, error: Exception) -> None:
        """Stop for good: somebody's state cannot be trusted any more."""
        if self._bug is not None:
            _log.error("another bug, while stopping: %r", error, exc_info=error)
            return
        self._bug = error
        story = "\n".join(_line(step) for step in self._story)
        _log.critical("a bug: no transfers are taken any more\n%s", story, exc_info=error)
        self._queue.clear()
        self._disarm()
        if self._wiring is not None:
            self._wiring.on_broken(error)

    # --- Steps --------------------------------------------------------------------------------

    def _run(self) -> None:
        wiring = self._wiring
        if wiring is None:
            return
        self._is_running = True
        try:
            while self._queue and not self._is_stopped:
                self._take(wiring, self._queue.popleft())
        finally:
            self._is_running = False
        self._arm(wiring)

    def _take(self, wiring: Wiring, event: Event) -> None:
        now = self._clock.now()
        if isinstance(event, RequestReceived) and isinstance(event.body, GetStatus):
            self._answer_status(wiring, event, now)
        elif self._bug is None:
            self._step(wiring, event, now)

    def _step(self, wiring: Wiring, event: Event, now: float) -> None:
        try:
            wiring.observer.event(event, now)
            effects = wiring.machine.step(event, now)
            self._remember(event, effects, now)
            for effect in effects:
                wiring.observer.effect(effect, now)
                wiring.outlet.dispatch(effect)
        except Exception as error:  # noqa: BLE001 - a bug; the daemon ends with exit status 70
            self._remember(event, (), now)
            self.on_bug(error)

    def _answer_status(self, wiring: Wiring, event: RequestReceived, now: float) -> None:
        """Answer from a snapshot; a status that cannot be shown must not end any transfer."""
        wiring.observer.event(event, now)
        reply: Reply
        try:
            reply = StatusDocument(wiring.render_status())
        except Exception as error:  # noqa: BLE001 - answered, logged and harmless
            _log.error("the status cannot be shown", exc_info=error)
            reply = to_refused(InvariantViolation(f"the status cannot be shown: {error!r}"[:500]))
        effect = ReplyToClient(event.route, event.sequence, reply)
        wiring.observer.effect(effect, now)
        wiring.outlet.dispatch(effect)

    def _remember(self, event: Event, effects: tuple[Effect, ...], now: float) -> None:
        body = getattr(event, "body", None)
        name = type(event).__name__
        if body is not None:
            name = f"{name}({type(body).__name__})"
        names = tuple([type(effect).__name__ for effect in effects])
        self._story.append(StoryStep(now, name, _subject(event), names))

    # --- Time ---------------------------------------------------------------------------------

    def _arm(self, wiring: Wiring) -> None:
        """Keep the one timer at the core's next deadline."""
        deadline = None
        if self._bug is None and not self._is_stopped:
            deadline = wiring.machine.next_deadline()
        if deadline == self._timer_at:
            return
        self._disarm()
        if deadline is not None:
            self._timer_at = deadline
            self._timer = self._clock.call_at(deadline, partial(self._on_timer, deadline))

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timer_at = None

    def _on_timer(self, deadline: float) -> None:
        self._timer = self._timer_at = None
        wiring = self._wiring
        if wiring is None or self._is_retired or self._is_stopped or self._bug is not None:
            return
        # A timer has a resolution and may fire a little early; told its own time, it cannot spin.
        self._is_running = True
        try:
            self._step(wiring, TimerFired(), max(deadline, self._clock.now()))
        finally:
            self._is_running = False
        self._run()


def _subject(event: Event) -> str:
    """Return what an event is about, without copying anything large."""
    if isinstance(event, RequestReceived | PeerMessageReceived):
        found = getattr(event.body, "transfer_id", None)
        return str(found if found is not None else event.route)
    for name in ("op", "session", "generation", "epoch", "route"):
        found = getattr(event, name, None)
        if found is not None:
            return str(found)
    return ""


def _line(step: StoryStep) -> str:
    return f"{step.now:.6f} {step.event} {step.subject} -> {', '.join(step.effects) or '-'}"
