"""The daemon's state as one JSON document: what ``moriiod status`` shows, and all that it shows.

``docs/operations.md`` lists the parts. Durations end in ``_s``, sizes in ``_bytes``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

import moriiod
from moriiod.core.messages import PROTOCOL_VERSIONS, Identity
from moriiod.core.snapshot import Counts, Snapshot
from moriiod.telemetry.catalog import COUNTERS
from moriiod.telemetry.metrics import GaugeValues, Metrics
from moriiod.zmqio.loopsocket import SocketCounters

#: Longest list of live things.
MAX_ROWS: Final = 200
_DIGITS: Final = 3


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the daemon is reached.

    Attributes:
        socket: Workers connect here.
        fd_socket: File descriptors are handed over here.
        control: As peers are told: ``host:port``.
        metrics: ``host:port``; None = there is none.
    """

    socket: str
    fd_socket: str
    control: str
    metrics: str | None


@dataclass(frozen=True, slots=True)
class ShellCounters:
    """What the shells count themselves."""

    ipc: SocketCounters
    control: SocketCounters
    routes_dialled: int
    fd_connections: int
    region_fds: int
    exported_regions: int
    engine_sessions: int
    engine_ops: int


@dataclass(frozen=True, slots=True)
class DaemonState:
    """Everything the document is made of.

    Attributes:
        state: ``starting``, ``ready``, ``draining`` or ``unhealthy``.
        reason: Why it is not ``ready``; empty if it is.
    """

    identity: Identity
    state: str
    reason: str
    uptime_s: float
    addresses: Addresses
    engine: str
    snapshot: Snapshot
    shells: ShellCounters


def render_status(state: DaemonState, metrics: Metrics) -> str:
    """Return the document as JSON text."""
    snapshot, counts = state.snapshot, state.snapshot.counts
    document: dict[str, Any] = {
        "version": moriiod.__version__,
        "protocol_versions": list(PROTOCOL_VERSIONS),
        "state": state.state,
        "reason": state.reason,
        "uptime_s": round(state.uptime_s, _DIGITS),
        "identity": asdict(state.identity),
        "addresses": asdict(state.addresses),
        "engine": {
            "name": state.engine,
            "sessions": counts.sessions,
            "ops_in_flight": counts.ops_in_flight,
            "bytes_in_flight": counts.bytes_in_flight,
            "ops_queued": counts.ops_queued,
        },
        "clients": _rows(snapshot.clients),
        "peers": _rows(snapshot.peers),
        "links": _rows(snapshot.links),
        "transfers": _transfers(snapshot),
        "leases": {"open": counts.leases_open, "next_to_end": _rows(snapshot.leases)},
        "quarantined": {
            "transfers": counts.quarantined_transfers,
            "bytes": counts.quarantined_bytes,
            "rows": _rows(snapshot.quarantined),
        },
        "limits": {row.name: {"limit": row.limit, "used": row.used} for row in snapshot.limits},
        "counters": _counters(state, metrics),
        "max_rows": snapshot.max_rows,
    }
    return json.dumps(document, separators=(",", ":"))


def gauges_of(counts: Counts) -> GaugeValues:
    """Return what the metrics show of the core."""
    return GaugeValues(
        transfers_active=counts.transfers,
        clients=counts.clients,
        peers=counts.peers,
        leases_open=counts.leases_open,
        early_messages=counts.early_messages,
        unconfirmed_events=counts.unconfirmed_events,
        quarantined_transfers=counts.quarantined_transfers,
        quarantined_bytes=counts.quarantined_bytes,
        engine_ops_in_flight=counts.ops_in_flight,
        engine_bytes_in_flight=counts.bytes_in_flight,
        engine_ops_queued=counts.ops_queued,
        is_draining=counts.is_draining,
    )


def _transfers(snapshot: Snapshot) -> dict[str, Any]:
    counts = snapshot.counts.transfers
    return {
        "live": sum(counts.values()),
        "counts": [
            {"role": role, "state": name, "count": count}
            for (role, name), count in sorted(counts.items())
        ],
        "rows": _rows(snapshot.transfers),
    }


def _counters(state: DaemonState, metrics: Metrics) -> dict[str, Any]:
    counted: dict[str, Any] = {
        "early_dropped": state.snapshot.counts.early_dropped,
        "messages_unanswered": state.snapshot.counts.messages_unanswered,
    }
    shells = asdict(state.shells)
    counted["sockets"] = {name: shells.pop(name) for name in ("ipc", "control")}
    counted["shells"] = shells
    names = {spec.name.removesuffix("_total"): spec for spec in COUNTERS}
    for family in metrics.families():
        spec = names.get(family.name)
        if spec is not None and spec.labels:
            key = family.name.removeprefix("moriiod_")
            counted[key] = [
                {**sample.labels, "count": _whole(sample.value)}
                for sample in family.samples
                if sample.name == spec.name
            ]
    return counted


def _rows(rows: Iterable[Any]) -> list[dict[str, Any]]:
    return [{name: _short(getattr(row, name)) for name in row.__slots__} for row in rows]


def _short(value: Any) -> Any:
    return round(value, _DIGITS) if isinstance(value, float) else value


def _whole(value: float) -> int | float:
    return int(value) if value.is_integer() else value
