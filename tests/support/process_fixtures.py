"""Fixtures of the tests with real processes; imported by the conftest of each such folder."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import clean_environment, short_folder
from tests.support.kv_cache import CacheShape
from tests.support.nursery import Nursery
from tests.support.pair import Pair
from tests.support.processes import Daemon, WorkerProcess

DaemonMaker = Callable[..., Daemon]
WorkerMaker = Callable[..., WorkerProcess]
PairMaker = Callable[..., Pair]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return an empty directory with a path short enough for sockets."""
    with short_folder() as path:
        yield path


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Return where workers and daemons with faults are forked."""
    made = Nursery(clean_environment())
    yield made
    made.close()


@pytest.fixture
def usual_faults() -> str | None:
    """Return how daemons run unless told otherwise: None = as users run them."""
    return None


@pytest.fixture
def make_daemon(
    folder: Path, nursery: Nursery, usual_faults: str | None
) -> Generator[DaemonMaker, None, None]:
    """Return a maker of daemons that are not started; ends them and shows their logs."""
    made: list[Daemon] = []

    def make(
        name: str = "p",
        settings: Mapping[str, str] | None = None,
        faults: str | None = None,
        **more: Any,
    ) -> Daemon:
        faults = usual_faults if faults is None else faults
        made.append(Daemon(folder / name, settings, faults, nursery, **more))
        return made[-1]

    yield make
    for daemon in made:
        daemon.close()
    for log in sorted(folder.glob("*.log")):
        # pytest shows it if the test has failed.
        print(f"--- {log.name}\n{log.read_text()}")  # noqa: T201


@pytest.fixture
def make_worker(make_daemon: DaemonMaker) -> Generator[WorkerMaker, None, None]:
    """Return a maker of workers that are registered; ends them."""
    made: list[WorkerProcess] = []

    def make(daemon: Daemon, shape: CacheShape | None = None, name: str = "") -> WorkerProcess:
        made.append(WorkerProcess(daemon, shape or CacheShape(heads=1), name))
        return made[-1].wait_ready()

    yield make
    for worker in made:
        worker.close()


@pytest.fixture
def make_pair(make_daemon: DaemonMaker, make_worker: WorkerMaker) -> PairMaker:
    """Return a maker of two daemons of one rank each that are ready, with their workers."""

    def make(
        settings: Mapping[str, str] | None = None,
        *,
        prefill_faults: str | None = None,
        decode_faults: str | None = None,
        shape: CacheShape | None = None,
    ) -> Pair:
        prefill = make_daemon("p", settings, prefill_faults)
        decode = make_daemon("d", settings, decode_faults)
        for daemon in (prefill, decode):
            daemon.launch()
        for daemon in (prefill, decode):
            daemon.wait_ready()
        return Pair(prefill, decode, make_worker(prefill, shape), make_worker(decode, shape))

    return make
