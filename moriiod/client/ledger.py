"""What a client asked and was told: requests, answers, transfers in flight, events. Pure.

Every request has a number and gets one answer. A transfer call does not wait for it: if the
daemon refuses, the refusal becomes the end of the transfer, so a caller looks in one place only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from moriiod.client.table import InFlight, Key, TransferTable
from moriiod.client.types import ClientProblem, ClientSettings, problem_from_refusal
from moriiod.core.ids import Epoch, Generation, Role
from moriiod.core.requests import (
    Abort,
    ConfirmEvents,
    LayerReady,
    PeerAddress,
    Publish,
    Pull,
    Push,
    Refused,
    Reject,
    Reply,
    Request,
    Reserve,
    Seal,
    TransferEnded,
)
from moriiod.errors import Busy, MoriiodError, NotRegistered, TransferConflict


@dataclass(frozen=True, slots=True)
class _Call:
    """A request that has no answer yet.

    ``key`` is the transfer of ours it is about. ``opens``: it made the table's entry;
    ``reopens``: it named a transfer that was in flight already.
    """

    request: str
    transfer_id: str | None = None
    key: Key | None = None
    opens: InFlight | None = None
    reopens: InFlight | None = None
    is_waited_for: bool = False


class Ledger:
    """Numbers requests, matches answers, and decides what the caller is told."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._calls: dict[int, _Call] = {}
        self._answers: dict[int, Reply | MoriiodError] = {}
        self._events: list[TransferEnded] = []
        self._problems: deque[ClientProblem] = deque(maxlen=settings.max_problems)
        #: Last event of the present attach that was taken in, and that was confirmed.
        self._received = 0
        self._confirmed = 0
        self._must_confirm = False
        self.table = TransferTable()
        self.next_sequence = 1

    # --- Requests -----------------------------------------------------------------------------

    def check_room(self, body: Request) -> None:
        """Refuse a request that cannot be remembered.

        Raises:
            Busy: A limit is reached.
            TransferConflict: The transfer was in flight with a daemon that was lost, and it is
                not known yet that it ended.
        """
        limits = self._settings
        if len(self._calls) >= limits.max_outstanding:
            raise _busy("max_outstanding", limits.max_outstanding)
        role = opening_role(body)
        if role is None:
            return
        if len(self.table) >= limits.max_in_flight:
            raise _busy("max_in_flight", limits.max_in_flight)
        transfer_id, _ = _opened(body)
        entry = self.table.get((role, transfer_id))
        if entry is not None and entry.is_lost:
            raise TransferConflict(
                "the transfer was in flight with a daemon that was lost and has not ended",
                transfer_id=transfer_id,
                epoch=entry.epoch,
            )

    def sent(
        self, body: Request, epoch: Epoch, generation: Generation, is_waited_for: bool = False
    ) -> int:
        """Remember a request that was sent under ``next_sequence``; return that number."""
        sequence = self.next_sequence
        self.next_sequence += 1
        name = type(body).__name__
        role = opening_role(body)
        if role is None:
            about = _transfer_id_of(body)
            self._calls[sequence] = _Call(name, about, _key_of(body), is_waited_for=is_waited_for)
            return sequence
        transfer_id, peer = _opened(body)
        entry = InFlight(role, transfer_id, sequence, epoch, generation, peer)
        key = (role, transfer_id)
        if self.table.open(entry):
            self._calls[sequence] = _Call(name, transfer_id, key, opens=entry)
        else:
            self._calls[sequence] = _Call(name, transfer_id, key, reopens=entry)
        return sequence

    @property
    def outstanding(self) -> int:
        """How many requests have no answer yet."""
        return len(self._calls)

    # --- Answers ------------------------------------------------------------------------------

    def reply_received(self, sequence: int, reply: Reply) -> bool:
        """Take an answer; False if it says that the daemon does not know this client."""
        call = self._calls.pop(sequence, None)
        if call is None:
            return True
        if call.is_waited_for:
            self._answers[sequence] = reply
        if isinstance(reply, Refused):
            if not call.is_waited_for:
                self._refused(call, reply)
            return reply.code != NotRegistered.code
        if call.reopens is not None:
            # The first transfer of this id ended before the daemon saw the second request, which
            # therefore opened a new one. If the first is still in flight, it stays the one.
            self.table.open(call.reopens)
        return True

    def _refused(self, call: _Call, reply: Refused) -> None:
        opened = call.opens
        if opened is not None and call.key is not None:
            if self.table.get(call.key) is opened:
                self.table.close(call.key)
                self._events.append(_refused_transfer(opened, reply))
            return
        is_too_late = call.key is not None and call.reopens is None and call.key not in self.table
        if not is_too_late:
            self.add_problem(problem_from_refusal(call.request, call.transfer_id, reply))

    def has_answer(self, sequence: int) -> bool:
        """Whether ``take_answer`` would return something."""
        return sequence in self._answers

    def take_answer(self, sequence: int) -> Reply | MoriiodError | None:
        """Return and forget the answer to a request that is waited for; None if there is none."""
        return self._answers.pop(sequence, None)

    def stop_waiting(self, sequence: int) -> None:
        """Nobody waits for this answer any more."""
        self._answers.pop(sequence, None)
        call = self._calls.get(sequence)
        if call is not None:
            self._calls[sequence] = _Call(call.request)

    # --- Events -------------------------------------------------------------------------------

    def event_received(self, sequence: int, event: TransferEnded) -> None:
        """Take an event of the present attach.

        Only the next one in order is taken: a copy of an older one is void, and after a gap the
        daemon sends the missing one and all that follow again as soon as it hears of us.
        """
        self._must_confirm = self._must_confirm or sequence != self._received + 1
        if sequence != self._received + 1:
            return
        self._received = sequence
        if self.table.close((event.role, event.transfer_id)) is not None:
            self._events.append(event)
        else:
            self._must_confirm = True

    @property
    def untaken(self) -> int:
        """How many events ``take_events`` would return."""
        return len(self._events)

    def take_events(self) -> list[TransferEnded]:
        """Return what has ended since the last call; it will be confirmed."""
        events, self._events = self._events, []
        self._must_confirm = self._must_confirm or self._received > self._confirmed
        return events

    @property
    def is_confirmation_due(self) -> bool:
        """Whether the daemon should hear how far the caller got. Never of untaken events."""
        return self._must_confirm and not self._events

    def confirmation(self) -> ConfirmEvents:
        """Return the confirmation of everything taken so far."""
        return ConfirmEvents(self._received)

    def confirmation_sent(self) -> None:
        """It is on its way."""
        self._must_confirm = False
        self._confirmed = self._received

    def add_problem(self, problem: ClientProblem) -> None:
        """Keep a problem for the caller; the oldest goes when there are too many."""
        self._problems.append(problem)

    def take_problems(self) -> list[ClientProblem]:
        """Return and forget the problems."""
        problems = list(self._problems)
        self._problems.clear()
        return problems

    # --- Loss ---------------------------------------------------------------------------------

    def attach_ended(self, generation: Generation, error: MoriiodError) -> None:
        """No answer and no event of this attach will come any more."""
        for sequence, call in self._calls.items():
            if call.is_waited_for:
                self._answers[sequence] = error
        self._calls.clear()
        self._received = self._confirmed = 0
        self._must_confirm = False
        self.table.lose(generation)

    def daemon_gone(self, epoch: Epoch) -> None:
        """The process of this daemon start has ended, and its operations with it."""
        self._events.extend(self.table.end_with_daemon((epoch,)))


