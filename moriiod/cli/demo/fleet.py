"""Starts the demo's processes and ends them: a daemon and a worker for every rank."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from moriiod.cli.demo import messages as msg
from moriiod.cli.demo.children import Child, end, wait_ended
from moriiod.cli.demo.hub import ChildEnded, DaemonReady, Hub, HubEvent, HungUp, Said
from moriiod.cli.demo.messages import Channel
from moriiod.cli.demo.plan import HOST, DemoOptions, Rank
from moriiod.cli.demo.ports import find_base_ports
from moriiod.cli.demo.tether import die_with_parent
from moriiod.config.names import ENV_PREFIX, toml_text
from moriiod.errors import AddressInUse

_START_ATTEMPTS: Final = 3
_END_PATIENCE_S: Final = 10.0
#: How long a daemon waits for transfers when the demo is interrupted.
_DRAIN_S: Final = 2.0
_PID_BYTES: Final = 8
#: One thread each: there are more processes than cores, and a fork may only copy one thread.
_ONE_THREAD: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class DemoFailed(Exception):
    """The demo cannot go on; ``suspects`` are the processes whose logs may tell why."""

    def __init__(self, text: str, suspects: tuple[Child, ...] = ()) -> None:
        super().__init__(text)
        self.suspects = suspects


@dataclass(slots=True)
class Instance:
    """One prefill or decode instance: its directory and its control ports."""

    name: str
    ranks: list[Rank]
    directory: Path
    base_port: int = 0

    def socket_path(self, rank: Rank) -> Path:
        """Return the worker socket of a rank's daemon."""
        return self.directory / f"rank{rank.tp_rank}.sock"


