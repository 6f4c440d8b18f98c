"""One cluster for all tests with faults, because starting twelve processes takes seconds."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from tests.support import leaks
from tests.support.children import short_folder
from tests.support.cluster import Cluster, running_cluster
from tests.support.e2e_daemon import PLAIN
from tests.support.kv_cache import CacheShape
from tests.support.nursery import Nursery
from tests.support.process_fixtures import folder, make_daemon, make_pair, make_worker, nursery

__all__ = ["folder", "make_daemon", "make_pair", "make_worker", "nursery"]

#: What each operation of the daemons under test may meet besides being slow.
FAULTS = "late=0.3,rounds=60"
HAS_FAILED = pytest.StashKey[bool]()


@dataclass
class SharedCluster:
    """A cluster that is replaced when a test has left it broken."""

    nursery: Nursery
    stack: ExitStack = field(default_factory=ExitStack)
    cluster: Cluster | None = None

    def get(self) -> Cluster:
        """Return it, running."""
        if self.cluster is None:
            folder = self.stack.enter_context(short_folder())
            shape = CacheShape(blocks=128, head_size=128)
            running = running_cluster(folder, shape=shape, faults=FAULTS, nursery=self.nursery)
            self.cluster = self.stack.enter_context(running)
            self.cluster.transfer_all(random.Random(0))
            self.cluster.check_empty()
        return self.cluster

    def close(self) -> None:
        """End its processes and delete its files."""
        self.cluster = None
        self.stack.close()


@pytest.fixture
def usual_faults() -> str | None:
    """Daemons are forked: here they are many, and how they start is not what is tested."""
    return PLAIN


@pytest.fixture(scope="session")
def shared_cluster(nursery: Nursery) -> Iterator[SharedCluster]:
    """Hold the cluster; what it leaves behind at the end of the run is a failure."""
    before = leaks.take()
    shared = SharedCluster(nursery)
    yield shared
    shared.close()
    assert leaks.leaks_since(before) == []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let fixtures know that the test has failed."""
    report = yield
    item.stash[HAS_FAILED] = item.stash.get(HAS_FAILED, False) or report.failed
    return report


@pytest.fixture
def cluster(shared_cluster: SharedCluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Give a P2/D4 cluster in which all is well; after a failure the next test gets a new one.

    A test that uses it must be marked ``allow_leaks``: the processes it restarts stay.
    """
    cluster = shared_cluster.get()
    logs = [rank.daemon.process.log for rank in cluster.ranks]
    starts = {log: log.stat().st_size for log in logs}
    cluster.done.clear()
    yield cluster
    if request.node.stash.get(HAS_FAILED, False):
        for log, start in starts.items():
            text = log.read_bytes()[start:].decode("utf-8", "replace")
            print(f"--- {log.name}\n{text}")  # noqa: T201 - pytest shows it with the failure
        shared_cluster.close()
