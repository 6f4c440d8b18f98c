"""What daemons say to each other. All of it is at-least-once and idempotent.

Every message travels in an envelope with the sender's epoch and, but for the handshake, the epoch
it is meant for (safety rule S7): what was meant for a dead daemon must not be taken by its
successor at the same address. Attempt ids
(``pull_id``, ``lease_id``, ``grant_id``) make a repeated message recognisable, so a retry, a
duplicate or a late copy can never act on a newer attempt of the same transfer (S3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le, Len, MaxLen

from moriiod.core.geometry import RemoteLayout
from moriiod.core.ids import (
    AttemptId,
    Bytes,
    Count,
    Duration,
    Epoch,
    Generation,
    GroupBlocks,
    GroupPositions,
    InstanceId,
    MessageText,
    Rank,
    Sequence,
    ShortText,
    Size,
    TransferId,
)
from moriiod.core.strict import Strict
from moriiod.errors import FieldValue

#: Protocol versions this build speaks, newest first.
PROTOCOL_VERSIONS = (1,)

MAX_RENEWALS = 16384


@dataclass(frozen=True, slots=True)
class Identity(Strict):
    """Who a daemon is: which rank of which instance, and which start of it."""

    instance: InstanceId
    dp_rank: Rank
    dp_size: Size
    tp_rank: Rank
    tp_size: Size
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class WireError(Strict):
    """An error as it crosses the wire; see ``moriiod.errors``."""

    code: ShortText
    message: MessageText
    retryable: bool
    fields: Mapping[str, FieldValue] = field(default_factory=dict)


# --- Link -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(Strict):
    """Dialler -> listener, repeated until answered. ``nonce`` ties the answer to this attempt."""

    nonce: AttemptId
    versions: Annotated[tuple[Annotated[int, Ge(0), Le(65535)], ...], Len(1, 16)]
    identity: Identity
    engines: Annotated[tuple[ShortText, ...], Len(1, 16)]


@dataclass(frozen=True, slots=True)
class Welcome(Strict):
    """Listener -> dialler: the link is up, in this protocol version."""

    nonce: AttemptId
    version: Annotated[int, Ge(0), Le(65535)]
    identity: Identity
    engines: Annotated[tuple[ShortText, ...], Len(1, 16)]


@dataclass(frozen=True, slots=True)
class HelloRefused(Strict):
    """Listener -> dialler: no link. For example no common version, or a self connect."""

    nonce: AttemptId
    error: WireError


@dataclass(frozen=True, slots=True)
class Heartbeat(Strict):
    """Dialler -> listener; says which of the sender's worker generations are registered now."""

    sequence: Sequence
    generations: Annotated[tuple[Generation, ...], MaxLen(64)]


@dataclass(frozen=True, slots=True)
class HeartbeatReply(Strict):
    """Listener -> dialler, same content."""

    sequence: Sequence
    generations: Annotated[tuple[Generation, ...], MaxLen(64)]


@dataclass(frozen=True, slots=True)
class UnknownEpoch(Strict):
    """The receiver of a message has had no handshake with its sender's epoch: say Hello first."""

    seen_epoch: Epoch


@dataclass(frozen=True, slots=True)
class Goodbye(Strict):
    """The sender is stopping in good order: its engine is closed, nothing of it is in flight."""


