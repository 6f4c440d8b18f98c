"""Host names to addresses, off the loop: a resolver may take half a minute to say no."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moriiod.errors import Busy, ConfigError, MoriiodError, PeerUnreachable

#: One slow name server must not hold up the names of others.
_MAX_THREADS: Final = 4
_MAX_PENDING: Final = 256

Resolved = str | MoriiodError


@dataclass(frozen=True, slots=True)
class _Job:
    host: str
    callback: Callable[[Resolved], None]


class Resolver:
    """A few threads that ask the system's resolver; none is started before it is needed.

    The threads are daemonic: one that waits for a dead name server does not hold up the exit.

    Args:
        loop: Callbacks are called on it.
        family: ``AF_INET`` or ``AF_INET6``; taken first where a name has both. Peers of one
            deployment listen on the family we listen on.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, family: socket.AddressFamily) -> None:
        self._loop = loop
        self._family = family
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending = 0
        self._n_threads = 0
        self._is_closed = False

    def resolve(self, host: str, callback: Callable[[Resolved], None]) -> None:
        """Find an address of a host; the callback gets an IP literal or why there is none.

        Raises:
            Busy: Too many names are being looked up.
        """
        if self._pending >= _MAX_PENDING:
            raise Busy(
                f"{self._pending} host names are being looked up",
                limit="max_pending_lookups",
                value=_MAX_PENDING,
            )
        self._pending += 1
        if self._n_threads < min(self._pending, _MAX_THREADS):
            self._n_threads += 1
            threading.Thread(
                target=self._work, name=f"moriiod-resolver-{self._n_threads}", daemon=True
            ).start()
        self._jobs.put(_Job(host, callback))

    def close(self) -> None:
        """Let the threads end when they next look; no callback is called any more."""
        self._is_closed = True
        for _ in range(self._n_threads):
            self._jobs.put(None)
        self._n_threads = 0

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            answer = look_up(job.host, self._family)
            try:
                self._loop.call_soon_threadsafe(self._deliver, job, answer)
            except RuntimeError:  # the loop was closed while the name was looked up
                return

    def _deliver(self, job: _Job, answer: Resolved) -> None:
        self._pending -= 1
        if not self._is_closed:
            job.callback(answer)


def look_up(host: str, family: socket.AddressFamily) -> Resolved:
    """Return an IP literal of a host, preferably of this family, or why there is none. Blocks."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return PeerUnreachable(
            f"host {host} cannot be resolved: {reason}", host=host, reason=str(reason)
        )
    found.sort(key=lambda item: item[0] != family)
    return str(found[0][4][0])


def look_up_within(host: str, timeout_s: float) -> str:
    """Return an IP literal of a host that this daemon is to listen on. Blocks.

    Raises:
        ConfigError: It cannot be resolved, or not in this time.
    """
    answers: queue.SimpleQueue[Resolved] = queue.SimpleQueue()

    def work() -> None:
        answers.put(look_up(host, socket.AF_INET))

    threading.Thread(target=work, name="moriiod-resolver", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise ConfigError(
            f"host {host} was not resolved within {timeout_s:g} s", host=host
        ) from None
    if isinstance(answer, MoriiodError):
        raise ConfigError(f"cannot listen on {host}: {answer.message}", host=host) from answer
    return answer
