"""One daemon, assembled from its configuration: what it is made of, and in which order."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

from moriiod.config.schema import Config, EngineSection
from moriiod.control.endpoint import ControlEndpoint
from moriiod.core.events import DrainRequested
from moriiod.core.ids import Epoch
from moriiod.core.machine import Machine
from moriiod.core.snapshot import take_counts, take_snapshot
from moriiod.daemon import settings
from moriiod.daemon.clock import Clock, Every, LoopClock
from moriiod.daemon.dispatch import Dispatcher, Shells
from moriiod.daemon.driver import Driver, Wiring
from moriiod.daemon.observer import Observer
from moriiod.daemon.status import (
    MAX_ROWS,
    Addresses,
    DaemonState,
    ShellCounters,
    gauges_of,
    render_status,
)
from moriiod.engines.base import RegionExporter, TransferEngine
from moriiod.engines.factory import make_engine
from moriiod.engines.runner import EngineRunner
from moriiod.errors import ConfigError
from moriiod.ipc.probe import ping
from moriiod.ipc.server import IpcServer
from moriiod.memory.fdserver import FdServer
from moriiod.telemetry.http import Health, HttpSources, TelemetryServer
from moriiod.telemetry.metrics import GaugeValues, Metrics
from moriiod.zmqio.options import new_context

#: Engines that ``auto`` tries, best first.
_AUTO: Final = ("mori", "nixl", "shm")
#: Longest wait for the answer of our own socket before the daemon is ready.
_SELF_CHECK_S: Final = 5.0
#: How long the engine may take to end what is in flight and to let go of all memory.
_ENGINE_CLOSE_S: Final = 5.0
#: How long peers and workers have to read what they were told last. libzmq throws away what a
#: dialled socket has received and not yet read when its connection ends.
_FAREWELL_S: Final = 0.2
#: How long goodbyes and last events may take to leave.
_LINGER_S: Final = 0.5
#: How often the loop's lag is measured, and how often the socket files are looked at.
_LAG_INTERVAL_S: Final = 1.0
_PATH_INTERVAL_S: Final = 2.0

_log: Final = logging.getLogger("moriiod.daemon")

#: Makes an engine from what hands memory to peers and the epoch of the daemon.
EngineMaker = Callable[[RegionExporter, Epoch], TransferEngine]


class Phase(enum.Enum):
    """Where a daemon stands in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a daemon is over.

    Attributes:
        is_clean: The drain left nothing in flight.
        bug: What broke it; None if nothing did.
    """

    is_clean: bool
    bug: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a daemon that was started is made of."""

    clock: Clock
    started_at: float
    driver: Driver
    shells: Shells
    machine: Machine
    metrics: Metrics
    http: TelemetryServer


