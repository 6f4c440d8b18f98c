"""``moriiod serve`` as a process: what starts, what refuses to, and with which exit status."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.children import HOST, clean_environment, take_ports
from tests.support.pair import Pair
from tests.support.process_fixtures import DaemonMaker, WorkerMaker


def moriiod(*arguments: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "moriiod", *arguments],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


# --- What refuses to start ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ("--tp-rank 8 --tp-size 8", 78, "tp_rank 8 not in [0,8)"),
        ("--tp-rank 0 --tp-size 0", 78, "tp_size"),
        ("--tp-rank 3", 2, "tp_size"),
        ("--tp-rank 0 --tp-size 1 --config /nowhere/moriiod.toml", 78, "/nowhere/moriiod.toml"),
        ("--tp-rank 0 --tp-size 1 --engine mori", 78, "mori"),
    ],
)
def test_C5_wrong_arguments_are_one_line_and_a_status_that_is_not_restarted(
    arguments: str, status: int, says: str, folder: Path
) -> None:
    result = moriiod("serve", *arguments.split(), "--runtime-dir", str(folder / "p"))
    assert result.returncode == status
    (line,) = result.stderr.splitlines()[-1:]
    assert line.startswith("moriiod: ")
    assert says in line
    assert "Traceback" not in result.stderr
    assert not (folder / "p").exists() or list((folder / "p").iterdir()) == []


def test_C5_second_daemon_of_a_rank_refuses_and_the_first_serves_on(
    make_daemon: DaemonMaker, make_worker: WorkerMaker
) -> None:
    first = make_daemon().start()
    worker = make_worker(first)
    second = make_daemon("p", {"control.base_port": str(take_ports(1))})
    # Both would write to the same files otherwise.
    second.folder.parent.joinpath("p0.notify").rename(first.folder.parent / "first.notify")
    second.launch()
    assert second.process.wait_ended() == 1
    assert "ADDRESS_IN_USE" in second.process.text()
    assert second.notify.take_all() == []
    assert first.status()["identity"]["epoch"] == worker.ask("look")["epoch"]


def test_P2_held_control_port_is_named_and_never_ready(make_daemon: DaemonMaker) -> None:
    port = take_ports(1)
    with socket.socket() as holder:
        holder.bind((HOST, port))
        holder.listen()
        daemon = make_daemon("p", {"control.base_port": str(port)})
        daemon.launch()
        assert daemon.process.wait_ended() == 1
    assert f"control port {port} on {HOST}" in daemon.process.text().splitlines()[-1]
    assert daemon.notify.take_all() == []
    assert list(daemon.folder.iterdir()) == []


def test_P2_daemons_that_start_together_on_port_0_advertise_different_ports(
    make_daemon: DaemonMaker,
) -> None:
    daemons = [make_daemon(f"p{n}", {"control.base_port": "0"}) for n in range(4)]
    for daemon in daemons:
        daemon.launch()
    for daemon in daemons:
        daemon.wait_ready()
    addresses = {daemon.status()["addresses"]["control"] for daemon in daemons}
    assert len(addresses) == 4


# --- What runs ------------------------------------------------------------------------------------


def test_daemon_serves_without_torch_until_it_is_told_to_stop(
    make_daemon: DaemonMaker, make_worker: WorkerMaker
) -> None:
    daemon = make_daemon().start()
    worker = make_worker(daemon)
    worker.order("publish", transfer_id="t1", blocks=[1])
    assert worker.ask("abort", transfer_id="t1", role="publish") == {}
    assert worker.wait_end("publish", "t1").reason == "aborted"
    mapped = {Path(name).name for name in daemon.process.mappings()}
    assert any("libzmq" in name or "_zmq" in name for name in mapped), mapped
    assert not [name for name in mapped if "torch" in name or "libc10" in name]
    assert worker.leave()
    assert daemon.stop() == 0
    assert list(daemon.folder.iterdir()) == []


def test_interrupt_stops_as_well_and_is_status_0(make_daemon: DaemonMaker) -> None:
    assert make_daemon().start().stop(signal.SIGINT) == 0


def test_status_command_asks_the_daemon(make_daemon: DaemonMaker) -> None:
    daemon = make_daemon().start()
    result = moriiod("status", "--json", "--socket", daemon.socket_path)
    assert result.returncode == 0
    document = json.loads(result.stdout)
    assert document["identity"] == daemon.status()["identity"]
    table = moriiod("status", "--socket", daemon.socket_path)
    assert document["identity"]["epoch"] in table.stdout
    daemon.stop()
    gone = moriiod("status", "--json", "--socket", daemon.socket_path, "--timeout", "0.2")
    assert (gone.returncode, gone.stdout) == (1, "")


def test_pages_follow_the_life_of_the_daemon(
    make_daemon: DaemonMaker, make_worker: WorkerMaker
) -> None:
    port = str(take_ports(1))
    daemon = make_daemon("p", {"telemetry.metrics_base_port": port}).start()
    worker = make_worker(daemon)
    assert daemon.fetch("/healthz") == (200, "ok\n")
    assert daemon.fetch("/readyz") == (200, "ok\n")
    worker.order("publish", transfer_id="t1", blocks=[1])
    worker.ask("sync")
    daemon.process.send_signal(signal.SIGTERM)
    while daemon.notify.take(1.0) != "STOPPING=1":
        pass
    assert daemon.fetch("/healthz") == (200, "ok\n")
    assert daemon.fetch("/readyz") == (503, "draining\n")
    text = daemon.fetch("/metrics")[1]
    assert 'moriiod_transfers_active{role="publish",state="open"} 1.0' in text
    assert "moriiod_draining 1.0" in text
    worker.ask("abort", transfer_id="t1", role="publish")
    assert daemon.process.wait_ended() == 0


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this host has no ::1")
def test_P5_peer_is_reached_by_an_ipv6_literal_with_and_without_brackets(
    make_daemon: DaemonMaker, make_worker: WorkerMaker
) -> None:
    prefill = make_daemon("p", {"control.host": "[::1]"}).start()
    decode = make_daemon("d", {"control.host": "::1"}).start()
    assert prefill.status()["addresses"]["control"].startswith("[::1]:")
    producer, consumer = make_worker(prefill), make_worker(decode)
    for name in ("::1", "[::1]"):
        pair = Pair(prefill, decode, producer, consumer, replace(prefill.address, host=name))
        pair.check_works(name)
