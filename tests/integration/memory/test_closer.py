"""Memory of a dead worker is given back without holding up the loop."""

from __future__ import annotations

import mmap
import os
import threading

import pytest

from moriiod.memory.closer import INLINE_BYTES, FdCloser
from moriiod.memory.held import HeldRegions
from moriiod.memory.limits import FdLimits
from moriiod.wire.memfd import create_sealed_memfd
from tests.support.engines import new_id


def touched_memfd(n_bytes: int) -> int:
    fd = create_sealed_memfd("t", n_bytes)
    with mmap.mmap(fd, n_bytes) as mapping:
        mapping[:: mmap.PAGESIZE] = b"x" * (n_bytes // mmap.PAGESIZE)
    return fd


@pytest.fixture
def closed_on(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Which thread closed which descriptor."""
    found: dict[int, str] = {}
    close = os.close

    def record(fd: int) -> None:
        found[fd] = threading.current_thread().name
        close(fd)

    monkeypatch.setattr("moriiod.memory.closer.os.close", record)
    return found


def test_large_region_of_a_dead_worker_is_closed_off_the_loop(closed_on: dict[int, str]) -> None:
    held, generation = HeldRegions(FdLimits()), new_id()
    held.add(generation)
    fd = touched_memfd(INLINE_BYTES + mmap.PAGESIZE)
    held.offer(generation, 0, INLINE_BYTES, fd)
    assert len(held.hold(generation)) == 1
    held.worker_gone(generation)
    held.release(generation, is_connected=False)
    held.close()
    assert held.n_fds == 0
    assert closed_on == {fd: "moriiod-closer"}


def test_what_is_small_or_was_never_touched_is_closed_at_once(closed_on: dict[int, str]) -> None:
    closer = FdCloser()
    small, untouched = touched_memfd(mmap.PAGESIZE), create_sealed_memfd("t", 1 << 40)
    closer.close_all((small, untouched))
    here = threading.current_thread().name
    assert closed_on == {small: here, untouched: here}
    closer.stop()


def test_many_small_regions_count_together(closed_on: dict[int, str]) -> None:
    closer = FdCloser()
    fds = [touched_memfd(INLINE_BYTES // 4) for _ in range(5)]
    closer.close_all(fds)
    closer.stop()
    closer.stop()
    assert closed_on == dict.fromkeys(fds, "moriiod-closer")
