"""Reservations that outlived their daemon: fenced at every producer before they are reported.

The daemon that granted the blocks is dead, but the producers' daemons may still be writing into
them. The worker names such reservations when it attaches to the new daemon, which asks every
producer rank to end what it has in flight with the dead epoch. Only then is the transfer reported
as failed, and its blocks are the worker's again (safety rule S1). A producer that cannot be asked
keeps them quarantined, and is asked again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from moriiod.core import topology
from moriiod.core.address import Endpoint, endpoint_for_rank
from moriiod.core.clients import Client
from moriiod.core.headplan import possible_sources
from moriiod.core.ids import AttemptId, Epoch, TransferId
from moriiod.core.links import Expected
from moriiod.core.messages import Fenced, FenceRequest
from moriiod.core.parts import Parts
from moriiod.core.peers import Peer
from moriiod.core.requests import Attach
from moriiod.core.requests import Orphan as OrphanRequest
from moriiod.core.transfers import Ending, Transfer
from moriiod.errors import DaemonLost, MoriiodError, TransferConflict


class FenceLeg:
    """One producer rank that may still be writing for a dead epoch of ours."""

    def __init__(self, orphan: Orphan, endpoint: Endpoint, expected: Expected) -> None:
        self.orphan = orphan
        self.endpoint = endpoint
        self.expected = expected
        self.fence_id = orphan.table.ctx.new_attempt()
        self.peer: Peer | None = None
        self.is_over = False

    def connect(self) -> None:
        """Look for the producer."""
        if not self.is_over:
            self.orphan.table.links.connect(self.endpoint, self.expected, self)

    def link_up(self, peer: Peer) -> None:
        """It is there: ask."""
        if self.is_over or peer.is_void:
            return
        self.peer = peer
        table = self.orphan.table
        table.peers.use(peer, self)
        request = FenceRequest(self.fence_id, self.orphan.old_epoch)
        table.peers.post(peer, ("fence", self.fence_id), request)

    def link_failed(self, error: MoriiodError) -> None:
        """It is not there now; the blocks stay quarantined."""
        self._try_again()

    def peer_lost(self, error: MoriiodError) -> None:
        """It was there and is not any more."""
        if not self.is_over and self.peer is not None:
            self._forget_peer(self.peer)
            self._try_again()

    def peer_forgotten(self) -> None:
        """It is asked again for as long as it takes."""

    def peer_fenced(self) -> None:
        """Nothing: this epoch of ours granted nothing."""

    def _try_again(self) -> None:
        ctx = self.orphan.table.ctx
        when = ctx.now + ctx.settings.link_timeout_s
        ctx.timers.set(("orphan", self.fence_id), when, self.connect)

    def _forget_peer(self, peer: Peer) -> None:
        self.orphan.table.peers.outbox.confirm(peer.epoch, ("fence", self.fence_id))
        self.orphan.table.peers.unuse(peer, self)
        self.peer = None

    def close(self) -> None:
        """The producer is done with the dead epoch, or nobody needs to know any more."""
        self.is_over = True
        table = self.orphan.table
        table.ctx.timers.cancel(("orphan", self.fence_id))
        table.links.forget(self, self.endpoint)
        if self.peer is not None:
            self._forget_peer(self.peer)


class Orphan(Transfer):
    """One reservation of a worker whose daemon was lost."""

    role = "reserve"

    def __init__(
        self, table: Orphans, client: Client, request: OrphanRequest, old_epoch: Epoch
    ) -> None:
        super().__init__(table.ctx, table.clients, client, request.transfer_id)
        self.table = table
        self.old_epoch = old_epoch
        self.legs: list[FenceLeg] = []

    def settle(self) -> None:
        """Report the failure once every producer has been fenced."""
        if not self.is_ended and all(leg.is_over for leg in self.legs):
            self.table.remove(self)
            self.report(Ending.failure(DaemonLost("the daemon restarted during the transfer")))
            self._clients.unpin(self.client, self)

    def worker_lost(self) -> None:
        """Nobody will reuse the blocks: the worker's memory is not ours to hold back."""
        for leg in self.legs:
            leg.close()
        self.settle()


class Orphans:
    """All reservations that wait for a fence."""

    def __init__(self, parts: Parts) -> None:
        self.ctx = parts.ctx
        self.clients = parts.clients
        self.links = parts.links
        self.peers = parts.peers
        self._orphans: dict[Orphan, None] = {}
        self._legs: dict[AttemptId, FenceLeg] = {}

    def __iter__(self) -> Iterator[Orphan]:
        return iter(self._orphans)

    def __len__(self) -> int:
        return len(self._orphans)

    def adopt(self, client: Client, request: Attach) -> None:
        """Take over the reservations that a worker brings from its lost daemon."""
        for orphan_request in request.orphans:
            old_epoch = orphan_request.epoch or request.lost_epoch
            if old_epoch is None:
                self.ctx.problem("orphan_without_epoch", orphan_request.transfer_id)
                continue
            orphan = Orphan(self, client, orphan_request, old_epoch)
            self._orphans[orphan] = None
            self.clients.pin(client, orphan)
            orphan.enter("fencing", f"of epoch {old_epoch}")
            self._make_legs(orphan, orphan_request)
            for leg in orphan.legs:
                self._legs[leg.fence_id] = leg
                leg.connect()
            self.ctx.later(orphan.settle)

    def check_free(self, client: Client, transfer_id: TransferId) -> None:
        """Refuse a new reservation under a name that is still being fenced.

        Raises:
            TransferConflict: It is.
        """
        if any(o.client is client and o.transfer_id == transfer_id for o in self._orphans):
            raise TransferConflict("the old one is being fenced", transfer_id=transfer_id)

    def _make_legs(self, orphan: Orphan, request: OrphanRequest) -> None:
        ours, peer = self.ctx.identity, request.peer
        remote_tp = peer.tp_size or ours.tp_size
        try:
            allows_uneven = self.ctx.settings.allow_uneven
            topology.check_sizes(remote_tp, ours.tp_size, allows_uneven=allows_uneven)
            # The worker has not registered yet, so which heads the cache has is not known here.
            for rank in possible_sources(ours.tp_rank, ours.tp_size, remote_tp):
                endpoint = endpoint_for_rank(peer, peer.dp_rank, rank, remote_tp)
                expected = Expected(peer.dp_rank, rank, remote_tp)
                orphan.legs.append(FenceLeg(orphan, endpoint, expected))
        except MoriiodError as error:
            # The same request was refused by the old daemon then, so nothing was granted.
            self.ctx.problem("orphan_impossible", f"{request.transfer_id}: {error.message}")

    def on_fenced(self, peer: Peer, message: Fenced) -> None:
        """A producer rank is done with an old epoch of ours."""
        self.peers.outbox.confirm(peer.epoch, ("fence", message.fence_id))
        leg = self._legs.get(message.fence_id)
        if leg is not None and leg.orphan.old_epoch == message.old_epoch:
            leg.close()
            self.ctx.later(partial(leg.orphan.settle))

    def remove(self, orphan: Orphan) -> None:
        """The orphan is about to report its end."""
        self._orphans.pop(orphan, None)
        for leg in orphan.legs:
            self._legs.pop(leg.fence_id, None)
