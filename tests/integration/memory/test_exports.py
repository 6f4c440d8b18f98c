"""Exports and the processes that fetched them: what a fence is told, also when threads meet."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from moriiod.errors import Busy, SharedMemoryUnavailable
from moriiod.memory import exports as exports_module
from moriiod.memory.exports import Exports
from moriiod.wire.fdsocket import FetchRegions
from moriiod.wire.memfd import create_sealed_memfd
from tests.support.engines import new_id

TOKEN = "a" * 32


@pytest.fixture
def exports() -> Iterator[Exports]:
    made = Exports("/s", max_fetchers=3)
    fd = create_sealed_memfd("t", 4096)
    made.export(TOKEN, fd, 4096)
    os.close(fd)
    yield made
    made.close()


def fetch(exports: Exports, epoch: str, pid: int | None = None) -> None:
    pid = pid or os.getpid()
    exports.fetch(FetchRegions(epoch, (TOKEN,)), pid, lambda: os.pidfd_open(pid))


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def start() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.kill()
    process.wait()


def test_fetched_fd_is_a_duplicate_that_lives_until_it_is_withdrawn(exports: Exports) -> None:
    fds, sizes = exports.fetch(
        FetchRegions(new_id(), (TOKEN, TOKEN)), os.getpid(), lambda: os.pidfd_open(os.getpid())
    )
    assert (sizes, os.fstat(fds[0]).st_size) == ((4096, 4096), 4096)
    exports.withdraw(TOKEN)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fds[0])
    with pytest.raises(SharedMemoryUnavailable):
        fetch(exports, new_id())


def test_fence_of_who_fetched_is_a_pidfd_and_keeps_him_out(exports: Exports) -> None:
    epoch = new_id()
    fetch(exports, epoch)
    pidfd = exports.refuse(epoch)
    assert pidfd is not None
    with pytest.raises(SharedMemoryUnavailable, match="fenced"):
        fetch(exports, epoch)
    exports.readmit(epoch)
    fetch(exports, epoch)
    assert exports.refuse(epoch) == pidfd


def test_forgetting_a_peer_that_lives_keeps_the_proof_that_it_is_waited_for(
    exports: Exports,
) -> None:
    epoch = new_id()
    fetch(exports, epoch)
    assert exports.refuse(epoch) is not None
    exports.forget(epoch)
    pidfd = exports.refuse(epoch)
    assert pidfd is not None, "a fence of a process that has our memory mapped was confirmed"
    assert not has_ended(pidfd)
    with pytest.raises(SharedMemoryUnavailable, match="fenced"):
        fetch(exports, epoch)


def test_peer_readmitted_and_forgotten_is_still_known_to_a_later_fence(exports: Exports) -> None:
    epoch = new_id()
    fetch(exports, epoch)
    exports.refuse(epoch)
    exports.readmit(epoch)
    exports.forget(epoch)
    fetch(exports, epoch)
    assert exports.refuse(epoch) is not None


def test_peer_that_has_ended_is_forgotten(exports: Exports) -> None:
    process, epoch = start(), new_id()
    fetch(exports, epoch, process.pid)
    pidfd = exports.refuse(epoch)
    assert pidfd is not None
    end(process)
    assert has_ended(pidfd)
    exports.forget(epoch)
    assert exports.n_fetchers == 0
    assert exports.refuse(epoch) is None


def test_epoch_belongs_to_the_process_that_fetched_first(exports: Exports) -> None:
    epoch = new_id()
    fetch(exports, epoch)
    with pytest.raises(SharedMemoryUnavailable, match="another process"):
        fetch(exports, epoch, os.getppid())


def test_process_id_that_came_again_is_not_taken_for_the_first(exports: Exports) -> None:
    process, epoch = start(), new_id()
    fetch(exports, epoch, process.pid)
    end(process)
    with pytest.raises(SharedMemoryUnavailable, match="another process"):
        exports.fetch(
            FetchRegions(epoch, (TOKEN,)), process.pid, lambda: os.pidfd_open(os.getpid())
        )


def test_ended_processes_make_room_unless_a_fence_watches_them(exports: Exports) -> None:
    processes = [start() for _ in range(3)]
    epochs = [new_id() for _ in processes]
    for epoch, process in zip(epochs, processes, strict=True):
        fetch(exports, epoch, process.pid)
    with pytest.raises(Busy):
        fetch(exports, new_id())
    watched = exports.refuse(epochs[0])
    assert watched is not None
    for process in processes:
        end(process)
    fetch(exports, new_id())
    assert exports.n_fetchers == 2
    assert has_ended(watched)
    assert exports.refuse(epochs[1]) is None


def test_fence_that_meets_the_loop_closing_the_pidfd_is_confirmed(exports: Exports) -> None:
    """The loop has taken an ended process out while the setup thread was looking at it."""
    epoch = new_id()
    fetch(exports, epoch)

    class TakenOut(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            return self.pop(key, default)

    gone = exports._fetchers[epoch]
    exports._fetchers = TakenOut(exports._fetchers)
    assert exports.refuse(epoch) is None
    assert not gone.is_watched
    os.close(gone.pidfd)


def test_fenced_epochs_are_bounded(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports_module, "MAX_REFUSED", 2)
    epochs = [new_id() for _ in range(3)]
    for epoch in epochs:
        exports.refuse(epoch)
    fetch(exports, epochs[0])
    for epoch in epochs[1:]:
        with pytest.raises(SharedMemoryUnavailable):
            fetch(exports, epoch)


def test_fd_is_closed_on_the_loop_and_on_the_spot_after_its_end(exports: Exports) -> None:
    loop = asyncio.new_event_loop()
    exports.open(loop)
    fds, _ = exports.fetch(
        FetchRegions(new_id(), (TOKEN,)), os.getpid(), lambda: os.pidfd_open(os.getpid())
    )
    exports.withdraw(TOKEN)
    os.fstat(fds[0])  # the loop may be sending it just now
    loop.call_soon(loop.stop)
    loop.run_forever()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fds[0])
    loop.close()
    fd = create_sealed_memfd("t", 4096)
    exports.export(TOKEN, fd, 4096)
    exports.withdraw(TOKEN)
    os.close(fd)
