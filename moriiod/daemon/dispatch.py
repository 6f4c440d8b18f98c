"""Each order of the core, carried out by the shell whose business it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from moriiod.control.endpoint import ControlEndpoint
from moriiod.core import effects as ef
from moriiod.core.events import Event, EventUndelivered
from moriiod.daemon.clock import Clock
from moriiod.daemon.observer import Observer
from moriiod.engines.base import RegionHandle
from moriiod.engines.runner import EngineRunner
from moriiod.ipc.server import IpcServer
from moriiod.memory.fdserver import FdServer

_ClientEffect = ef.ReplyToClient | ef.SendEvent | ef.DisconnectWorker
_MemoryEffect = ef.RegisterMemory | ef.ReleaseMemory
_PeerEffect = ef.OpenRoute | ef.CloseRoute | ef.SendToPeer
_EngineEffect = (
    ef.OpenSession | ef.CloseSession | ef.PostOp | ef.CancelOp | ef.FencePeer | ef.ReadmitPeer
)


@dataclass(frozen=True, slots=True)
class Shells:
    """The parts of the daemon that do I/O."""

    ipc: IpcServer
    fds: FdServer
    control: ControlEndpoint
    engine: EngineRunner


class Dispatcher:
    """Implements ``driver.Outlet``.

    Args:
        shells: Who does the work.
        observer: Told what became of events to clients.
        emit: Takes events that an order raises.
        on_drained: Called when the drain has ended; says whether nothing was left.
        clock: For the observer.
    """

    def __init__(
        self,
        shells: Shells,
        observer: Observer,
        emit: Callable[[Event], None],
        on_drained: Callable[[bool], None],
        clock: Clock,
    ) -> None:
        self._shells = shells
        self._observer = observer
        self._emit = emit
        self._on_drained = on_drained
        self._clock = clock

    def dispatch(self, effect: ef.Effect) -> None:
        """Carry out one order; never waits."""
        match effect:
            case ef.ReplyToClient() | ef.SendEvent() | ef.DisconnectWorker():
                self._to_client(effect)
            case ef.RegisterMemory() | ef.ReleaseMemory():
                self._memory(effect)
            case ef.OpenRoute() | ef.CloseRoute() | ef.SendToPeer():
                self._to_peer(effect)
            case ef.Transition() | ef.CountProblem():
                return  # the observer has seen them
            case ef.DrainEnded():
                self._on_drained(effect.clean)
            case _:
                self._to_engine(effect)

    def _to_client(self, effect: _ClientEffect) -> None:
        match effect:
            case ef.ReplyToClient():
                if not self._shells.ipc.send(effect):
                    self._observer.reply_undelivered(effect, self._clock.now())
            case ef.SendEvent():
                is_delivered = self._shells.ipc.send(effect)
                now = self._clock.now()
                self._observer.event_sent(effect, is_delivered=is_delivered, now=now)
                if not is_delivered:
                    self._emit(EventUndelivered(effect.route, effect.sequence))
            case ef.DisconnectWorker():
                self._shells.fds.disconnect(effect.generation)
            case _:
                assert_never(effect)

    def _memory(self, effect: _MemoryEffect) -> None:
        match effect:
            case ef.RegisterMemory():
                held = self._shells.fds.hold(effect.layout.generation)
                handles = [RegionHandle(one.kind, one.fd, one.n_bytes) for one in held]
                self._shells.engine.register(effect.layout, handles)
            case ef.ReleaseMemory():
                # The runner gives the file descriptors back before it says MemoryReleased.
                self._shells.engine.release(effect.generation)
            case _:
                assert_never(effect)

    def _to_peer(self, effect: _PeerEffect) -> None:
        match effect:
            case ef.OpenRoute():
                self._shells.control.open_route(effect)
            case ef.CloseRoute():
                self._shells.control.close_route(effect)
            case ef.SendToPeer():
                # What cannot be sent now is lost; the core repeats what must arrive.
                self._shells.control.send(effect)
            case _:
                assert_never(effect)

    def _to_engine(self, effect: _EngineEffect) -> None:
        engine = self._shells.engine
        match effect:
            case ef.OpenSession():
                engine.open_session(
                    effect.session, effect.peer, effect.local_generation, effect.remote
                )
            case ef.CloseSession():
                engine.close_session(effect.session)
            case ef.PostOp():
                engine.post(effect.op, effect.session, effect.direction, effect.plan)
            case ef.CancelOp():
                engine.cancel(effect.op)
            case ef.FencePeer():
                engine.fence(effect.peer)
            case ef.ReadmitPeer():
                engine.readmit(effect.peer)
            case _:
                assert_never(effect)
