"""Fixtures of the tests with real processes; imported by the conftest of each such folder."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import short_folder
from tests.support.kv_cache import CacheShape
from tests.support.processes import Daemon, WorkerProcess

DaemonMaker = Callable[..., Daemon]
WorkerMaker = Callable[..., WorkerProcess]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return an empty directory with a path short enough for sockets."""
    with short_folder() as path:
        yield path


@pytest.fixture
def make_daemon(folder: Path) -> Generator[DaemonMaker, None, None]:
    """Return a maker of daemons that are not started; ends them and shows their logs."""
    made: list[Daemon] = []

    def make(name: str = "p", settings: Mapping[str, str] | None = None, **more: Any) -> Daemon:
        made.append(Daemon(folder / name, settings, **more))
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
