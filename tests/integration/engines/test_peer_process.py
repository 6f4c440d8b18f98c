"""The peer in another process, and its death: idle, with our memory mapped, in mid-transfer."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moriiod.core.geometry import RemoteLayout
from moriiod.engines.base import Fence
from moriiod.errors import SessionFailed, SharedMemoryUnavailable
from tests.support.engine_peer import FILLING, from_json, to_json
from tests.support.engines import HOSTS, EngineHost, WorkerMemory, simple_plan

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
GIVE_UP_MS = 10_000

pytestmark = pytest.mark.xdist_group("processes")


class Peer:
    """The other process."""

    def __init__(self, folder: Path, n_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.engine_peer", str(folder), str(n_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        self.epoch, self.layout = from_json(self._line())

    def order(self, text: str) -> None:
        """Have it do something, and wait until it is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        assert self._line().strip() == "done"

    def kill(self) -> None:
        """End it without a last word."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it if it is still there, and close the pipes."""
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@contextmanager
def hosts(
    folder: Path, n_bytes: int
) -> Iterator[tuple[EngineHost, WorkerMemory, RemoteLayout, Peer]]:
    host, memory = HOSTS["shm"](folder), WorkerMemory(n_bytes)
    peer = Peer(folder, n_bytes)
    try:
        yield host, memory, host.register(memory), peer
    finally:
        peer.close()
        host.close()
        memory.close()


def ends(fence: Fence) -> bool:
    """Wait until a fence is confirmed by its fd."""
    assert fence.watch_fd is not None
    poll = select.poll()
    poll.register(fence.watch_fd, select.POLLIN)
    return bool(poll.poll(GIVE_UP_MS))


def is_confirmed_now(fence: Fence) -> bool:
    assert fence.watch_fd is not None
    poll = select.poll()
    poll.register(fence.watch_fd, select.POLLIN)
    return bool(poll.poll(0))


def test_bytes_cross_between_processes_both_ways(tmp_path: Path) -> None:
    with hosts(tmp_path, MIB) as (host, memory, own, peer):
        session = host.engine.open_session(peer.epoch, own.layout.generation, peer.layout)
        assert host.transfer(session, "read", simple_plan([0], [0], MIB)).error is None
        assert (memory.bytes == FILLING).all()
        memory.bytes[:] = 0
        peer.order("open " + to_json(host.epoch, own))
        peer.order("write")
        assert (memory.bytes == FILLING).all()
        host.engine.close_session(session)


def test_fence_of_a_live_peer_waits_for_its_end(tmp_path: Path) -> None:
    with hosts(tmp_path, 4096) as (host, _, own, peer):
        peer.order("open " + to_json(host.epoch, own))
        fence = host.engine.fence(peer.epoch)
        assert not fence.confirmed
        assert not is_confirmed_now(fence)
        peer.order("write")  # it still can: that is why the fence is not confirmed
        peer.kill()
        assert ends(fence)
        host.engine.forget(peer.epoch)
        assert host.engine.fence(peer.epoch).confirmed


def test_readmitted_peer_fetches_again_and_is_still_known_to_a_later_fence(
    tmp_path: Path,
) -> None:
    with hosts(tmp_path, 4096) as (host, _, own, peer):
        peer.order("open " + to_json(host.epoch, own))
        host.engine.fence(peer.epoch)
        host.engine.readmit(peer.epoch)
        peer.order("open " + to_json(host.epoch, own))
        assert not host.engine.fence(peer.epoch).confirmed


def test_peer_killed_while_idle_leaves_its_memory_readable_but_opens_no_new_session(
    tmp_path: Path,
) -> None:
    with hosts(tmp_path, MIB) as (host, memory, own, peer):
        session = host.engine.open_session(peer.epoch, own.layout.generation, peer.layout)
        peer.kill()
        assert host.transfer(session, "read", simple_plan([0], [0], MIB)).error is None
        assert (memory.bytes == FILLING).all()
        with pytest.raises(SharedMemoryUnavailable):
            host.engine.open_session(peer.epoch, own.layout.generation, peer.layout)
        host.engine.close_session(session)


def test_peer_killed_in_mid_transfer_does_not_disturb_it(tmp_path: Path) -> None:
    size = 64 * MIB
    with hosts(tmp_path, size) as (host, memory, own, peer):
        session = host.engine.open_session(peer.epoch, own.layout.generation, peer.layout)
        host.engine.post(1, session, "read", simple_plan([0], [0], size))
        assert host.engine.progress() == []
        peer.kill()
        (completion,) = host.run()
        assert completion.error is None
        assert (memory.bytes == FILLING).all()
        host.engine.close_session(session)


def test_another_process_cannot_fetch_under_a_known_epoch(tmp_path: Path) -> None:
    with hosts(tmp_path, 4096) as (host, _, own, peer):
        peer.order("open " + to_json(host.epoch, own))
        thief = HOSTS["shm"](tmp_path)
        thief.engine._epoch = peer.epoch  # type: ignore[attr-defined]
        memory = WorkerMemory(4096)
        stolen = thief.register(memory)
        try:
            with pytest.raises(SessionFailed, match="another process"):
                thief.engine.open_session(host.epoch, stolen.layout.generation, own)
        finally:
            thief.close()
            memory.close()


def test_peers_that_come_and_go_do_not_add_up(tmp_path: Path) -> None:
    with hosts(tmp_path, 4096) as (host, _, own, peer):
        peer.order("open " + to_json(host.epoch, own))
        peer.kill()
        for _ in range(3):
            following = Peer(tmp_path, 4096)
            try:
                following.order("open " + to_json(host.epoch, own))
                assert host.server.exports.n_fetchers == 1
            finally:
                following.close()
