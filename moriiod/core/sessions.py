"""Engine sessions: one local generation paired with one generation of a peer.

Before a session opens, the peer's layout is fetched, checked as strictly as our own (safety rule
S5) and compared; what cannot be bridged is refused before any transfer. A session that failed is
forgotten, so the next transfer tries again (case T7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from moriiod.core.compare import find_mismatches
from moriiod.core.context import Context
from moriiod.core.effects import CloseSession, OpenSession
from moriiod.core.geometry import CacheLayout, RemoteLayout
from moriiod.core.ids import Epoch, Generation, SessionId
from moriiod.core.layout import check_layout
from moriiod.core.messages import LayoutReply, LayoutRequest
from moriiod.core.pairing import BlockTable
from moriiod.core.peers import Peer, Peers
from moriiod.errors import (
    EngineMismatch,
    GeometryMismatch,
    InvalidGeometry,
    MoriiodError,
    NotRegistered,
    PeerLost,
    SessionFailed,
)


class SessionWaiter(Protocol):
    """Someone who needs a session."""

    def session_ready(self, session: PeerSession) -> None:
        """The session is open."""
        ...

    def session_failed(self, error: MoriiodError) -> None:
        """There will be no session."""
        ...


@dataclass(eq=False)
class PeerSession:
    """A pairing, from the first question about the peer's layout to its closing."""

    peer: Epoch
    #: TP size of the peer's instance.
    peer_tp: int
    local: CacheLayout
    remote_generation: Generation
    session: SessionId
    #: Called when the last user of a session that must close has let go.
    on_idle: Callable[[PeerSession], None]
    remote: RemoteLayout | None = None
    #: Groups that cannot be bridged, and why; the others can still be moved.
    mismatches: Mapping[int, GeometryMismatch] = field(default_factory=dict)
    is_opening: bool = False
    is_open: bool = False
    is_closing: bool = False
    #: Legs that hold it and operations that run on it; it stays open meanwhile.
    uses: int = 0
    waiters: dict[SessionWaiter, None] = field(default_factory=dict)

    @property
    def remote_layout(self) -> CacheLayout:
        """The peer's layout; only of a session that is open."""
        if self.remote is None:
            raise SessionFailed("the session is not open")
        return self.remote.layout

    def check_groups(self, tables: Sequence[BlockTable]) -> None:
        """Refuse blocks of a group that differs from the peer's.

        Raises:
            GeometryMismatch: Names the field and both values.
        """
        for index, table in enumerate(tables):
            if len(table.ids) and index in self.mismatches:
                raise self.mismatches[index]

    def acquire(self) -> None:
        """One more leg or operation uses the session."""
        self.uses += 1

    def release(self) -> None:
        """One leg or operation less uses the session."""
        self.uses -= 1
        if self.uses == 0 and self.is_closing:
            self.on_idle(self)


_Key = tuple[Epoch, Generation, Generation]


