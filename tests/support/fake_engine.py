"""An engine that does nothing but what a test tells it, and stops at gates.

Checks on its own that it is used as ``TransferEngine`` demands: which thread calls what, nothing
deregistered under an open session, nothing closed under an operation.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from moriiod.core.geometry import RemoteLayout
from moriiod.core.ids import Epoch, Generation, OpId
from moriiod.core.plan import TransferPlan
from moriiod.engines.base import (
    Completion,
    Direction,
    EngineCapabilities,
    Fence,
    RegionHandle,
    Session,
)
from moriiod.errors import MoriiodError, TransferAborted


class Gate:
    """A call that has begun and goes on when the test says so."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()

    def open(self) -> None:
        """Let the call go on."""
        self._open.set()

    def pass_through(self) -> None:
        """Called by the engine, on its thread."""
        self._loop.call_soon_threadsafe(self.entered.set)
        self._open.wait()


class FakeSession:
    """A session of a FakeEngine."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation


class FakeEngine:
    """Implements ``TransferEngine``.

    Attributes:
        calls: What was called, in order: (name, first argument).
        broken: Contract violations, each a sentence; must stay empty.
        n_progress: Calls of ``progress``.
    """

    def __init__(self, setup_threads: int = 4, poll_interval_s: float = 0.001) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.broken: list[str] = []
        self.n_progress = 0
        self.fences: dict[Epoch, Fence] = {}
        self._setup_threads = setup_threads
        self._poll_interval_s = poll_interval_s
        self._gates: dict[tuple[str, Any], Gate] = {}
        self._errors: dict[str, deque[Exception]] = {}
        self._registered: set[Generation] = set()
        self._sessions: set[FakeSession] = set()
        self._ops: dict[OpId, FakeSession] = {}
        self._ended: deque[Completion] = deque()
        self._data_thread: int | None = None

    # --- For tests ------------------------------------------------------------------------------

    def gate(self, name: str, argument: Any) -> Gate:
        """Hold the next call of this method with this first argument."""
        gate = self._gates[name, argument] = Gate()
        return gate

    def fail(self, name: str, *errors: Exception) -> None:
        """Let the next calls of a method raise."""
        self._errors.setdefault(name, deque()).extend(errors)

    def end(self, op: OpId, n_bytes: int = 0, error: MoriiodError | None = None) -> None:
        """End an operation that is in flight."""
        self._ended.append(Completion(op, n_bytes, error))

    # --- Setup threads --------------------------------------------------------------------------

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("fake", True, self._setup_threads, self._poll_interval_s, 0)

    def register(
        self, generation: Generation, regions: Sequence[RegionHandle]
    ) -> tuple[bytes, ...]:
        self._enter("register", generation, in_setup=True)
        self._registered.add(generation)
        return tuple(b"descriptor" for _ in regions)

    def deregister(self, generation: Generation) -> None:
        self._enter("deregister", generation, in_setup=True)
        if any(session.generation == generation for session in self._sessions):
            self.broken.append("deregistered under an open session")
        self._registered.remove(generation)

    def open_session(self, peer: Epoch, local: Generation, remote: RemoteLayout) -> Session:
        self._enter("open_session", peer, in_setup=True)
        if local not in self._registered:
            self.broken.append("session with memory that is not registered")
        session = FakeSession(local)
        self._sessions.add(session)
        return session

    def close_session(self, session: Session) -> None:
        assert isinstance(session, FakeSession)
        self._enter("close_session", session.generation, in_setup=True)
        if session in self._ops.values():
            self.broken.append("session closed under an operation")
        self._sessions.remove(session)

    def fence(self, peer: Epoch) -> Fence:
        self._enter("fence", peer, in_setup=True)
        return self.fences.get(peer, Fence(confirmed=True))

    def readmit(self, peer: Epoch) -> None:
        self._enter("readmit", peer, in_setup=True)

    def forget(self, peer: Epoch) -> None:
        self._enter("forget", peer, in_setup=True)

    def close(self) -> None:
        self._enter("close", None, in_setup=True)
        if self._ops or self._sessions or self._registered:
            self.broken.append("closed while in use")

    # --- Data thread ----------------------------------------------------------------------------

    def post(self, op: OpId, session: Session, direction: Direction, plan: TransferPlan) -> None:
        self._enter("post", op, in_setup=False)
        assert isinstance(session, FakeSession)
        if session not in self._sessions:
            self.broken.append("posted on a session that is not open")
        self._ops[op] = session

    def cancel(self, op: OpId) -> None:
        self._enter("cancel", op, in_setup=False)
        if op in self._ops:
            self.end(op, 0, TransferAborted("cancelled"))

    def progress(self) -> list[Completion]:
        self.n_progress += 1
        for error in self._take_errors("progress"):
            raise error
        ended = []
        while self._ended:
            completion = self._ended.popleft()
            self._ops.pop(completion.op, None)
            ended.append(completion)
        return ended

    @property
    def in_flight(self) -> int:
        return len(self._ops)

    def _enter(self, name: str, argument: Any, *, in_setup: bool) -> None:
        thread = threading.current_thread().name
        if ("setup" in thread) is not in_setup:
            self.broken.append(f"{name} was called on {thread}")
        self.calls.append((name, argument))
        gate = self._gates.pop((name, argument), None)
        if gate is not None:
            gate.pass_through()
        for error in self._take_errors(name):
            raise error

    def _take_errors(self, name: str) -> list[Exception]:
        waiting = self._errors.get(name)
        return [waiting.popleft()] if waiting else []
