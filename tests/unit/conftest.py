"""Unit tests are calls and results: no socket, no thread, no event loop, no sleep."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest


def _refuse(what: str) -> Callable[..., NoReturn]:
    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        pytest.fail(f"a unit test {what}; such a test belongs in tests/integration")

    return refuse


@pytest.fixture(autouse=True)
def no_outside_world(no_leaks: None) -> Iterator[None]:
    """Refuse sockets, event loops, threads, ZMQ sockets and sleeping."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "__init__", _refuse("opens a socket"))
        patch.setattr(socket, "socketpair", _refuse("opens a socket pair"))
        patch.setattr(asyncio, "new_event_loop", _refuse("runs an event loop"))
        patch.setattr(asyncio.events, "new_event_loop", _refuse("runs an event loop"))
        patch.setattr(threading.Thread, "start", _refuse("starts a thread"))
        patch.setattr(time, "sleep", _refuse("sleeps"))
        if (zmq := sys.modules.get("zmq")) is not None:
            patch.setattr(zmq.Context, "socket", _refuse("opens a ZMQ socket"))
        yield
