"""What systemd hears, over a real datagram socket."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from moriiod.daemon.notify import Notifier


class Systemd:
    """The listening end of ``NOTIFY_SOCKET``."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address[0] == "@" else address)
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        """Return everything that was said since the last call."""
        messages = []
        while True:
            try:
                messages.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return messages

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Systemd]:
    name = str(tmp_path / "notify") if request.param == "path" else f"@moriiod-{uuid.uuid4().hex}"
    listener = Systemd(name)
    yield listener
    listener.close()


def notifier(systemd: Systemd, **more: str) -> Notifier:
    return Notifier.from_environment({"NOTIFY_SOCKET": systemd.address, **more})


def test_S3_ready_is_said_once(systemd: Systemd) -> None:
    sent = notifier(systemd)
    sent.ready("rank 3/8, 12 clients")
    sent.ready("again")
    assert systemd.heard() == ["READY=1\nSTATUS=rank 3/8, 12 clients"]


def test_S3_stopping_and_status_are_said(systemd: Systemd) -> None:
    sent = notifier(systemd)
    sent.stopping()
    sent.status("draining\nREADY=1\r\nMAINPID=1")
    sent.status("")
    assert systemd.heard() == ["STOPPING=1", "STATUS=draining READY=1 MAINPID=1"]


def test_S3_the_watchdog_is_fed_only_where_there_is_one(systemd: Systemd) -> None:
    without = notifier(systemd)
    without.watchdog()
    assert without.watchdog_interval_s is None
    assert systemd.heard() == []
    fed = notifier(systemd, WATCHDOG_USEC="2000000", WATCHDOG_PID=str(os.getpid()))
    fed.watchdog()
    assert fed.watchdog_interval_s == 1.0
    assert systemd.heard() == ["WATCHDOG=1"]
    assert notifier(systemd, WATCHDOG_USEC="2000000").watchdog_interval_s == 1.0


@pytest.mark.parametrize(
    "more",
    [
        {"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"},
        {"WATCHDOG_USEC": "abc"},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "-5"},
        {"WATCHDOG_USEC": ""},
        {"WATCHDOG_USEC": "٢"},
    ],
)
def test_S3_a_watchdog_for_somebody_else_or_of_no_time_is_none(
    systemd: Systemd, more: dict[str, str]
) -> None:
    assert notifier(systemd, **more).watchdog_interval_s is None


def test_S3_a_forked_helper_does_not_speak_for_the_daemon(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = notifier(systemd)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    sent.ready()
    sent.stopping()
    assert systemd.heard() == []


def test_S3_without_a_socket_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    sent = Notifier.from_environment({"WATCHDOG_USEC": "1000000"})
    sent.ready("x")
    sent.watchdog()
    sent.stopping()
    assert sent.watchdog_interval_s is None
    assert caplog.records == []


@pytest.mark.parametrize("address", ["/nowhere/notify", "@nobody-listens-here", "/" + "x" * 200])
def test_S3_an_unreachable_socket_is_one_warning(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever configured logging before must not keep the records from being seen here.
    monkeypatch.setattr(logging.getLogger("moriiod"), "propagate", True)
    sent = Notifier.from_environment({"NOTIFY_SOCKET": address})
    sent.ready()
    sent.status("x")
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_S3_a_kind_of_socket_we_do_not_speak_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("moriiod"), "propagate", True)
    Notifier.from_environment({"NOTIFY_SOCKET": "vsock:2:1234"}).ready()
    assert "not supported" in caplog.text


def test_S3_a_full_socket_never_blocks_the_loop(tmp_path: Path) -> None:
    listener = Systemd(str(tmp_path / "notify"))
    sent = Notifier.from_environment({"NOTIFY_SOCKET": listener.address})
    for _ in range(5000):  # far more than the socket holds while nobody reads
        sent.status("busy")
    assert len(listener.heard()) < 5000
    listener.close()
