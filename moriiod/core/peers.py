"""Other daemons, by epoch: which are alive, which are void, and what waits for them.

A peer is *up* while it is heard. One that falls silent is *lost*: whoever uses it is told, and may
ask for a fence. It can come back under the same epoch. One whose identity came back with another
epoch, or that said Goodbye, is *void* for good (safety rule S7).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from moriiod.core.context import Context
from moriiod.core.effects import FencePeer, ReadmitPeer, SendToPeer
from moriiod.core.ids import Epoch, Generation, PeerRoute
from moriiod.core.messages import Identity, PeerBody
from moriiod.core.outbox import Key, Outbox
from moriiod.errors import MoriiodError, PeerLost, PeerRestarted

#: First part of the outbox keys of messages that end a claim or grant of a peer.
REVOCATIONS = frozenset({"revoke", "revoke_grant"})
#: Who has something to settle with a lost peer waits for it so many times longer.
_PATIENCE = 10


#: (instance, DP rank, TP rank).
RankKey = tuple[str, int, int]


class PeerUser(Protocol):
    """Something that depends on a peer: one leg of a transfer, one claim on a lease."""

    def peer_lost(self, error: MoriiodError) -> None:
        """The peer is silent or void; told once for each loss."""
        ...

    def peer_fenced(self) -> None:
        """Nothing of the peer can touch local memory any more."""
        ...

    def peer_forgotten(self) -> None:
        """The peer has been silent for very long: give up what only it would want to know."""
        ...


@dataclass(eq=False)
class Peer:
    """One start of one remote daemon."""

    identity: Identity
    #: Where it was last heard from.
    route: PeerRoute
    last_heard: float
    is_up: bool = True
    #: Its epoch is over; nothing it says counts any more.
    is_void: bool = False
    is_fenced: bool = False
    fence_requested: bool = False
    #: Worker generations it has registered, as of its newest heartbeat.
    generations: frozenset[Generation] = frozenset()
    heartbeat_sequence: int = -1
    #: Who depends on it. A dict for its order.
    users: dict[PeerUser, None] = field(default_factory=dict)

    @property
    def epoch(self) -> Epoch:
        """The peer's epoch, its key everywhere."""
        return self.identity.epoch

    @property
    def rank_key(self) -> RankKey:
        """Which rank of which instance it is."""
        return rank_key(self.identity)


def rank_key(identity: Identity) -> RankKey:
    """Return which rank of which instance this is, whatever its epoch."""
    return identity.instance, identity.dp_rank, identity.tp_rank


