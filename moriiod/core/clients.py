"""Local workers: who is attached, what memory they registered, which events they have not taken.

A worker is known by its generation. It introduces itself on the fd socket (from there on its life
is watched), attaches over ZMQ, registers its caches, and may then transfer. Its memory is released
only when no transfer uses it any more, also after its death.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from moriiod.core.context import Context
from moriiod.core.effects import (
    DisconnectWorker,
    RegisterMemory,
    ReleaseMemory,
    ReplyToClient,
    SendEvent,
)
from moriiod.core.faults import to_refused
from moriiod.core.geometry import CacheLayout
from moriiod.core.ids import ClientRoute, Generation
from moriiod.core.layout import check_layout
from moriiod.core.requests import Attach, Done, RegisterCaches, Reply, TransferEnded
from moriiod.errors import (
    Busy,
    DuplicateClient,
    InvalidGeometry,
    MoriiodError,
    NotRegistered,
    TransferConflict,
)


class Memory(Enum):
    """Where a worker's memory stands with the engine."""

    NONE = "none"
    REGISTERING = "registering"
    REGISTERED = "registered"
    RELEASING = "releasing"


class Pin(Protocol):
    """Something that uses a worker's memory: a transfer."""

    def worker_lost(self) -> None:
        """The worker is gone; come to rest and unpin."""
        ...


@dataclass(eq=False)
class Client:
    """One attach of one worker."""

    generation: Generation
    pid: int
    uid: int
    name: str = ""
    #: Where replies and events go; None before Attach.
    route: ClientRoute | None = None
    #: Set once the worker died or detached; nothing is sent to it any more.
    is_gone: bool = False
    #: Regions handed over on the fd socket: index -> bytes.
    offered: dict[int, int] = field(default_factory=dict)
    memory: Memory = Memory.NONE
    #: Its memory was released. A generation names one memory for ever: peers may still have it
    #: mapped, and would take other memory under the same name for it.
    had_memory: bool = False
    layout: CacheLayout | None = None
    descriptors: tuple[bytes, ...] = ()
    #: How often the present layout was registered (M1).
    references: int = 0
    #: (route, sequence) of a RegisterCaches that waits for the engine.
    waiting_reply: tuple[ClientRoute, int] | None = None
    #: What uses the memory. A dict for its order.
    pins: dict[Pin, None] = field(default_factory=dict)
    next_sequence: int = 1
    #: Events that the client has not confirmed, oldest first.
    unconfirmed: deque[tuple[int, TransferEnded]] = field(default_factory=deque)
    #: Highest sequence that was sent.
    sent_sequence: int = 0

    @property
    def usable_layout(self) -> CacheLayout | None:
        """The layout new transfers are planned with and peers are told of, None if there is none.

        Memory whose last reference was dropped stays registered as long as old transfers touch it.
        """
        is_usable = self.memory is Memory.REGISTERED and self.references and not self.is_gone
        return self.layout if is_usable else None

    @property
    def registered_layout(self) -> CacheLayout:
        """The same, of a client that must have one.

        Raises:
            NotRegistered: Nothing is registered.
        """
        layout = self.usable_layout
        if layout is None:
            raise NotRegistered("no KV cache is registered", generation=self.generation)
        return layout


