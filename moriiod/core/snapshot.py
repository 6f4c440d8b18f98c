"""What the core holds, as values: for ``moriiod status`` and the metrics. Reads only.

Lists of live things are cut at a given length, so that a look at a busy daemon stays short; the
counts are always whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Final

from moriiod.core.clients import Client
from moriiod.core.lease import Lease
from moriiod.core.orphans import Orphan
from moriiod.core.peers import Peer
from moriiod.core.pull import Pull
from moriiod.core.push import Push
from moriiod.core.quarantine import QuarantineRow, peer_name, quarantined
from moriiod.core.reserve import Reserve
from moriiod.core.transfers import Transfer

if TYPE_CHECKING:
    from moriiod.core.machine import Machine

_AnyTransfer = Lease | Pull | Push | Reserve | Orphan

#: State of a transfer that was reported, and still has to tell its peers.
DELIVERING: Final = "delivering"


@dataclass(frozen=True, slots=True)
class ClientRow:
    """One attached worker.

    Attributes:
        state: ``connected`` (fd socket only), ``attached``, or ``gone``: its memory is still in
            use.
        memory: ``none``, ``registering``, ``registered`` or ``releasing``.
        registered_bytes: Of its regions, registered or about to be.
        transfers: That pin its memory.
    """

    name: str
    generation: str
    pid: int
    uid: int
    state: str
    memory: str
    regions: int
    registered_bytes: int
    layers: int
    transfers: int
    unconfirmed_events: int


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer epoch.

    Attributes:
        state: ``up``, ``lost`` (silent), ``fencing`` (lost, and it may still reach local memory),
            or ``over`` (its epoch has ended, and it may still reach local memory).
        silent_s: Since it was last heard.
        users: Legs and claims that depend on it.
        unanswered: Messages that are repeated to it until they are answered.
    """

    instance: str
    dp_rank: int
    tp_rank: int
    tp_size: int
    epoch: str
    address: str
    state: str
    silent_s: float
    users: int
    unanswered: int


@dataclass(frozen=True, slots=True)
class LinkRow:
    """One control endpoint that this daemon dialled; ``state`` is ``up`` or ``dialling``."""

    host: str
    port: int
    route: str
    state: str
    peer: str
    waiters: int
    unused_s: float


@dataclass(frozen=True, slots=True)
class TransferRow:
    """One transfer that is live, or has messages to deliver.

    Attributes:
        pending_ack_ranks: For a ``publish``: consumer ranks that have not acknowledged.
        legs: Each peer it depends on, and where it stands with it.
    """

    transfer_id: str
    role: str
    state: str
    age_s: float
    pending_ack_ranks: tuple[int, ...]
    legs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One lease that is open: how long it still holds, and how many consumers hold it."""

    transfer_id: str
    remaining_s: float
    holders: int


@dataclass(frozen=True, slots=True)
class LimitRow:
    """One limit; ``used`` is None for a limit of single messages or of what is remembered."""

    name: str
    limit: int
    used: int | None


@dataclass(frozen=True, slots=True)
class Counts:
    """Whole numbers of everything.

    Attributes:
        transfers: Count by (role, state).
        early_dropped: Early messages given up since the start.
    """

    transfers: dict[tuple[str, str], int]
    clients: int
    peers: int
    links: int
    sessions: int
    leases_open: int
    early_messages: int
    early_dropped: int
    unconfirmed_events: int
    quarantined_transfers: int
    quarantined_bytes: int
    ops_in_flight: int
    bytes_in_flight: int
    ops_queued: int
    messages_unanswered: int
    is_draining: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment; each list has at most ``max_rows`` entries."""

    max_rows: int
    counts: Counts
    clients: tuple[ClientRow, ...]
    peers: tuple[PeerRow, ...]
    links: tuple[LinkRow, ...]
    transfers: tuple[TransferRow, ...]
    leases: tuple[LeaseRow, ...]
    quarantined: tuple[QuarantineRow, ...]
    limits: tuple[LimitRow, ...]


def take_snapshot(machine: Machine, now: float, max_rows: int) -> Snapshot:
    """Return what the core holds now.

    Args:
        machine: Is only read.
        now: As for ``Machine.step``.
        max_rows: Longest list.
    """
    leases = sorted((x for x in machine.leases if x.is_open), key=lambda x: x.expires_at)
    peers = {peer.epoch: peer for peer in (*machine.peers, *machine.peers.fencing)}
    return Snapshot(
        max_rows=max_rows,
        counts=take_counts(machine),
        clients=tuple(_client_row(x) for x in islice(machine.clients, max_rows)),
        peers=tuple(_peer_rows(machine, islice(peers.values(), max_rows), now)),
        links=tuple(_link_rows(machine, now, max_rows)),
        transfers=tuple(_transfer_row(x, now) for x in islice(_transfers(machine), max_rows)),
        leases=tuple(
            LeaseRow(x.transfer_id, x.expires_at - now, len(x.open_claims()))
            for x in leases[:max_rows]
        ),
        quarantined=tuple(islice(quarantined(machine, now), max_rows)),
        limits=tuple(_limits(machine)),
    )


