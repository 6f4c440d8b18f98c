"""The leak checks of tests/conftest.py find planted leaks, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import uvloop
import zmq

from tests.support import leaks

pytest_plugins = ["pytester"]

PLANTED = """
    import asyncio, os, subprocess, sys, threading
    import pytest, zmq

    HELD = []

    def test_clean():
        read, write = os.pipe()
        os.close(read)
        os.close(write)

    async def test_clean_with_a_loop():
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait()).cancel()

    def test_leaks_fd():
        HELD.append(os.pipe())

    def test_leaks_thread():
        gate = threading.Event()
        HELD.append(gate)
        threading.Thread(target=gate.wait, name="planted", daemon=True).start()

    async def test_leaks_task():
        HELD.append(asyncio.get_running_loop().create_task(asyncio.Event().wait()))

    def test_leaks_context():
        HELD.append(zmq.Context())
        HELD.append(HELD[-1].socket(zmq.PAIR))
        HELD[-1].linger = 0

    @pytest.mark.allow_leaks(reason="planted")
    def test_is_excused():
        HELD.append(os.pipe())
"""


def test_planted_leaks_are_each_found_in_the_test_that_left_them(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(PLANTED)
    root = Path(__file__).parents[2]
    pytester.makepyprojecttoml(
        f"[tool.pytest.ini_options]\npythonpath = ['{root}']\nasyncio_mode = 'auto'\n"
        "asyncio_default_fixture_loop_scope = 'function'\n"
        "markers = ['allow_leaks(reason): x', 'timeout: x']\n"
    )

    result = pytester.runpytest_subprocess("-v", "-p", "no:randomly", timeout=60)

    result.assert_outcomes(passed=7, errors=4)
    output = result.stdout.str()
    for line in (
        "ERROR at teardown of test_leaks_fd",
        "ERROR at teardown of test_leaks_thread",
        "ERROR at teardown of test_leaks_task",
        "ERROR at teardown of test_leaks_context",
        "thread 'planted'",
        "tasks still running",
        "2 ZMQ threads: a context is open",
    ):
        assert line in output


def test_nothing_left_reports_nothing() -> None:
    before = leaks.take()
    context = zmq.Context()
    context.socket(zmq.PAIR).close(linger=0)
    context.term()
    uvloop.new_event_loop().close()
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert leaks.leaks_since(before) == []


def test_descriptor_reused_for_something_else_is_reported() -> None:
    read, write = os.pipe()
    before = leaks.take()
    os.close(read)
    other_read, other_write = os.pipe()
    try:
        assert any("pipe:" in line for line in leaks.leaks_since(before))
    finally:
        for fd in (write, other_read, other_write):
            os.close(fd)
