"""Child processes of tests: started, signalled and watched by pidfd, and what /proc says of them.

Every test process has a loopback address of its own and hands out ports of it in order, so two
test runs on one machine never meet, and no port is found free by one and taken by another.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from moriiod.cli.demo.tether import die_with_parent
from tests.support.nursery import Nursery

T = TypeVar("T")

ROOT: Final = Path(__file__).parents[2]
#: Longest wait for anything unless told otherwise: long, because the machine may be busy.
PATIENCE_S: Final = 30.0
#: Between two looks at a condition.
_INTERVAL_S: Final = 0.01
_FIRST_PORT: Final = 20000
_LAST_PORT: Final = 32000
_TAIL_LINES: Final = 40


def _own_host() -> str:
    """Return a loopback address that no other process's tests use."""
    pid = os.getpid()
    return f"127.{1 + (pid >> 14) % 254}.{pid >> 7 & 127}.{1 + (pid & 127)}"


HOST: Final = _own_host()
_ports: Final = itertools.cycle(range(_FIRST_PORT, _LAST_PORT))


def take_ports(count: int) -> int:
    """Return the first of ``count`` ports in a row of ``HOST`` that nobody else was given."""
    ports = [next(_ports) for _ in range(count)]
    return ports[0] if ports[-1] - ports[0] == count - 1 else take_ports(count)


def until(condition: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
    """Look again and again until the condition holds; return what it returned.

    Args:
        condition: Something to ask; a true value ends the waiting.
        what: Is waited for, for the message.
        timeout_s: Fail after so long.
    """
    give_up = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() >= give_up:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        select.select((), (), (), _INTERVAL_S)
    return found


def holds_for(duration_s: float, condition: Callable[[], object], what: str) -> None:
    """Make sure that a condition holds all the time."""
    give_up = time.monotonic() + duration_s
    while time.monotonic() < give_up:
        assert condition(), f"does not hold any more: {what}"
        select.select((), (), (), 5 * _INTERVAL_S)


@contextmanager
def short_folder() -> Iterator[Path]:
    """Give an empty directory with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="m", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without anything that configures a daemon."""
    foreign = ("MORIIOD_", "VLLM_MORIIO_", "NOTIFY_SOCKET", "WATCHDOG_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    # One thread each: there are more processes than cores.
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def _is_readable(fd: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


class Process:
    """A process, its log file, and everything /proc says about it.

    Args:
        name: For messages.
        log: Its stdout and stderr are appended there.
        pid: Its number.
        pidfd: Of the process; closed when its end was seen.
        reap: Returns the exit status of the process, -n if signal n killed it; it has ended.
    """

    def __init__(self, name: str, log: Path, pid: int, pidfd: int, reap: Callable[[], int]) -> None:
        self.name = name
        self.log = log
        self.pid: Final = pid
        self._pidfd: int | None = pidfd
        self._reap = reap
        self._status: int | None = None
        self._is_paused = False

    @classmethod
    def run(cls, name: str, command: Sequence[str], log: Path, **options: Any) -> Process:
        """Run a command.

        Args:
            name: For messages.
            command: What to run.
            log: Its stdout and stderr are appended there.
            options: For ``Popen``: ``env``, ``umask``, ``cwd``.
        """
        with log.open("ab") as output:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
                **options,
            )
        return cls(name, log, popen.pid, os.pidfd_open(popen.pid), popen.wait)

    @classmethod
    def fork(
        cls,
        nursery: Nursery,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str],
        fds: Sequence[int] = (),
    ) -> Process:
        """Run the ``main`` of a module in a fork of the nursery; see ``Nursery.spawn``."""
        with log.open("ab") as output:
            pid, pidfd = nursery.spawn(module, arguments, env, output.fileno(), fds)
        return cls(name, log, pid, pidfd, partial(nursery.wait, pid))

    # --- Life ---------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._pidfd is not None and not _is_readable(self._pidfd, 0.0)

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def pause(self) -> None:
        """Stop it with SIGSTOP, and see that all its threads have stopped."""
        self._is_paused = True
        self.send_signal(signal.SIGSTOP)
        until(lambda: set(self._thread_states()) == {"T"}, f"{self.name} is stopped")

    def resume(self) -> None:
        """Let it go on."""
        self._is_paused = False
        self.send_signal(signal.SIGCONT)

    def wait_ended(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end; return the exit status, -n if signal n killed it."""
        if self._pidfd is not None:
            if not _is_readable(self._pidfd, timeout_s):
                raise AssertionError(f"{self.name} did not end in {timeout_s:g} s\n{self.tail()}")
            os.close(self._pidfd)
            self._pidfd = None
        if self._status is None:
            self._status = self._reap()
        return self._status

    def kill(self) -> None:
        """End it with SIGKILL and wait until it is gone."""
        self.send_signal(signal.SIGKILL)
        self.wait_ended()

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = PATIENCE_S) -> int:
        """Ask it to end; return the exit status."""
        if self._is_paused:
            self.resume()
        self.send_signal(number)
        return self.wait_ended(timeout_s)

    # --- What is known of it --------------------------------------------------------------------

    def n_fds(self) -> int:
        """Return how many file descriptors it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def fds(self) -> list[str]:
        """Return what its file descriptors refer to, sorted, sockets without their numbers."""
        found = []
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/{self.pid}/fd/{name}"))
        return sorted(re.sub(r"\[\d+\]", "", target) for target in found)

    def mappings(self) -> list[str]:
        """Return the names of the files it has mapped, one for each mapping."""
        lines = Path(f"/proc/{self.pid}/maps").read_text(encoding="utf-8").splitlines()
        return [parts[5] for line in lines if len(parts := line.split(maxsplit=5)) > 5]

    def memfds(self, name: str = "") -> list[str]:
        """Return the names of the memfds it has mapped; only those that contain ``name``."""
        names = (path.removesuffix(" (deleted)") for path in self.mappings())
        return sorted(path for path in names if path.startswith("/memfd:") and name in path)

    def rss_bytes(self) -> int:
        """Return its resident memory that is not shared."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024

    def _thread_states(self) -> Iterator[str]:
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                yield (task / "stat").read_text().rpartition(")")[2].split()[0]

    def text(self) -> str:
        """Return everything it has written."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def tail(self) -> str:
        """Return the end of its log, with its name, for a test that fails."""
        lines = self.text().splitlines()[-_TAIL_LINES:]
        return "\n".join([f"--- {self.name}", *lines])


class NotifySocket:
    """Hears what a daemon tells systemd, without an event loop.

    Args:
        address: A path, or ``@name`` in the abstract namespace.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + address[1:] if address[0] == "@" else address)
        #: First lines of all messages so far.
        self.heard: list[str] = []

    def take(self, timeout_s: float = 0.0) -> str | None:
        """Return the next message's first line; None if there is none in time."""
        if not select.select((self._socket,), (), (), timeout_s)[0]:
            return None
        self.heard.append(self._socket.recv(4096).decode().splitlines()[0])
        return self.heard[-1]

    def take_all(self) -> list[str]:
        """Return everything that was said so far."""
        while self.take() is not None:
            pass
        return self.heard

    def close(self) -> None:
        """Stop listening, and remove the file."""
        name = self._socket.getsockname()
        self._socket.close()
        if isinstance(name, str):
            Path(name).unlink(missing_ok=True)