def take_counts(machine: Machine) -> Counts:
    """Return the whole numbers of what the core holds."""
    unreleased = list(quarantined(machine, 0.0))
    early = _early(machine)
    return Counts(
        transfers=dict(Counter((x.role, _state(x)) for x in _transfers(machine))),
        clients=len(machine.clients),
        peers=len(machine.peers),
        links=len(machine.links),
        sessions=len(machine.sessions),
        leases_open=sum(lease.is_open for lease in machine.leases),
        early_messages=sum(early),
        early_dropped=machine.leases.early_dropped + machine.pushes.early_dropped,
        unconfirmed_events=sum(len(client.unconfirmed) for client in machine.clients),
        quarantined_transfers=len(unreleased),
        quarantined_bytes=sum(row.n_bytes for row in unreleased),
        ops_in_flight=machine.ops.in_flight,
        bytes_in_flight=machine.ops.in_flight_bytes,
        ops_queued=len(machine.ops) - machine.ops.in_flight,
        messages_unanswered=machine.peers.outbox.count(),
        is_draining=machine.ctx.is_draining,
    )


# --- Rows ---------------------------------------------------------------------------------------


def _client_row(client: Client) -> ClientRow:
    layout = client.layout
    attached = "attached" if client.route is not None else "connected"
    return ClientRow(
        name=client.name,
        generation=client.generation,
        pid=client.pid,
        uid=client.uid,
        state="gone" if client.is_gone else attached,
        memory=client.memory.value,
        regions=len(layout.region_bytes) if layout else len(client.offered),
        registered_bytes=sum(layout.region_bytes) if layout else 0,
        layers=sum(len(group.layers) for group in layout.groups) if layout else 0,
        transfers=len(client.pins),
        unconfirmed_events=len(client.unconfirmed),
    )


def _peer_rows(machine: Machine, peers: Iterable[Peer], now: float) -> Iterator[PeerRow]:
    fencing = {peer.epoch for peer in machine.peers.fencing}
    # Where we dialled it; a peer that dialled us is known by its route only.
    dialled = {x.route: f"{x.endpoint.host} port {x.endpoint.port}" for x in machine.links}
    for peer in peers:
        state = "up" if peer.is_up else "lost"
        if peer.epoch in fencing:
            state = "over" if peer.is_void else "fencing"
        yield PeerRow(
            instance=peer.identity.instance,
            dp_rank=peer.identity.dp_rank,
            tp_rank=peer.identity.tp_rank,
            tp_size=peer.identity.tp_size,
            epoch=peer.epoch,
            address=dialled.get(peer.route, peer.route),
            state=state,
            silent_s=max(0.0, now - peer.last_heard),
            users=len(peer.users),
            unanswered=machine.peers.outbox.count(peer.epoch),
        )


def _link_rows(machine: Machine, now: float, max_rows: int) -> Iterator[LinkRow]:
    for link in islice(machine.links, max_rows):
        yield LinkRow(
            host=link.endpoint.host,
            port=link.endpoint.port,
            route=link.route,
            state="up" if link.is_up else "dialling",
            peer="" if link.peer is None else peer_name(link.peer),
            waiters=len(link.waiters),
            unused_s=max(0.0, now - link.last_used),
        )


def _transfer_row(transfer: _AnyTransfer, now: float) -> TransferRow:
    ranks: tuple[int, ...] = ()
    if isinstance(transfer, Lease):
        ranks = tuple(sorted(transfer.fan_in.pending()))
    return TransferRow(
        transfer_id=transfer.transfer_id,
        role=transfer.role,
        state=_state(transfer),
        age_s=max(0.0, now - transfer.started_at),
        pending_ack_ranks=ranks,
        legs=tuple(_legs(transfer)),
    )


def _legs(transfer: _AnyTransfer) -> Iterator[str]:
    if isinstance(transfer, Lease):
        for claim in transfer.open_claims():
            yield f"{peer_name(claim.peer)}: holding"
    elif isinstance(transfer, Push):
        for target in transfer.targets.values():
            yield f"{peer_name(target.peer)}: {target.state.value}"
    elif isinstance(transfer, Orphan):
        for fence in transfer.legs:
            where = f"{fence.endpoint.host} port {fence.endpoint.port}"
            yield f"{where}: {'fenced' if fence.is_over else 'asked'}"
    else:
        for leg in transfer.legs:
            where = f"{leg.endpoint.host} port {leg.endpoint.port}"
            yield f"{where if leg.peer is None else peer_name(leg.peer)}: {leg.state.value}"


# --- Small ----------------------------------------------------------------------------------------


def _transfers(machine: Machine) -> Iterator[_AnyTransfer]:
    tables: tuple[Iterable[_AnyTransfer], ...] = (
        machine.leases,
        machine.pulls,
        machine.pushes,
        machine.reserves,
        machine.orphans,
    )
    for table in tables:
        yield from table


def _state(transfer: Transfer) -> str:
    return DELIVERING if transfer.is_ended else transfer.state


def _early(machine: Machine) -> tuple[int, int, int]:
    leases = machine.leases
    return leases.early_claims, machine.pushes.early_grants, len(leases.early_acks)


def _limits(machine: Machine) -> Iterator[LimitRow]:
    used = {
        "max_clients": len(machine.clients),
        "max_peers": max(len(machine.peers), len(machine.links)),
        "max_transfers": machine.admission.active,
        "max_early": max(_early(machine)),
        "max_ops_in_flight": machine.ops.in_flight,
        "max_bytes_in_flight": machine.ops.in_flight_bytes,
        "max_unconfirmed_events": max((len(x.unconfirmed) for x in machine.clients), default=0),
    }
    for field in fields(machine.ctx.settings):
        if field.name.startswith("max_"):
            limit = getattr(machine.ctx.settings, field.name)
            yield LimitRow(field.name, limit, used.get(field.name))
