"""Forked and spawned children of a process that uses a client."""

from __future__ import annotations

import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from moriiod.client import Client, ClientSettings, PeerAddress, TransferEnded
from moriiod.core.requests import Attach, Pull
from moriiod.errors import ClientUnusable
from tests.support.fake_daemon import FakeDaemon

PEER = PeerAddress("10.0.0.1", 6301, 4)


def in_child(work: Callable[[], bool]) -> int:
    """Fork; return the child's exit status: 0 if ``work`` was true."""
    with warnings.catch_warnings():
        # Python warns that this process has threads (the fake daemon's); that is the point.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 70
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except ClientUnusable as error:
        return "process that forked" in error.message
    return False


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_Z9_child_gets_a_clear_error_and_the_parent_goes_on(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "d.sock") as daemon:
        with Client(daemon.path) as client:
            client.pull("a", PEER, [[1]], [[1]])
            daemon.wait_for(Pull)

            def child() -> bool:
                calls: list[Callable[[], object]] = [
                    client.poll,
                    client.wait,
                    client.ping,
                    client.fileno,
                    lambda: client.publish("b", []),
                    client.unregister_kv_caches,
                ]
                refused = all(refuses(call) for call in calls)
                return refused and client.close() is True

            assert in_child(child) == 0
            daemon.tell(TransferEnded("a", "pull", "received", "done"))
            assert [event.transfer_id for event in client.wait(5)] == ["a"]
            assert client.ping() == daemon.epoch
        assert len(daemon.wait_for(Attach)) == 1


def test_Z9_child_that_ends_normally_does_not_disturb_the_parent(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "d.sock") as daemon:
        holder = [Client(daemon.path)]
        holder[0].connect()

        def child() -> bool:
            # What the interpreter would do with it at its end.
            holder.clear()
            gc.collect()
            return True

        assert in_child(child) == 0
        assert holder[0].ping() == daemon.epoch
        holder[0].close()


def test_Z9_child_may_have_a_client_of_its_own(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "d.sock") as daemon:
        with Client(daemon.path) as client:

            def child() -> bool:
                with Client(daemon.path, "child") as own:
                    return own.ping() == daemon.epoch

            assert in_child(child) == 0
            assert client.ping() == daemon.epoch
        assert [request.name for request in daemon.wait_for(Attach, 2)][1] == "child"


def _spawned(path: str, epoch: str) -> None:
    with Client(path, "spawned", ClientSettings()) as client:
        if client.ping() != epoch:
            raise SystemExit(1)


@pytest.mark.allow_leaks(reason="multiprocessing keeps its resource tracker for the whole run")
def test_Z9_spawned_child_uses_its_own_client(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "d.sock") as daemon, Client(daemon.path) as client:
        process = multiprocessing.get_context("spawn").Process(
            target=_spawned, args=(daemon.path, daemon.epoch)
        )
        process.start()
        process.join()
        assert process.exitcode == 0
        process.close()
        assert client.ping() == daemon.epoch


def test_Z9_a_thousand_clients_come_and_go_under_garbage_collection(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path / "d.sock") as daemon:
        for number in range(1000):
            with Client(daemon.path, f"w{number}") as client:
                assert client.epoch == daemon.epoch
            if number % 50 == 0:
                gc.collect()
        assert len(daemon.wait_for(Attach, 1000)) == 1000
