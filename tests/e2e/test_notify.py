"""What systemd is told by the real process (case S3)."""

from __future__ import annotations

import signal
import uuid

from tests.support.children import NotifySocket, until
from tests.support.process_fixtures import DaemonMaker

WATCHDOG_S = 0.2


def test_S3_ready_and_stopping_are_said_once_by_the_main_process(make_daemon: DaemonMaker) -> None:
    daemon = make_daemon()
    daemon.launch()
    daemon.wait_ready()
    # Whoever is told that it is ready can use it at once.
    assert daemon.status()["state"] == "ready"
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: "SIGHUP" in daemon.process.text(), "SIGHUP in the log")
    assert daemon.stop() == 0
    assert daemon.notify.take_all() == ["READY=1", "STOPPING=1"]


def test_S3_abstract_socket_is_told_too(make_daemon: DaemonMaker) -> None:
    listener = NotifySocket(f"@moriiod-test-{uuid.uuid4().hex}")
    daemon = make_daemon()
    daemon.environment["NOTIFY_SOCKET"] = listener.address
    daemon.launch()
    assert listener.take(20.0) == "READY=1"
    assert daemon.stop() == 0
    assert listener.take_all() == ["READY=1", "STOPPING=1"]
    listener.close()


def test_S3_without_a_listener_it_serves_and_warns_once(make_daemon: DaemonMaker) -> None:
    daemon = make_daemon()
    daemon.environment["NOTIFY_SOCKET"] = "/nowhere/notify"
    daemon.launch()
    until(daemon.is_answering, "the daemon answers")
    assert daemon.stop() == 0
    warnings = [line for line in daemon.process.text().splitlines() if "/nowhere/notify" in line]
    assert len(warnings) == 1


def test_S3_watchdog_is_fed_while_the_loop_runs_and_not_while_it_is_stuck(
    make_daemon: DaemonMaker,
) -> None:
    daemon = make_daemon()
    daemon.environment["WATCHDOG_USEC"] = str(round(WATCHDOG_S * 1e6))
    daemon.start()
    for _ in range(3):
        assert daemon.notify.take(5.0) == "WATCHDOG=1"
    daemon.process.pause()
    daemon.notify.take_all()
    # Longer than systemd would wait.
    assert daemon.notify.take(2 * WATCHDOG_S) is None
    daemon.process.resume()
    assert daemon.notify.take(5.0) == "WATCHDOG=1"
    assert daemon.stop() == 0
