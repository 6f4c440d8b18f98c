"""Turns what the core is told and what it orders into metrics and log lines. Decides nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moriiod.core.effects import (
    CloseSession,
    CountProblem,
    Effect,
    OpenSession,
    PostOp,
    ReplyToClient,
    SendEvent,
    SendToPeer,
    Transition,
)
from moriiod.core.events import Event, OpEnded, OpRefused, RequestReceived, SessionRefused
from moriiod.core.ids import ClientRoute, Epoch, OpId, SessionId
from moriiod.core.messages import AckConfirmed
from moriiod.core.requests import Refused, RegisterCaches
from moriiod.engines.base import Direction
from moriiod.telemetry.log import ProblemLog, log_token_spans, log_transition
from moriiod.telemetry.metrics import Metrics

#: Kind under which the core counts a peer that fell silent; the detail is its instance.
PEER_LOST: Final = "peer_lost"
#: Kinds of problems counted here: what a client did not take, because it is gone or does not read.
EVENT_UNDELIVERED: Final = "ipc_event_undelivered"
REPLY_UNDELIVERED: Final = "ipc_reply_undelivered"

_OUTCOMES: Final = frozenset({"released", "received", "failed"})
#: Peer instances that are warned about.
_MAX_WARNED: Final = 1024
#: Clients whose events are told apart from repeats; more than may be attached.
_MAX_ROUTES: Final = 256


@dataclass(frozen=True, slots=True)
class _Posted:
    """An operation that the engine has."""

    direction: Direction
    posted_at: float
    peer: str
    n_token_spans: int


class Observer:
    """Sees every event before the core does, and every effect before the shells do.

    Args:
        metrics: Counts.
        instance_of: Returns the name of a peer's instance, for a label.
    """

    def __init__(self, metrics: Metrics, instance_of: Callable[[Epoch], str]) -> None:
        self._metrics = metrics
        self._instance_of = instance_of
        self._problems = ProblemLog()
        self._ops: dict[OpId, _Posted] = {}
        self._sessions: dict[SessionId, str] = {}
        #: Peer instances whose split NHD heads were warned about.
        self._warned: set[str] = set()
        #: (route, sequence) and type of the request that is being served.
        self._request: tuple[ClientRoute, int, str] = (b"", 0, "")
        #: Highest event that was offered to each client, longest unused first.
        self._offered: OrderedDict[ClientRoute, int] = OrderedDict()

    def event(self, event: Event, now: float) -> None:
        """The core is about to be told."""
        match event:
            case RequestReceived():
                self._request = (event.route, event.sequence, type(event.body).__name__)
            case OpEnded():
                self._op_ended(event, now)
            case OpRefused():
                self._ops.pop(event.op, None)
            case SessionRefused():
                self._sessions.pop(event.session, None)
            case _:
                return

    def effect(self, effect: Effect, now: float) -> None:
        """The core has ordered something."""
        match effect:
            case Transition():
                self._transition(effect)
            case PostOp():
                self._posted(effect, now)
            case ReplyToClient():
                self._replied(effect)
            case SendToPeer(body=AckConfirmed() as body):
                self._metrics.ack(body.valid)
            case OpenSession():
                self._sessions[effect.session] = self._instance_of(effect.peer)
            case CloseSession():
                self._sessions.pop(effect.session, None)
            case CountProblem():
                self.problem(effect, now)
            case _:
                return

    def problem(self, problem: CountProblem, now: float) -> None:
        """Something wrong came from outside and was contained."""
        if problem.kind == PEER_LOST:
            self._metrics.peer_lost(problem.detail)
        self._metrics.problem(problem.kind)
        self._problems.log(problem, now)

    def event_sent(self, effect: SendEvent, *, is_delivered: bool, now: float) -> None:
        """An event was handed to libzmq, or could not be."""
        if not is_delivered:
            self.problem(CountProblem(EVENT_UNDELIVERED, f"event {effect.sequence}"), now)
            return
        highest = self._offered.pop(effect.route, 0)
        self._metrics.event_sent(is_repeat=effect.sequence <= highest)
        self._offered[effect.route] = max(highest, effect.sequence)
        if len(self._offered) > _MAX_ROUTES:
            self._offered.popitem(last=False)

    def reply_undelivered(self, effect: ReplyToClient, now: float) -> None:
        """A reply could not be handed to libzmq."""
        detail = f"{type(effect.body).__name__} to request {effect.sequence}"
        self.problem(CountProblem(REPLY_UNDELIVERED, detail), now)

    def _posted(self, effect: PostOp, now: float) -> None:
        peer, n = self._sessions.get(effect.session, ""), effect.plan.n_token_spans
        self._ops[effect.op] = _Posted(effect.direction, now, peer, n)
        if n and peer not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(peer)
            log_token_spans(peer, n, effect.plan.n_bytes)

    def _op_ended(self, event: OpEnded, now: float) -> None:
        posted = self._ops.pop(event.op, None)
        if posted is None:
            return
        self._metrics.op_ended(posted.direction, event.error is None, now - posted.posted_at)
        if posted.n_token_spans:
            self._metrics.token_spans(posted.peer, posted.n_token_spans)
        if event.n_bytes:
            self._metrics.peer_bytes(posted.peer, posted.direction, event.n_bytes)

    def _transition(self, effect: Transition) -> None:
        log_transition(effect)
        if effect.new in _OUTCOMES:
            self._metrics.transfer_ended(
                effect.role, effect.new, effect.detail, effect.age_s, effect.n_bytes
            )

    def _replied(self, effect: ReplyToClient) -> None:
        route, sequence, kind = self._request
        if (route, sequence) != (effect.route, effect.sequence):
            kind = RegisterCaches.__name__  # the only request that is answered in a later step
        self._metrics.request(kind, not isinstance(effect.body, Refused))
