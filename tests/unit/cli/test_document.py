"""Any JSON document becomes tables."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from moriiod.cli.document import render_document

STATUS = {
    "version": "0.1.0",
    "identity": {"instance": "decode-0", "tp_rank": 3, "tp_size": 8, "epoch": "e" * 32},
    "state": "ready",
    "uptime_s": 12.3456789,
    "engine": {"name": "shm", "bytes_in_flight": 3 << 30},
    "clients": [{"name": "worker-3", "pid": 17, "uid": 0}],
    "peers": [],
    "transfers": {
        "counts": {"pull": {"reading": 2}, "publish": {"open": 5}},
        "live": [
            {"transfer_id": "tx-[red]1[/red]", "role": "publish", "pending_ack_ranks": [6, 7]},
            {"transfer_id": "tx-2\x1b[31m", "role": "pull", "age_s": 0.25},
        ],
    },
    "limits": {"max_clients": {"limit": 16, "in_use": 1}},
    "counters": {"acks": 12, "is_ok": True, "nothing": None},
}


def rendered(document: dict[str, Any], width: int = 120) -> str:
    stream = io.StringIO()
    render_document(document, Console(file=stream, width=width, highlight=False))
    return stream.getvalue()


def test_everything_in_a_status_is_shown() -> None:
    text = rendered(STATUS)
    for part in (
        "decode-0",
        "12.3457 s",
        "3.0 GiB",
        "worker-3",
        "transfers.live",
        "tx-[red]1[/red]",
        "6, 7",
        "0.25 s",
        "max_clients",
        "yes",
        "transfers.counts",
    ):
        assert part in text, part
    assert "peers  " in text


def test_nothing_in_a_status_can_steer_the_terminal() -> None:
    text = rendered(STATUS)
    assert "\x1b" not in text
    assert "tx-2\\x1b[31m" in text


@pytest.mark.parametrize("value", [{}, {"a": {}}, {"a": [[1, [2]], {"b": [{}]}]}, {"a": [None]}])
def test_odd_documents_are_rendered_too(value: dict[str, Any]) -> None:
    rendered(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=5))
def test_any_document_is_rendered_in_printable_lines(document: dict[str, Any]) -> None:
    assert all(line.isprintable() for line in rendered(document).split("\n"))


def test_long_cells_are_cut() -> None:
    assert rendered({"x": "y" * 5000}).count("y") == 200
