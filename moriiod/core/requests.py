"""What a local worker may ask of its daemon, what it is answered, and what it is told.

Every request carries a sequence number in its envelope and gets exactly one ``Reply``.
A transfer that was accepted ends in exactly one ``TransferEnded`` (safety rule S2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le, Len, MaxLen

from moriiod.core.geometry import KvGroup
from moriiod.core.ids import (
    MAX_GROUPS,
    MAX_LAYERS,
    MAX_REGIONS,
    Bytes,
    Count,
    Duration,
    Epoch,
    Generation,
    GroupBlocks,
    GroupBlockTokens,
    GroupPositions,
    MaybeSize,
    MessageText,
    Outcome,
    Port,
    PositiveBytes,
    Rank,
    Role,
    Sequence,
    ShortText,
    Size,
    TransferId,
)
from moriiod.core.strict import Strict
from moriiod.errors import FieldValue


@dataclass(frozen=True, slots=True)
class PeerAddress(Strict):
    """How a router names the other instance (``kv_transfer_params``).

    Attributes:
        host: Host name or IP literal of rank 0's control endpoint, without brackets.
        base_port: Control port of (dp 0, tp 0); upstream's ``remote_handshake_port``.
        tp_size: TP size the router claims; 0 = unknown = same as ours. The handshake has the
            last word: a different size there is ``TopologyMismatch``.
        dp_size: DP size the router claims. The peer's registered size is authoritative.
        dp_rank: DP rank that holds (or will take) the request.
        node_hosts: Hosts of a TP group that spans several; () = all on ``host``.
    """

    host: ShortText
    base_port: Port
    tp_size: MaybeSize = 0
    dp_size: Size = 1
    dp_rank: Rank = 0
    node_hosts: Annotated[tuple[ShortText, ...], MaxLen(1024)] = ()


@dataclass(frozen=True, slots=True)
class Orphan(Strict):
    """A reservation that was open when the client's previous daemon was lost.

    The new daemon makes sure that no producer can still write into its blocks before it reports
    the transfer as failed. ``epoch`` is the daemon start that granted the blocks (a daemon may be
    lost before it could fence its predecessor); None means ``Attach.lost_epoch``.
    """

    transfer_id: TransferId
    peer: PeerAddress
    epoch: Epoch | None = None


@dataclass(frozen=True, slots=True)
class Attach(Strict):
    """First request of a worker, after it introduced itself on the fd socket.

    ``generation`` is the uuid the worker chose for this attach and already sent over the fd
    socket. ``lost_epoch`` and ``orphans`` come from a client whose daemon restarted.
    """

    generation: Generation
    name: ShortText
    lost_epoch: Epoch | None = None
    orphans: Annotated[tuple[Orphan, ...], MaxLen(65536)] = ()


@dataclass(frozen=True, slots=True)
class RegisterCaches(Strict):
    """Describe the KV cache that lies in the regions handed over on the fd socket.

    Repeating an identical registration is a no-op that counts one more reference.
    """

    groups: Annotated[tuple[KvGroup, ...], Len(1, MAX_GROUPS)]
    region_bytes: Annotated[tuple[PositiveBytes, ...], Len(1, MAX_REGIONS)]


@dataclass(frozen=True, slots=True)
class UnregisterCaches(Strict):
    """Drop one reference; at zero the memory is deregistered once nothing touches it."""


@dataclass(frozen=True, slots=True)
class Publish(Strict):
    """READ, producer: these blocks hold the finished prefill; keep them until read.

    ``lease_s`` None means the configured lease. ``remote_tp_size`` 0 means unknown.
    """

    transfer_id: TransferId
    blocks: GroupBlocks
    lease_s: Duration | None = None
    remote_tp_size: MaybeSize = 0


@dataclass(frozen=True, slots=True)
class Pull(Strict):
    """READ, consumer: copy the peer's blocks into these local blocks.

    Lists are matched by position: ``local_blocks[g][i]`` is position ``local_first[g] + i`` of
    the prompt, ``remote_blocks`` likewise; both must end at the same position.

    ``remote_block_tokens`` says how many tokens a block of the peer's groups has, where that is
    another number than here; () = the same. The lists are checked with it at once, and again with
    the peer's own word.
    """

    transfer_id: TransferId
    peer: PeerAddress
    remote_blocks: GroupBlocks
    local_blocks: GroupBlocks
    local_first: GroupPositions = ()
    remote_first: GroupPositions = ()
    timeout_s: Duration | None = None
    remote_block_tokens: GroupBlockTokens = ()


@dataclass(frozen=True, slots=True)
class Reserve(Strict):
    """WRITE, consumer: the peer may write this transfer into these local blocks."""

    transfer_id: TransferId
    peer: PeerAddress
    blocks: GroupBlocks
    first: GroupPositions = ()
    timeout_s: Duration | None = None


@dataclass(frozen=True, slots=True)
class Push(Strict):
    """WRITE, producer: these blocks are being filled; write each layer when it is ready."""

    transfer_id: TransferId
    blocks: GroupBlocks
    first: GroupPositions = ()
    remote_tp_size: MaybeSize = 0
    timeout_s: Duration | None = None


@dataclass(frozen=True, slots=True)
class LayerReady(Strict):
    """WRITE, producer: these layers (index over all groups in order) hold their final bytes."""

    transfer_id: TransferId
    layers: Annotated[tuple[Annotated[int, Ge(0), Le(MAX_LAYERS - 1)], ...], Len(1, MAX_LAYERS)]


@dataclass(frozen=True, slots=True)
class Seal(Strict):
    """WRITE, producer: ``n_layers`` distinct layers in all belong to this transfer."""

    transfer_id: TransferId
    n_layers: Annotated[int, Ge(0), Le(MAX_LAYERS)]


@dataclass(frozen=True, slots=True)
class Reject(Strict):
    """READ, consumer: this rank will never pull the transfer; let the producer free it."""

    transfer_id: TransferId
    peer: PeerAddress


@dataclass(frozen=True, slots=True)
class Abort(Strict):
    """Give up a transfer of this client. Answered at once; the end is reported after the drain."""

    transfer_id: TransferId
    role: Role


@dataclass(frozen=True, slots=True)
class ConfirmEvents(Strict):
    """Every event up to and including this sequence number has been taken by the client."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Ping(Strict):
    """Ask whether the daemon is there; the reply carries its epoch."""


