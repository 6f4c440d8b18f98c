"""Every asynchronous integration test runs on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest
import zmq

from moriiod.zmqio.options import new_context
from tests.support.loops import LOOPS
from tests.support.shell import Recorder


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Name the loops to run on."""
    return LOOPS


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Return a ZMQ context; the test hangs, and so fails, if a socket keeps it from ending."""
    made = new_context(max_dialled=1200)
    yield made
    made.term()


@pytest.fixture
def recorder() -> Recorder:
    """Return a driver that only remembers."""
    return Recorder()
