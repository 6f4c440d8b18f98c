"""All leases of this daemon: requests in, claims and acks matched to their lease."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moriiod.core.blocks import count_blocks, unpack_groups
from moriiod.core.clients import Client
from moriiod.core.early import Early
from moriiod.core.fanin import EarlyAcks, TransferAck
from moriiod.core.faults import to_wire_error
from moriiod.core.ids import AttemptId, TransferId
from moriiod.core.lease import ClaimKey, Lease
from moriiod.core.messages import (
    Ack,
    AckConfirmed,
    Claim,
    ClaimGranted,
    ClaimRefused,
    Renew,
    Renewed,
)
from moriiod.core.parts import Parts
from moriiod.core.peers import Peer
from moriiod.core.requests import Publish
from moriiod.core.transfers import Memorial, is_repeat
from moriiod.errors import MoriiodError, TransferAborted, UnknownTransfer


class Leases:
    """All leases of this daemon."""

    def __init__(self, parts: Parts) -> None:
        self.ctx = parts.ctx
        self.clients = parts.clients
        self.peers = parts.peers
        self._admission = parts.admission
        self._live: dict[TransferId, Lease] = {}
        #: Ended leases by lease id: which (epoch, pull) had a valid Ack.
        self._ended: Memorial[AttemptId, frozenset[ClaimKey]] = Memorial(
            self.ctx.settings.max_tombstones
        )
        #: Why a transfer id is not open any more.
        self._reasons: Memorial[TransferId, MoriiodError] = Memorial(
            self.ctx.settings.max_tombstones
        )
        self._early: Early[Claim] = Early(self.ctx, "claim", self._give_up_claim)
        self.early_acks = EarlyAcks(self.ctx.settings.max_early, self.ctx.settings.early_ttl_s)
        self._expired_acks = 0

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    @property
    def early_claims(self) -> int:
        """Claims that wait for a publish."""
        return len(self._early)

    @property
    def early_dropped(self) -> int:
        """Claims and ACKs that waited for a publish in vain, or found no room, since the start."""
        return self._early.dropped + self.early_acks.dropped + self._expired_acks

    # --- Requests of the worker ---------------------------------------------------------------

    def publish(self, client: Client, request: Publish) -> None:
        """Open a lease.

        Raises:
            MoriiodError: Nothing was opened; says why.
        """
        if is_repeat(self._live.get(request.transfer_id), client, request):
            return
        layout = client.registered_layout
        self._admission.check(client, count_blocks(request.blocks))
        blocks = unpack_groups(request.blocks, layout, distinct=False)
        lease = Lease(self, client, request)
        lease.blocks = [np.unique(ids) for ids in blocks]
        self._live[lease.transfer_id] = lease
        self._admission.active += 1
        self._reasons.discard(lease.transfer_id)
        self.clients.pin(client, lease)
        lease.enter("open", f"{count_blocks(request.blocks)} blocks for {lease.lease_s:g} s")
        self.arm_expiry(lease)
        for peer, claim in self._early.take(lease.transfer_id):
            self._answer_claim(peer, claim)
        for ack in self.early_acks.take(lease.transfer_id):
            lease.legacy_acked(ack)

    def abort(self, client: Client, transfer_id: TransferId) -> None:
        """The worker gives the transfer up.

        Raises:
            UnknownTransfer: It has no such lease.
        """
        lease = self._live.get(transfer_id)
        if lease is None or lease.client is not client:
            raise UnknownTransfer("no such publish", transfer_id=transfer_id)
        lease.was_aborted_by_worker = True
        lease.revoke(TransferAborted("aborted by the producer's worker"))

    # --- Messages of consumers ----------------------------------------------------------------

    def on_claim(self, peer: Peer, message: Claim) -> None:
        """A consumer wants to read."""
        if message.transfer_id in self._live:
            self._answer_claim(peer, message)
            return
        reason = self._reasons.get(message.transfer_id)
        if reason is not None:
            self._refuse(peer, message, reason)
        elif self.ctx.is_draining or not self._early.put(
            message.transfer_id, message.pull_id, peer, message, sum(map(len, message.blocks))
        ):
            self._refuse(peer, message, UnknownTransfer("not published here"))

    def _answer_claim(self, peer: Peer, message: Claim) -> None:
        lease = self._live[message.transfer_id]
        try:
            lease.claim(peer, message)
        except MoriiodError as error:
            self._refuse(peer, message, error)
            return
        ttl_s = max(lease.expires_at - self.ctx.now, 0.001)
        granted = ClaimGranted(
            lease.transfer_id, message.pull_id, lease.lease_id, lease.client.generation, ttl_s
        )
        self.peers.send(peer.epoch, granted)

    def _refuse(self, peer: Peer, message: Claim, error: MoriiodError) -> None:
        refusal = ClaimRefused(message.transfer_id, message.pull_id, to_wire_error(error))
        self.peers.send(peer.epoch, refusal)

    def _give_up_claim(self, peer: Peer, message: Claim) -> None:
        self._refuse(peer, message, UnknownTransfer("not published here in time"))

    def on_ack(self, peer: Peer, message: Ack) -> None:
        """A consumer is done; confirmed whatever we know of it, so that it stops repeating."""
        identity = peer.identity
        stated = (message.consumer_tp_rank, message.consumer_tp_size)
        if stated != (identity.tp_rank, identity.tp_size):
            self.ctx.problem("ack_not_of_sender", message.transfer_id)
            return
        self.peers.outbox.confirm(peer.epoch, ("revoke", message.pull_id))
        lease = self._live.get(message.transfer_id)
        key = (peer.epoch, message.pull_id)
        if lease is not None and lease.lease_id == message.lease_id:
            claim = lease.claims.get(key)
            if claim is not None:
                lease.acked(claim, message)
            valid = claim is not None and claim.is_valid
        else:
            valid = key in (self._ended.get(message.lease_id) or frozenset())
        confirmed = AckConfirmed(message.transfer_id, message.pull_id, valid)
        self.peers.send(peer.epoch, confirmed)

    def on_renew(self, peer: Peer, message: Renew) -> None:
        """A consumer wants to keep leases; it is told which are open and which are not (L8)."""
        renewed: list[tuple[TransferId, AttemptId, float]] = []
        unknown: list[tuple[TransferId, AttemptId]] = []
        for transfer_id, lease_id in message.leases:
            lease = self._live.get(transfer_id)
            if lease is None or lease.lease_id != lease_id or not lease.is_open:
                unknown.append((transfer_id, lease_id))
            elif any(claim.peer is peer for claim in lease.open_claims()):
                renewed.append((transfer_id, lease_id, lease.renew()))
            else:
                unknown.append((transfer_id, lease_id))
        if unknown:
            self.ctx.problem("renew_unknown", f"{len(unknown)} leases")
        self.peers.send(peer.epoch, Renewed(tuple(renewed), tuple(unknown)))

    def legacy_ack(self, ack: TransferAck) -> None:
        """An ACK of a peer that does not speak our protocol; early ones wait for the publish."""
        lease = self._live.get(ack.transfer_id)
        if lease is not None:
            lease.legacy_acked(ack)
        elif self._reasons.get(ack.transfer_id) is None:
            verdict = self.early_acks.add(ack, self.ctx.now)
            if verdict.is_problem:
                self.ctx.problem("ack_" + verdict.value, str(ack.transfer_id))
            self._arm_early_acks()

    def _arm_early_acks(self) -> None:
        deadline = self.early_acks.next_deadline()
        if deadline is not None:
            self.ctx.timers.set(("early_acks",), deadline, self._expire_early_acks)

    def _expire_early_acks(self) -> None:
        self._expired_acks += self.early_acks.expire(self.ctx.now)
        self._arm_early_acks()

    # --- Housekeeping -------------------------------------------------------------------------

    def arm_expiry(self, lease: Lease) -> None:
        """Look at the lease again when it would end."""
        key = ("lease", lease.lease_id)
        self.ctx.timers.set(key, lease.expires_at, lease.check_expiry)

    def disarm_expiry(self, lease: Lease) -> None:
        """The lease has ended or is being revoked: time means nothing to it any more."""
        self.ctx.timers.cancel(("lease", lease.lease_id))

    def remove(self, lease: Lease) -> None:
        """The lease is about to report its end."""
        del self._live[lease.transfer_id]
        self._admission.active -= 1
        self.disarm_expiry(lease)
        valid = frozenset(key for key, claim in lease.claims.items() if claim.is_valid)
        self._ended.put(lease.lease_id, valid)
        reason = lease.error or UnknownTransfer("this transfer was released already")
        self._reasons.put(lease.transfer_id, reason)

    def revoke_all(self, error: MoriiodError) -> None:
        """End every lease (the daemon is stopping)."""
        for lease in list(self._live.values()):
            lease.revoke(error)
