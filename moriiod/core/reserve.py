"""WRITE, consumer side: grant blocks to the producers, and take them back only when it is proven.

    active --every producer rank we read from reported WriteDone--> received
       \\--any failure, timeout, abort, worker lost--> draining --every grant ended--> failed

The producers write into our memory, so nothing but their word ends a grant: ``WriteDone``,
``WriteFailed``, or the engine's proof that the producer's daemon can no longer reach us. A grant
that cannot be ended keeps the blocks quarantined (safety rule S1).
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from moriiod.core.address import Endpoint
from moriiod.core.clients import Client
from moriiod.core.faults import to_error
from moriiod.core.links import Expected
from moriiod.core.messages import Grant, RevokeGrant, WriteDone, WriteFailed
from moriiod.core.peers import Peer
from moriiod.core.requests import Reserve as ReserveRequest
from moriiod.core.transfers import Ending, Transfer
from moriiod.errors import MoriiodError, PeerLost, PeerRestarted, TransferAborted, WorkerLost

if TYPE_CHECKING:
    from moriiod.core.reserves import Reserves


class GrantState(Enum):
    """Where one grant of a reservation stands."""

    DIALING = "dialing"
    #: The producer may be writing.
    GRANTED = "granted"
    #: The producer was asked to stop.
    REVOKING = "revoking"
    #: Every sealed layer is in our blocks.
    DONE = "done"
    #: Nothing of this producer writes to our blocks any more.
    CLOSED = "closed"


class GrantLeg:
    """One producer rank of a reservation."""

    def __init__(
        self, reserve: Reserve, endpoint: Endpoint, expected: Expected, writes: bool
    ) -> None:
        self.reserve = reserve
        self.endpoint = endpoint
        self.expected = expected
        self.writes = writes
        self.state = GrantState.DIALING
        self.peer: Peer | None = None
        self.grant_id = reserve.table.ctx.new_attempt()
        self.n_bytes = 0
        self.n_layers = 0
        #: The producer has said that it has the grant.
        self.is_accepted = False
        #: The producer restarted before it accepted: grant anew once the old one is fenced.
        self.grants_anew = False

    @property
    def is_over(self) -> bool:
        """Whether this producer surely writes nothing more."""
        return self.state in (GrantState.DONE, GrantState.CLOSED)

    # --- Link ---------------------------------------------------------------------------------

    def link_up(self, peer: Peer) -> None:
        """The producer rank is there: grant it our blocks."""
        if self.state is not GrantState.DIALING:
            return
        if peer.is_void:
            self.link_failed(PeerLost("the producer restarted"))
            return
        self.peer = peer
        self.state = GrantState.GRANTED
        reserve = self.reserve
        reserve.table.peers.use(peer, self)
        grant = Grant(
            reserve.transfer_id,
            self.grant_id,
            reserve.client.generation,
            self.writes,
            reserve.request.blocks if self.writes else (),
            reserve.request.first if self.writes else (),
        )
        reserve.table.peers.post(peer, ("grant", self.grant_id), grant)

    def link_failed(self, error: MoriiodError) -> None:
        """The producer rank cannot be reached; it was never granted anything."""
        if self.state is GrantState.DIALING:
            self._close(GrantState.CLOSED)
            self._failed(error)

    # --- Messages -----------------------------------------------------------------------------

    def accepted(self, peer: Peer) -> None:
        """The producer remembers the grant."""
        self.is_accepted = True
        self.reserve.table.peers.outbox.confirm(peer.epoch, ("grant", self.grant_id))

    def write_done(self, message: WriteDone) -> None:
        """The producer has written everything and writes nothing more."""
        if self.is_over:
            return
        self.n_bytes, self.n_layers = message.n_bytes, message.n_layers
        self._close(GrantState.DONE)
        self.reserve.leg_done()

    def write_failed(self, message: WriteFailed) -> None:
        """The producer gave up and writes nothing more."""
        if self.is_over:
            return
        self._close(GrantState.CLOSED)
        self._failed(to_error(message.error))

    # --- Loss ---------------------------------------------------------------------------------

    def peer_lost(self, error: MoriiodError) -> None:
        """The producer's daemon is silent or over: it may still be writing, so seek proof."""
        if self.is_over or self.peer is None:
            return
        if not self.writes:  # it has no blocks of ours
            self._close(GrantState.CLOSED)
        elif isinstance(error, PeerRestarted) and not self.is_accepted and self.reserve.is_active:
            self.grants_anew = True
            self.reserve.table.peers.fence(self.peer)
            return
        self._failed(error)
        if not self.is_over:
            self.reserve.table.peers.fence(self.peer)

    def peer_forgotten(self) -> None:
        """The producer may still be writing: it is not forgotten before that is settled."""

    def peer_fenced(self) -> None:
        """The producer's daemon cannot reach our memory any more.

        The revocation stays in the outbox: should the daemon come back, it must answer it before
        it is let in again.
        """
        if self.is_over or self.peer is None:
            return
        if self.grants_anew and self.reserve.is_active:
            self._grant_anew(self.peer)
            return
        self.revoke()
        self.state = GrantState.CLOSED
        self.reserve.table.peers.unuse(self.peer, self)
        self._failed(PeerLost("the producer's daemon is gone"))

    def _grant_anew(self, old: Peer) -> None:
        """Another daemon answers at the endpoint, and the old one surely writes nothing."""
        self.grants_anew = False
        table = self.reserve.table
        table.peers.unuse(old, self)
        self.peer = None
        self.state = GrantState.DIALING
        table.rename_grant(self)
        table.links.connect(self.endpoint, self.expected, self)

    # --- End ----------------------------------------------------------------------------------

    def revoke(self) -> None:
        """Ask the producer to stop; the leg ends when it says that it has."""
        if self.state is GrantState.DIALING:
            self.reserve.table.links.forget(self, self.endpoint)
            self._close(GrantState.CLOSED)
        elif self.state is GrantState.GRANTED and self.peer is not None:
            self.state = GrantState.REVOKING
            peers = self.reserve.table.peers
            peers.outbox.confirm(self.peer.epoch, ("grant", self.grant_id))
            revoke = RevokeGrant(self.reserve.transfer_id, self.grant_id)
            peers.post(self.peer, ("revoke_grant", self.grant_id), revoke)
            if not self.peer.is_up and not self.peer.is_fenced:
                peers.fence(self.peer)

    def _failed(self, error: MoriiodError) -> None:
        """A leg that is not written is only a courtesy: its failure fails nothing."""
        if self.writes:
            self.reserve.fail(error)
        self.reserve.settle()

    def _close(self, state: GrantState) -> None:
        self.state = state
        peer, peers = self.peer, self.reserve.table.peers
        if peer is not None:
            peers.outbox.confirm(peer.epoch, ("grant", self.grant_id))
            peers.outbox.confirm(peer.epoch, ("revoke_grant", self.grant_id))
            peers.unuse(peer, self)


