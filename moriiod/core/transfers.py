"""What all four kinds of transfer share: identity, one terminal outcome, admission limits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from moriiod.core.clients import Client, Clients
from moriiod.core.context import Context
from moriiod.core.effects import Transition
from moriiod.core.ids import Outcome, Role, TransferId
from moriiod.core.requests import TransferEnded
from moriiod.errors import (
    Busy,
    Draining,
    InvariantViolation,
    MoriiodError,
    TooLarge,
    TransferConflict,
)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a transfer ended, before it is told to the client."""

    outcome: Outcome
    reason: str
    message: str = ""
    retryable: bool = False
    n_bytes: int = 0
    n_layers: int = 0

    @classmethod
    def failure(cls, error: MoriiodError) -> Ending:
        """A transfer that failed."""
        return cls("failed", error.code, error.message[:2000], error.retryable)


class Transfer:
    """One side of one transfer. Reports its end exactly once (safety rule S2).

    Attributes:
        state: For people and the story; the subclasses' tables say what is possible.
        is_ended: Set when the end was reported: nothing touches the blocks any more.
    """

    role: Role

    def __init__(self, ctx: Context, clients: Clients, client: Client, transfer_id: str) -> None:
        self._ctx = ctx
        self._clients = clients
        self.client = client
        self.transfer_id: TransferId = transfer_id
        self.state = "new"
        self.started_at = ctx.now
        self.is_ended = False

    def enter(self, state: str, detail: str = "") -> None:
        """Move to another state and record it."""
        self._ctx.transition(self.transfer_id, self.role, self.state, state, detail)
        self.state = state

    def report(self, ending: Ending) -> None:
        """Tell the worker that it is over.

        Raises:
            InvariantViolation: It was told before.
        """
        if self.is_ended:
            raise InvariantViolation(
                "a transfer ended twice", transfer_id=self.transfer_id, role=self.role
            )
        self.is_ended = True
        self._record_end(ending)
        event = TransferEnded(
            transfer_id=self.transfer_id,
            role=self.role,
            outcome=ending.outcome,
            reason=ending.reason,
            message=ending.message,
            retryable=ending.retryable,
            n_bytes=ending.n_bytes,
            n_layers=ending.n_layers,
        )
        self._clients.tell(self.client, event)

    def _record_end(self, ending: Ending) -> None:
        end = Transition(
            self.transfer_id,
            self.role,
            self.state,
            ending.outcome,
            ending.reason,
            self._ctx.now - self.started_at,
            ending.n_bytes,
        )
        self._ctx.emit(end)
        self.state = ending.outcome


class Requested(Protocol):
    """A live transfer and what asked for it."""

    client: Client
    transfer_id: TransferId

    @property
    def request(self) -> object:
        """What the worker sent."""
        ...


def is_repeat(live: Requested | None, client: Client, request: object) -> bool:
    """Whether a request only repeats the one that opened a live transfer (case A10).

    Raises:
        TransferConflict: The id is live, and is somebody else's or was opened with other values.
    """
    if live is None:
        return False
    if live.client is client and live.request == request:
        return True
    raise TransferConflict("this transfer id is live", transfer_id=live.transfer_id)


class Admission:
    """Says no before anything is started (safety rule S6).

    Attributes:
        active: Transfers that are live or have messages to deliver; the tables keep it.
    """

    def __init__(self, ctx: Context, clients: Clients) -> None:
        self._ctx = ctx
        self._clients = clients
        self.active = 0

    def check(self, client: Client, n_blocks: int) -> None:
        """Refuse a new transfer that would exceed a limit.

        Raises:
            Draining: The daemon is stopping.
            Busy: A limit is reached; fields name it.
            TooLarge: More blocks than one transfer may have.
        """
        settings = self._ctx.settings
        if self._ctx.is_draining:
            raise Draining("the daemon is stopping")
        if self.active >= settings.max_transfers:
            raise Busy(
                "too many transfers",
                limit="max_transfers",
                value=settings.max_transfers,
                retry_after_s=1.0,
            )
        if n_blocks > settings.max_blocks_per_transfer:
            raise TooLarge(
                "too many blocks in one transfer",
                limit="max_blocks_per_transfer",
                value=settings.max_blocks_per_transfer,
                n_blocks=n_blocks,
            )
        self._clients.check_room(client)


KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class Memorial(Generic[KeyT, ValueT]):
    """What is remembered about ended attempts, to answer repeats: bounded, newest kept."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[KeyT, ValueT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: KeyT, value: ValueT) -> None:
        """Remember, and forget the oldest if there are too many."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def get(self, key: KeyT) -> ValueT | None:
        """Return what is remembered, None if nothing is."""
        return self._entries.get(key)

    def discard(self, key: KeyT) -> None:
        """Forget one entry; unknown keys are ignored."""
        self._entries.pop(key, None)
