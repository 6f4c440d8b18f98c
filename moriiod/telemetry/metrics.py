"""Metrics for Prometheus: one registry for each daemon, and label sets that cannot grow.

No transfer, request or client id is ever a label. What comes from outside and is one (a peer's
name) is capped: the first ``max_peer_labels`` peers have their own series, the others share
``other``. Gauges are read from the daemon when somebody scrapes, so they cannot drift.
"""

from __future__ import annotations

import dataclasses
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moriiod import __version__
from moriiod.core.ids import Outcome, Role
from moriiod.errors import error_classes
from moriiod.telemetry.catalog import ACTIVE, COUNTERS, GAUGES, HISTOGRAMS, INFO

OTHER: Final = "other"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ROLES: Final = frozenset(get_args(Role))
_OUTCOMES: Final = frozenset(get_args(Outcome))
#: Which way the bytes went, for the roles whose daemon moves them.
_DIRECTION_OF: Final = {"pull": "read", "push": "write"}
#: Reasons of released and received transfers, and the error codes of failed ones.
_REASONS: Final = frozenset({"acked", "aborted", *error_classes()})
_WORD: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,63}\Z", re.ASCII)
_MAX_PEER_NAME: Final = 64
Direction = Literal["read", "write"]


@dataclass(frozen=True, slots=True)
class GaugeValues:
    """What the daemon holds at this moment.

    Attributes:
        transfers_active: Count by (role, state); states are the core's own words.
        clients: Attached workers.
        peers: Known peer daemons.
        leases_open: Leases that are open.
        early_messages: Claims, grants and ACKs that wait for their transfer.
        unconfirmed_events: Events that clients have not confirmed.
        quarantined_transfers: Transfers whose blocks could not be fenced.
        quarantined_bytes: Bytes of their blocks.
        engine_ops_in_flight: Posted operations that have not ended.
        engine_bytes_in_flight: Their bytes.
        engine_ops_queued: Operations that wait to be posted.
        is_draining: No new transfers are taken.
    """

    transfers_active: Mapping[tuple[str, str], int] = field(default_factory=dict)
    clients: int = 0
    peers: int = 0
    leases_open: int = 0
    early_messages: int = 0
    unconfirmed_events: int = 0
    quarantined_transfers: int = 0
    quarantined_bytes: int = 0
    engine_ops_in_flight: int = 0
    engine_bytes_in_flight: int = 0
    engine_ops_queued: int = 0
    is_draining: bool = False


class LabelCap:
    """Maps label values to a bounded set: the first ``limit`` distinct ones, then ``other``."""

    def __init__(self, limit: int, is_allowed: Callable[[str], bool]) -> None:
        self._limit: Final = limit
        self._is_allowed: Final = is_allowed
        self._seen: set[str] = set()

    def __call__(self, value: object) -> str:
        """Return the value itself or ``other``; anything at all may be passed."""
        if not isinstance(value, str) or not self._is_allowed(value):
            return OTHER
        if value not in self._seen:
            if len(self._seen) >= self._limit:
                return OTHER
            self._seen.add(value)
        return value


@dataclass(frozen=True, slots=True)
class DaemonInfo:
    """Constant labels of ``moriiod_info``: which daemon this is."""

    instance: str
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int
    engine: str
    epoch: str


