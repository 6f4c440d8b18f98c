"""What a daemon's own status document says about the transfers it has served."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DaemonFigures:
    """Counts since the daemon's start.

    Attributes:
        acks: Valid ACKs of consumer ranks, repeats included.
        released: Transfers that it released as a producer, because all had acknowledged.
        received: Transfers that it received as a consumer.
        failed: Transfers that failed.
        live: Transfers that have not ended.
        quarantined: Transfers whose blocks could not be fenced.
    """

    acks: int
    released: int
    received: int
    failed: int
    live: int
    quarantined: int


def read_figures(document: str) -> DaemonFigures:
    """Read a status document.

    Raises:
        ValueError: It lacks a part that is needed here.
    """
    try:
        status: Mapping[str, Any] = json.loads(document)
        counters = status["counters"]
        ends = counters.get("transfers", [])
        return DaemonFigures(
            acks=_count(counters.get("acks", []), result="valid"),
            released=_count(ends, outcome="released", reason="acked"),
            received=_count(ends, outcome="received"),
            failed=_count(ends, outcome="failed"),
            live=int(status["transfers"]["live"]),
            quarantined=int(status["quarantined"]["transfers"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a status document: {error!r}") from error


def _count(rows: Iterable[Mapping[str, Any]], **labels: str) -> int:
    return sum(
        int(row["count"])
        for row in rows
        if all(row.get(name) == value for name, value in labels.items())
    )
