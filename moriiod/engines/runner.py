"""Owns one transfer engine: calls it on its own threads, reports what came of it as core events.

Used on the loop's thread only; no method waits. Nothing here decides about transfers: it keeps
the calls of one session, generation or peer in order, and sees that nothing is deregistered while
a session of it is still being opened or closed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Final

from moriiod.core.events import (
    MemoryRefused,
    MemoryRegistered,
    MemoryReleased,
    OpEnded,
    OpRefused,
    SessionOpened,
    SessionRefused,
)
from moriiod.core.geometry import CacheLayout, RemoteLayout
from moriiod.core.ids import Epoch, Generation, OpId, SessionId
from moriiod.core.plan import TransferPlan
from moriiod.engines.base import (
    Direction,
    EngineCapabilities,
    RegionHandle,
    Session,
    TransferEngine,
)
from moriiod.engines.fences import PeerFences
from moriiod.engines.threads import Cancel, DataThread, OpResult, Post, SetupThreads
from moriiod.errors import MoriiodError, RegistrationFailed, SessionFailed, TransferAborted
from moriiod.zmqio.hooks import ShellHooks

#: Most operations in flight; more are refused, and posted again later.
MAX_OPS: Final = 4096
#: How long a thread that computes may keep another from running Python code. A thread that copies
#: needs the interpreter for a moment between two copies; with Python's 5 ms, a busy loop would
#: slow it down to a copy every 5 ms.
SWITCH_INTERVAL_S: Final = 0.0005
#: Kind of problem this shell counts: a call failed that no event answers.
CALL_FAILED: Final = "engine_call_failed"

_log = logging.getLogger(__name__)


class _Phase(Enum):
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"


@dataclass(slots=True, eq=False)
class _Memory:
    """A generation: OPENING while it is being registered, CLOSING from ``release`` on."""

    phase: _Phase = _Phase.OPENING
    is_registered: bool = False
    sessions: set[SessionId] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _OpenSession:
    """CLOSING while it opens: it is closed as soon as it has opened."""

    generation: Generation
    phase: _Phase = _Phase.OPENING
    handle: Session | None = None


class EngineRunner:
    """One engine and its threads.

    Args:
        engine: Nobody else calls it.
        hooks: The driver.
        release_handles: Called when the engine has let go of a generation's regions (or never
            took them), before the event that says so.
        max_ops: Most operations in flight.
    """

    def __init__(
        self,
        engine: TransferEngine,
        hooks: ShellHooks,
        release_handles: Callable[[Generation], None],
        max_ops: int = MAX_OPS,
    ) -> None:
        self._engine = engine
        self._hooks = hooks
        self._release_handles = release_handles
        self._max_ops = max_ops
        self._memories: dict[Generation, _Memory] = {}
        self._sessions: dict[SessionId, _OpenSession] = {}
        #: Operations in flight; True once they are cancelled.
        self._ops: dict[OpId, bool] = {}
        self._waiter: tuple[Callable[[], bool], asyncio.Future[bool]] | None = None
        self._is_closing = False

    def open(self) -> None:
        """Start the threads; results are delivered on the running loop.

        Until ``close``, the whole process switches threads more often than Python's default.
        """
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_INTERVAL_S, self._switch_interval_s))
        threads = self._engine.capabilities.setup_threads
        self._setup = SetupThreads(threads, self._loop, self._notify)
        self._data = DataThread(self._engine, self._loop, self._on_results, self._hooks.on_bug)
        self._fences = PeerFences(self._engine, self._setup, self._hooks.emit, self._report)

    @property
    def capabilities(self) -> EngineCapabilities:
        """Of the engine."""
        return self._engine.capabilities

    @property
    def in_flight(self) -> int:
        """Number of operations that were posted and have not ended."""
        return len(self._ops)

    @property
    def n_sessions(self) -> int:
        """Number of sessions that are open, opening or closing."""
        return len(self._sessions)

    # --- Memory -------------------------------------------------------------------------------

    def register(self, layout: CacheLayout, handles: Sequence[RegionHandle]) -> None:
        """Register a generation; ends in MemoryRegistered or MemoryRefused.

        Args:
            layout: Says how many bytes of which regions.
            handles: One a region, in order; more are ignored. They stay open until
                ``release_handles`` is called.
        """
        generation, sizes = layout.generation, layout.region_bytes
        if generation in self._memories:
            refused = RegistrationFailed("this generation is registered", generation=generation)
            self._hooks.emit(MemoryRefused(generation, refused))
            return
        self._memories[generation] = _Memory()
        if len(handles) < len(sizes):
            missing = RegistrationFailed(
                f"{len(sizes)} regions are described, {len(handles)} were handed over",
                n_bytes=sum(sizes),
            )
            self._on_registered(generation, None, missing)
            return
        regions = [
            RegionHandle(handle.kind, handle.fd, n_bytes)
            for handle, n_bytes in zip(handles, sizes, strict=False)
        ]
        self._setup.submit(
            ("generation", generation),
            partial(self._engine.register, generation, regions),
            partial(self._on_registered, generation),
        )

    def release(self, generation: Generation) -> None:
        """Deregister a generation once its sessions are closed; ends in MemoryReleased.

        Sessions that are still open are closed. No operation of the generation is in flight.
        """
        memory = self._memories.get(generation)
        if memory is None:
            self._release_handles(generation)
            self._hooks.emit(MemoryReleased(generation))
            return
        if memory.phase is _Phase.CLOSING:
            return
        memory.phase = _Phase.CLOSING
        for session in list(memory.sessions):
            self.close_session(session)
        self._deregister_if_unused(generation)

    def _on_registered(
        self, generation: Generation, descriptors: Any, failure: Exception | None
    ) -> None:
        memory = self._memories[generation]
        if failure is not None:
            error = _typed(failure, RegistrationFailed, "the engine failed to register memory")
            del self._memories[generation]
            self._release_handles(generation)
            self._hooks.emit(MemoryRefused(generation, error))
            return
        memory.is_registered = True
        if memory.phase is _Phase.CLOSING:
            self._deregister_if_unused(generation)
            return
        memory.phase = _Phase.OPEN
        self._hooks.emit(MemoryRegistered(generation, tuple(descriptors)))

    def _deregister_if_unused(self, generation: Generation) -> None:
        memory = self._memories.get(generation)
        if memory is None or memory.sessions or not memory.is_registered:
            return
        if memory.phase is _Phase.CLOSING:
            memory.is_registered = False
            self._setup.submit(
                ("generation", generation),
                partial(self._engine.deregister, generation),
                partial(self._on_deregistered, generation),
            )

    def _on_deregistered(
        self, generation: Generation, _result: Any, failure: Exception | None
    ) -> None:
        del self._memories[generation]
        if failure is None:
            self._release_handles(generation)
            self._hooks.emit(MemoryReleased(generation))
        else:
            # The hardware may still reach this memory, so it stays open and is never reported
            # as released.
            self._report(f"generation {generation} stays registered", failure)

    # --- Sessions -----------------------------------------------------------------------------

    def open_session(
        self, session: SessionId, peer: Epoch, local: Generation, remote: RemoteLayout
    ) -> None:
        """Pair a registered generation with a peer's; ends in SessionOpened or SessionRefused.

        Neither comes if the session is closed before.
        """
        memory = self._memories.get(local)
        if memory is None or memory.phase is not _Phase.OPEN or session in self._sessions:
            refused = SessionFailed("the local generation is not registered", generation=local)
            self._hooks.emit(SessionRefused(session, refused))
            return
        memory.sessions.add(session)
        self._sessions[session] = _OpenSession(local)
        self._setup.submit(
            ("session", session),
            partial(self._engine.open_session, peer, local, remote),
            partial(self._on_opened, session),
        )

    def close_session(self, session: SessionId) -> None:
        """Close a session, also one that is still opening; unknown ones are ignored.

        No operation of it is in flight.
        """
        item = self._sessions.get(session)
        if item is None or item.phase is _Phase.CLOSING:
            return
        item.phase = _Phase.CLOSING
        if item.handle is not None:
            self._close(session, item.handle)

    def _on_opened(self, session: SessionId, handle: Any, failure: Exception | None) -> None:
        item = self._sessions[session]
        if failure is not None:
            was_wanted = item.phase is _Phase.OPENING
            self._forget_session(session)
            if was_wanted:
                error = _typed(failure, SessionFailed, "the engine failed to open a session")
                self._hooks.emit(SessionRefused(session, error))
            return
        item.handle = handle
        if item.phase is _Phase.CLOSING:
            self._close(session, handle)
            return
        item.phase = _Phase.OPEN
        self._hooks.emit(SessionOpened(session))

    def _close(self, session: SessionId, handle: Session) -> None:
        self._setup.submit(
            ("session", session),
            partial(self._engine.close_session, handle),
            partial(self._on_closed, session),
        )

    def _on_closed(self, session: SessionId, _result: Any, failure: Exception | None) -> None:
        if failure is not None:
            self._report(f"session {session} was not closed cleanly", failure)
        self._forget_session(session)

    def _forget_session(self, session: SessionId) -> None:
        item = self._sessions.pop(session)
        memory = self._memories.get(item.generation)
        if memory is not None:
            memory.sessions.discard(session)
            self._deregister_if_unused(item.generation)

    # --- Operations ---------------------------------------------------------------------------

    def post(self, op: OpId, session: SessionId, direction: Direction, plan: TransferPlan) -> None:
        """Start an operation; ends in exactly one OpEnded, or in OpRefused if there is no room."""
        item = self._sessions.get(session)
        if item is None or item.phase is not _Phase.OPEN or item.handle is None:
            self._hooks.emit(OpEnded(op, 0, SessionFailed("the session is not open")))
        elif self._is_closing:
            # Those in flight are being cancelled; whoever waited for them is not to take over.
            self._hooks.emit(OpEnded(op, 0, TransferAborted("the engine is being closed")))
        elif len(self._ops) >= self._max_ops:
            self._hooks.emit(OpRefused(op))
        else:
            self._ops[op] = False
            self._data.send(Post(op, item.handle, direction, plan))

    def cancel(self, op: OpId) -> None:
        """End an operation early; its OpEnded still comes. Unknown ones are ignored."""
        if self._ops.get(op) is False:
            self._ops[op] = True
            self._data.send(Cancel(op))

    def _on_results(self, results: list[OpResult]) -> None:
        for result in results:
            self._ops.pop(result.op, None)
            self._hooks.emit(result)
        self._notify()

    # --- Fence --------------------------------------------------------------------------------

    def fence(self, peer: Epoch) -> None:
        """Refuse a peer; PeerFenced comes once it can reach nothing any more, or never."""
        self._fences.fence(peer)

    def readmit(self, peer: Epoch) -> None:
        """Undo a fence, confirmed or not; unknown peers are ignored."""
        self._fences.readmit(peer)

    # --- End ----------------------------------------------------------------------------------

    async def close(self, timeout_s: float) -> bool:
        """Cancel what is in flight, release everything, end the threads.

        Events go on until everything has ended.

        Returns:
            False: Something did not end in time. What it may touch stays registered and mapped,
            and its threads go on until the process exits.
        """
        deadline = self._loop.time() + timeout_s
        self._is_closing = True
        self._fences.close()
        for op in list(self._ops):
            self.cancel(op)
        if not await self._wait(lambda: not self._ops, deadline):
            return False
        for generation in list(self._memories):
            self.release(generation)
        if not await self._wait(lambda: not self._memories and self._setup.is_idle, deadline):
            return False
        self._setup.submit("engine", self._engine.close, self._on_engine_closed)
        if not await self._wait(lambda: self._setup.is_idle, deadline):
            return False
        self._data.stop()
        self._setup.stop()
        sys.setswitchinterval(self._switch_interval_s)
        return True

    async def _wait(self, is_true: Callable[[], bool], deadline: float) -> bool:
        if is_true():
            return True
        future: asyncio.Future[bool] = self._loop.create_future()
        self._waiter = is_true, future
        timer = self._loop.call_at(deadline, _resolve, future, False)
        try:
            return await future
        finally:
            timer.cancel()
            self._waiter = None

    def _notify(self) -> None:
        if self._waiter is not None and self._waiter[0]():
            _resolve(self._waiter[1], True)

    def _on_engine_closed(self, _result: Any, failure: Exception | None) -> None:
        if failure is not None:
            self._report("the engine was not closed cleanly", failure)

    def _report(self, what: str, failure: Exception | None) -> None:
        _log.error("%s: %r", what, failure, exc_info=failure)
        self._hooks.count_problem(CALL_FAILED, f"{what}: {failure!r}"[:500])


def _resolve(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)


def _typed(failure: Exception, error_type: type[MoriiodError], what: str) -> MoriiodError:
    """Return a failure as the core may have it; the engine goes on."""
    if isinstance(failure, MoriiodError):
        return failure
    _log.error("%s", what, exc_info=failure)
    return error_type(f"{what}: {failure!r}"[:500])