class Daemon:
    """Everything that serves one rank.

    ``start``, then ``wait_ended``, then ``close``; all of it on one running loop. Any number of
    daemons may live on one loop.

    Args:
        config: What it is and where.
        make: Makes the engine; None = the one that the configuration names.

    Attributes:
        epoch: Of this start.
    """

    def __init__(self, config: Config, make: EngineMaker | None = None) -> None:
        self.config: Final = config
        self.epoch: Final[Epoch] = uuid.uuid4().hex
        self._make = make or partial(_make_engine, config.engine)
        self._stack = AsyncExitStack()
        self._maybe_parts: _Parts | None = None
        self._ended: asyncio.Future[Ended] | None = None
        self._phase = Phase.STARTING
        #: What does not work although the daemon runs; empty = nothing.
        self._trouble = ""
        self._early_dropped = 0
        self._is_drained = False

    # --- Life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind every socket, start the engine, and see that a client gets an answer.

        Raises:
            ConfigError: The configuration cannot work on this machine.
            AddressInUse: A live process holds a socket or a port.
            MoriiodError: The engine does not start, or our own socket does not answer.
        """
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        driver = Driver(LoopClock(loop))
        try:
            await self._start(driver, LoopClock(loop))
        except BaseException as error:
            await self.close()
            if driver.bug is not None:
                raise driver.bug from error
            raise
        self._phase = Phase.READY

    async def _start(self, driver: Driver, clock: Clock) -> None:
        config, epoch, stack = self.config, self.epoch, self._stack
        started_at = clock.now()
        context = new_context(config.limits.max_peers)
        stack.callback(context.term)
        stack.callback(driver.stop)
        fds = FdServer(settings.fd_settings(config), epoch, driver.hooks)
        stack.callback(fds.close)
        ipc = IpcServer(context, settings.ipc_settings(config), epoch, driver.hooks)
        stack.callback(ipc.close, _LINGER_S)
        control = ControlEndpoint(context, settings.control_settings(config), epoch, driver.hooks)
        stack.callback(control.close, _LINGER_S)
        stack.push_async_callback(self._bid_farewell)
        # In this order, and without letting the loop run: nobody is served before all are bound.
        fds.open()
        ipc.open()
        control.open()
        engine = EngineRunner(self._make(fds.exports, epoch), driver.hooks, fds.release)
        engine.open()
        stack.push_async_callback(_close_engine, engine)
        stack.callback(driver.retire)
        http = TelemetryServer(HttpSources(self.render_metrics, self.health, self.readiness))
        shells = Shells(ipc, fds, control, engine)
        machine = self._make_machine(engine)
        info = settings.daemon_info(config, machine.engine, epoch)
        metrics = Metrics(info, self._read_gauges, config.telemetry.max_peer_labels)
        self._maybe_parts = _Parts(clock, started_at, driver, shells, machine, metrics, http)
        self._wire(self._parts)
        if config.metrics_port:
            stack.push_async_callback(http.close)
            await http.start(config.telemetry.metrics_host, config.metrics_port)
        self._watch(self._parts)
        await ping(context, config.socket_path, epoch, _SELF_CHECK_S)

    def _make_machine(self, engine: EngineRunner) -> Machine:
        return Machine(
            settings.identity_of(self.config, self.epoch),
            settings.core_settings(self.config),
            engine.capabilities.name,
            engine.capabilities.max_op_bytes,
        )

    def _wire(self, parts: _Parts) -> None:
        driver, machine = parts.driver, parts.machine
        observer = Observer(parts.metrics, self._instance_of)
        outlet = Dispatcher(parts.shells, observer, driver.handle, self._on_drained, parts.clock)
        driver.start(Wiring(machine, outlet, observer, self.render_status, self._on_broken))

    def _watch(self, parts: _Parts) -> None:
        for interval_s, callback in (
            (_LAG_INTERVAL_S, parts.metrics.loop_lag),
            (_PATH_INTERVAL_S, self._look_at_paths),
        ):
            every = Every(parts.clock, interval_s, callback)
            every.start()
            self._stack.callback(every.stop)

    def drain(self, timeout_s: float | None = None) -> None:
        """Take no new transfers, and end when the others have.

        Args:
            timeout_s: After so long what is left is aborted; None = as configured. Asked a second
                time, it is aborted at once.
        """
        self._phase = Phase.DRAINING
        limit = self.config.daemon.drain_timeout_s if timeout_s is None else timeout_s
        self._parts.driver.handle(DrainRequested(limit))

    async def wait_ended(self) -> Ended:
        """Wait for the end of a drain, for ``end``, or for a bug."""
        if self._ended is None:
            raise _not_started()
        return await self._ended

    def end(self) -> None:
        """Wait for no drain any more; ``close`` still ends what is in flight."""
        self._end(Ended(is_clean=False))

    async def close(self) -> None:
        """Close the engine, the links and the sockets, in this order. Idempotent.

        The engine first, so that peers are still told of the operations that were cut short.
        """
        self._phase = Phase.ENDED
        await self._stack.aclose()

    async def _bid_farewell(self) -> None:
        parts = self._maybe_parts
        if parts is None or not self._is_drained:
            return
        if len(parts.machine.peers) or len(parts.machine.clients):
            loop = asyncio.get_running_loop()
            heard: asyncio.Future[None] = loop.create_future()
            timer = loop.call_later(_FAREWELL_S, heard.set_result, None)
            try:
                await heard
            finally:
                timer.cancel()

    def on_bug(self, error: Exception) -> None:
        """Something outside of the driver broke: nothing is decided any more."""
        self._parts.driver.on_bug(error)

    def _on_drained(self, is_clean: bool) -> None:
        self._is_drained = True
        self._end(Ended(is_clean))

    def _on_broken(self, bug: Exception) -> None:
        self._trouble = "a bug; see the log"
        self._end(Ended(is_clean=False, bug=bug))

    def _end(self, ended: Ended) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(ended)

    # --- How it is ----------------------------------------------------------------------------

    @property
    def _parts(self) -> _Parts:
        if self._maybe_parts is None:
            raise _not_started()
        return self._maybe_parts

    @property
    def phase(self) -> Phase:
        """Where it stands in its life."""
        return self._phase

    @property
    def addresses(self) -> Addresses:
        """Where it is reached; known from ``start`` on."""
        control = self._parts.shells.control.address
        host, port = self.config.telemetry.metrics_host, self._parts.http.port
        return Addresses(
            socket=self.config.socket_path,
            fd_socket=self.config.fd_socket_path,
            control=_host_port(control.host, control.port),
            metrics=_host_port(host, port) if port else None,
        )

    @property
    def control_port(self) -> int:
        """The control port that is really bound."""
        return self._parts.shells.control.address.port

    @property
    def machine(self) -> Machine:
        """The core, to look at; only the driver changes it."""
        return self._parts.machine

    def health(self) -> Health:
        """Return whether it works at all."""
        return Health(not self._trouble, self._trouble)

    def readiness(self) -> Health:
        """Return whether it takes new transfers now."""
        if self._trouble:
            return Health(False, self._trouble)
        if self._phase is not Phase.READY:
            return Health(False, self._phase.value)
        return Health(True)

    def render_status(self) -> str:
        """Return its state as JSON text; see ``daemon.status``."""
        parts = self._parts
        now = parts.clock.now()
        state = DaemonState(
            identity=parts.machine.ctx.identity,
            state="unhealthy" if self._trouble else self._phase.value,
            reason=self.readiness().detail,
            uptime_s=now - parts.started_at,
            addresses=self.addresses,
            engine=parts.machine.engine,
            snapshot=take_snapshot(parts.machine, now, MAX_ROWS),
            shells=_count_shells(parts.shells),
        )
        return render_status(state, parts.metrics)

    def render_metrics(self) -> bytes:
        """Return its metrics in the text format of Prometheus."""
        dropped = take_counts(self._parts.machine).early_dropped
        self._parts.metrics.early_dropped(dropped - self._early_dropped)
        self._early_dropped = dropped
        return self._parts.metrics.render()

    def _read_gauges(self) -> GaugeValues:
        return gauges_of(take_counts(self._parts.machine))

    def _instance_of(self, epoch: Epoch) -> str:
        peer = self._parts.machine.peers.get(epoch)
        return "" if peer is None else peer.identity.instance

    def _look_at_paths(self, _late_s: float) -> None:
        """Notice that somebody removed or replaced the socket files (case S4)."""
        config, parts = self.config, self._parts
        if parts.driver.bug is not None:
            return
        gone = [
            path
            for path, is_intact in (
                (config.socket_path, parts.shells.ipc.is_path_intact()),
                (config.fd_socket_path, parts.shells.fds.is_path_intact()),
            )
            if not is_intact
        ]
        trouble = f"not reachable any more at {' and '.join(gone)}" if gone else ""
        if trouble and trouble != self._trouble:
            _log.error("a socket file was removed or replaced: %s", trouble)
        self._trouble = trouble


async def _close_engine(engine: EngineRunner) -> None:
    if not await engine.close(_ENGINE_CLOSE_S):
        _log.error(
            "the engine did not end in time: its memory stays registered until this process ends",
            extra={"timeout_s": _ENGINE_CLOSE_S, "ops": engine.in_flight},
        )


def _count_shells(shells: Shells) -> ShellCounters:
    return ShellCounters(
        ipc=shells.ipc.counters,
        control=shells.control.counters,
        routes_dialled=shells.control.n_dialled,
        fd_connections=shells.fds.n_connections,
        region_fds=shells.fds.n_region_fds,
        exported_regions=shells.fds.exports.n_exports,
        engine_sessions=shells.engine.n_sessions,
        engine_ops=shells.engine.in_flight,
    )


def _not_started() -> RuntimeError:
    return RuntimeError("the daemon was not started")


def _make_engine(section: EngineSection, exporter: RegionExporter, epoch: Epoch) -> TransferEngine:
    make = partial(
        make_engine, exporter=exporter, epoch=epoch, shm_chunk_bytes=section.shm_chunk_bytes
    )
    if section.name != "auto":
        return make(section.name)
    for candidate in _AUTO[:-1]:
        with contextlib.suppress(ConfigError):
            return make(candidate)
    return make(_AUTO[-1])


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
