"""All metrics by name: what they mean, their labels and buckets. Documentation is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_TRANSFER_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_OP_BUCKETS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0,
)  # fmt: skip
_LAG_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric: name, what it means, its labels, and the buckets of a histogram.

    ``attribute`` is the field of ``GaugeValues`` that a plain gauge shows.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    attribute: str = ""


COUNTERS: Final = (
    Spec("moriiod_transfers_total", "Transfers that ended.", ("role", "outcome", "reason")),
    Spec("moriiod_bytes_total", "Payload bytes this daemon moved.", ("direction",)),
    Spec("moriiod_peer_bytes_total", "Payload bytes by peer instance.", ("peer", "direction")),
    Spec("moriiod_peers_lost_total", "Peers that stopped answering.", ("peer",)),
    Spec("moriiod_requests_total", "Requests of workers.", ("type", "result")),
    Spec("moriiod_acks_total", "ACKs of consumer ranks.", ("result",)),
    Spec("moriiod_events_sent_total", "Events sent to workers.", ("delivery",)),
    Spec("moriiod_engine_ops_total", "Engine operations that ended.", ("direction", "result")),
    Spec(
        "moriiod_protocol_problems_total",
        "Problems from outside that were contained.",
        ("kind",),
    ),
    Spec(
        "moriiod_token_spans_total",
        "Descriptors of one token each, of heads that are split in an NHD layout.",
        ("peer",),
    ),
    Spec("moriiod_early_dropped_total", "Early messages dropped: too many, or too old."),
)
HISTOGRAMS: Final = (
    Spec("moriiod_transfer_duration_seconds", "From request to end.", ("role",), _TRANSFER_BUCKETS),
    Spec(
        "moriiod_op_duration_seconds",
        "Engine operations, from post to end.",
        ("direction",),
        _OP_BUCKETS,
    ),
    Spec("moriiod_loop_lag_seconds", "How late the event loop was.", (), _LAG_BUCKETS),
)
ACTIVE: Final = Spec("moriiod_transfers_active", "Transfers by state.", ("role", "state"))
INFO: Final = Spec(
    "moriiod_info",
    "Which daemon this is; always 1.",
    (
        "version", "python", "instance", "tp_rank", "tp_size", "dp_rank", "dp_size", "engine",
        "epoch",
    ),
)  # fmt: skip
GAUGES: Final = (
    Spec("moriiod_clients", "Attached workers.", attribute="clients"),
    Spec("moriiod_peers", "Known peer daemons.", attribute="peers"),
    Spec("moriiod_leases_open", "Leases that are open.", attribute="leases_open"),
    Spec(
        "moriiod_early_messages",
        "Claims, grants and ACKs that wait for their transfer.",
        attribute="early_messages",
    ),
    Spec(
        "moriiod_unconfirmed_events",
        "Events that clients have not confirmed.",
        attribute="unconfirmed_events",
    ),
    Spec(
        "moriiod_quarantined_transfers",
        "Transfers whose blocks could not be fenced.",
        attribute="quarantined_transfers",
    ),
    Spec(
        "moriiod_quarantined_bytes",
        "Bytes of blocks that could not be fenced.",
        attribute="quarantined_bytes",
    ),
    Spec(
        "moriiod_engine_ops_in_flight",
        "Posted operations that have not ended.",
        attribute="engine_ops_in_flight",
    ),
    Spec(
        "moriiod_engine_bytes_in_flight",
        "Bytes of the posted operations that have not ended.",
        attribute="engine_bytes_in_flight",
    ),
    Spec(
        "moriiod_engine_ops_queued",
        "Operations that wait to be posted to the engine.",
        attribute="engine_ops_queued",
    ),
    Spec("moriiod_draining", "1 while no new transfers are taken.", attribute="is_draining"),
)


def render_metrics_table() -> str:
    """Return all metrics as a Markdown table."""
    kinds = (
        ("counter", COUNTERS),
        ("histogram", HISTOGRAMS),
        ("gauge", (ACTIVE, *GAUGES, INFO)),
    )
    rows = ["| Metric | Type | Labels | Meaning |", "|---|---|---|---|"]
    for kind, specs in kinds:
        for spec in specs:
            labels = ", ".join(f"`{label}`" for label in spec.labels)
            rows.append(f"| `{spec.name}` | {kind} | {labels} | {spec.text} |")
    return "\n".join(rows)
