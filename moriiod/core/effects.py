"""Everything the core can ask of the shells. Orders, in the imperative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moriiod.core.geometry import CacheLayout, RemoteLayout
from moriiod.core.ids import ANY_EPOCH, ClientRoute, Epoch, Generation, OpId, PeerRoute, SessionId
from moriiod.core.messages import PeerBody
from moriiod.core.plan import TransferPlan
from moriiod.core.requests import ClientEvent, Reply


@dataclass(frozen=True, slots=True)
class ReplyToClient:
    """Answer the request with this sequence number."""

    route: ClientRoute
    sequence: int
    body: Reply


@dataclass(frozen=True, slots=True)
class SendEvent:
    """Tell a client an event; kept and repeated by the core until confirmed."""

    route: ClientRoute
    sequence: int
    body: ClientEvent


@dataclass(frozen=True, slots=True)
class DisconnectWorker:
    """Close the fd connection of a worker and stop watching its process."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class RegisterMemory:
    """Register a generation's offered regions with the engine; answered by MemoryRegistered or
    MemoryRefused."""

    layout: CacheLayout


@dataclass(frozen=True, slots=True)
class ReleaseMemory:
    """Deregister a generation's regions and close their handles; answered by MemoryReleased."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class OpenRoute:
    """Start connecting to a control endpoint; the route name is the core's."""

    route: PeerRoute
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class CloseRoute:
    """Forget a route and whatever is still queued for it."""

    route: PeerRoute


@dataclass(frozen=True, slots=True)
class SendToPeer:
    """Send on a route to one epoch. May be lost: the core repeats what must arrive."""

    route: PeerRoute
    body: PeerBody
    to: Epoch = ANY_EPOCH


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Pair a local generation with a peer's memory; answered by SessionOpened or SessionRefused."""

    session: SessionId
    peer: Epoch
    local_generation: Generation
    remote: RemoteLayout


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Give up a session that has no operation in flight, or that is still opening."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class PostOp:
    """Post one operation; answered by exactly one OpEnded, or by OpRefused."""

    op: OpId
    session: SessionId
    direction: Literal["read", "write"]
    plan: TransferPlan


@dataclass(frozen=True, slots=True)
class CancelOp:
    """End an operation early; its OpEnded still comes, when nothing touches memory any more."""

    op: OpId


@dataclass(frozen=True, slots=True)
class FencePeer:
    """Report PeerFenced once nothing of this epoch can touch local memory; may never happen."""

    peer: Epoch


@dataclass(frozen=True, slots=True)
class ReadmitPeer:
    """A fenced peer is back, alive, under its old epoch: it may reach local memory again."""

    peer: Epoch


@dataclass(frozen=True, slots=True)
class Transition:
    """A transfer changed state; for the log, the metrics and the story.

    At its end ``new`` is the outcome and ``detail`` the reason.

    Attributes:
        age_s: Since the transfer was asked for.
        n_bytes: At its end: payload bytes that were moved for it.
    """

    transfer_id: str
    role: str
    old: str
    new: str
    detail: str = ""
    age_s: float = 0.0
    n_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CountProblem:
    """Something wrong came from outside and was contained; ``kind`` is from a fixed list."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class DrainEnded:
    """Nothing is in flight any more (``clean``), or the drain's time is over."""

    clean: bool


Effect = (
    ReplyToClient
    | SendEvent
    | DisconnectWorker
    | RegisterMemory
    | ReleaseMemory
    | OpenRoute
    | CloseRoute
    | SendToPeer
    | OpenSession
    | CloseSession
    | PostOp
    | CancelOp
    | FencePeer
    | ReadmitPeer
    | Transition
    | CountProblem
    | DrainEnded
)
