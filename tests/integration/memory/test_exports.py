"""Whose memory may still be mapped somewhere is never forgotten (safety rule S1)."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator

import pytest

from moriiod.errors import SharedMemoryUnavailable
from moriiod.memory.exports import Exports
from moriiod.wire.fdsocket import FetchRegions
from moriiod.wire.memfd import create_sealed_memfd

TOKEN = "0" * 32
PEER = "a" * 32
REQUEST = FetchRegions(PEER, (TOKEN,))


@pytest.fixture
def exports() -> Iterator[Exports]:
    made = Exports("/nowhere", max_fetchers=4)
    fd = create_sealed_memfd("test", 4096)
    made.export(TOKEN, fd, 4096)
    os.close(fd)
    yield made
    made.close()


def fetch(exports: Exports, pid: int) -> None:
    exports.fetch(REQUEST, pid, lambda: os.pidfd_open(pid))


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def test_forgetting_a_peer_that_lives_keeps_the_proof_that_it_is_waited_for(
    exports: Exports,
) -> None:
    fetch(exports, os.getpid())
    assert exports.refuse(PEER) is not None
    exports.forget(PEER)
    pidfd = exports.refuse(PEER)
    assert pidfd is not None, "a fence of a process that has our memory mapped was confirmed"
    assert not has_ended(pidfd)
    with pytest.raises(SharedMemoryUnavailable, match="fenced"):
        fetch(exports, os.getpid())


def test_peer_readmitted_and_forgotten_is_still_known_to_a_later_fence(exports: Exports) -> None:
    fetch(exports, os.getpid())
    exports.refuse(PEER)
    exports.readmit(PEER)
    exports.forget(PEER)
    fetch(exports, os.getpid())
    assert exports.refuse(PEER) is not None


def test_peer_that_has_ended_is_forgotten(exports: Exports) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        fetch(exports, process.pid)
        pidfd = exports.refuse(PEER)
        assert pidfd is not None
        process.kill()
        process.wait()
        assert has_ended(pidfd)
    exports.forget(PEER)
    assert exports.n_fetchers == 0
    assert exports.refuse(PEER) is None
