"""The order in which a worker introduces itself and hands over its memory. Pure.

    fd socket   WorkerHello(generation)      ->   WorkerWelcome(epoch)
    ZMQ         Attach(generation, orphans)  ->   Attached
    fd socket   OfferRegion + fd, each       ->   RegionTaken
    ZMQ         RegisterCaches               ->   Done

Each step waits for the answer of the one before, so at most one is under way and nothing has to
be matched up.
"""

from __future__ import annotations

from collections.abc import Callable

from moriiod.client.registration import (
    Registering,
    SendPacket,
    SendRequest,
    Step,
    raise_if_refused,
)
from moriiod.core.faults import to_error
from moriiod.core.ids import Epoch, Generation
from moriiod.core.requests import Attach, Attached, Orphan, Refused, Reply
from moriiod.errors import UnexpectedMessage
from moriiod.wire.fdsocket import FdMessage, WorkerHello, WorkerWelcome


class Attaching:
    """One try to attach, and to register what was registered before.

    Args:
        generation: The uuid of this attach.
        name: What the worker calls itself.
        lost_epoch: The last daemon start this client was attached to, if it was lost.
        orphans: Returns the reservations that the daemon start with this epoch must fence.
        registering: Memory to hand over after the attach.
    """

    def __init__(
        self,
        generation: Generation,
        name: str,
        lost_epoch: Epoch | None,
        orphans: Callable[[Epoch], tuple[Orphan, ...]],
        registering: Registering | None,
    ) -> None:
        #: Known from the WorkerWelcome on.
        self.epoch: Epoch | None = None
        #: Known from the Attached on.
        self.identity: Attached | None = None
        self._generation = generation
        self._name = name
        self._lost_epoch = lost_epoch
        self._orphans = orphans
        self._registering = registering

    def start(self) -> Step:
        """Return the first step."""
        return SendPacket(WorkerHello(self._generation))

    def packet_received(self, message: FdMessage) -> Step:
        """Take the daemon's answer on the fd socket; return the next step.

        Raises:
            MoriiodError: The daemon refused, with the code it gave; the connection is over.
            UnexpectedMessage: It is no answer to what was sent.
        """
        raise_if_refused(message)
        if self.epoch is None and isinstance(message, WorkerWelcome):
            self.epoch = message.epoch
            lost = self._lost_epoch if self._lost_epoch != message.epoch else None
            orphans = self._orphans(message.epoch)
            return SendRequest(Attach(self._generation, self._name, lost, orphans))
        if self.identity is None or self._registering is None:
            raise UnexpectedMessage("the daemon answered out of turn", got=type(message).__name__)
        return self._registering.packet_received(message)

    def reply_received(self, reply: Reply) -> Step | None:
        """Take the answer to a request; None when the attach is complete.

        Raises:
            MoriiodError: The daemon refused to attach.
            RegistrationRefused: It attached, but did not take the memory.
            UnexpectedMessage: It is no answer to what was sent.
        """
        if self.identity is not None and self._registering is not None:
            return self._registering.reply_received(reply)
        if isinstance(reply, Refused):
            raise to_error(reply)
        if not isinstance(reply, Attached):
            raise UnexpectedMessage("not an answer to Attach", got=type(reply).__name__)
        self.identity = reply
        return self._registering.start() if self._registering is not None else None