@dataclass(slots=True)
class Fleet:
    """All processes of a demo.

    Args:
        options: The whole demo.
        directory: For sockets, settings and logs; not deleted here.
        hub: Where their ends and words are waited for.
        log_level: Of the daemons.
    """

    options: DemoOptions
    directory: Path
    hub: Hub
    log_level: str = "info"
    instances: dict[str, Instance] = field(default_factory=dict)
    daemons: dict[Rank, Child] = field(default_factory=dict)
    workers: dict[Rank, Child] = field(default_factory=dict)
    _zygote: Child | None = None
    _zygote_socket: socket.socket | None = None

    def __post_init__(self) -> None:
        for rank in self.options.ranks:
            name = rank.instance_name
            if name not in self.instances:
                self.instances[name] = Instance(name, [], self.directory / name)
            self.instances[name].ranks.append(rank)

    def instance_of(self, rank: Rank) -> Instance:
        """Return the instance that a rank belongs to."""
        return self.instances[rank.instance_name]

    def base_port(self, side: str, index: int) -> int:
        """Return the control port of an instance's rank 0; what routers know of it."""
        return self.instances[f"{side[0].upper()}{index}"].base_port

    # --- Start --------------------------------------------------------------------------------

    def start_daemons(self) -> None:
        """Start all daemons and wait until they are ready.

        Raises:
            DemoFailed: One ended, or was not ready in time.
            AddressInUse: Ports that were free were taken each time before a daemon got them.
        """
        for instance in self.instances.values():
            instance.directory.mkdir(mode=0o750)
        self._start_zygote()
        for _ in range(_START_ATTEMPTS):
            self._launch_daemons()
            if self._wait_ready():
                return
            end(list(self.daemons.values()), _END_PATIENCE_S)
            self._forget_daemons()
        raise AddressInUse(
            f"somebody took the control ports {_START_ATTEMPTS} times", attempts=_START_ATTEMPTS
        )

    def _launch_daemons(self) -> None:
        sizes = [len(instance.ranks) for instance in self.instances.values()]
        bases = find_base_ports(sizes, random.Random(os.urandom(8)))
        for instance, base_port in zip(self.instances.values(), bases, strict=True):
            instance.base_port = base_port
            settings = instance.directory / "moriiod.toml"
            settings.write_text(self._settings(instance), encoding="utf-8")
            for rank in instance.ranks:
                self._launch_daemon(instance, rank, settings)

    def _launch_daemon(self, instance: Instance, rank: Rank, settings: Path) -> None:
        notify_path = instance.directory / f"rank{rank.tp_rank}.notify"
        self.hub.open_notify_socket(rank, notify_path)
        command = [
            *(sys.executable, "-m", "moriiod", "serve"),
            *("--config", str(settings), "--tp-rank", str(rank.tp_rank)),
        ]
        environment = _clean_environment() | {"NOTIFY_SOCKET": str(notify_path)}
        log = instance.directory / f"rank{rank.tp_rank}.log"
        self.daemons[rank] = self._spawn(f"daemon {rank.name}", command, environment, log)

    def _settings(self, instance: Instance) -> str:
        tables: dict[str, dict[str, object]] = {
            "daemon": {
                "instance": instance.name,
                "tp_size": len(instance.ranks),
                "runtime_dir": str(instance.directory),
                "drain_timeout_s": _DRAIN_S,
            },
            "control": {"host": HOST, "base_port": instance.base_port},
            "engine": {"name": self.options.engine},
            "telemetry": {"log_level": self.log_level},
            "topology": {"allow_uneven": self.options.allow_uneven},
        }
        return "\n".join(
            f"[{name}]\n" + "".join(f"{key} = {toml_text(v)}\n" for key, v in table.items())
            for name, table in tables.items()
        )

    def _wait_ready(self) -> bool:
        """Wait for READY=1 of all; False if a port was taken by somebody else meanwhile."""
        missing = set(self.daemons)
        deadline = time.monotonic() + self.options.timeout_s
        while missing:
            match self.hub.next(deadline):
                case DaemonReady(rank):
                    missing.discard(rank)
                case ChildEnded(pidfd):
                    child = self._child(pidfd)
                    # The command line puts the error's code before its message.
                    if AddressInUse.code in child.tail(5):
                        return False
                    raise self._ended_early(child)
                case None:
                    names = ", ".join(sorted(rank.name for rank in missing))
                    raise DemoFailed(
                        f"not ready within {self.options.timeout_s:g} s: {names}",
                        tuple(self.daemons[rank] for rank in sorted(missing)),
                    )
                case event:
                    raise self.unexpected(event)
        return True

    def _forget_daemons(self) -> None:
        self.hub.forget_daemons(child.pidfd for child in self.daemons.values())
        for child in self.daemons.values():
            child.close()
        self.daemons.clear()

    def start_workers(self) -> None:
        """Fork a worker for every rank and wait until its cache is registered.

        Raises:
            DemoFailed: One ended, or was not done in time.
        """
        for rank in self.options.ranks:
            self._fork_worker(rank)
        missing = set(self.workers)
        deadline = time.monotonic() + self.options.timeout_s
        while missing:
            match self.hub.next(deadline):
                case Said(rank, msg.Registered()):
                    missing.discard(rank)
                case None:
                    names = ", ".join(sorted(rank.name for rank in missing))
                    raise DemoFailed(
                        f"not registered within {self.options.timeout_s:g} s: {names}",
                        tuple(self.workers[rank] for rank in sorted(missing)),
                    )
                case event:
                    raise self.unexpected(event)

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._zygote_socket = ours
        with theirs:
            command = [
                *(sys.executable, "-m", "moriiod.cli.demo.zygote"),
                *(str(theirs.fileno()), str(os.getpid())),
            ]
            environment = _clean_environment() | _ONE_THREAD
            log = self.directory / "zygote.log"
            self._zygote = self._spawn(
                "zygote", command, environment, log, pass_fds=(theirs.fileno(),)
            )
        ours.settimeout(self.options.timeout_s)

    def _fork_worker(self, rank: Rank) -> None:
        control, zygote = self._zygote_socket, self._zygote
        if control is None or zygote is None:
            raise DemoFailed("the daemons come first")
        log_path = self.instance_of(rank).directory / f"worker{rank.tp_rank}.log"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, log_path.open("wb") as log:
            try:
                socket.send_fds(control, [b"f"], [theirs.fileno(), log.fileno()])
                data, fds, _, _ = socket.recv_fds(control, _PID_BYTES, 1)
            except OSError as error:
                ours.close()
                raise DemoFailed(f"the zygote does not answer: {error}", (zygote,)) from error
        ours.setblocking(False)
        channel = Channel(ours)
        self.hub.watch_worker(rank, channel)
        if len(data) != _PID_BYTES or len(fds) != 1:
            raise DemoFailed("the zygote has ended", (zygote,))
        pid = int.from_bytes(data, "little")
        self.workers[rank] = Child(f"worker {rank.name}", pid, fds[0], log_path)
        self.hub.send(rank, self._setup(rank))

    def _setup(self, rank: Rank) -> msg.Setup:
        options, instance = self.options, self.instance_of(rank)
        shape = options.shape(rank.side)
        return msg.Setup(
            side=rank.side,
            instance=rank.instance,
            tp_rank=rank.tp_rank,
            tp_size=shape.tp_size,
            socket_path=str(instance.socket_path(rank)),
            base_port=instance.base_port,
            layers=shape.layers,
            blocks=shape.blocks,
            kv_heads=options.kv.kv_heads,
            layout=options.kv.layout,
            head_order=options.kv.head_order,
            model=options.kv.model,
            allow_uneven=options.allow_uneven,
            seed=options.seed,
            timeout_s=options.timeout_s,
            fault=options.fault if rank == options.faulty_rank else "none",
        )

    def _spawn(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        pass_fds: tuple[int, ...] = (),
    ) -> Child:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
                # Ctrl-C is for the coordinator alone: it ends the others in order.
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        child = Child(name, process.pid, os.pidfd_open(process.pid), log, process)
        self.hub.watch_child(child.pidfd)
        return child

    # --- What should not happen ---------------------------------------------------------------

    def unexpected(self, event: HubEvent) -> DemoFailed:
        """Return the failure that an event means which nobody waits for."""
        match event:
            case ChildEnded(pidfd):
                return self._ended_early(self._child(pidfd))
            case HungUp(rank):
                return self._ended_early(self.workers[rank])
            case _:
                return DemoFailed(f"out of turn: {event}")

    def _child(self, pidfd: int) -> Child:
        return next(child for child in self._own_children() if child.pidfd == pidfd)

    def _own_children(self) -> list[Child]:
        zygote = [] if self._zygote is None else [self._zygote]
        return [*self.daemons.values(), *zygote]

    def _ended_early(self, noticed: Child) -> DemoFailed:
        """Name who ended first: a worker goes when its daemon has gone, and is noticed sooner."""
        children = self._own_children()
        running = wait_ended(children, time.monotonic())
        ended = [child for child in children if child not in running] or [noticed]
        return DemoFailed("; ".join(_describe_end(child) for child in ended), (*ended, noticed))

    # --- End ----------------------------------------------------------------------------------

    def stop_daemons(self) -> list[str]:
        """Stop the daemons as an operator would; return what was wrong with how they ended."""
        killed = end(list(self.daemons.values()), self.options.timeout_s)
        wrong = [
            f"{child.name} did not stop within {self.options.timeout_s:g} s" for child in killed
        ]
        for child in self.daemons.values():
            status = None if child.process is None else child.process.wait()
            if status and child not in killed:
                wrong.append(f"{child.name} stopped with status {status}")
        return wrong

    def close(self) -> None:
        """End whatever still runs. What was ended in good order is not touched."""
        self.hub.hang_up()
        end(list(self.workers.values()), _END_PATIENCE_S)
        if self._zygote_socket is not None:
            self._zygote_socket.close()
        rest = list(self.daemons.values())
        if self._zygote is not None:
            wait_ended([self._zygote], time.monotonic() + _END_PATIENCE_S)
            rest.append(self._zygote)
        end(rest, _END_PATIENCE_S)
        for child in (*self.workers.values(), *rest):
            child.close()
        self.workers.clear()
        self.daemons.clear()
        self._zygote = None


def _describe_end(child: Child) -> str:
    status = "" if child.process is None else f" with status {child.process.wait()}"
    return f"{child.name} (pid {child.pid}) has ended{status}"


def _clean_environment() -> dict[str, str]:
    """Return our environment without anything that would change a daemon's settings."""
    unwanted = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(ENV_PREFIX) and key not in unwanted
    }
