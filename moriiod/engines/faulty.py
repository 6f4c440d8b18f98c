"""Wraps any engine and makes it misbehave, by dice with a seed or by a script. For tests only.

Every fault keeps the engine's contract: an operation that was posted ends in exactly one
Completion, and then nothing of it touches memory. What it shows is that the rest of moriiod does
not rely on more than that: not on speed, not on order, not on a cancel that works.
"""

from __future__ import annotations

import enum
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

from moriiod.core.geometry import RemoteLayout
from moriiod.core.ids import Epoch, Generation, OpId
from moriiod.core.plan import TransferPlan
from moriiod.engines.base import (
    Completion,
    Direction,
    EngineCapabilities,
    Fence,
    RegionHandle,
    Session,
    TransferEngine,
)
from moriiod.engines.shm import ShmSession
from moriiod.errors import (
    ConfigError,
    EngineOpFailed,
    EngineQueueFull,
    MoriiodError,
    RegistrationFailed,
    TransferAborted,
)

#: A thread that waits for a fault to be over must not spin meanwhile.
_POLL_INTERVAL_S: Final = 0.0005


class Fault(enum.Enum):
    """What may happen to one operation."""

    #: Nothing.
    NONE = "none"
    #: Refused for want of room; nothing was posted.
    FULL = "full"
    #: Refused for good; nothing was posted.
    FAIL_POST = "fail_post"
    #: Ends with an error; nothing was copied.
    FAIL = "fail"
    #: Copied, but the end is not told before it is cancelled.
    LOSE = "lose"
    #: Not copied, and not ended before it is cancelled.
    STALL = "stall"
    #: Copied at once, but the end is not told before the gate opens; cannot be cancelled.
    HOLD = "hold"
    #: Not copied before the gate opens; cannot be cancelled. So it lands after its deadline.
    LATE = "late"
    #: Copied, then one byte of the destination is changed; reported as a success.
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances of each fault, drawn for every post from one generator.

    Attributes:
        seed: Of the dice.
        fail_post, fail, lose, stall, hold, late, corrupt: Probability, 0 to 1; together at most 1.
        full: So many posts are refused before the first is taken.
        reorder: 1 = operations that end together are reported in random order.
        rounds: ``hold`` and ``late`` last at most so many calls of ``progress``; 0 = until the
            gate opens.
        register_errno: Every registration fails with this error number; 0 = none does.
    """

    seed: int = 0
    fail_post: float = 0.0
    fail: float = 0.0
    lose: float = 0.0
    stall: float = 0.0
    hold: float = 0.0
    late: float = 0.0
    corrupt: float = 0.0
    full: int = 0
    reorder: int = 0
    rounds: int = 0
    register_errno: int = 0


_CHANCES: Final = (
    Fault.FAIL_POST,
    Fault.FAIL,
    Fault.LOSE,
    Fault.STALL,
    Fault.HOLD,
    Fault.LATE,
    Fault.CORRUPT,
)


def parse_faults(text: str) -> Faults:
    """Return the faults of a text such as ``seed=7,fail=0.1,rounds=50``; "" = none.

    Raises:
        ConfigError: A name is unknown or a value is no number in range.
    """
    known: dict[str, Callable[[str], float]] = {
        item.name: float if isinstance(item.default, float) else int for item in fields(Faults)
    }
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            values[name] = known[name](value)
        except (KeyError, ValueError):
            raise ConfigError(f"no such fault: {part!r}", key="engine", value=part[:64]) from None
    faults = replace(Faults(), **values)  # type: ignore[arg-type]
    chances = [float(getattr(faults, fault.value)) for fault in _CHANCES]
    if min(chances) < 0 or sum(chances) > 1:
        raise ConfigError(
            "the chances of faults lie between 0 and 1", key="engine", value=text[:64]
        )
    return faults


@dataclass(slots=True, eq=False)
class _Op:
    """An operation that was taken. ``inner`` is True while the wrapped engine has it."""

    op: OpId
    session: Session
    direction: Direction
    plan: TransferPlan
    fault: Fault
    #: Calls of ``progress`` until a held or late one goes on by itself; 0 = never.
    rounds: int
    in_inner: bool = False
    is_cancelled: bool = False
    #: What the wrapped engine said, while it is not passed on.
    ended: Completion | None = None


class FaultyEngine:
    """Implements ``TransferEngine`` on top of another one.

    Args:
        inner: Does the real work.
        faults: By chance, for operations without a script.
    """

    def __init__(self, inner: TransferEngine, faults: Faults | None = None) -> None:
        self._inner = inner
        self._faults = faults or Faults()
        self._dice = random.Random(self._faults.seed)
        self._script: deque[Fault] = deque([Fault.FULL] * self._faults.full)
        self._register_errnos: deque[int] = deque()
        self._gate = threading.Event()
        self._ops: dict[OpId, _Op] = {}

    # --- For tests; any thread ----------------------------------------------------------------

    def script(self, *faults: Fault) -> None:
        """Decide what happens to the next operations that are posted, in order."""
        self._script.extend(faults)

    def fail_register(self, *errnos: int) -> None:
        """Let the next registrations fail with these error numbers; 0 = succeed."""
        self._register_errnos.extend(errnos)

    def open_gate(self) -> None:
        """Let held and late operations go on, now and later."""
        self._gate.set()

    def close_gate(self) -> None:
        """Hold back again those that come from now on."""
        self._gate.clear()

    # --- Setup threads ------------------------------------------------------------------------

    @property
    def capabilities(self) -> EngineCapabilities:
        """See ``TransferEngine``."""
        inner = self._inner.capabilities
        return replace(inner, poll_interval_s=max(inner.poll_interval_s, _POLL_INTERVAL_S))

    def register(
        self, generation: Generation, regions: Sequence[RegionHandle]
    ) -> tuple[bytes, ...]:
        """See ``TransferEngine``."""
        number = self._faults.register_errno
        if self._register_errnos:
            number = self._register_errnos.popleft()
        if number:
            n_bytes = max((region.n_bytes for region in regions), default=0)
            raise RegistrationFailed(
                f"a region of {n_bytes} bytes was refused (errno {number})",
                n_bytes=n_bytes,
                errno=number,
            )
        return self._inner.register(generation, regions)

    def deregister(self, generation: Generation) -> None:
        """See ``TransferEngine``."""
        self._inner.deregister(generation)

    def open_session(self, peer: Epoch, local: Generation, remote: RemoteLayout) -> Session:
        """See ``TransferEngine``."""
        return self._inner.open_session(peer, local, remote)

    def close_session(self, session: Session) -> None:
        """See ``TransferEngine``."""
        self._inner.close_session(session)

    def fence(self, peer: Epoch) -> Fence:
        """See ``TransferEngine``."""
        return self._inner.fence(peer)

    def readmit(self, peer: Epoch) -> None:
        """See ``TransferEngine``."""
        self._inner.readmit(peer)

    def forget(self, peer: Epoch) -> None:
        """See ``TransferEngine``."""
        self._inner.forget(peer)

    def close(self) -> None:
        """See ``TransferEngine``."""
        self._ops.clear()
        self._inner.close()

    # --- Data thread --------------------------------------------------------------------------

    def post(self, op: OpId, session: Session, direction: Direction, plan: TransferPlan) -> None:
        """See ``TransferEngine``."""
        fault = self._draw()
        if fault is Fault.FULL:
            raise EngineQueueFull("SQ full (injected)", op=op)
        if fault is Fault.FAIL_POST:
            raise EngineOpFailed("the post failed (injected)", op=op)
        rounds = self._dice.randint(1, self._faults.rounds) if self._faults.rounds else 0
        item = _Op(op, session, direction, plan, fault, rounds)
        if fault not in (Fault.FAIL, Fault.STALL, Fault.LATE):
            self._start(item)
        self._ops[op] = item

    def cancel(self, op: OpId) -> None:
        """See ``TransferEngine``."""
        item = self._ops.get(op)
        if item is None:
            return
        item.is_cancelled = True
        if item.in_inner and item.fault not in (Fault.HOLD, Fault.LATE):
            self._inner.cancel(op)

    def progress(self) -> list[Completion]:
        """See ``TransferEngine``."""
        for completion in self._inner.progress():
            item = self._ops[completion.op]
            item.in_inner = False
            item.ended = completion
            if item.fault is Fault.CORRUPT and completion.error is None:
                _corrupt(item)
        ended = [c for item in list(self._ops.values()) if (c := self._advance(item)) is not None]
        for completion in ended:
            del self._ops[completion.op]
        if self._faults.reorder:
            self._dice.shuffle(ended)
        return ended

    @property
    def in_flight(self) -> int:
        """See ``TransferEngine``."""
        return len(self._ops)

    def _draw(self) -> Fault:
        if self._script:
            return self._script.popleft()
        point = self._dice.random()
        for fault in _CHANCES:
            point -= getattr(self._faults, fault.value)
            if point < 0:
                return fault
        return Fault.NONE

    def _start(self, item: _Op) -> None:
        self._inner.post(item.op, item.session, item.direction, item.plan)
        item.in_inner = True

    def _advance(self, item: _Op) -> Completion | None:
        """Return the end of an operation if it may be told now."""
        match item.fault:
            case Fault.FAIL:
                failed = EngineOpFailed("the operation failed (injected)", op=item.op)
                return Completion(item.op, 0, failed)
            case Fault.STALL | Fault.LOSE if item.is_cancelled and not item.in_inner:
                n_bytes = item.ended.n_bytes if item.ended else 0
                return Completion(item.op, n_bytes, TransferAborted("cancelled"))
            case Fault.STALL | Fault.LOSE:
                return None
            case Fault.HOLD | Fault.LATE if not self._is_over(item):
                return None
            case Fault.LATE if item.ended is None and not item.in_inner:
                try:
                    self._start(item)
                except MoriiodError as error:
                    return Completion(item.op, 0, error)
        return item.ended

    def _is_over(self, item: _Op) -> bool:
        """Whether a held or late operation may go on."""
        if self._gate.is_set() or item.rounds == 1:
            return True
        if item.rounds:
            item.rounds -= 1
        return False


def _corrupt(item: _Op) -> None:
    session = item.session
    if not isinstance(session, ShmSession):
        raise ConfigError("only shm can be made to corrupt bytes", key="engine", value="corrupt")
    layer = item.plan.layers[0]
    if item.direction == "read":
        region = session.local[layer.local_region]
        at = layer.local_offset + int(layer.spans.local[0])
    else:
        region = session.remote[layer.remote_region]
        at = layer.remote_offset + int(layer.spans.remote[0])
    region.array[at] ^= 0xFF
