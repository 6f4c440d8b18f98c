"""One message of every type, with every field set. The golden frames are made from these.

A sample never changes once its protocol version is released; new types are added.
"""

from __future__ import annotations

import struct
from typing import Final

from moriiod.core.geometry import CacheLayout, KvGroup, KvLayer, RemoteLayout
from moriiod.core.messages import (
    Ack,
    AckConfirmed,
    Claim,
    ClaimGranted,
    ClaimRefused,
    Fenced,
    FenceRequest,
    Goodbye,
    Grant,
    GrantAccepted,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloRefused,
    Identity,
    LayoutReply,
    LayoutRequest,
    PeerBody,
    Renew,
    Renewed,
    Revoke,
    RevokeGrant,
    UnknownEpoch,
    Welcome,
    WireError,
    WriteConfirmed,
    WriteDone,
    WriteFailed,
)
from moriiod.core.requests import (
    Abort,
    Attach,
    Attached,
    ClientEvent,
    ConfirmEvents,
    Detach,
    Done,
    GetStatus,
    LayerReady,
    Orphan,
    PeerAddress,
    Ping,
    Publish,
    Pull,
    Push,
    Refused,
    RegisterCaches,
    Reject,
    Reply,
    Request,
    Reserve,
    Seal,
    StatusDocument,
    TransferEnded,
    UnregisterCaches,
)

EPOCH: Final = "0123456789abcdef0123456789abcdef"
OLD_EPOCH: Final = "fedcba9876543210fedcba9876543210"
GENERATION: Final = "11111111111111111111111111111111"
ATTEMPT: Final = "22222222222222222222222222222222"
LEASE: Final = "33333333333333333333333333333333"
TRANSFER: Final = "tx-\N{BLACK STAR}-1"
SEQUENCE: Final = 7


def packed(*ids: int) -> bytes:
    """Return block ids as they travel: little-endian u32."""
    return struct.pack(f"<{len(ids)}I", *ids)


BLOCKS: Final = (packed(0, 1, 2**32 - 1), packed(7))
PEER: Final = PeerAddress("decode-0.example", 6301, 8, 2, 1, ("n0.example", "n1.example"))
GROUP: Final = KvGroup(
    name="full",
    layout="kv_first",
    head_order="NHD",
    dtype="bfloat16",
    block_tokens=16,
    num_blocks=4096,
    total_kv_heads=8,
    head_size=128,
    layers=(
        KvLayer("model.layers.0.attn", 0, 0, 32768, 134217728, 32768),
        KvLayer("model.layers.1.attn", 1, 64, 32768, 0, 32768, (16384, 16384)),
    ),
    content="fp8 scales",
    kernel_tokens=8,
)
LAYOUT: Final = CacheLayout(GENERATION, (GROUP,), (268435456, 134217792))
IDENTITY: Final = Identity("llama-prefill", 1, 2, 3, 8, EPOCH)
ERROR: Final = WireError(
    "BUSY", "too many transfers", True, {"limit": "max_transfers", "value": 4, "retry_after_s": 0.5}
)

REQUESTS: Final[tuple[Request, ...]] = (
    Attach(GENERATION, "worker 3", OLD_EPOCH, (Orphan(TRANSFER, PEER, OLD_EPOCH),)),
    RegisterCaches((GROUP,), (268435456, 134217792)),
    UnregisterCaches(),
    Publish(TRANSFER, BLOCKS, 30.5, 8),
    Pull(TRANSFER, PEER, BLOCKS, BLOCKS, (0, 3), (1, 2), 60.0, (64, 16)),
    Reserve(TRANSFER, PEER, BLOCKS, (0, 3), 60.0),
    Push(TRANSFER, BLOCKS, (0, 3), 4, 60.0),
    LayerReady(TRANSFER, (0, 1, 60)),
    Seal(TRANSFER, 61),
    Reject(TRANSFER, PEER),
    Abort(TRANSFER, "pull"),
    ConfirmEvents(41),
    Ping(),
    GetStatus(),
    Detach(),
)
REPLIES: Final[tuple[Reply, ...]] = (
    Done(),
    Refused("BUSY", "too many transfers", True, {"limit": "max_transfers", "value": 4}),
    Attached("llama-prefill", 3, 8, 1, 2, "shm"),
    StatusDocument('{"ready":true}'),
)
EVENTS: Final[tuple[ClientEvent, ...]] = (
    TransferEnded(TRANSFER, "pull", "failed", "TIMED_OUT", "no answer", True, 2**32, 61),
)
PEER_BODIES: Final[tuple[PeerBody, ...]] = (
    Hello(ATTEMPT, (1,), IDENTITY, ("shm", "mori")),
    Welcome(ATTEMPT, 1, IDENTITY, ("shm",)),
    HelloRefused(ATTEMPT, ERROR),
    UnknownEpoch(OLD_EPOCH),
    Heartbeat(5, (GENERATION,)),
    HeartbeatReply(5, (GENERATION,)),
    Goodbye(),
    LayoutRequest(GENERATION),
    LayoutReply(GENERATION, RemoteLayout(LAYOUT, "shm", (b"\x00\x01", b"\xff"))),
    Claim(TRANSFER, ATTEMPT, True, BLOCKS),
    ClaimGranted(TRANSFER, ATTEMPT, LEASE, GENERATION, 59.5),
    ClaimRefused(TRANSFER, ATTEMPT, ERROR),
    Ack(TRANSFER, ATTEMPT, LEASE, 3, 8, True),
    AckConfirmed(TRANSFER, ATTEMPT, True),
    Renew(((TRANSFER, LEASE),)),
    Renewed(((TRANSFER, LEASE, 60.0),), (("tx-2", LEASE),)),
    Revoke(TRANSFER, ATTEMPT, LEASE, ERROR),
    Grant(TRANSFER, ATTEMPT, GENERATION, True, BLOCKS, (0, 3)),
    GrantAccepted(TRANSFER, ATTEMPT),
    WriteDone(TRANSFER, ATTEMPT, 61, 2**40),
    WriteFailed(TRANSFER, ATTEMPT, ERROR),
    WriteConfirmed(TRANSFER, ATTEMPT),
    RevokeGrant(TRANSFER, ATTEMPT),
    FenceRequest(ATTEMPT, OLD_EPOCH),
    Fenced(ATTEMPT, OLD_EPOCH),
)
