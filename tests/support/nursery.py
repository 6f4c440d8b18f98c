"""Forks processes that have imported everything already: fifty starts a minute cost no more CPU.

    python -m tests.support.nursery FD

The nursery is one child of the test run. Told to, it forks a child that runs the ``main`` of a
module as if the module had been started by itself, and it says later how the child ended. It has no
threads, no sockets but the one to the tests, and no state that a fork could share.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

from moriiod.cli.demo.tether import die_with_parent

#: What the children run; imported once.
MODULES: Final = ("tests.support.e2e_worker", "tests.support.e2e_daemon")
_PACKET_BYTES: Final = 1 << 17
_MAX_FDS: Final = 16
#: Above every number that a child is told to use.
_HIGH_FD: Final = 500
_TIMEOUT_S: Final = 60.0


class Nursery:
    """The tests' side.

    Args:
        env: The environment of the nursery.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "tests.support.nursery", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=dict(env),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        ours.settimeout(_TIMEOUT_S)
        self._socket = ours

    def spawn(
        self,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        output: int,
        fds: Sequence[int] = (),
    ) -> tuple[int, int]:
        """Fork a child; return its pid and a new pidfd.

        Args:
            module: One of ``MODULES``.
            arguments: For its ``main``.
            env: The child's environment.
            output: Descriptor that becomes its stdout and stderr.
            fds: Descriptors that it gets under the same numbers.
        """
        order = {
            "module": module,
            "arguments": list(arguments),
            "env": dict(env),
            "fds": list(fds),
        }
        socket.send_fds(self._socket, [json.dumps(order).encode()], [output, *fds])
        data, received, _, _ = socket.recv_fds(self._socket, _PACKET_BYTES, 1)
        return json.loads(data)["pid"], received[0]

    def wait(self, pid: int) -> int:
        """Wait for the end of a child; return its exit status, -n if signal n killed it."""
        self._socket.sendall(json.dumps({"wait": pid}).encode())
        status: int = json.loads(self._socket.recv(_PACKET_BYTES))["status"]
        return status

    def close(self) -> None:
        """End the nursery. Children that still run end with it."""
        self._socket.close()
        self._popen.wait()


def main(arguments: Sequence[str]) -> None:
    """Serve until the tests are gone."""
    for module in MODULES:
        importlib.import_module(module)
    with socket.socket(fileno=int(arguments[0])) as control:
        while True:
            data, fds, _, _ = socket.recv_fds(control, _PACKET_BYTES, _MAX_FDS)
            if not data:
                return
            _obey(control, json.loads(data), fds)


def _obey(control: socket.socket, order: dict[str, Any], fds: list[int]) -> None:
    if "wait" in order:
        _, status = os.waitpid(order["wait"], 0)
        answer = {"status": os.waitstatus_to_exitcode(status)}
        control.sendall(json.dumps(answer).encode())
        return
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        control.close()
        _become(order, fds, parent)
    for fd in fds:
        os.close(fd)
    pidfd = os.pidfd_open(pid)
    socket.send_fds(control, [json.dumps({"pid": pid}).encode()], [pidfd])
    os.close(pidfd)


def _become(order: dict[str, Any], fds: list[int], parent: int) -> NoReturn:
    """Run a module in this process, and end it without the nursery's clean-up."""
    status = 1
    try:
        die_with_parent(parent)
        os.setsid()
        os.environ.clear()
        os.environ.update(order["env"])
        _place(fds, [1, *order["fds"]])
        os.dup2(1, 2)
        found = importlib.import_module(order["module"]).main(order["arguments"])
        status = found if isinstance(found, int) else 0
    except BaseException:  # noqa: BLE001 - as the interpreter would, and the process ends
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors the numbers that they are known by."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


if __name__ == "__main__":
    main(sys.argv[1:])
