"""The threads an engine's calls run on. They hold no state of transfers, only calls to make.

All of them are daemon threads: a native call that never returns must not keep the process from
exiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final

from moriiod.core.events import OpEnded, OpRefused
from moriiod.core.ids import OpId
from moriiod.core.plan import TransferPlan
from moriiod.engines.base import Direction, Session, TransferEngine
from moriiod.errors import EngineOpFailed, EngineQueueFull, MoriiodError

_JOIN_S: Final = 5.0


def call_on_loop(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object
) -> None:
    """Call from any thread; after the end of the loop nobody is left to be told."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


@dataclass(frozen=True, slots=True)
class _Call:
    key: Hashable
    function: Callable[[], Any]
    done: Callable[[Any, Exception | None], None]


class SetupThreads:
    """A few threads for calls that may block. Calls with the same key run one after the other.

    Args:
        n_threads: How many calls may run at once.
        loop: Where results are delivered and ``submit`` is called.
        on_finished: Called on the loop after each result has been delivered.
    """

    def __init__(
        self, n_threads: int, loop: asyncio.AbstractEventLoop, on_finished: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._on_finished = on_finished
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        #: Calls of a key that is busy; a key without entry is idle.
        self._chains: dict[Hashable, deque[_Call]] = {}
        self._threads = [
            threading.Thread(target=self._run, name=f"moriiod-setup-{i}", daemon=True)
            for i in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether no call is running or waiting."""
        return not self._chains

    def submit(
        self,
        key: Hashable,
        function: Callable[[], Any],
        done: Callable[[Any, Exception | None], None],
    ) -> None:
        """Run ``function`` on a thread, after earlier calls with this key.

        Args:
            key: What must not be worked on twice at once.
            function: May block, may raise.
            done: Called on the loop with (result, None) or (None, the exception).
        """
        call = _Call(key, function, done)
        chain = self._chains.get(key)
        if chain is None:
            self._chains[key] = deque()
            self._queue.put(call)
        else:
            chain.append(call)

    def stop(self) -> None:
        """End the threads; nothing is running."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            result, failure = None, None
            try:
                result = call.function()
            except Exception as error:  # noqa: BLE001 - delivered, and typed by the runner
                failure = error
            call_on_loop(self._loop, self._finished, call, result, failure)
            # Not until the next call may this thread keep what it was given and what came of it.
            del call, result, failure

    def _finished(self, call: _Call, result: Any, failure: Exception | None) -> None:
        chain = self._chains[call.key]
        if chain:
            self._queue.put(chain.popleft())
        else:
            del self._chains[call.key]
        call.done(result, failure)
        self._on_finished()


@dataclass(frozen=True, slots=True)
class Post:
    """Start an operation."""

    op: OpId
    session: Session
    direction: Direction
    plan: TransferPlan


@dataclass(frozen=True, slots=True)
class Cancel:
    """End an operation early."""

    op: OpId


@dataclass(frozen=True, slots=True)
class _Stop:
    """End the thread."""


OpResult = OpEnded | OpRefused


class DataThread:
    """The one thread that posts, polls and (with shm) copies. Blocks while nothing is in flight.

    The queue of commands is bounded by its user: at most one Post and one Cancel an operation,
    and a bounded number of operations.

    Args:
        engine: Its ``post``, ``cancel``, ``progress`` and ``in_flight`` are this thread's alone.
        loop: Where results are delivered.
        on_results: Called on the loop with what has ended, in batches.
        on_bug: Called on the loop when the engine broke its contract and the thread ended;
            whatever was in flight never ends.
    """

    def __init__(
        self,
        engine: TransferEngine,
        loop: asyncio.AbstractEventLoop,
        on_results: Callable[[list[OpResult]], None],
        on_bug: Callable[[Exception], None],
    ) -> None:
        self._engine = engine
        self._poll_interval_s = engine.capabilities.poll_interval_s
        self._loop = loop
        self._on_results = on_results
        self._on_bug = on_bug
        self._queue: SimpleQueue[Post | Cancel | _Stop] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="moriiod-data", daemon=True)
        self._thread.start()

    def send(self, command: Post | Cancel) -> None:
        """Hand over a command; never waits."""
        self._queue.put(command)

    def stop(self) -> None:
        """End the thread; nothing is in flight."""
        self._queue.put(_Stop())
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # noqa: BLE001 - a broken engine must not go unnoticed
            call_on_loop(self._loop, self._on_bug, error)

    def _turn(self) -> bool:
        """Take what is queued, make progress, deliver; False at the end."""
        results: list[OpResult] = []
        command = self._wait_command()
        while command is not None:
            if isinstance(command, _Stop):
                return False
            self._obey(command, results)
            command = self._next_command()
        ended = self._engine.progress()
        results.extend(OpEnded(one.op, one.n_bytes, one.error) for one in ended)
        if results:
            call_on_loop(self._loop, self._on_results, results)
        return True

    def _wait_command(self) -> Post | Cancel | _Stop | None:
        """Wait as long as there is nothing else to do."""
        if not self._engine.in_flight:
            return self._queue.get()
        if not self._poll_interval_s:
            return self._next_command()
        try:
            return self._queue.get(timeout=self._poll_interval_s)
        except Empty:
            return None

    def _next_command(self) -> Post | Cancel | _Stop | None:
        try:
            return self._queue.get_nowait()
        except Empty:
            return None

    def _obey(self, command: Post | Cancel, results: list[OpResult]) -> None:
        if isinstance(command, Cancel):
            self._engine.cancel(command.op)
            return
        op = command.op
        try:
            self._engine.post(op, command.session, command.direction, command.plan)
        except EngineQueueFull:
            results.append(OpRefused(op))
        except MoriiodError as error:
            results.append(OpEnded(op, 0, error))
        except Exception as error:  # noqa: BLE001 - typed; by contract nothing was posted
            failed = EngineOpFailed(f"the engine failed to post: {error!r}"[:500], op=op)
            results.append(OpEnded(op, 0, failed))
