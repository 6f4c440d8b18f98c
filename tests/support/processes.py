"""Daemons as users run them, and workers beside them: real processes, driven by a test."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from moriiod.client.admin import fetch_status
from moriiod.config.names import SETTINGS
from moriiod.core.requests import PeerAddress
from moriiod.errors import DaemonLost
from tests.support.children import (
    HOST,
    PATIENCE_S,
    NotifySocket,
    Process,
    clean_environment,
    take_ports,
    until,
)
from tests.support.e2e_worker import PACKET_BYTES
from tests.support.kv_cache import CacheShape, KvCache, make_memory
from tests.support.nursery import Nursery


class Daemon:
    """``moriiod serve`` of one rank. Every start is a new process with the same settings.

    Args:
        folder: Its runtime directory; the last part of its path names the instance.
        settings: By name, ``section.key``; over the defaults of a single rank on ``HOST``.
        faults: None = run the real command. Anything else is forked from the nursery: ``PLAIN``
            with the real engine, else with a faulty one, see ``e2e_daemon``; "" is one that takes
            half a millisecond for each ``engine.shm_chunk_bytes``.
        nursery: Where it is forked.
        wrapper: For the real command, one that runs the rest of its arguments: ``setpriv``.
        popen: For the real command, options of ``Popen``: ``umask``, ``cwd``.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, str] | None = None,
        faults: str | None = None,
        nursery: Nursery | None = None,
        wrapper: Sequence[str] = (),
        **popen: Any,
    ) -> None:
        self.folder = folder
        self.faults = faults
        self.nursery = nursery
        self.settings: dict[str, str] = {
            "daemon.tp_rank": "0",
            "daemon.tp_size": "1",
            "daemon.instance": folder.name,
            "daemon.runtime_dir": str(folder),
            "control.host": HOST,
            "telemetry.metrics_host": HOST,
            **(settings or {}),
        }
        if "control.base_port" not in self.settings:
            self.settings["control.base_port"] = str(take_ports(1))
        self._wrapper = wrapper
        self._popen = popen
        self._process: Process | None = None
        self._notify: NotifySocket | None = None
        #: Added to the environment of the next start.
        self.environment: dict[str, str] = {}

    # --- Life ---------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the process without waiting."""
        self.close()
        log = self.folder.parent / f"{self.name}.log"
        notify_path = self.folder.parent / f"{self.name}.notify"
        self._notify = NotifySocket(str(notify_path))
        env = clean_environment(**{"NOTIFY_SOCKET": str(notify_path), **self.environment})
        if self.faults is None:
            command = [*self._wrapper, *self._command()]
            self._process = Process.run(self.name, command, log, env=env, **self._popen)
            return
        assert self.nursery is not None
        values = [f"{name}={value}" for name, value in self.settings.items()]
        self._process = Process.fork(
            self.nursery,
            self.name,
            "tests.support.e2e_daemon",
            [self.faults, *values],
            log,
            env=env,
        )

    def wait_ready(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait for READY=1; fail if the process ends first."""
        give_up = time.monotonic() + timeout_s
        while "READY=1" not in self.notify.heard:
            if self.notify.take(0.05) is None:
                assert self.process.is_running, f"ended before it was ready\n{self.process.tail()}"
                assert time.monotonic() < give_up, f"not ready\n{self.process.tail()}"

    def start(self) -> Daemon:
        """Start the process and wait until it is ready."""
        self.launch()
        self.wait_ready()
        return self

    def restart(self) -> None:
        """Kill the process and start another one at the same address."""
        self.process.kill()
        self.start()

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = PATIENCE_S) -> int:
        """Ask it to end; return the exit status."""
        return self.process.stop(number, timeout_s)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()

    def close(self) -> None:
        """End the process, however it is, and forget it."""
        if self._process is not None:
            if self._process.is_running:
                self._process.resume()
            self._process.kill()
            self._process = None
        if self._notify is not None:
            self._notify.close()
            self._notify = None

    def _command(self) -> list[str]:
        flags = [(SETTINGS[name].flag, value) for name, value in self.settings.items()]
        return [sys.executable, "-m", "moriiod", "serve", *itertools.chain.from_iterable(flags)]

    # --- Where it is --------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Instance and rank, for messages and file names."""
        return f"{self.folder.name}{self.settings['daemon.tp_rank']}"

    @property
    def process(self) -> Process:
        """The process of the newest start."""
        assert self._process is not None, "not started"
        return self._process

    @property
    def notify(self) -> NotifySocket:
        """Where the newest start tells systemd."""
        assert self._notify is not None, "not started"
        return self._notify

    @property
    def socket_path(self) -> str:
        """Where workers connect."""
        usual = f"{self.settings['daemon.runtime_dir']}/rank{self.settings['daemon.tp_rank']}.sock"
        return self.settings.get("daemon.socket", usual)

    @property
    def address(self) -> PeerAddress:
        """How a router names its instance."""
        base_port = int(self.settings["control.base_port"])
        tp_size = int(self.settings["daemon.tp_size"])
        return PeerAddress(self.settings["control.host"], base_port, tp_size)

    # --- How it is ----------------------------------------------------------------------------

    def status(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Return its status document."""
        document: dict[str, Any] = json.loads(fetch_status(self.socket_path, timeout_s))
        return document

    def is_answering(self) -> bool:
        """Whether somebody answers at its socket now."""
        try:
            self.status(0.5)
        except DaemonLost:
            return False
        return True

    def fetch(self, page: str) -> tuple[int, str]:
        """Return the status and the text of a page of its HTTP server."""
        host = self.settings["telemetry.metrics_host"]
        port = int(self.settings["telemetry.metrics_base_port"])
        connection = http.client.HTTPConnection(host, port, timeout=10)
        try:
            connection.request("GET", page)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class End:
    """How a transfer ended, as a worker was told.

    Attributes:
        outcome: As in ``TransferEnded``; ``refused`` if the client refused to send the request.
        reason: As there; the error's code if it was refused.
        wrong: A byte of its blocks that is not what it must be; "" if all are right.
    """

    transfer_id: str
    role: str
    outcome: str
    reason: str
    message: str = ""
    retryable: bool = False
    n_bytes: int = 0
    n_layers: int = 0
    wrong: str = ""


class WorkerProcess:
    """A worker of one daemon, in a process of its own; see ``e2e_worker``.

    Args:
        daemon: Its daemon; must be ready when the worker starts.
        shape: Of its cache.
        name: What the daemon calls it, and the start of the name of its memfds.
    """

    def __init__(self, daemon: Daemon, shape: CacheShape, name: str = "") -> None:
        self.daemon = daemon
        self.shape = shape
        self.name = name or f"worker-{daemon.name}"
        #: What has ended and was not taken, oldest first.
        self.ends: list[End] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._numbers = itertools.count(1)
        self._ready_epoch = ""
        self._fds = make_memory(self.name, shape)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = ours
        setup = {
            "name": self.name,
            "socket_path": daemon.socket_path,
            "tp_rank": int(daemon.settings["daemon.tp_rank"]),
            "shape": asdict(shape),
            "fds": self._fds,
            "channel": theirs.fileno(),
        }
        with theirs:
            assert daemon.nursery is not None
            self.process = Process.fork(
                daemon.nursery,
                self.name,
                "tests.support.e2e_worker",
                [json.dumps(setup)],
                daemon.folder.parent / f"{self.name}.log",
                env=clean_environment(),
                fds=(*self._fds, theirs.fileno()),
            )

    def wait_ready(self, timeout_s: float = PATIENCE_S) -> Self:
        """Wait until it is attached and its cache is registered."""
        self._until(lambda: self._ready_epoch, "registered", timeout_s)
        return self

    def close(self) -> None:
        """End the process if it has not ended, and release the memory."""
        self.process.resume()
        self.process.kill()
        self.channel.close()
        for fd in self._fds:
            os.close(fd)

    def leave(self) -> bool:
        """Let it close its client and end; return whether the daemon has let go of everything."""
        is_clean: bool = self.ask("quit")["is_clean"]
        assert self.process.wait_ended() == 0, self.process.tail()
        return is_clean

    @contextmanager
    def cache(self) -> Iterator[KvCache]:
        """Map its memory in this process, also after its death."""
        cache = KvCache(self.shape, self._fds)
        try:
            yield cache
        finally:
            cache.close()

    # --- Talking ------------------------------------------------------------------------------

    def order(self, do: str, **arguments: Any) -> None:
        """Start a transfer; its end comes later. Nothing happens if the worker is dead."""
        self._send({"do": do, **arguments})

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Give a command that is answered at once; return the answer."""
        number = next(self._numbers)
        self._send({"do": do, "number": number, **arguments})
        self._until(lambda: number in self._answers, f"answer to {do}")
        return self._answers.pop(number)

    def take(self) -> list[End]:
        """Return, and forget, what has ended so far; never waits."""
        while self._receive(0.0):
            pass
        ends, self.ends = self.ends, []
        return ends

    def wait_end(self, role: str, transfer_id: str, timeout_s: float = PATIENCE_S) -> End:
        """Wait for the end of one transfer, and take it."""
        found: list[End] = []

        def has_ended() -> bool:
            found.extend(e for e in self.ends if (e.role, e.transfer_id) == (role, transfer_id))
            return bool(found)

        self._until(has_ended, f"the end of {role} {transfer_id}", timeout_s)
        self.ends.remove(found[0])
        return found[0]

    def wait_attached(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until its client is attached to the daemon that runs now."""
        epoch = self.daemon.status()["identity"]["epoch"]
        until(lambda: self.ask("look")["epoch"] == epoch, f"{self.name} attached", timeout_s)

    def _send(self, command: dict[str, Any]) -> None:
        try:
            self.channel.sendall(json.dumps(command).encode())
        except (BrokenPipeError, ConnectionResetError):
            assert not self.process.is_running

    def _until(self, condition: Any, what: str, timeout_s: float = PATIENCE_S) -> None:
        give_up = time.monotonic() + timeout_s
        while not condition():
            left = give_up - time.monotonic()
            text = f"{self.name}: {what}"
            assert left > 0, f"not within {timeout_s:g} s: {text}\n{self.process.tail()}"
            if not self._receive(min(left, 1.0)):
                assert self.process.is_running, f"{text}: has ended\n{self.process.tail()}"

    def _receive(self, timeout_s: float) -> bool:
        """Take one message; False if there was none in time, or will be none any more."""
        if not select.select((self.channel,), (), (), timeout_s)[0]:
            return False
        try:
            packet = self.channel.recv(PACKET_BYTES)
        except ConnectionResetError:
            return False
        if packet:
            self._sort(json.loads(packet))
        return bool(packet)

    def _sort(self, message: dict[str, Any]) -> None:
        match message:
            case {"ended": event, "wrong": wrong}:
                self.ends.append(End(**event, wrong=wrong))
            case {"refused": transfer_id, "role": role, "code": code}:
                self.ends.append(End(transfer_id, role, "refused", code))
            case {"answer": number, **answer}:
                self._answers[number] = answer
            case {"ready": epoch}:
                self._ready_epoch = epoch
            case _:
                raise AssertionError(f"{self.name} says {message}")