@dataclass(frozen=True, slots=True)
class GetStatus(Strict):
    """Ask for the daemon's state; needs no attach."""


@dataclass(frozen=True, slots=True)
class Detach(Strict):
    """The worker leaves in good order; its transfers are aborted and its memory released."""


Request = (
    Attach
    | RegisterCaches
    | UnregisterCaches
    | Publish
    | Pull
    | Reserve
    | Push
    | LayerReady
    | Seal
    | Reject
    | Abort
    | ConfirmEvents
    | Ping
    | GetStatus
    | Detach
)


@dataclass(frozen=True, slots=True)
class Done(Strict):
    """The request was accepted."""


@dataclass(frozen=True, slots=True)
class Refused(Strict):
    """The request was not taken; nothing changed. See ``moriiod.errors`` for the codes."""

    code: ShortText
    message: MessageText
    retryable: bool
    fields: Mapping[str, FieldValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attached(Strict):
    """Reply to ``Attach``."""

    instance: ShortText
    tp_rank: Rank
    tp_size: Size
    dp_rank: Rank
    dp_size: Size
    engine: ShortText


@dataclass(frozen=True, slots=True)
class StatusDocument(Strict):
    """Reply to ``GetStatus``: one JSON object as text."""

    json: str


Reply = Done | Refused | Attached | StatusDocument


@dataclass(frozen=True, slots=True)
class TransferEnded(Strict):
    """The one terminal event of a transfer: no engine operation touches its blocks any more.

    Attributes:
        transfer_id: As in the request.
        role: Which request it ends.
        outcome: ``released`` (producer), ``received`` (consumer) or ``failed``.
        reason: For ``released``: ``acked`` or ``aborted``; for ``failed``: the error code.
        message: For people; empty on success.
        retryable: Whether the same request can succeed later.
        n_bytes: Payload bytes this daemon moved (pull, push) or was told of (reserve).
        n_layers: Layers that were written (push, reserve) or read (pull).
    """

    transfer_id: TransferId
    role: Role
    outcome: Outcome
    reason: ShortText
    message: MessageText = ""
    retryable: bool = False
    n_bytes: Bytes = 0
    n_layers: Count = 0


ClientEvent = TransferEnded