@dataclass(frozen=True, slots=True)
class LayoutRequest(Strict):
    """Ask for the layout of one worker generation."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class LayoutReply(Strict):
    """``layout`` is None when that generation is not registered (any more)."""

    generation: Generation
    layout: RemoteLayout | None


# --- READ -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim(Strict):
    """Consumer -> producer: I am about to read these blocks (or, ``reads`` false, none)."""

    transfer_id: TransferId
    pull_id: AttemptId
    reads: bool
    blocks: GroupBlocks


@dataclass(frozen=True, slots=True)
class ClaimGranted(Strict):
    """Producer -> consumer: the lease is open for ``ttl_s`` more seconds from now."""

    transfer_id: TransferId
    pull_id: AttemptId
    lease_id: AttemptId
    generation: Generation
    ttl_s: Duration


@dataclass(frozen=True, slots=True)
class ClaimRefused(Strict):
    """Producer -> consumer: no lease, or other blocks than the lease has."""

    transfer_id: TransferId
    pull_id: AttemptId
    error: WireError


@dataclass(frozen=True, slots=True)
class Ack(Strict):
    """Consumer -> producer, until confirmed: this rank is done with the lease's blocks.

    ``ok`` false means that it gave up. Either way nothing of this rank touches them any more.
    """

    transfer_id: TransferId
    pull_id: AttemptId
    lease_id: AttemptId
    consumer_tp_rank: Rank
    consumer_tp_size: Size
    ok: bool


@dataclass(frozen=True, slots=True)
class AckConfirmed(Strict):
    """Producer -> consumer. ``valid``: the lease was open from the claim until this Ack.

    Only a valid confirmation lets the consumer report ``received`` (S3).
    """

    transfer_id: TransferId
    pull_id: AttemptId
    valid: bool


@dataclass(frozen=True, slots=True)
class Renew(Strict):
    """Consumer -> producer: keep these leases, by (transfer id, lease id)."""

    leases: Annotated[tuple[tuple[TransferId, AttemptId], ...], MaxLen(MAX_RENEWALS)]


@dataclass(frozen=True, slots=True)
class Renewed(Strict):
    """Producer -> consumer: what was renewed, for how long, and what is not open here."""

    leases: Annotated[tuple[tuple[TransferId, AttemptId, Duration], ...], MaxLen(MAX_RENEWALS)]
    unknown: Annotated[tuple[tuple[TransferId, AttemptId], ...], MaxLen(MAX_RENEWALS)]


@dataclass(frozen=True, slots=True)
class Revoke(Strict):
    """Producer -> consumer, until it is acked: stop reading, the lease is over."""

    transfer_id: TransferId
    pull_id: AttemptId
    lease_id: AttemptId
    error: WireError


# --- WRITE ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grant(Strict):
    """Consumer -> producer, until accepted: write this transfer into these blocks.

    ``writes`` false: this producer rank has nothing to write and may let its transfer end.
    """

    transfer_id: TransferId
    grant_id: AttemptId
    generation: Generation
    writes: bool
    blocks: GroupBlocks
    first: GroupPositions


@dataclass(frozen=True, slots=True)
class GrantAccepted(Strict):
    """Producer -> consumer: the grant has arrived and is remembered."""

    transfer_id: TransferId
    grant_id: AttemptId


@dataclass(frozen=True, slots=True)
class WriteDone(Strict):
    """Producer -> consumer, until confirmed: every layer is in your blocks."""

    transfer_id: TransferId
    grant_id: AttemptId
    n_layers: Count
    n_bytes: Bytes


@dataclass(frozen=True, slots=True)
class WriteFailed(Strict):
    """Producer -> consumer, until confirmed: nothing of mine writes to your blocks any more.

    Also the answer to ``RevokeGrant``, once the writes in flight have drained.
    """

    transfer_id: TransferId
    grant_id: AttemptId
    error: WireError


@dataclass(frozen=True, slots=True)
class WriteConfirmed(Strict):
    """Consumer -> producer: your WriteDone or WriteFailed has arrived."""

    transfer_id: TransferId
    grant_id: AttemptId


@dataclass(frozen=True, slots=True)
class RevokeGrant(Strict):
    """Consumer -> producer, until answered: stop writing and say so when it is true."""

    transfer_id: TransferId
    grant_id: AttemptId


# --- Fence ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FenceRequest(Strict):
    """A restarted daemon asks: is anything of yours still in flight to or from my old epoch?"""

    fence_id: AttemptId
    old_epoch: Epoch


@dataclass(frozen=True, slots=True)
class Fenced(Strict):
    """Nothing between the sender and ``old_epoch`` is in flight, and nothing will be."""

    fence_id: AttemptId
    old_epoch: Epoch


PeerBody = (
    Hello
    | Welcome
    | HelloRefused
    | Heartbeat
    | HeartbeatReply
    | UnknownEpoch
    | Goodbye
    | LayoutRequest
    | LayoutReply
    | Claim
    | ClaimGranted
    | ClaimRefused
    | Ack
    | AckConfirmed
    | Renew
    | Renewed
    | Revoke
    | Grant
    | GrantAccepted
    | WriteDone
    | WriteFailed
    | WriteConfirmed
    | RevokeGrant
    | FenceRequest
    | Fenced
)