def opening_role(body: Request) -> Role | None:
    """Return the role of the transfer a request opens, None if it opens none."""
    match body:
        case Publish():
            return "publish"
        case Pull():
            return "pull"
        case Push():
            return "push"
        case Reserve():
            return "reserve"
        case _:
            return None


def _opened(body: Request) -> tuple[str, PeerAddress | None]:
    match body:
        case Reserve():
            return body.transfer_id, body.peer
        case Publish() | Pull() | Push():
            return body.transfer_id, None
        case _:
            raise TypeError(f"{type(body).__name__} opens no transfer")


def _transfer_id_of(body: Request) -> str | None:
    match body:
        case LayerReady() | Seal() | Abort() | Reject():
            return body.transfer_id
        case _:
            return None


def _key_of(body: Request) -> Key | None:
    match body:
        case LayerReady() | Seal():
            return "push", body.transfer_id
        case Abort():
            return body.role, body.transfer_id
        case _:
            return None


def _refused_transfer(entry: InFlight, reply: Refused) -> TransferEnded:
    return TransferEnded(
        transfer_id=entry.transfer_id,
        role=entry.role,
        outcome="failed",
        reason=reply.code,
        message=reply.message,
        retryable=reply.retryable,
    )


def _busy(limit: str, value: int) -> Busy:
    return Busy(
        f"the client has {value} of these open already: {limit}",
        limit=limit,
        value=value,
        retry_after_s=0.1,
    )