class Clients:
    """The registry of local workers.

    Args:
        close_sessions: Closes the engine sessions that pair a generation, before its release.
    """

    def __init__(self, ctx: Context, close_sessions: Callable[[Generation], None]) -> None:
        self._ctx = ctx
        self._close_sessions = close_sessions
        self._clients: dict[Generation, Client] = {}
        self._by_route: dict[ClientRoute, Client] = {}

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients.values())

    def __len__(self) -> int:
        return len(self._clients)

    def get(self, generation: Generation) -> Client | None:
        """Return the client of a generation, None if it is unknown."""
        return self._clients.get(generation)

    def of_route(self, route: ClientRoute) -> Client:
        """Return the client that attached from this route.

        Raises:
            NotRegistered: Nobody did.
        """
        client = self._by_route.get(route)
        if client is None:
            raise NotRegistered("not attached to this daemon")
        return client

    def registered(self) -> list[Client]:
        """Clients whose memory peers may be told of."""
        return [client for client in self if client.usable_layout is not None]

    # --- Life of a worker ---------------------------------------------------------------------

    def worker_connected(self, generation: Generation, pid: int, uid: int) -> None:
        """A worker introduced itself on the fd socket."""
        if generation in self._clients or len(self._clients) >= self._ctx.settings.max_clients:
            self._ctx.problem("worker_refused", f"pid {pid}")
            self._ctx.emit(DisconnectWorker(generation))
            return
        self._clients[generation] = Client(generation, pid, uid)

    def region_offered(self, generation: Generation, region: int, n_bytes: int) -> None:
        """A sealed region arrived on the fd socket."""
        client = self._clients.get(generation)
        if client is not None and not client.is_gone:
            client.offered[region] = n_bytes

    def worker_died(self, generation: Generation) -> None:
        """The worker's process or its fd connection ended."""
        client = self._clients.get(generation)
        if client is not None and not client.is_gone:
            self._leave(client)

    def attach(self, route: ClientRoute, request: Attach) -> Client:
        """Bind a ZMQ route to a worker that introduced itself on the fd socket.

        Raises:
            NotRegistered: It did not.
            DuplicateClient: The generation or the route is in use by another client.
        """
        client = self._clients.get(request.generation)
        if client is None or client.is_gone:
            raise NotRegistered("introduce yourself on the fd socket first")
        if client.route not in (None, route) or self._by_route.get(route) not in (None, client):
            raise DuplicateClient("this generation is attached already", name=request.name)
        client.route, client.name = route, request.name
        self._by_route[route] = client
        return client

    def detach(self, client: Client) -> None:
        """The worker leaves in good order."""
        self._leave(client)

    def _leave(self, client: Client) -> None:
        client.is_gone = True
        client.unconfirmed.clear()
        if client.route is not None:
            self._by_route.pop(client.route, None)
        for pin in list(client.pins):
            pin.worker_lost()
        self._release_if_unused(client)

    # --- Memory -------------------------------------------------------------------------------

    def register(
        self, client: Client, reply_to: tuple[ClientRoute, int], request: RegisterCaches
    ) -> None:
        """Check the description and hand the memory to the engine; answered when it has it.

        Args:
            client: Whose memory it is.
            reply_to: Route and sequence of the request.
            request: What lies in the memory.

        Raises:
            InvalidGeometry: Description and memory disagree.
            TransferConflict: Another layout is registered.
        """
        layout = CacheLayout(client.generation, request.groups, request.region_bytes)
        if client.memory in (Memory.REGISTERED, Memory.REGISTERING):
            if client.layout != layout:
                raise TransferConflict("another layout is registered; unregister it first")
            if client.memory is Memory.REGISTERED:
                client.references += 1
                self._ctx.emit(ReplyToClient(*reply_to, Done()))
                return
            raise Busy("this layout is being registered", limit="registrations", retry_after_s=0.1)
        if client.memory is Memory.RELEASING:
            raise Busy("the old layout is being released", limit="registrations", retry_after_s=0.1)
        if client.had_memory:
            raise NotRegistered(
                "this generation's memory was released; attach anew for other memory"
            )
        for index, n_bytes in enumerate(request.region_bytes):
            if client.offered.get(index, -1) < n_bytes:
                raise InvalidGeometry(
                    "a region was not handed over, or is smaller than described",
                    region=index,
                    described_bytes=n_bytes,
                    offered_bytes=client.offered.get(index, 0),
                )
        check_layout(layout)
        client.layout = layout
        client.memory = Memory.REGISTERING
        client.waiting_reply = reply_to
        self._ctx.emit(RegisterMemory(layout))

    def memory_registered(self, generation: Generation, descriptors: tuple[bytes, ...]) -> None:
        """The engine has the memory."""
        client = self._clients.get(generation)
        if client is None or client.memory is not Memory.REGISTERING:
            self._ctx.problem("engine_event_unexpected", "memory registered")
            return
        client.memory, client.descriptors, client.references = Memory.REGISTERED, descriptors, 1
        self._answer_registration(client, Done())
        self._release_if_unused(client)

    def memory_refused(self, generation: Generation, error: MoriiodError) -> None:
        """The engine does not take the memory."""
        client = self._clients.get(generation)
        if client is None or client.memory is not Memory.REGISTERING:
            self._ctx.problem("engine_event_unexpected", "memory refused")
            return
        client.memory, client.layout = Memory.NONE, None
        self._answer_registration(client, to_refused(error))
        self._release_if_unused(client)

    def unregister(self, client: Client) -> None:
        """Drop one reference to the layout.

        Raises:
            NotRegistered: There is none.
        """
        if client.usable_layout is None:
            raise NotRegistered("no KV cache is registered", generation=client.generation)
        client.references -= 1
        if client.references:
            return
        for pin in list(client.pins):
            pin.worker_lost()
        self._release_if_unused(client)

    def memory_released(self, generation: Generation) -> None:
        """The engine and the fd table have let go of the memory."""
        client = self._clients.get(generation)
        if client is None or client.memory is not Memory.RELEASING:
            self._ctx.problem("engine_event_unexpected", "memory released")
            return
        client.had_memory = True
        client.memory, client.layout, client.descriptors = Memory.NONE, None, ()
        client.offered.clear()
        self._release_if_unused(client)

    def pin(self, client: Client, user: Pin) -> None:
        """Keep the client's memory registered for ``user``."""
        client.pins[user] = None

    def unpin(self, client: Client, user: Pin) -> None:
        """``user`` no longer touches the client's memory."""
        client.pins.pop(user, None)
        self._release_if_unused(client)

    def _release_if_unused(self, client: Client) -> None:
        # Both the end of its last transfer and its own may come here.
        if client.pins or self._clients.get(client.generation) is not client:
            return
        if client.memory is Memory.REGISTERED and (client.is_gone or client.references == 0):
            client.memory = Memory.RELEASING
            self._close_sessions(client.generation)
            self._ctx.emit(ReleaseMemory(client.generation))
        elif client.memory is Memory.NONE and client.is_gone:
            del self._clients[client.generation]
            self._ctx.emit(DisconnectWorker(client.generation))

    def _answer_registration(self, client: Client, body: Reply) -> None:
        waiting, client.waiting_reply = client.waiting_reply, None
        if waiting is not None and not client.is_gone:
            self._ctx.emit(ReplyToClient(*waiting, body))

    # --- Events -------------------------------------------------------------------------------

    def check_room(self, client: Client) -> None:
        """Refuse a new transfer whose end the client might never take in.

        Raises:
            Busy: The client's unconfirmed events and live transfers are at the limit.
        """
        limit = self._ctx.settings.max_unconfirmed_events
        if len(client.unconfirmed) + len(client.pins) >= limit:
            raise Busy(
                "too many unconfirmed events and live transfers",
                limit="max_unconfirmed_events",
                value=limit,
                retry_after_s=1.0,
            )

    def tell(self, client: Client, event: TransferEnded) -> None:
        """Keep an event until the client has confirmed it, and send it when the window allows."""
        if client.is_gone:
            return
        client.unconfirmed.append((client.next_sequence, event))
        client.next_sequence += 1
        self._send_events(client)

    def confirm_events(self, client: Client, sequence: int) -> None:
        """The client has every event up to ``sequence``; what was never sent it cannot have."""
        taken = min(sequence, client.sent_sequence)
        while client.unconfirmed and client.unconfirmed[0][0] <= taken:
            client.unconfirmed.popleft()
        self._send_events(client)

    def event_undelivered(self, route: ClientRoute, sequence: int) -> None:
        """The shell could not send an event: send it again when the client is next heard of."""
        client = self._by_route.get(route)
        if client is not None:
            client.sent_sequence = min(client.sent_sequence, sequence - 1)

    def heard(self, client: Client) -> None:
        """The client is there: send what it has not been sent."""
        self._send_events(client)

    def _send_events(self, client: Client) -> None:
        if client.route is None or not client.unconfirmed:
            return
        oldest = client.unconfirmed[0][0]
        start = max(client.sent_sequence + 1, oldest)
        stop = min(oldest + self._ctx.settings.event_window, client.next_sequence)
        for sequence in range(start, stop):
            event = client.unconfirmed[sequence - oldest][1]
            self._ctx.emit(SendEvent(client.route, sequence, event))
            client.sent_sequence = sequence
