"""What holds for every test: repeatable, and nothing left behind. See docs/testing.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop
from hypothesis import HealthCheck, settings

from tests.support import leaks

#: Order of the tests and the ``seed`` fixture, unless ``--randomly-seed=N`` says otherwise.
DEFAULT_SEED = 1
#: Folders whose tests start processes: more time, and one at a time (they share two cores).
PROCESS_FOLDERS = ("e2e", "fault")
PROCESS_TIMEOUT_S = 120

settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", settings.get_profile("ci"), derandomize=False)
settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Fix the order of the tests before pytest-randomly draws one."""
    if config.getoption("randomly_seed", None) == "default":
        config.option.randomly_seed = DEFAULT_SEED


def pytest_report_header(config: pytest.Config) -> str:
    """Say what is needed to run exactly this again."""
    profile = config.getoption("hypothesis_profile", None) or "ci"
    examples = config.getoption("hypothesis_seed", None) or "fixed"
    return f"moriiod: seed {_seed(config)}, hypothesis profile {profile}, example seed {examples}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that start processes more time, and keep them together under xdist."""
    root = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(root).parts[0] if item.path.is_relative_to(root) else ""
        if folder not in PROCESS_FOLDERS:
            continue
        item.add_marker(pytest.mark.xdist_group("processes"))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PROCESS_TIMEOUT_S))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return the seed for a test's own dice; the header of the run prints it."""
    return _seed(request.config)


@pytest.fixture(scope="session", autouse=True)
def libuv_signal_pipe() -> None:
    """Let libuv open the one pipe that it keeps for the life of the process."""
    uvloop.new_event_loop().close()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves an fd, a thread, a child process or a ZMQ context behind."""
    before = leaks.take()
    yield
    if request.node.get_closest_marker("allow_leaks") is None:
        found = leaks.leaks_since(before)
        if found:
            pytest.fail("left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def no_task_leaks(request: pytest.FixtureRequest, no_leaks: None) -> None:
    """Fail an async test that leaves a task running in its loop."""
    if pytest_asyncio.is_async_test(request.node):
        request.getfixturevalue("tasks_end_with_the_test")


@pytest_asyncio.fixture
async def tasks_end_with_the_test(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Runs before the test's own fixtures and after them, in the test's loop."""
    yield
    if request.node.get_closest_marker("allow_leaks") is None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            lines = sorted(f"{task.get_name()}: {task.get_coro()!r}" for task in left)
            pytest.fail("tasks still running:\n  " + "\n  ".join(lines), pytrace=False)


def _seed(config: pytest.Config) -> int:
    return int(config.getoption("randomly_seed", DEFAULT_SEED))
