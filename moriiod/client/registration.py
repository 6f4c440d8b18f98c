"""Handing memory over to the daemon, and remembering what it was asked to hold. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from moriiod.client.types import Registration
from moriiod.core.faults import to_error
from moriiod.core.requests import Done, Refused, RegisterCaches, Reply, Request
from moriiod.errors import (
    Busy,
    MoriiodError,
    NotRegistered,
    TransferConflict,
    UnexpectedMessage,
)
from moriiod.wire.fdsocket import FdMessage, FdRefused, OfferRegion, RegionTaken


@dataclass(frozen=True, slots=True)
class SendPacket:
    """Send this on the fd socket, with a file descriptor if there is one."""

    message: FdMessage
    fd: int | None = None


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send this on the ZMQ socket."""

    body: Request


Step = SendPacket | SendRequest


class RegistrationRefused(Exception):
    """The daemon does not take the memory; the attach itself stands."""

    def __init__(self, error: MoriiodError) -> None:
        super().__init__(error.message)
        self.error = error


class Registering:
    """Hands over the regions and describes them, once for each reference that is held.

    Args:
        registration: What to register.
        references: How often.
        is_offered: The daemon holds these regions already.
    """

    def __init__(
        self, registration: Registration, references: int, *, is_offered: bool = False
    ) -> None:
        self._registration = registration
        self._references = references
        self._next_region = len(registration.region_bytes) if is_offered else 0

    def start(self) -> Step:
        """Return the first step."""
        return self._step()

    def packet_received(self, message: FdMessage) -> Step:
        """Take the daemon's answer on the fd socket; return the next step.

        Raises:
            MoriiodError: The daemon refused, with the code it gave; the connection is over.
            UnexpectedMessage: It is no answer to the region that was offered last.
        """
        raise_if_refused(message)
        if message != RegionTaken(self._next_region):
            raise UnexpectedMessage(
                "the daemon answered something else than the region offered",
                got=type(message).__name__,
                region=self._next_region,
            )
        self._next_region += 1
        return self._step()

    def reply_received(self, reply: Reply) -> Step | None:
        """Take the answer to RegisterCaches; None when all references are registered.

        Raises:
            RegistrationRefused: The memory was not taken.
            UnexpectedMessage: It is no answer to RegisterCaches.
        """
        if isinstance(reply, Refused):
            raise RegistrationRefused(to_error(reply))
        if not isinstance(reply, Done):
            raise UnexpectedMessage("not an answer to RegisterCaches", got=type(reply).__name__)
        self._references -= 1
        return self._step() if self._references > 0 else None

    def _step(self) -> Step:
        sizes = self._registration.region_bytes
        if self._next_region < len(sizes):
            offer = OfferRegion(self._next_region, sizes[self._next_region])
            return SendPacket(offer, self._registration.fds[self._next_region])
        return SendRequest(RegisterCaches(self._registration.groups, sizes))


def raise_if_refused(message: FdMessage) -> None:
    """Raise the error that a packet of the daemon is, if it is one."""
    if isinstance(message, FdRefused):
        raise to_error(Refused(message.code, message.message, retryable=False))


class RegistrationBook:
    """What the daemon holds for us, must hold again after a restart, and what a caller waits for.

    Memory belongs to a generation: a daemon and its peers know it by that. So other memory is
    never registered under a generation that was used before, but under a new attach.
    """

    def __init__(self) -> None:
        #: What is registered, and how often (an identical registration counts one more).
        self.held: Registration | None = None
        self.references = 0
        #: What a caller waits for.
        self.wanted: Registration | None = None
        #: Whether regions were handed over in the present attach.
        self.is_generation_used = False
        self._outcome: MoriiodError | bool | None = None

    def want(self, registration: Registration, n_in_flight: int) -> None:
        """A caller wants this memory registered.

        Raises:
            Busy: Another registration is under way, or transfers in flight keep the old attach.
            TransferConflict: Other memory is registered.
        """
        if self.wanted is not None:
            raise Busy("a registration is under way", limit="registrations", retry_after_s=0.1)
        if self.held not in (None, registration):
            raise TransferConflict("another KV cache is registered; unregister it first")
        if self.needs_new_attach(registration) and n_in_flight:
            raise Busy(
                "the former cache still has transfers in flight",
                limit="in_flight",
                value=n_in_flight,
                retry_after_s=0.1,
            )
        self.wanted, self._outcome = registration, None

    def needs_new_attach(self, registration: Registration) -> bool:
        """Whether this memory may not be registered under the present generation."""
        return self.is_generation_used and self.held != registration

    def in_place(self, registration: Registration) -> Registering:
        """Return the steps that register once more in the present attach."""
        return Registering(registration, 1, is_offered=self.held == registration)

    def after_attach(self) -> Registering | None:
        """Return the steps that a new attach needs; None if there is nothing to register."""
        registration = self.held or self.wanted
        if registration is None:
            return None
        return Registering(registration, self.references + (self.wanted is not None))

    def succeeded(self) -> None:
        """The steps are through."""
        if self.wanted is not None:
            self.held = self.held or self.wanted
            self.references += 1
            self.wanted, self._outcome = None, True

    def refused(self, error: MoriiodError) -> bool:
        """The memory was not taken; True if a caller was waiting for it and is told."""
        if self.wanted is None:
            return False
        self.wanted, self._outcome = None, error
        return True

    def forget(self) -> None:
        """Nothing is to be registered any more."""
        self.held = self.wanted = None
        self.references = 0

    def abandon(self) -> None:
        """The caller waits no longer."""
        self.wanted = None

    def take_outcome(self) -> MoriiodError | bool | None:
        """Return how the caller's registration ended: True or why not; None while it runs."""
        outcome, self._outcome = self._outcome, None
        return outcome

    def check_held(self) -> None:
        """Check that something is registered.

        Raises:
            NotRegistered: Nothing is.
        """
        if self.held is None:
            raise NotRegistered("no KV cache is registered")

    def unregistered(self) -> None:
        """The daemon dropped one reference."""
        self.references = max(0, self.references - 1)
        if not self.references:
            self.held = None