class Peers:
    """The registry of peers.

    Args:
        on_void: Called with a peer whose epoch is over, or that is forgotten, to close its
            sessions.
    """

    def __init__(self, ctx: Context, on_void: Callable[[Peer], None]) -> None:
        self._ctx = ctx
        self._on_void = on_void
        self._peers: dict[Epoch, Peer] = {}
        self._by_rank: dict[RankKey, Peer] = {}
        #: Epochs that are over, newest last, bounded.
        self._void: OrderedDict[Epoch, RankKey] = OrderedDict()
        #: Peers whose fence the engine was asked for; also void ones, which are in no other table.
        self._fencing: dict[Epoch, Peer] = {}
        self.outbox = Outbox(ctx, self.send)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def fencing(self) -> tuple[Peer, ...]:
        """Peers whose fence the engine was asked for and has not confirmed; also void ones."""
        return tuple(self._fencing.values())

    def get(self, epoch: Epoch) -> Peer | None:
        """Return the peer of an epoch, None if it is unknown or void."""
        return self._peers.get(epoch)

    def is_void(self, epoch: Epoch, identity: Identity | None = None) -> bool:
        """Whether this epoch is known to be over.

        Args:
            identity: Who claims it, where that is known: nobody can end an epoch of another rank.
        """
        key = self._void.get(epoch)
        return key is not None and (identity is None or key == rank_key(identity))

    def send(self, epoch: Epoch, body: PeerBody) -> None:
        """Send once where the peer was last heard from; may be lost."""
        peer = self._peers.get(epoch)
        if peer is not None:
            self._ctx.emit(SendToPeer(peer.route, body, to=epoch))

    def post(self, peer: Peer, key: Key, body: PeerBody) -> None:
        """Send until it is answered; nothing is sent to a peer whose epoch is over."""
        if not peer.is_void:
            self.outbox.post(peer.epoch, key, body)

    # --- Coming and going ---------------------------------------------------------------------

    def greet(self, identity: Identity, route: PeerRoute) -> Peer:
        """A handshake with this identity succeeded; an older epoch of the same rank is void."""
        old = self._by_rank.get(rank_key(identity))
        if old is not None and old.epoch != identity.epoch:
            self.void(
                old,
                PeerRestarted(
                    "the peer came back with a new epoch",
                    old_epoch=old.epoch,
                    new_epoch=identity.epoch,
                ),
            )
        peer = self._peers.get(identity.epoch)
        if peer is None:
            peer = Peer(identity, route, self._ctx.now)
            self._peers[identity.epoch] = peer
            self._by_rank[rank_key(identity)] = peer
            self._arm(peer)
        self.heard(peer, route)
        return peer

    def heard(self, peer: Peer, route: PeerRoute) -> None:
        """A message of the peer arrived."""
        peer.last_heard = self._ctx.now
        peer.route = route
        if not peer.is_up:
            peer.is_up = True
            self._arm(peer)
        if peer.fence_requested and not self._owes_revocation(peer):
            peer.fence_requested = peer.is_fenced = False
            self._fencing.pop(peer.epoch, None)
            self._ctx.emit(ReadmitPeer(peer.epoch))

    def _owes_revocation(self, peer: Peer) -> bool:
        """Whether the peer may still hold a claim or grant that a fence has ended for us.

        It must not reach our memory again before it has confirmed that it will not use them: a
        grant that was on its way all the time could start a write into blocks that are free.
        """
        return self.outbox.is_any_waiting(peer.epoch, REVOCATIONS)

    def _arm(self, peer: Peer) -> None:
        when = peer.last_heard + self._ctx.settings.link_timeout_s
        self._ctx.timers.set(("peer", peer.epoch), when, lambda: self._check_silence(peer))

    def _check_silence(self, peer: Peer) -> None:
        silence = self._ctx.now - peer.last_heard
        settings = self._ctx.settings
        # Compared as it was armed: rounding must never arm a timer that is due at once again.
        if self._ctx.now < peer.last_heard + settings.link_timeout_s:
            self._arm(peer)
            return
        if peer.is_up:
            peer.is_up = False
            self._ctx.problem("peer_lost", peer.identity.instance)
            self._tell_lost(
                peer,
                PeerLost(
                    "the peer stopped answering",
                    peer=str(peer.rank_key),
                    silent_s=round(silence, 3),
                ),
            )
        elif silence >= settings.peer_forget_s and self._forgets(peer, silence):
            return
        when = self._ctx.now + settings.link_timeout_s
        self._ctx.timers.set(("peer", peer.epoch), when, lambda: self._check_silence(peer))

    def _forgets(self, peer: Peer, silence: float) -> bool:
        """Let go of a peer that has been silent for long, unless something waits for it.

        What only it would want to know (our Acks), and what only it can confirm, is kept for much
        longer: a peer that comes back without having heard it keeps blocks for us.
        """
        is_patient = silence < _PATIENCE * self._ctx.settings.peer_forget_s
        if not is_patient:
            for user in list(peer.users):
                user.peer_forgotten()
        if peer.users or (is_patient and self._owes_revocation(peer)):
            return False
        if self._owes_revocation(peer):
            self.void(peer, PeerLost("the peer never confirmed that it has stopped"))
        else:
            self._drop(peer)
        return True

    def void(self, peer: Peer, error: MoriiodError, *, is_fenced: bool = False) -> None:
        """The peer's epoch is over: tell its users, forget what waits for it, fence what is left.

        Args:
            is_fenced: It said itself that nothing of it is in flight.
        """
        if peer.is_void:
            return
        peer.is_void, peer.is_up = True, False
        peer.is_fenced = peer.is_fenced or is_fenced
        self.mark_void(peer.epoch, peer.rank_key)
        self._tell_lost(peer, error)
        self._drop(peer)

    def mark_void(self, epoch: Epoch, key: RankKey) -> None:
        """Refuse whatever this epoch of a rank says from now on, also if it was never heard of."""
        self._void.setdefault(epoch, key)
        while len(self._void) > self._ctx.settings.max_tombstones:
            self._void.popitem(last=False)

    def _drop(self, peer: Peer) -> None:
        """Know nothing of it any more; a dropped peer may already have a successor."""
        self._ctx.timers.cancel(("peer", peer.epoch))
        self.outbox.drop_peer(peer.epoch)
        self._peers.pop(peer.epoch, None)
        if self._by_rank.get(peer.rank_key) is peer:
            del self._by_rank[peer.rank_key]
        self._on_void(peer)

    def _tell_lost(self, peer: Peer, error: MoriiodError) -> None:
        for user in list(peer.users):
            self._ctx.later(partial(user.peer_lost, error))

    # --- Use and fence ------------------------------------------------------------------------

    def use(self, peer: Peer, user: PeerUser) -> None:
        """Tell ``user`` when the peer is lost, at once if it is lost already."""
        peer.users[user] = None
        if not peer.is_up:
            error = PeerLost("the peer is not answering", peer=str(peer.rank_key))
            self._ctx.later(partial(user.peer_lost, error))

    def unuse(self, peer: Peer, user: PeerUser) -> None:
        """``user`` no longer depends on the peer."""
        peer.users.pop(user, None)

    def fence(self, peer: Peer) -> None:
        """Ask for proof that nothing of the peer can touch local memory.

        Every user of the peer is told by ``peer_fenced``, now or whenever the proof comes.
        """
        if peer.is_fenced:
            self._tell_fenced(peer)
        elif not peer.fence_requested:
            peer.fence_requested = True
            self._fencing[peer.epoch] = peer
            self._ctx.emit(FencePeer(peer.epoch))

    def fenced(self, epoch: Epoch) -> None:
        """The engine has the proof."""
        peer = self._fencing.pop(epoch, None)
        if peer is None:
            self._ctx.problem("engine_event_unexpected", "fence of an unknown epoch")
        else:
            peer.is_fenced = True
            self._tell_fenced(peer)

    def _tell_fenced(self, peer: Peer) -> None:
        for user in list(peer.users):
            self._ctx.later(user.peer_fenced)
