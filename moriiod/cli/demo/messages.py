"""What the coordinator and its workers say to each other: one JSON array on each line.

Both ends are the same program on the same machine, so a line that is none of these is a bug and
ends whoever reads it.
"""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from moriiod.cli.demo.plan import Fault, Mode, Side
from moriiod.core.geometry import HeadOrder, Layout
from moriiod.core.ids import Outcome

_READ_BYTES: Final = 1 << 16


# --- To a worker ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """First of all: who you are, your daemon and your cache. Answered by ``Registered``."""

    side: Side
    instance: int
    tp_rank: int
    tp_size: int
    socket_path: str
    #: Control port of rank 0 of this instance, for what a producer hands back to the router.
    base_port: int
    layers: int
    blocks: int
    kv_heads: int
    layout: Layout
    head_order: HeadOrder
    model: str
    allow_uneven: bool
    seed: int
    timeout_s: float
    fault: Fault


@dataclass(frozen=True, slots=True)
class Prefill:
    """The producer's leg of a request. Answered by ``Prefilled``, later ``Ended``."""

    number: int
    mode: Mode
    request_id: str
    params: Mapping[str, object]
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Decode:
    """The consumer's leg of a request. Answered by ``Ended``."""

    number: int
    mode: Mode
    request_id: str
    params: Mapping[str, object]
    blocks: list[int]
    #: For the check: which prefill instance wrote the bytes, and its TP size.
    producer: int
    producer_tp_size: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Compare a request's blocks with what the producer wrote. Answered by ``Checked``."""

    number: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """Look at every block that belongs to no request. Answered by ``Checked``."""


@dataclass(frozen=True, slots=True)
class CountOpen:
    """Answered by ``Open``, after every end that the daemon has reported so far."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Close the client and exit. Answered by ``Left``."""


Command = Setup | Prefill | Decode | Verify | Sweep | CountOpen | Leave


# --- From a worker ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    """The cache is filled with canaries and known to the daemon."""

    engine: str


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prefill of a request is done; ``params`` is what rank 0 hands back to the router."""

    number: int
    params: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class Ended:
    """A transfer has ended, as the client reported it.

    ``started_at`` and ``ended_at`` are readings of the monotonic clock, which all processes of a
    machine share: when the request was sent to the daemon, and when its end came back.
    """

    number: int
    role: str
    outcome: Outcome
    reason: str
    text: str
    n_bytes: int
    started_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class Checked:
    """So many bytes were compared; ``wrong`` describes the first that differs, "" if none does."""

    number: int | None
    n_bytes: int
    wrong: str


@dataclass(frozen=True, slots=True)
class Open:
    """How many transfers of this worker have not ended."""

    count: int


@dataclass(frozen=True, slots=True)
class Left:
    """The client is closed. ``problems`` are refusals that ended no transfer."""

    is_clean: bool
    problems: list[str]


Report = Registered | Prefilled | Ended | Checked | Open | Left
Message = Command | Report

_CLASSES: Final = {
    cls.__name__: cls
    for cls in (
        Setup, Prefill, Decode, Verify, Sweep, CountOpen, Leave,
        Registered, Prefilled, Ended, Checked, Open, Left,
    )
}  # fmt: skip


def encode(message: Message) -> bytes:
    """Return a message as one line."""
    return json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message of one line.

    Raises:
        ValueError: It is none.
    """
    try:
        name, fields = json.loads(line)
        message: Any = _CLASSES[name](**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"not a message of the demo: {line[:200]!r}") from error
    return message  # type: ignore[no-any-return]


class Channel:
    """One end of the connection between the coordinator and a worker.

    Args:
        stream: A connected stream socket. With a blocking one, ``send`` waits; with a
            non-blocking one, what does not fit is kept until ``flush``.
    """

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._unsent: deque[bytes] = deque()
        self._rest = b""
        self.is_closed = False

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._stream.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether ``flush`` is to be called when the socket takes more."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Send, or keep what does not fit."""
        self._unsent.append(encode(message))
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes of what was kept. A reader that is gone is no error."""
        try:
            while self._unsent:
                n_bytes = self._stream.send(self._unsent[0])
                if n_bytes == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][n_bytes:]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            # Reading will tell.
            self._unsent.clear()

    def receive(self) -> list[Message]:
        """Return what has come; ``is_closed`` is set at the end of the stream.

        Raises:
            ValueError: A line is no message.
        """
        try:
            data = self._stream.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        self.is_closed = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [decode(line) for line in lines]

    def close(self) -> None:
        """Hang up."""
        self._stream.close()
