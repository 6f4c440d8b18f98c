"""Names for the plain values that cross every boundary, with the limits they must keep.

The constraints are ``annotated_types`` metadata: data only, so the core stays free of pydantic,
and ``wire`` enforces them on every message from outside (safety rule S5).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from annotated_types import Ge, Gt, Le, Len, MaxLen, Predicate

#: Largest TP or DP size accepted from outside.
MAX_RANKS: Final = 1024
#: Longest transfer id in UTF-8 bytes.
MAX_TRANSFER_ID_BYTES: Final = 256
#: Longest duration accepted anywhere: one week.
MAX_DURATION_S: Final = 7 * 24 * 3600.0
#: Offsets, strides and sizes stay below 2^62, so a sum of two never wraps in int64.
MAX_OFFSET: Final = 1 << 62
#: Most KV groups one cache layout may have.
MAX_GROUPS: Final = 64
#: Most layers of one cache layout, all groups together.
MAX_LAYERS: Final = 4096
#: Most tokens in one block.
MAX_BLOCK_TOKENS: Final = 1 << 20
#: Most memory regions of one cache layout.
MAX_REGIONS: Final = 4096
#: Block ids are u32 on the wire.
MAX_BLOCK_ID: Final = 1 << 32
#: Most block ids in one KV group of one transfer.
MAX_BLOCKS_PER_GROUP: Final = 1 << 20


def _is_id_text(text: str) -> bool:
    """No control characters, and not longer than the limit in bytes."""
    return text.isprintable() and len(text.encode("utf-8", "replace")) <= MAX_TRANSFER_ID_BYTES


def _is_hex(text: str) -> bool:
    return all(c in "0123456789abcdef" for c in text)


def _has_whole_ids(packed: bytes) -> bool:
    return len(packed) % 4 == 0


#: Opaque name of a transfer, chosen by the router or engine; only exact matches count.
TransferId = Annotated[str, Len(1, MAX_TRANSFER_ID_BYTES), Predicate(_is_id_text)]
#: uuid4 hex of one daemon start.
Epoch = Annotated[str, Len(32, 32), Predicate(_is_hex)]
#: Stands for no daemon start in particular: whoever gets a handshake message may take it.
ANY_EPOCH: Final = "0" * 32
#: uuid4 hex of one worker attach; names the memory the worker registered.
Generation = Annotated[str, Len(32, 32), Predicate(_is_hex)]
#: uuid4 hex that names one attempt (a pull, a lease, a grant) so that a retry is not a new one.
AttemptId = Annotated[str, Len(32, 32), Predicate(_is_hex)]
#: Name of a serving instance; all ranks of one instance share it.
InstanceId = Annotated[str, Len(1, 128), Predicate(str.isprintable)]
#: Short human text: a host, a layer name, a dtype.
ShortText = Annotated[str, Len(1, 256), Predicate(str.isprintable)]
#: Free text for people, bounded.
MessageText = Annotated[str, MaxLen(2048)]

Rank = Annotated[int, Ge(0), Le(MAX_RANKS - 1)]
Size = Annotated[int, Ge(1), Le(MAX_RANKS)]
#: A peer's TP size as a router passes it: 0 means "same as ours".
MaybeSize = Annotated[int, Ge(0), Le(MAX_RANKS)]
Port = Annotated[int, Ge(1), Le(65535)]
#: Seconds, finite, more than zero.
Duration = Annotated[float, Gt(0.0), Le(MAX_DURATION_S)]
Bytes = Annotated[int, Ge(0), Le(MAX_OFFSET)]
PositiveBytes = Annotated[int, Ge(1), Le(MAX_OFFSET)]
Count = Annotated[int, Ge(0), Le(1 << 32)]
Sequence = Annotated[int, Ge(0), Le(1 << 62)]
#: Block ids of one KV group: little-endian u32, packed.
PackedBlocks = Annotated[bytes, MaxLen(4 * MAX_BLOCKS_PER_GROUP), Predicate(_has_whole_ids)]
#: Block ids of every KV group, in the order of the layout's groups.
GroupBlocks = Annotated[tuple[PackedBlocks, ...], MaxLen(MAX_GROUPS)]
#: First position (in blocks from the start of the prompt) of each group's list; () means all 0.
GroupPositions = Annotated[
    tuple[Annotated[int, Ge(0), Le(MAX_BLOCKS_PER_GROUP)], ...], MaxLen(MAX_GROUPS)
]

#: Tokens in a block of each group.
GroupBlockTokens = Annotated[
    tuple[Annotated[int, Ge(1), Le(MAX_BLOCK_TOKENS)], ...], MaxLen(MAX_GROUPS)
]

#: Which table a transfer is in: (READ producer, READ consumer, WRITE producer, WRITE consumer).
Role = Literal["publish", "pull", "push", "reserve"]
#: How a transfer ended. ``released``: producer, blocks free. ``received``: consumer, bytes valid.
#: ``failed``: either side, blocks free as well.
Outcome = Literal["released", "received", "failed"]

#: Where to send to a local client: the ROUTER's routing id.
ClientRoute = bytes
#: Where to send to a peer: chosen by the core for links it dials, by the shell for others.
PeerRoute = str
OpId = int
SessionId = int
