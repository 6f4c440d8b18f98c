"""Engine operations: who owns each, and how many may be in flight at once.

Operations over the limit wait in order. One that the engine had no room for is posted again after
a pause, and counts as in flight meanwhile, so that it is never posted twice (case T1).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from moriiod.core.context import Context
from moriiod.core.effects import CancelOp, PostOp
from moriiod.core.ids import Epoch, OpId, SessionId
from moriiod.core.plan import TransferPlan
from moriiod.errors import MoriiodError, TransferAborted

#: Pauses double so often, so that an engine that stays full costs little.
_MOST_DOUBLINGS = 5


class OpOwner(Protocol):
    """Who is told about the end of an operation, exactly once."""

    def op_ended(self, op: OpId, n_bytes: int, error: MoriiodError | None) -> None:
        """Nothing of the operation touches memory any more."""
        ...


class SessionUse(Protocol):
    """The session an operation runs on; it is not closed while it is in use."""

    session: SessionId
    #: The peer whose memory it reaches.
    peer: Epoch

    def acquire(self) -> None:
        """One more operation uses the session."""
        ...

    def release(self) -> None:
        """One operation less uses the session."""
        ...


class _State(Enum):
    WAITING = "waiting"
    POSTED = "posted"
    #: The engine had no room; a timer will post it again.
    RETRYING = "retrying"


@dataclass(eq=False, slots=True)
class _Op:
    op: OpId
    owner: OpOwner
    use: SessionUse
    direction: Literal["read", "write"]
    plan: TransferPlan
    state: _State = _State.WAITING
    is_cancelled: bool = False
    refusals: int = 0


class Ops:
    """All operations that have not ended."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._ops: dict[OpId, _Op] = {}
        #: In order; a dict, so that a cancelled one leaves at once.
        self._waiting: dict[OpId, None] = {}
        self._next_op = 1
        self.in_flight = 0
        self.in_flight_bytes = 0

    def __len__(self) -> int:
        return len(self._ops)

    def count_with(self, peer: Epoch) -> int:
        """Number of operations with one peer's memory that have not ended."""
        return sum(op.use.peer == peer for op in self._ops.values())

    def post(
        self,
        owner: OpOwner,
        use: SessionUse,
        direction: Literal["read", "write"],
        plan: TransferPlan,
    ) -> OpId:
        """Post as soon as the limits allow; the owner is told of the end."""
        op = _Op(self._next_op, owner, use, direction, plan)
        self._next_op += 1
        self._ops[op.op] = op
        use.acquire()
        self._waiting[op.op] = None
        self._pump()
        return op.op

    def cancel(self, op_id: OpId) -> None:
        """End an operation early; its owner is still told, when it is over."""
        op = self._ops.get(op_id)
        if op is None or op.is_cancelled:
            return
        op.is_cancelled = True
        if op.state is _State.POSTED:
            self._ctx.emit(CancelOp(op_id))
        else:
            self._ctx.timers.cancel(("op", op_id))
            self._end(op, 0, TransferAborted("cancelled before it was posted"))

    def has_no_room(self, op_id: OpId) -> bool:
        """Whether the engine refused an operation when it was last posted."""
        op = self._ops.get(op_id)
        return op is not None and op.state is _State.RETRYING

    def ended(self, op_id: OpId, n_bytes: int, error: MoriiodError | None) -> None:
        """The engine says that an operation is over."""
        op = self._ops.get(op_id)
        if op is None or op.state is not _State.POSTED:
            self._ctx.problem("engine_event_unexpected", f"end of operation {op_id}")
            return
        self._end(op, n_bytes, error)

    def refused(self, op_id: OpId) -> None:
        """The engine had no room: nothing was posted."""
        op = self._ops.get(op_id)
        if op is None or op.state is not _State.POSTED:
            self._ctx.problem("engine_event_unexpected", f"refusal of operation {op_id}")
            return
        if op.is_cancelled:
            self._end(op, 0, TransferAborted("cancelled before it was posted"))
            return
        op.state = _State.RETRYING
        pause_s = self._ctx.settings.op_retry_s * 2 ** min(op.refusals, _MOST_DOUBLINGS)
        op.refusals += 1
        self._ctx.timers.set(("op", op_id), self._ctx.now + pause_s, lambda: self._emit_post(op))

    def _pump(self) -> None:
        settings = self._ctx.settings
        while self._waiting and self.in_flight < settings.max_ops_in_flight:
            op = self._ops[next(iter(self._waiting))]
            room = settings.max_bytes_in_flight - self.in_flight_bytes
            if self.in_flight and op.plan.n_bytes > room:
                return
            del self._waiting[op.op]
            self.in_flight += 1
            self.in_flight_bytes += op.plan.n_bytes
            self._emit_post(op)

    def _emit_post(self, op: _Op) -> None:
        op.state = _State.POSTED
        self._ctx.emit(PostOp(op.op, op.use.session, op.direction, op.plan))

    def _end(self, op: _Op, n_bytes: int, error: MoriiodError | None) -> None:
        del self._ops[op.op]
        self._waiting.pop(op.op, None)
        if op.state is not _State.WAITING:
            self.in_flight -= 1
            self.in_flight_bytes -= op.plan.n_bytes
        op.use.release()
        self._ctx.later(lambda: op.owner.op_ended(op.op, n_bytes, error))
        self._ctx.later(self._pump)