class Sessions:
    """All sessions, and the layouts they were opened with."""

    def __init__(self, ctx: Context, peers: Peers, engine: str) -> None:
        self._ctx = ctx
        self._peers = peers
        self._engine = engine
        self._sessions: dict[_Key, PeerSession] = {}
        self._by_id: dict[SessionId, PeerSession] = {}
        self._next_session = 1

    def __len__(self) -> int:
        return len(self._by_id)

    def ensure(
        self, peer: Peer, local: CacheLayout, remote: Generation, waiter: SessionWaiter
    ) -> None:
        """Tell ``waiter`` when the pair of generations is connected."""
        key = (peer.epoch, local.generation, remote)
        session = self._sessions.get(key)
        if session is None:
            session = PeerSession(
                peer.epoch,
                peer.identity.tp_size,
                local,
                remote,
                self._next_session,
                on_idle=self._close_now,
            )
            self._next_session += 1
            self._sessions[key] = self._by_id[session.session] = session
            self._peers.outbox.post(peer.epoch, ("layout", remote), LayoutRequest(remote))
        if session.is_open:
            self._ctx.later(partial(waiter.session_ready, session))
        else:
            session.waiters[waiter] = None

    def forget(self, waiter: SessionWaiter) -> None:
        """``waiter`` needs its session no more."""
        for session in self._by_id.values():
            session.waiters.pop(waiter, None)

    # --- Opening ------------------------------------------------------------------------------

    def on_layout(self, peer: Peer, message: LayoutReply) -> None:
        """The peer described a generation, or says that it has none of that name."""
        self._peers.outbox.confirm(peer.epoch, ("layout", message.generation))
        for session in list(self._sessions.values()):
            is_meant = (session.peer, session.remote_generation) == (
                peer.epoch,
                message.generation,
            )
            if is_meant and session.remote is None:
                self._open(session, message)

    def _open(self, session: PeerSession, message: LayoutReply) -> None:
        try:
            session.remote = self._checked(session, message)
        except MoriiodError as error:
            self._fail(session, error)
            return
        session.is_opening = True
        self._ctx.emit(
            OpenSession(session.session, session.peer, session.local.generation, session.remote)
        )

    def _checked(self, session: PeerSession, message: LayoutReply) -> RemoteLayout:
        remote = message.layout
        if remote is None:
            raise NotRegistered("the peer's worker has no KV cache registered")
        if remote.layout.generation != message.generation:
            raise InvalidGeometry("the peer described another generation than it was asked for")
        if remote.engine != self._engine:
            raise EngineMismatch("no engine in common", ours=self._engine, theirs=remote.engine)
        if len(remote.descriptors) != len(remote.layout.region_bytes):
            raise InvalidGeometry(
                "the peer's regions and descriptors differ in number",
                regions=len(remote.layout.region_bytes),
                descriptors=len(remote.descriptors),
            )
        check_layout(remote.layout)
        ours = self._ctx.identity
        session.mismatches = find_mismatches(
            session.local, remote.layout, ours.tp_size, session.peer_tp
        )
        if len(session.mismatches) == len(session.local.groups):
            raise session.mismatches[0]
        return remote

    def opened(self, session_id: SessionId) -> None:
        """The engine opened a session."""
        session = self._by_id.get(session_id)
        if session is None or not session.is_opening:
            return  # closed while it was opening; the shell closes what opens too late
        session.is_opening, session.is_open = False, True
        waiters, session.waiters = session.waiters, {}
        for waiter in waiters:
            self._ctx.later(partial(waiter.session_ready, session))

    def refused(self, session_id: SessionId, error: MoriiodError) -> None:
        """The engine could not open a session."""
        session = self._by_id.get(session_id)
        if session is not None and session.is_opening:
            session.is_opening = False
            self._fail(session, error)

    # --- Closing ------------------------------------------------------------------------------

    def _fail(self, session: PeerSession, error: MoriiodError) -> None:
        self._forget_session(session)
        waiters, session.waiters = session.waiters, {}
        for waiter in waiters:
            self._ctx.later(partial(waiter.session_failed, error))

    def _forget_session(self, session: PeerSession) -> None:
        self._sessions.pop(
            (session.peer, session.local.generation, session.remote_generation), None
        )
        self._by_id.pop(session.session, None)

    def close_of_generation(self, generation: Generation) -> None:
        """A local worker's memory is about to be deregistered."""
        self._close_where(lambda s: s.local.generation == generation)

    def close_of_peer(self, peer: Peer) -> None:
        """A peer's epoch is over or forgotten."""
        self._close_where(lambda s: s.peer == peer.epoch)

    def close_unregistered(self, peer: Peer) -> None:
        """Close idle sessions with generations that the peer's newest heartbeat does not name."""
        self._close_where(
            lambda s: (
                s.peer == peer.epoch
                and s.is_open
                and not s.uses
                and s.remote_generation not in peer.generations
            )
        )

    def _close_where(self, condition: Callable[[PeerSession], bool]) -> None:
        for session in [s for s in self._by_id.values() if condition(s)]:
            self._close(session)

    def _close(self, session: PeerSession) -> None:
        was_requested = session.is_opening or session.is_open
        self._fail(session, PeerLost("the session was closed"))
        if not was_requested:
            self._stop_asking(session)
            return
        session.is_opening = False
        session.is_closing = True
        if session.uses == 0:
            self._close_now(session)

    def _stop_asking(self, closed: PeerSession) -> None:
        """Nobody needs the peer's layout any more, unless another session waits for it as well."""
        asked = (closed.peer, closed.remote_generation)
        is_shared = any(
            (s.peer, s.remote_generation) == asked and s.remote is None
            for s in self._by_id.values()
        )
        if not is_shared:
            self._peers.outbox.confirm(closed.peer, ("layout", closed.remote_generation))

    def _close_now(self, session: PeerSession) -> None:
        session.is_closing = session.is_open = False
        self._ctx.emit(CloseSession(session.session))
