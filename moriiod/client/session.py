"""The client's side of the protocol with one daemon. Pure: no socket, no clock, no torch.

``Client`` and ``AsyncClient`` are two shells around this: they tell what happened, carry out the
``orders`` and hand on what has ended. The rules that both must keep are here and nowhere else:

* A daemon start is an epoch, an attach is a generation, and memory belongs to a generation.
* The end of an attach is not the end of its transfers; see ``table``.
* A client that lost its daemon attaches again by itself, with pauses, until it is closed.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moriiod.client.attach import Attaching
from moriiod.client.ledger import Ledger
from moriiod.client.registration import (
    Registering,
    RegistrationBook,
    RegistrationRefused,
    SendPacket,
    SendRequest,
    Step,
)
from moriiod.client.types import ClientSettings, ClientState, Registration, problem_from_error
from moriiod.core.ids import Epoch, Generation
from moriiod.core.requests import Attached, Detach, Done, Ping, RegisterCaches, Reply
from moriiod.errors import DaemonLost, MoriiodError, UnexpectedMessage
from moriiod.wire.fdsocket import FdMessage
from moriiod.wire.ipc import EventFrame, ReplyFrame


@dataclass(frozen=True, slots=True)
class OpenChannel:
    """Connect the fd socket and the ZMQ socket; tell ``opened`` or ``failed``."""


@dataclass(frozen=True, slots=True)
class CloseChannel:
    """Close both sockets; what they still hold is void. ``epoch``: whose they were, or ""."""

    epoch: Epoch


Order = OpenChannel | CloseChannel | SendPacket | SendRequest


class Phase(enum.Enum):
    """What the client waits for."""

    IDLE = "idle"
    #: The time of the next try.
    BACKOFF = "backoff"
    #: The daemon's next answer on the way to being attached.
    ATTACHING = "attaching"
    #: Nothing.
    READY = "ready"
    #: The daemon's next answer on the way to having memory registered.
    REGISTERING = "registering"
    #: The end of an attach that makes way for a new one.
    DETACHING = "detaching"
    #: The end of the last attach.
    LEAVING = "leaving"
    CLOSED = "closed"


_CONNECTED: Final = frozenset((Phase.READY, Phase.REGISTERING))


class ClientProtocol:
    """One client of one daemon socket.

    Args:
        name: What the worker calls itself, for logs and status.
        new_generation: Returns a new uuid4 hex.
        settings: Limits and times.
    """

    def __init__(
        self, name: str, new_generation: Callable[[], Generation], settings: ClientSettings
    ) -> None:
        self._name = name
        self._new_generation = new_generation
        self._settings = settings
        self._steps: Attaching | Registering | None = None
        #: Number of the request that the present step waits for.
        self._step_sequence = 0
        self._lost_epoch: Epoch | None = None
        self._failures = 0
        self.phase = Phase.IDLE
        self.ledger = Ledger(settings)
        self.caches = RegistrationBook()
        #: What the shell must do next, oldest first.
        self.orders: deque[Order] = deque()
        #: When ``timer`` must be called; None = no need.
        self.deadline: float | None = None
        #: Of the daemon that is connected; "" before it told.
        self.epoch: Epoch = ""
        self.generation: Generation = ""
        #: What the daemon is; None until the first attach.
        self.identity: Attached | None = None
        #: Why the last try to attach failed; None after a success.
        self.attach_error: MoriiodError | None = None
        #: The daemon confirmed that it let go of everything (after ``leave``).
        self.has_left = False
        #: While leaving: the daemon closed the fd socket, and was asked something after that.
        self._has_connection_ended = False
        self._is_proof_of_life = False

    @property
    def state(self) -> ClientState:
        """What the caller may do."""
        if self.phase in _CONNECTED:
            return ClientState.CONNECTED
        return ClientState.CLOSED if self.phase is Phase.CLOSED else ClientState.RECONNECTING

    # --- What the caller wants ----------------------------------------------------------------

    def start(self) -> None:
        """Begin the first attach; nothing if that was done."""
        if self.phase is Phase.IDLE:
            self._open()

    def check_connected(self) -> None:
        """Check that requests can be sent.

        Raises:
            DaemonLost: Not at present.
        """
        if self.phase not in _CONNECTED:
            raise DaemonLost(
                "not connected to a daemon at present",
                state=self.state.value,
                cause=None if self.attach_error is None else self.attach_error.message,
            )

    def register(self, registration: Registration, now: float) -> None:
        """Begin to register memory; ``caches.take_outcome`` tells how it ended.

        Raises:
            DaemonLost: Not connected at present.
            Busy: Another registration, or what is left of the former one, is under way.
            TransferConflict: Other memory is registered.
        """
        self.check_connected()
        self.caches.want(registration, len(self.ledger.table))
        if self.caches.needs_new_attach(registration):
            self.phase = Phase.DETACHING
            self._take(SendRequest(Detach()), now)
            return
        self.phase = Phase.REGISTERING
        self._steps = self.caches.in_place(registration)
        self._take(self._steps.start(), now)

    def abandon_registration(self) -> None:
        """The caller of ``register`` waits no longer; if it can be, nothing stays registered."""
        self.caches.abandon()
        if self._steps is not None and self.caches.held is None:
            self._reopen()

    def leave(self, now: float) -> None:
        """Begin to leave in good order; it is over when ``phase`` is CLOSED."""
        if self.phase is not Phase.READY:
            self.close()
            return
        self.phase = Phase.LEAVING
        self._take(SendRequest(Detach()), now)

    def close(self) -> None:
        """Leave at once: nothing is sent or taken in any more."""
        if self.phase is not Phase.CLOSED:
            self._give_up_channel(DaemonLost("the client was closed"))
            self.phase, self.deadline = Phase.CLOSED, None

    # --- What happens -------------------------------------------------------------------------

    def opened(self, now: float) -> None:
        """The sockets are connected."""
        self._steps = Attaching(
            self.generation,
            self._name,
            self._lost_epoch,
            self.ledger.table.orphans,
            self.caches.after_attach(),
        )
        self._take(self._steps.start(), now)

    def failed(self, error: MoriiodError, now: float) -> None:
        """A try to attach did not succeed; there will be another one."""
        self.attach_error = error
        if not isinstance(error, DaemonLost):
            self.ledger.add_problem(problem_from_error("Attach", error))
        self._give_up_channel(error)
        pause = self._settings.backoff_first_s * 2 ** min(self._failures, 16)
        self.deadline = now + min(pause, self._settings.backoff_max_s)
        self._failures += 1

    def lost(self, error: MoriiodError, now: float) -> None:
        """The daemon, or our connection to it, is gone."""
        if self.phase is Phase.LEAVING:
            self.close()
        elif self.phase is Phase.ATTACHING:
            self.failed(error, now)
        elif self.phase in (Phase.READY, Phase.REGISTERING, Phase.DETACHING):
            self._lost_epoch = self.epoch
            self._give_up_channel(error)
            self.deadline = now

    def connection_ended(self, error: MoriiodError, now: float) -> None:
        """The daemon closed the fd socket."""
        if self.phase is not Phase.LEAVING or self.orders:
            self.lost(error, now)
            return
        # It does that once nothing of ours is in its hands any more; but so does a dying process.
        # Whoever answers after this is alive.
        self._has_connection_ended = True
        if not self._step_sequence:
            self._is_proof_of_life = True
            self._take(SendRequest(Ping()), now)

    def daemon_gone(self, epoch: Epoch) -> None:
        """The process of that daemon start has ended."""
        self.ledger.daemon_gone(epoch)

    def timer(self, now: float) -> None:
        """``deadline`` has been reached."""
        if self.deadline is None or now < self.deadline:
            return
        if self.phase is Phase.BACKOFF:
            self._open()
        elif self.phase is Phase.DETACHING:
            self._reopen()
        elif self.phase is Phase.LEAVING:
            self.close()
        else:
            self.lost(DaemonLost("the daemon does not answer", phase=self.phase.value), now)

    def packet_received(self, message: FdMessage, now: float) -> None:
        """A packet came on the fd socket."""
        steps = self._steps
        try:
            if steps is None:
                raise UnexpectedMessage("packet out of turn", got=type(message).__name__)
            step = steps.packet_received(message)
        except MoriiodError as error:
            if self._is_handing_over():
                self.caches.refused(error)
            self.lost(error, now)
            return
        if isinstance(steps, Attaching) and steps.epoch is not None:
            self.epoch = steps.epoch
        self._take(step, now)

    def frame_received(self, frame: ReplyFrame | EventFrame, now: float) -> None:
        """A reply or an event came on the ZMQ socket."""
        if frame.epoch != self.epoch:
            self.lost(DaemonLost("the daemon restarted", epoch=frame.epoch), now)
        elif isinstance(frame, EventFrame):
            self.ledger.event_received(frame.sequence, frame.body)
        elif frame.sequence == self._step_sequence:
            self._step_sequence = 0
            self._step_answered(frame.body, now)
        elif not self.ledger.reply_received(frame.sequence, frame.body) and self.caches.held:
            self.lost(DaemonLost("the daemon does not know this client any more"), now)

    def frame_refused(self, error: MoriiodError, now: float) -> None:
        """What came on the ZMQ socket is no message of this protocol."""
        if self.phase is Phase.ATTACHING:
            self.failed(error, now)
        else:
            self.ledger.add_problem(problem_from_error("Frame", error))

    def step_sent(self) -> None:
        """The request of the present step was sent, under the ledger's next number."""
        self._step_sequence = self.ledger.next_sequence
        self.ledger.next_sequence += 1

    def step_unsendable(self, error: MoriiodError, now: float) -> None:
        """The request or packet of the present step cannot be sent at all."""
        if self._is_handing_over():
            self.caches.refused(error)
        self.lost(error, now)

    # --- Steps --------------------------------------------------------------------------------

    def _take(self, step: Step | None, now: float) -> None:
        """Go on with this step; None means that the last one is done."""
        if step is None:
            self._complete()
            return
        is_slow = isinstance(step, SendRequest) and isinstance(step.body, RegisterCaches)
        wait_s = self._settings.register_timeout_s if is_slow else self._settings.step_timeout_s
        if isinstance(step, SendPacket) and step.fd is not None:
            self.caches.is_generation_used = True
        self.deadline = now + wait_s
        self.orders.append(step)

    def _step_answered(self, reply: Reply, now: float) -> None:
        if self.phase is Phase.DETACHING:
            self._reopen()
        elif self.phase is Phase.LEAVING:
            self._leaving_answered(reply, now)
        elif self._steps is not None:
            try:
                self._take(self._steps.reply_received(reply), now)
            except RegistrationRefused as refusal:
                self._registration_refused(refusal.error, now)
            except MoriiodError as error:
                self.lost(error, now)

    def _leaving_answered(self, reply: Reply, now: float) -> None:
        is_proof = self._is_proof_of_life and isinstance(reply, Done)
        if is_proof or not len(self.ledger.table):
            # A daemon vouches for what it was asked itself, not for what a lost one left behind.
            self.has_left = not self.ledger.table.has_lost
            self.close()
        elif self._has_connection_ended:
            self._is_proof_of_life = True
            self._take(SendRequest(Ping()), now)

    def _registration_refused(self, error: MoriiodError, now: float) -> None:
        if self.caches.refused(error) and self.caches.held is None:
            # It was a caller's wish, and the caller is told; we stay attached without memory.
            self._ready()
        elif self.phase is Phase.REGISTERING:
            self._ready()
        else:
            self.lost(error, now)

    def _complete(self) -> None:
        self.caches.succeeded()
        self._ready()

    def _ready(self) -> None:
        if isinstance(self._steps, Attaching):
            self.identity = self._steps.identity
        self._steps = None
        self._failures = 0
        self.attach_error = None
        self.phase, self.deadline = Phase.READY, None

    def _is_handing_over(self) -> bool:
        steps = self._steps
        return isinstance(steps, Registering) or (
            isinstance(steps, Attaching) and steps.identity is not None
        )

    # --- The channel --------------------------------------------------------------------------

    def _open(self) -> None:
        self.generation = self._new_generation()
        self.caches.is_generation_used = False
        self.phase, self.deadline = Phase.ATTACHING, None
        self.orders.append(OpenChannel())

    def _reopen(self) -> None:
        self._give_up_channel(DaemonLost("attaching anew"))
        self._open()

    def _give_up_channel(self, error: MoriiodError) -> None:
        self.ledger.attach_ended(self.generation, error)
        self._steps = None
        self._step_sequence = 0
        self.phase = Phase.BACKOFF
        self.orders.clear()
        self.orders.append(CloseChannel(self.epoch))
        self.epoch = ""
