"""One question to a daemon, without attaching."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moriiod.client.admin import fetch_status, ping
from moriiod.core.requests import Done, GetStatus, Ping, Refused
from moriiod.errors import Busy, DaemonLost, InvalidAddress, UnexpectedMessage
from tests.support.fake_daemon import FakeDaemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "rank3.sock") as running:
        yield running


def test_status_is_text_and_needs_no_attach(daemon: FakeDaemon) -> None:
    assert fetch_status(daemon.path, 5.0) == '{"fake": true}'
    assert daemon.requests == [GetStatus()]
    assert daemon.workers == []


def test_ping_returns_the_epoch(daemon: FakeDaemon) -> None:
    assert ping(f"ipc://{daemon.path}", 5.0) == daemon.epoch


def test_refusal_raises_as_its_error(daemon: FakeDaemon) -> None:
    daemon.answer(Ping, Refused("BUSY", "no", True, {"limit": "x"}))
    with pytest.raises(Busy) as raised:
        ping(daemon.path)
    assert raised.value.fields["limit"] == "x"


def test_answer_to_another_question_is_refused(daemon: FakeDaemon) -> None:
    daemon.answer(GetStatus, Done())
    with pytest.raises(UnexpectedMessage):
        fetch_status(daemon.path)


def test_silence_ends_with_the_time(daemon: FakeDaemon) -> None:
    daemon.answer(Ping, None)
    with pytest.raises(DaemonLost):
        ping(daemon.path, 0.02)


def test_nobody_there_ends_with_the_time(tmp_path: Path) -> None:
    for path in (tmp_path / "none.sock", tmp_path / "file.sock"):
        (tmp_path / "file.sock").touch()
        with pytest.raises(DaemonLost):
            fetch_status(str(path), 0.02)


def test_path_that_cannot_be_a_socket_is_refused() -> None:
    for path in ("", "ipc://", "/" + "a" * 107 + ".sock"):
        with pytest.raises(InvalidAddress):
            ping(path, 0.02)