class Metrics:
    """All metrics of one daemon.

    Args:
        info: Who it is.
        read_gauges: Called at every scrape, on the caller's thread; must be quick.
        max_peer_labels: Peers that get series of their own.
    """

    def __init__(
        self,
        info: DaemonInfo,
        read_gauges: Callable[[], GaugeValues],
        max_peer_labels: int = 64,
    ) -> None:
        # Creation times double the number of series and nothing here reads them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry: Final = CollectorRegistry(auto_describe=False)
        self._word: Final = LabelCap(64, _is_word)
        self._peer: Final = LabelCap(max_peer_labels, _is_peer_name)
        self._counters: Final = {
            spec.name: Counter(spec.name, spec.text, spec.labels, registry=self._registry)
            for spec in COUNTERS
        }
        self._histograms: Final = {
            spec.name: Histogram(
                spec.name, spec.text, spec.labels, buckets=spec.buckets, registry=self._registry
            )
            for spec in HISTOGRAMS
        }
        self._registry.register(_DaemonCollector(info, read_gauges, LabelCap(64, _is_word)))
        ProcessCollector(registry=self._registry, namespace="moriiod")

    def transfer_ended(
        self, role: str, outcome: str, reason: str, duration_s: float, n_bytes: int
    ) -> None:
        """Count a transfer that reached its one terminal outcome.

        Args:
            role: Which request it ends: ``publish``, ``pull``, ``push`` or ``reserve``.
            outcome: ``released``, ``received`` or ``failed``.
            reason: As in ``TransferEnded``; what is not a known reason counts as ``other``.
            duration_s: From the request until the end.
            n_bytes: Payload bytes that this daemon moved for it.
        """
        role = _one_of(_ROLES, role)
        self._count(
            "moriiod_transfers_total",
            role,
            _one_of(_OUTCOMES, outcome),
            _one_of(_REASONS, reason),
        )
        self._observe("moriiod_transfer_duration_seconds", duration_s, role)
        direction = _DIRECTION_OF.get(role)
        if direction is not None:
            self._count("moriiod_bytes_total", direction, by=n_bytes)

    def op_ended(self, direction: Direction, is_ok: bool, duration_s: float) -> None:
        """Count an engine operation that is over."""
        self._count("moriiod_engine_ops_total", direction, "ok" if is_ok else "failed")
        self._observe("moriiod_op_duration_seconds", duration_s, direction)

    def peer_bytes(self, peer: str, direction: Direction, n_bytes: int) -> None:
        """Count payload bytes that were read from or written to a peer's memory.

        Args:
            peer: Name of the peer's instance.
            direction: ``read`` from it or ``write`` to it.
            n_bytes: How many.
        """
        self._count("moriiod_peer_bytes_total", self._peer(peer), direction, by=n_bytes)

    def token_spans(self, peer: str, n: int) -> None:
        """Count descriptors of one token each, by the name of the peer's instance."""
        self._count("moriiod_token_spans_total", self._peer(peer), by=n)

    def peer_lost(self, peer: str) -> None:
        """Count a peer that stopped answering, by the name of its instance."""
        self._count("moriiod_peers_lost_total", self._peer(peer))

    def request(self, kind: str, is_accepted: bool) -> None:
        """Count a request of a worker, by the name of its message type."""
        result = "accepted" if is_accepted else "refused"
        self._count("moriiod_requests_total", self._word(kind), result)

    def ack(self, is_valid: bool) -> None:
        """Count an ACK of a consumer rank; not valid means that its lease was over."""
        self._count("moriiod_acks_total", "valid" if is_valid else "invalid")

    def event_sent(self, is_repeat: bool) -> None:
        """Count an event that was sent to a worker."""
        self._count("moriiod_events_sent_total", "repeat" if is_repeat else "first")

    def problem(self, kind: str) -> None:
        """Count something wrong that came from outside and was contained."""
        self._count("moriiod_protocol_problems_total", self._word(kind))

    def early_dropped(self, count: int = 1) -> None:
        """Count early messages that were dropped: too many, or too old."""
        self._count("moriiod_early_dropped_total", by=count)

    def loop_lag(self, lag_s: float) -> None:
        """Record how late the event loop was."""
        self._observe("moriiod_loop_lag_seconds", max(0.0, lag_s))

    def render(self) -> bytes:
        """Return everything in the text format of Prometheus (``CONTENT_TYPE``)."""
        return generate_latest(self._registry)

    def families(self) -> Iterator[Metric]:
        """Yield all metric families with their samples."""
        yield from self._registry.collect()

    def _count(self, name: str, *labels: str, by: float = 1) -> None:
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(by)

    def _observe(self, name: str, value: float, *labels: str) -> None:
        histogram = self._histograms[name]
        (histogram.labels(*labels) if labels else histogram).observe(value)


class _DaemonCollector(Collector):
    """Reads the gauges from the daemon at every scrape."""

    def __init__(
        self, info: DaemonInfo, read_gauges: Callable[[], GaugeValues], state: LabelCap
    ) -> None:
        self._info: Final = info
        self._read_gauges: Final = read_gauges
        self._state: Final = state

    def collect(self) -> Iterable[Metric]:
        values = self._read_gauges()
        yield self._info_metric()
        active = GaugeMetricFamily(ACTIVE.name, ACTIVE.text, labels=ACTIVE.labels)
        counts: dict[tuple[str, str], int] = {}
        for (role, state), count in values.transfers_active.items():
            key = (self._state(role), self._state(state))
            counts[key] = counts.get(key, 0) + count
        for labels, count in sorted(counts.items()):
            active.add_metric(labels, count)
        yield active
        for spec in GAUGES:
            value = float(getattr(values, spec.attribute))
            yield GaugeMetricFamily(spec.name, spec.text, value=value)

    def _info_metric(self) -> Metric:
        known = {
            "version": __version__,
            "python": platform.python_version(),
            **dataclasses.asdict(self._info),
        }
        metric = GaugeMetricFamily(INFO.name, INFO.text, labels=INFO.labels)
        metric.add_metric([str(known[label]) for label in INFO.labels], 1)
        return metric


def _is_word(text: str) -> bool:
    return _WORD.match(text) is not None


def _is_peer_name(text: str) -> bool:
    return 0 < len(text) <= _MAX_PEER_NAME and text.isprintable()


def _one_of(known: frozenset[str], value: object) -> str:
    return value if isinstance(value, str) and value in known else OTHER
