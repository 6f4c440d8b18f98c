"""What a transfer engine must offer. Every engine passes the same contract suite.

An engine holds no transfer state: it registers memory, pairs it with a peer's, copies what it is
told and says when nothing of an operation touches memory any more. ``engines.runner`` owns it:
``post``, ``cancel``, ``progress`` and ``in_flight`` are used on one data thread, everything else
on setup threads, where it may block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from moriiod.core.geometry import RemoteLayout
from moriiod.core.ids import Epoch, Generation, OpId
from moriiod.core.plan import TransferPlan
from moriiod.errors import MoriiodError

Direction = Literal["read", "write"]


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What the daemon must know to use an engine well.

    Attributes:
        name: As in configuration and handshake: ``shm``, ``mori``, ``nixl``.
        is_local_only: Reaches peers on the same host only.
        setup_threads: How many setup calls may run at once (1: the library is not thread-safe).
        poll_interval_s: Pause between two ``progress`` calls while operations are in flight;
            0 where ``progress`` itself does the work.
        max_op_bytes: Largest size of one span; larger ones are split by the planner. 0 = no limit.
    """

    name: str
    is_local_only: bool
    setup_threads: int
    poll_interval_s: float
    max_op_bytes: int


@dataclass(frozen=True, slots=True)
class RegionHandle:
    """Local memory to register. The fd stays open for as long as the region is registered.

    Attributes:
        kind: ``memfd``: a sealed memfd, mapped by the engine.
        fd: Owned by the caller; the engine duplicates it if it needs it longer.
        n_bytes: Size of the region; the file is at least as large.
    """

    kind: Literal["memfd"]
    fd: int
    n_bytes: int


class Session(Protocol):
    """An engine's own pairing of a local and a remote generation; opaque to everyone else."""


@dataclass(frozen=True, slots=True)
class Completion:
    """An operation is over and nothing of it touches memory any more."""

    op: OpId
    n_bytes: int
    error: MoriiodError | None


@dataclass(frozen=True, slots=True)
class Fence:
    """What an engine knows about a fence.

    ``confirmed``: nothing of the peer can touch local memory any more. Otherwise ``watch_fd``, if
    not None, becomes readable when that is so (a pidfd of the peer's process); the engine keeps
    the fd open until ``forget``.
    """

    confirmed: bool
    watch_fd: int | None = None


class TransferEngine(Protocol):
    """The seam between moriiod and a transfer library."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Constant for the life of the engine."""
        ...

    def register(
        self, generation: Generation, regions: Sequence[RegionHandle]
    ) -> tuple[bytes, ...]:
        """Register a worker's regions; return one descriptor for the peer for each.

        All or nothing. Raises:
            RegistrationFailed: The library or the kernel refused; fields carry size and errno.
        """
        ...

    def deregister(self, generation: Generation) -> None:
        """Undo ``register``. Never called while an operation of that generation is in flight."""
        ...

    def open_session(self, peer: Epoch, local: Generation, remote: RemoteLayout) -> Session:
        """Pair a registered generation with a peer's memory.

        Raises:
            SessionFailed: Also as SharedMemoryUnavailable: cannot reach that memory from here.
        """
        ...

    def close_session(self, session: Session) -> None:
        """Undo ``open_session``. Never called while an operation of it is in flight."""
        ...

    def post(self, op: OpId, session: Session, direction: Direction, plan: TransferPlan) -> None:
        """Start an operation; it ends in exactly one ``Completion`` from ``progress``.

        Every offset is checked in 64 bits against both regions before anything is touched.

        Raises:
            EngineQueueFull: No room now; nothing was posted and no Completion will come.
            MoriiodError: Refused for good; nothing was posted and no Completion will come.
        """
        ...

    def cancel(self, op: OpId) -> None:
        """End an operation as early as is safe; unknown ids are ignored."""
        ...

    def progress(self) -> list[Completion]:
        """Do or poll a bounded amount of work (a few ms); return what has ended since."""
        ...

    @property
    def in_flight(self) -> int:
        """Number of posted operations that have not ended."""
        ...

    def fence(self, peer: Epoch) -> Fence:
        """Refuse the peer any further access, and say whether it can still have some."""
        ...

    def readmit(self, peer: Epoch) -> None:
        """Undo ``fence``, confirmed or not: the peer is back under its old epoch.

        ``watch_fd`` of that fence is not watched any more. A later fence must still know what the
        peer reached before. Unknown epochs are ignored.
        """
        ...

    def forget(self, peer: Epoch) -> None:
        """Drop what is remembered about a peer's epoch; unknown epochs are ignored.

        Called when the fence is confirmed by ``watch_fd``: the peer's process is gone.
        """
        ...

    def close(self) -> None:
        """Release everything. No operation is in flight."""
        ...


class RegionExporter(Protocol):
    """How an engine hands file descriptors to peers on the same host (the fd socket does it)."""

    @property
    def address(self) -> str:
        """Path of the Unix socket where a peer fetches regions by token."""
        ...

    def export(self, token: str, fd: int, n_bytes: int) -> None:
        """Offer a region under an unguessable token; the fd is duplicated. Any thread."""
        ...

    def withdraw(self, token: str) -> None:
        """Stop offering a region; unknown tokens are ignored. Any thread."""
        ...

    def refuse(self, peer: Epoch) -> int | None:
        """Refuse an epoch from now on. Any thread.

        Returns:
            A pidfd of the process that fetched under this epoch, None if it never fetched.
            The exporter keeps it open for as long as the process lives, and while it is watched.
        """
        ...

    def readmit(self, peer: Epoch) -> None:
        """Undo ``refuse``, but remember which process fetched. Any thread."""
        ...

    def forget(self, peer: Epoch) -> None:
        """Close the pidfd of an epoch whose process has ended, and forget the refusal.

        Unknown epochs, and those whose process lives, are ignored.
        """
        ...
