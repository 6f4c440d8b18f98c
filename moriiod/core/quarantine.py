"""Failed transfers whose blocks nobody may reuse yet (safety rule S1). Reads only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from moriiod.core.geometry import CacheLayout
from moriiod.core.ids import Generation
from moriiod.core.peers import Peer
from moriiod.core.transfers import Transfer

if TYPE_CHECKING:
    from moriiod.core.machine import Machine

#: Block ids are packed as u32.
_ID_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class QuarantineRow:
    """A transfer that has failed, and whose blocks a peer may still reach.

    Attributes:
        n_bytes: Of its blocks in all layers; 0 where this daemon was never told the blocks.
        peers: Whose word, or whose end, releases the blocks.
    """

    transfer_id: str
    role: str
    state: str
    age_s: float
    n_bytes: int
    peers: tuple[str, ...]


def quarantined(machine: Machine, now: float) -> Iterator[QuarantineRow]:
    """Yield every transfer that waits for a peer's word, or for a fence."""
    sizes: dict[Generation, tuple[int, ...]] = {}
    for transfer, n_blocks, peers in _waiting(machine):
        layout = transfer.client.layout
        n_bytes = 0
        if layout is not None and n_blocks:
            if layout.generation not in sizes:
                sizes[layout.generation] = _block_bytes(layout)
            per_block = sizes[layout.generation]
            n_bytes = sum(n * size for n, size in zip(n_blocks, per_block, strict=False))
        yield QuarantineRow(
            transfer_id=transfer.transfer_id,
            role=transfer.role,
            state=transfer.state,
            age_s=max(0.0, now - transfer.started_at),
            n_bytes=n_bytes,
            peers=peers,
        )


def peer_name(peer: Peer) -> str:
    """Return what people call a peer."""
    identity = peer.identity
    return f"{identity.instance} dp {identity.dp_rank} tp {identity.tp_rank}"


def _waiting(machine: Machine) -> Iterator[tuple[Transfer, tuple[int, ...], tuple[str, ...]]]:
    """Yield each such transfer, its number of blocks by group, and whom it waits for."""
    for lease in machine.leases:
        if not lease.is_open:
            peers = tuple(peer_name(claim.peer) for claim in lease.open_claims())
            yield lease, tuple(len(ids) for ids in lease.blocks), peers
    for reserve in machine.reserves:
        if not reserve.is_active and not reserve.is_ended:
            n_blocks = tuple(len(packed) // _ID_BYTES for packed in reserve.request.blocks)
            waiting = [leg.peer for leg in reserve.legs if leg.writes and not leg.is_over]
            yield reserve, n_blocks, tuple(peer_name(peer) for peer in waiting if peer is not None)
    for orphan in machine.orphans:
        endpoints = [leg.endpoint for leg in orphan.legs if not leg.is_over]
        yield orphan, (), tuple(f"{at.host} port {at.port}" for at in endpoints)


def _block_bytes(layout: CacheLayout) -> tuple[int, ...]:
    """Bytes of one block in all layers, for each group."""
    return tuple(
        group.tiles_per_block * sum(layer.pieces * layer.piece_bytes for layer in group.layers)
        for group in layout.groups
    )