class Reserve(Transfer):
    """One reservation of this rank, for all its producer ranks."""

    role = "reserve"

    def __init__(self, table: Reserves, client: Client, request: ReserveRequest) -> None:
        super().__init__(table.ctx, table.clients, client, request.transfer_id)
        self.table = table
        self.request = request
        self.legs: list[GrantLeg] = []
        self.error: MoriiodError | None = None

    @property
    def is_active(self) -> bool:
        """Whether it may still succeed."""
        return self.state == "active"

    def leg_done(self) -> None:
        """One producer has written everything."""
        if self.is_active and all(leg.state is GrantState.DONE for leg in self.legs if leg.writes):
            self.receive()
        self.settle()

    def receive(self) -> None:
        """Every byte is there."""
        if not self.is_active:
            return
        written = [leg for leg in self.legs if leg.writes]
        n_layers = max((leg.n_layers for leg in written), default=0)
        n_bytes = sum(leg.n_bytes for leg in written)
        self._end(Ending("received", "acked", n_bytes=n_bytes, n_layers=n_layers))
        self.settle()

    def fail(self, error: MoriiodError) -> None:
        """Drain: take every grant back, then report."""
        if not self.is_active:
            return
        self.error = error
        self.enter("draining", error.code)
        for leg in self.legs:
            leg.revoke()
        self.settle()

    def worker_lost(self) -> None:
        """Our own worker is gone."""
        self.fail(WorkerLost("the consumer's worker is gone"))

    def abort(self) -> None:
        """The worker gives it up."""
        self.fail(TransferAborted("aborted by the consumer's worker"))

    def settle(self) -> None:
        """Report a failure once nobody writes; forget the reservation once every leg is over."""
        if self.state == "draining" and all(leg.is_over for leg in self.legs if leg.writes):
            self._end(Ending.failure(self.error or TransferAborted("aborted")))
        if self.is_ended and all(leg.is_over for leg in self.legs):
            self.table.remove(self)

    def _end(self, ending: Ending) -> None:
        self.table.ended(self)
        self.report(ending)
        self._clients.unpin(self.client, self)
