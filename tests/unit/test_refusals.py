"""tests/unit/conftest.py keeps unit tests away from sockets, threads, loops and sleep."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable

import pytest
import zmq


def _open_socket() -> None:
    socket.create_connection(("127.0.0.1", 9))


def _open_socket_pair() -> None:
    socket.socketpair()


def _make_loop() -> None:
    asyncio.new_event_loop()


def _start_thread() -> None:
    threading.Thread(target=int).start()


def _open_zmq_socket() -> None:
    with zmq.Context() as context:
        context.socket(zmq.PAIR)


def _pause() -> None:
    pause = time.sleep
    pause(0)


@pytest.mark.parametrize(
    "reach_out",
    [_open_socket, _open_socket_pair, _make_loop, _start_thread, _open_zmq_socket, _pause],
)
def test_reaching_out_is_refused(reach_out: Callable[[], None]) -> None:
    with pytest.raises(pytest.fail.Exception, match="tests/integration"):
        reach_out()
