"""Signals, systemd and exit statuses, with the signals of this very process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from moriiod.core.ids import Epoch
from moriiod.daemon.app import Daemon
from moriiod.daemon.lifecycle import Lifecycle
from moriiod.daemon.notify import Notifier
from moriiod.engines.base import RegionExporter, TransferEngine
from moriiod.engines.factory import make_engine
from moriiod.errors import AddressInUse
from tests.support.daemons import attached_worker, make_daemon, running_daemon
from tests.support.systemd import FakeSystemd


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[FakeSystemd]:
    listener = FakeSystemd(str(tmp_path / "notify"))
    yield listener
    listener.close()


def notifier(systemd: FakeSystemd, **more: str) -> Notifier:
    return Notifier.from_environment({"NOTIFY_SOCKET": systemd.address, **more})


@asynccontextmanager
async def living(daemon: Daemon, systemd: FakeSystemd, **more: str):
    """Give the task that runs a daemon, once systemd was told that it is ready."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(Lifecycle(daemon, notifier(systemd, **more)).run())
        await systemd.hears("READY=1")
        yield task


async def test_S3_ready_is_said_once_and_only_when_everything_is_bound(
    tmp_path: Path, systemd: FakeSystemd
) -> None:
    folder = tmp_path / "run"

    def make(exporter: RegionExporter, epoch: Epoch) -> TransferEngine:
        assert systemd.heard() == [], "ready was said before the engine was there"
        assert sorted(path.name for path in folder.iterdir()) == ["rank0.fd.sock", "rank0.sock"]
        return make_engine("shm", exporter, epoch)

    daemon = make_daemon(folder, make=make)
    async with living(daemon, systemd) as task:
        async with attached_worker(daemon.config.socket_path) as worker:
            assert await worker.client.ping() == daemon.epoch
        os.kill(os.getpid(), signal.SIGTERM)
        assert await task == 0
    states = [message.splitlines()[0] for message in systemd.heard()]
    assert states == ["READY=1", "STOPPING=1"]
    assert list(folder.iterdir()) == []


async def test_S3_failed_start_is_never_ready(tmp_path: Path, systemd: FakeSystemd) -> None:
    async with running_daemon(tmp_path / "run"):
        second = make_daemon(tmp_path / "run")
        with pytest.raises(AddressInUse):
            await Lifecycle(second, notifier(systemd)).run()
    assert systemd.heard() == []


async def test_S3_watchdog_is_fed_by_the_loop(tmp_path: Path, systemd: FakeSystemd) -> None:
    async with living(make_daemon(tmp_path / "run"), systemd, WATCHDOG_USEC="20000") as task:
        await systemd.hears("WATCHDOG=1", 3)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await task == 0


async def test_L9_interrupt_drains_like_a_termination(tmp_path: Path, systemd: FakeSystemd) -> None:
    daemon = make_daemon(tmp_path / "run", {"daemon.drain_timeout_s": "0.05"})
    async with living(daemon, systemd) as task:
        async with attached_worker(daemon.config.socket_path) as worker:
            worker.client.publish("t1", [[1]])
            await worker.client.ping()
            os.kill(os.getpid(), signal.SIGINT)
            event = await worker.end_of("t1", "publish")
            assert (event.outcome, event.reason) == ("failed", "DRAINING")
        assert await task == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def test_L9_second_signal_does_not_wait(tmp_path: Path, systemd: FakeSystemd) -> None:
    daemon = make_daemon(tmp_path / "run")
    async with living(daemon, systemd) as task:
        async with attached_worker(daemon.config.socket_path) as worker:
            worker.client.publish("t1", [[1]])
            await worker.client.ping()
            os.kill(os.getpid(), signal.SIGTERM)
            await systemd.hears("STOPPING=1")
            os.kill(os.getpid(), signal.SIGTERM)
            assert await task == 128 + signal.SIGTERM
    assert list((tmp_path / "run").iterdir()) == []


async def test_L9_hangup_changes_nothing(
    tmp_path: Path,
    systemd: FakeSystemd,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("moriiod"), "propagate", True)
    caplog.set_level(logging.INFO, "moriiod")
    daemon = make_daemon(tmp_path / "run")
    async with living(daemon, systemd) as task:
        os.kill(os.getpid(), signal.SIGHUP)
        async with attached_worker(daemon.config.socket_path) as worker:
            while "SIGHUP" not in caplog.text:
                await worker.client.ping()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await task == 0


async def test_bug_in_a_callback_of_the_loop_is_exit_status_70(
    tmp_path: Path, systemd: FakeSystemd
) -> None:
    def planted() -> None:
        raise ZeroDivisionError

    async with living(make_daemon(tmp_path / "run"), systemd) as task:
        asyncio.get_running_loop().call_soon(planted)
        assert await task == 70
    states = [message.splitlines()[0] for message in systemd.heard()]
    assert states == ["READY=1", "STOPPING=1"]


async def test_broken_connection_in_a_callback_of_the_loop_is_no_bug(
    tmp_path: Path, systemd: FakeSystemd
) -> None:
    def broken() -> None:
        raise ConnectionResetError

    daemon = make_daemon(tmp_path / "run")
    async with living(daemon, systemd) as task:
        asyncio.get_running_loop().call_soon(broken)
        async with attached_worker(daemon.config.socket_path) as worker:
            await worker.client.ping()
        assert daemon.health().is_ok
        os.kill(os.getpid(), signal.SIGTERM)
        assert await task == 0
