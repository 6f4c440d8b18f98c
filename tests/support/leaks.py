"""What a test must not leave behind: file descriptors, threads, processes, ZMQ contexts.

A snapshot costs some hundred microseconds, so every test takes two. Only what is there after and
was not there before counts, so fixtures of a wider scope are nobody's leak.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: libzmq names its own threads so; they live from a context's first socket to its termination.
_ZMQ_THREAD_PREFIX: Final = "ZMQbg/"
#: The kernel takes a moment to forget a thread that was joined.
_SETTLE_S: Final = 0.5
_TASKS: Final = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the process holds at one moment.

    Attributes:
        fds: (number, what it refers to) of every open file descriptor.
        threads: Python threads, by name and identity.
        zmq_threads: How many threads libzmq runs; 0 when every context has ended.
        children: Process ids of children that were not waited for.
    """

    fds: frozenset[tuple[int, str]]
    threads: frozenset[tuple[str, int | None]]
    zmq_threads: int
    children: frozenset[int]


def take() -> Snapshot:
    """Look at what this process holds now."""
    names, children = _kernel_threads()
    return Snapshot(
        fds=_open_fds(),
        threads=frozenset((thread.name, thread.ident) for thread in threading.enumerate()),
        zmq_threads=sum(name.startswith(_ZMQ_THREAD_PREFIX) for name in names),
        children=children,
    )


def leaks_since(before: Snapshot) -> list[str]:
    """Say what came since the snapshot and stays, one line each; [] = nothing.

    What only waits for the garbage collector, or for the kernel to forget a joined thread, is
    given half a second to go.
    """
    found = _differences(before, take())
    if not found:
        return []
    gc.collect()
    give_up = time.monotonic() + _SETTLE_S
    while (found := _differences(before, take())) and time.monotonic() < give_up:
        os.sched_yield()
    return found


def _differences(before: Snapshot, after: Snapshot) -> list[str]:
    found = [f"fd {number} -> {target}" for number, target in sorted(after.fds - before.fds)]
    new_threads = after.threads - before.threads
    found += [f"thread {name!r}" for name, count in sorted(_count(new_threads)) if count]
    found += [f"child process {pid}" for pid in sorted(after.children - before.children)]
    if after.zmq_threads > before.zmq_threads:
        found.append(f"{after.zmq_threads - before.zmq_threads} ZMQ threads: a context is open")
    return found


def _count(threads: frozenset[tuple[str, int | None]]) -> list[tuple[str, int]]:
    return list(Counter(name for name, _ in threads).items())


def _open_fds() -> frozenset[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:
            continue  # the descriptor that listdir itself used
    return frozenset(found)


def _kernel_threads() -> tuple[list[str], frozenset[int]]:
    """Return the names of all threads, native ones included, and the pids of their children."""
    names: list[str] = []
    children: set[int] = set()
    for task in os.listdir(_TASKS):
        try:
            names.append((_TASKS / task / "comm").read_text().rstrip("\n"))
            children.update(int(pid) for pid in (_TASKS / task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked, or this kernel does not list children
    return names, frozenset(children)
