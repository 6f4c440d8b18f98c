"""What every engine test gets: hosts to make, and the certainty that no memory stays mapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.engines import HOSTS, EngineHost

MakeHost = Callable[[Path], EngineHost]


@pytest.fixture(params=list(HOSTS))
def make_host(request: pytest.FixtureRequest) -> MakeHost:
    """Return a factory of hosts, for each engine in turn."""
    return HOSTS[request.param]


@pytest.fixture(autouse=True)
def no_mappings_left(no_leaks: None) -> Iterator[None]:
    """Fail a test that leaves a memfd mapped."""
    before = mapped_memfds()
    yield
    assert mapped_memfds() == before


def mapped_memfds() -> int:
    """Return the number of memfd mappings of this process."""
    return sum("/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())
