"""Everything that can happen to the core. Facts, in the past tense."""

from __future__ import annotations

from dataclasses import dataclass

from moriiod.core.fanin import TransferAck
from moriiod.core.ids import ANY_EPOCH, ClientRoute, Epoch, Generation, OpId, PeerRoute, SessionId
from moriiod.core.messages import PeerBody
from moriiod.core.requests import Request
from moriiod.errors import MoriiodError


@dataclass(frozen=True, slots=True)
class RequestReceived:
    """A well-formed request of a local client."""

    route: ClientRoute
    sequence: int
    body: Request


@dataclass(frozen=True, slots=True)
class EventUndelivered:
    """An event could not be sent to its client (gone, or not reading)."""

    route: ClientRoute
    sequence: int


@dataclass(frozen=True, slots=True)
class WorkerConnected:
    """A worker introduced itself on the fd socket; its liveness is watched from here on."""

    generation: Generation
    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class RegionOffered:
    """A worker's region arrived on the fd socket, is sealed and has this size in bytes."""

    generation: Generation
    region: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The worker's process ended or its fd connection closed."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class PeerMessageReceived:
    """A well-formed message of a peer, with the epochs its envelope carries: from and to."""

    route: PeerRoute
    epoch: Epoch
    body: PeerBody
    to: Epoch = ANY_EPOCH


@dataclass(frozen=True, slots=True)
class RouteFailed:
    """A dialled route cannot be opened (unresolvable host, refused address)."""

    route: PeerRoute
    error: MoriiodError


@dataclass(frozen=True, slots=True)
class LegacyAckReceived:
    """An ACK of a peer that speaks no moriiod protocol (plain string or upstream ``release``)."""

    ack: TransferAck


@dataclass(frozen=True, slots=True)
class MemoryRegistered:
    """The engine took a generation's regions; one descriptor for each, in order."""

    generation: Generation
    descriptors: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class MemoryRefused:
    """The engine refused a generation's regions; none of them is registered."""

    generation: Generation
    error: MoriiodError


@dataclass(frozen=True, slots=True)
class MemoryReleased:
    """A generation's regions are deregistered and their handles closed."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """The engine paired a local and a remote generation."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class SessionRefused:
    """The engine could not open the session."""

    session: SessionId
    error: MoriiodError


@dataclass(frozen=True, slots=True)
class OpEnded:
    """An operation is over: nothing of it touches memory any more.

    ``error`` None means that every byte of the plan was copied.
    """

    op: OpId
    n_bytes: int
    error: MoriiodError | None = None


@dataclass(frozen=True, slots=True)
class OpRefused:
    """The engine had no room; nothing of the operation was posted. It may be posted again."""

    op: OpId


@dataclass(frozen=True, slots=True)
class PeerFenced:
    """The engine knows that nothing of this epoch can touch local memory any more."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class TimerFired:
    """``next_deadline()`` has been reached."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The daemon is to stop: take no new transfers; after ``timeout_s`` abort what is left."""

    timeout_s: float


Event = (
    RequestReceived
    | EventUndelivered
    | WorkerConnected
    | RegionOffered
    | WorkerDied
    | PeerMessageReceived
    | RouteFailed
    | LegacyAckReceived
    | MemoryRegistered
    | MemoryRefused
    | MemoryReleased
    | SessionOpened
    | SessionRefused
    | OpEnded
    | OpRefused
    | PeerFenced
    | TimerFired
    | DrainRequested
)
