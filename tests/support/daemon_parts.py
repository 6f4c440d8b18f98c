"""A driver and a dispatcher around a real core, with shells that only remember."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import requests as req
from moriiod.core.geometry import CacheLayout
from moriiod.core.ids import Generation
from moriiod.core.machine import Machine
from moriiod.core.messages import Identity
from moriiod.core.settings import CoreSettings
from moriiod.daemon.clock import Clock
from moriiod.daemon.dispatch import Dispatcher, Shells
from moriiod.daemon.driver import Driver, Wiring
from moriiod.daemon.observer import Observer
from moriiod.engines.base import RegionHandle
from moriiod.memory.held import HeldRegion
from moriiod.telemetry.metrics import DaemonInfo, GaugeValues, Metrics
from tests.support.caches import group
from tests.support.clock import FakeClock

EPOCH = "e" * 32
GENERATION = "9" * 32
ROUTE = b"worker"


def make_metrics() -> Metrics:
    """Return metrics of a daemon that holds nothing."""
    return Metrics(DaemonInfo("i", 0, 1, 0, 1, "shm", EPOCH), GaugeValues)


def make_machine(settings: CoreSettings | None = None) -> Machine:
    """Return the core of a single rank."""
    return Machine(Identity("i", 0, 1, 0, 1, EPOCH), settings or CoreSettings(), "shm")


def counted(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a counter by the values of its labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in metrics.families()
        for sample in family.samples
        if sample.name == name
    }


@dataclass
class FakeShells:
    """All shells in one: keeps every order, and answers what a test says.

    Attributes:
        calls: (name, argument) of every order, in order.
        delivers: Whether messages to clients and peers leave.
    """

    calls: list[tuple[str, Any]] = field(default_factory=list)
    delivers: bool = True
    held: tuple[HeldRegion, ...] = ()

    def send(self, effect: ef.ReplyToClient | ef.SendEvent | ef.SendToPeer) -> bool:
        """A message to a client or to a peer."""
        self.calls.append(("send", effect))
        return self.delivers

    def disconnect(self, generation: Generation) -> None:
        """Of the fd socket."""
        self.calls.append(("disconnect", generation))

    def hold(self, generation: Generation) -> tuple[HeldRegion, ...]:
        """Of the fd socket."""
        self.calls.append(("hold", generation))
        return self.held

    def register(self, layout: CacheLayout, handles: Sequence[RegionHandle]) -> None:
        """Of the engine."""
        self.calls.append(("register", (layout, tuple(handles))))

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Every other order: only remembered."""
        if name not in _ORDERS:
            raise AttributeError(name)
        return lambda *args: self.calls.append((name, args[0] if len(args) == 1 else args))

    def shells(self) -> Shells:
        """What the dispatcher takes."""
        return Shells(*[cast(Any, self)] * 4)

    @property
    def names(self) -> list[str]:
        """Names of the orders so far."""
        return [name for name, _ in self.calls]

    def replies(self) -> list[req.Reply]:
        """Replies so far."""
        return [e.body for _, e in self.calls if isinstance(e, ef.ReplyToClient)]

    def events(self) -> list[ef.SendEvent]:
        """Events so far."""
        return [e for _, e in self.calls if isinstance(e, ef.SendEvent)]


_ORDERS = frozenset(
    {
        "release", "open_route", "close_route", "open_session", "close_session", "post", "cancel",
        "fence", "readmit",
    }
)  # fmt: skip


@dataclass
class Assembly:
    """A driver that is started.

    Attributes:
        drained: What the drain ended with.
        broken: Bugs that were reported.
    """

    clock: FakeClock
    driver: Driver
    shells: FakeShells
    machine: Machine
    metrics: Metrics
    observer: Observer
    drained: list[bool]
    broken: list[Exception]

    def request(self, sequence: int, body: req.Request) -> None:
        """A request of the one worker."""
        self.driver.handle(ev.RequestReceived(ROUTE, sequence, body))


def assemble(
    machine: Machine | None = None,
    *,
    render_status: Callable[[], str] = lambda: "{}",
    wrap: Callable[[Dispatcher], Any] = lambda dispatcher: dispatcher,
    prepare: Callable[[Driver], None] = lambda driver: None,
) -> Assembly:
    """Return a started driver around a core.

    Args:
        machine: The core; None = a fresh one.
        render_status: Answers GetStatus.
        wrap: Puts something in front of the dispatcher.
        prepare: Called with the driver before it is started.
    """
    clock, shells = FakeClock(), FakeShells()
    machine = machine or make_machine()
    metrics, drained, broken = make_metrics(), list[bool](), list[Exception]()
    observer = Observer(metrics, lambda epoch: f"of {epoch[:2]}")
    driver = Driver(cast(Clock, clock))
    prepare(driver)
    dispatcher = Dispatcher(shells.shells(), observer, driver.handle, drained.append, clock)
    outlet = wrap(dispatcher)
    driver.start(Wiring(machine, outlet, observer, render_status, broken.append))
    return Assembly(clock, driver, shells, machine, metrics, observer, drained, broken)


def attach(assembly: Assembly) -> None:
    """Bring the worker to the point where its cache is registered."""
    n_bytes = 8 * 4096
    handle = assembly.driver.handle
    handle(ev.WorkerConnected(GENERATION, 1, 0))
    handle(ev.RegionOffered(GENERATION, 0, n_bytes))
    assembly.request(1, req.Attach(GENERATION, "w"))
    assembly.request(2, req.RegisterCaches((group(),), (n_bytes,)))
    handle(ev.MemoryRegistered(GENERATION, (b"d",)))
