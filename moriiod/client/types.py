"""What the client library hands out: its state, problems, registrations and settings."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from moriiod.core.geometry import KvGroup
from moriiod.core.requests import Refused
from moriiod.errors import FieldValue, MoriiodError


class ClientState(enum.Enum):
    """Where a client stands with its daemon."""

    #: Attached; requests are taken.
    CONNECTED = "connected"
    #: No daemon answers, or it is being introduced to ours; transfer calls raise DaemonLost.
    RECONNECTING = "reconnecting"
    #: ``close`` was called; nothing works any more.
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ClientProblem:
    """Something the daemon refused that did not end a transfer.

    Attributes:
        request: Name of the request: ``LayerReady``, ``Abort``, ``Attach``.
        transfer_id: The transfer it was about, None if about none.
        code: The error's code, see ``moriiod.errors``.
        message: For people.
        retryable: Whether the same request can succeed later.
        fields: The values the message speaks of.
    """

    request: str
    transfer_id: str | None
    code: str
    message: str
    retryable: bool
    fields: Mapping[str, FieldValue] = field(default_factory=dict)


def problem_from_refusal(request: str, transfer_id: str | None, reply: Refused) -> ClientProblem:
    """Return a daemon's refusal as a problem."""
    return ClientProblem(
        request, transfer_id, reply.code, reply.message, reply.retryable, dict(reply.fields)
    )


def problem_from_error(request: str, error: MoriiodError) -> ClientProblem:
    """Return an error met by the client itself as a problem."""
    return ClientProblem(
        request, None, error.code, error.message, error.retryable, dict(error.fields)
    )


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Memory to hand over: a sealed memfd and how many of its bytes are meant.

    Attributes:
        fd: Stays the caller's; the client duplicates it.
        n_bytes: Counted from offset 0 of the file.
    """

    fd: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Registration:
    """A KV cache as the daemon is told of it: what the bytes mean, and the memory they lie in.

    Attributes:
        groups: One entry a KV group; layers name regions by index.
        region_bytes: Bytes of each region.
        memory: Identity (device, inode) of each region's file. Two registrations are the same
            only if the memory is.
        fds: File descriptor of each region, open for as long as the registration is used.
    """

    groups: tuple[KvGroup, ...]
    region_bytes: tuple[int, ...]
    memory: tuple[tuple[int, int], ...]
    fds: tuple[int, ...] = field(compare=False)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Limits and times of a client; the defaults fit a worker beside its daemon.

    Attributes:
        step_timeout_s: Longest wait for one answer of the daemon while attaching.
        register_timeout_s: The same for the registration of memory, which an RDMA engine may
            take long for.
        backoff_first_s: Pause after the first failed try to reconnect; doubles with each try.
        backoff_max_s: Longest pause between two tries.
        max_outstanding: Requests without an answer; more are refused with Busy.
        max_in_flight: Transfers that have not ended; more are refused with Busy.
        max_problems: Problems that are kept; older ones are dropped.
    """

    step_timeout_s: float = 5.0
    register_timeout_s: float = 120.0
    backoff_first_s: float = 0.02
    backoff_max_s: float = 2.0
    max_outstanding: int = 16384
    max_in_flight: int = 65536
    max_problems: int = 1024
