"""The protocol pages know every message and every field."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from moriiod.core.messages import PeerBody
from moriiod.core.requests import ClientEvent, Reply, Request
from moriiod.wire.frames import IPC_VERSIONS
from moriiod.wire.peer import HANDSHAKE_TYPES

DOCS = Path(__file__).parents[2] / "docs"
MESSAGES = [
    *[("protocol-ipc.md", cls) for cls in (*get_args(Request), *get_args(Reply), ClientEvent)],
    *[("protocol-peer.md", cls) for cls in get_args(PeerBody)],
]


@pytest.mark.parametrize(
    ("page", "cls"), MESSAGES, ids=lambda value: getattr(value, "__name__", "")
)
def test_message_has_a_section_with_all_its_fields(page: str, cls: type[Any]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    match = re.search(rf"^### {cls.__name__}$(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"{page} does not describe {cls.__name__}"
    for item in fields(cls):
        assert f"| `{item.name}` |" in match[1], f"{page} lacks {cls.__name__}.{item.name}"


def test_tables_are_up_to_date() -> None:
    tool = DOCS / "tools" / "gen_protocol.py"
    done = subprocess.run(
        [sys.executable, tool, "--check"],
        cwd=DOCS.parent,
        env={"PYTHONPATH": str(DOCS.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_pages_name_the_version_they_describe_and_the_handshake() -> None:
    ipc = (DOCS / "protocol-ipc.md").read_text(encoding="utf-8")
    peer = (DOCS / "protocol-peer.md").read_text(encoding="utf-8")
    assert f"version {IPC_VERSIONS[0]}" in ipc
    for cls in HANDSHAKE_TYPES:
        assert f"`{cls.__name__}`" in peer.partition("## Messages")[0]
