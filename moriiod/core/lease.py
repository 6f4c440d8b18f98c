"""READ, producer side: the promise to keep published blocks until everybody has read them.

    open --every rank of the ack set acked, no claim left--> released
    open --expiry | abort | worker or claimant lost--> revoking --no claim left--> failed

A *claim* is one consumer attempt that was told it may read. Time alone never ends a claim (safety
rule S1): it ends by the consumer's Ack, or by the proof that the consumer is gone. Claims that came
before the worker published wait in a bounded buffer (case A4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moriiod.core.blocks import unpack_groups
from moriiod.core.clients import Client
from moriiod.core.fanin import AckVerdict, FanIn, TransferAck
from moriiod.core.faults import to_wire_error
from moriiod.core.headplan import HeadRule
from moriiod.core.ids import AttemptId, Epoch
from moriiod.core.messages import Ack, Claim, Revoke
from moriiod.core.peers import Peer
from moriiod.core.plan import Int64Array
from moriiod.core.requests import Publish
from moriiod.core.transfers import Ending, Transfer
from moriiod.errors import (
    Busy,
    InvalidTopology,
    LeaseExpired,
    MoriiodError,
    OutOfRange,
    TransferAborted,
    TransferConflict,
    WorkerLost,
)

if TYPE_CHECKING:
    from moriiod.core.leases import Leases

#: Attempts of one consumer daemon at one lease; each may be followed by another, within reason.
MAX_CLAIMS_OF_A_PEER = 16
#: Which attempt of which daemon start.
ClaimKey = tuple[Epoch, AttemptId]


@dataclass(eq=False)
class LeaseClaim:
    """One consumer attempt that may be reading."""

    lease: Lease
    peer: Peer
    pull_id: AttemptId
    #: Set when the consumer, or the proof of its end, says that it no longer reads.
    is_closed: bool = False
    #: Its Ack came while the lease was open, so its data was valid.
    is_valid: bool = False

    def peer_lost(self, error: MoriiodError) -> None:
        """The consumer's daemon is silent: nothing ends, but look for proof that it is dead."""
        if not self.is_closed:
            self.lease.table.peers.fence(self.peer)

    def peer_forgotten(self) -> None:
        """The consumer may still be reading: it is not forgotten before that is settled."""

    def peer_fenced(self) -> None:
        """The consumer's daemon cannot read any more."""
        if not self.is_closed:
            self.lease.claimant_died(self)


class Lease(Transfer):
    """One published transfer."""

    role = "publish"

    def __init__(self, table: Leases, client: Client, request: Publish) -> None:
        super().__init__(table.ctx, table.clients, client, request.transfer_id)
        self.table = table
        self.request = request
        self.lease_id = table.ctx.new_attempt()
        self.lease_s = request.lease_s or table.ctx.settings.lease_s
        self.expires_at = table.ctx.now + self.lease_s
        #: Sorted distinct block ids of each group.
        self.blocks: list[Int64Array] = []
        identity = table.ctx.identity
        self.rule = HeadRule.of_layout(
            client.registered_layout, allows_uneven=table.ctx.settings.allow_uneven
        )
        self.fan_in = FanIn(identity.tp_rank, identity.tp_size, request.remote_tp_size, self.rule)
        #: (instance, dp rank, tp size) of the one consumer group that may claim.
        self.consumer: tuple[str, int, int] | None = None
        self.claims: dict[ClaimKey, LeaseClaim] = {}
        self.was_refused_by_consumer = False
        #: Why it is being revoked, None while it is open.
        self.error: MoriiodError | None = None
        #: The worker wanted it, so its end is a release and not a failure.
        self.was_aborted_by_worker = False

    @property
    def is_open(self) -> bool:
        """Whether claims are taken and acks are valid."""
        return self.state == "open"

    def open_claims(self) -> list[LeaseClaim]:
        """Claims that have not ended."""
        return [claim for claim in self.claims.values() if not claim.is_closed]

    # --- Claims -------------------------------------------------------------------------------

    def claim(self, peer: Peer, message: Claim) -> LeaseClaim:
        """Let a consumer attempt read.

        Raises:
            MoriiodError: It may not; says why.
        """
        known = self.claims.get((peer.epoch, message.pull_id))
        if not self.is_open or (known is not None and known.is_closed):
            raise self.error or LeaseExpired("the lease is over")
        if known is not None:
            return known
        if sum(epoch == peer.epoch for epoch, _ in self.claims) >= MAX_CLAIMS_OF_A_PEER:
            raise Busy("too many attempts of one consumer rank", limit="claims", retry_after_s=1.0)
        self._check_consumer(peer)
        self._check_blocks(message)
        claim = LeaseClaim(self, peer, message.pull_id)
        self.claims[peer.epoch, message.pull_id] = claim
        self.table.peers.use(peer, claim)
        return claim

    def _check_consumer(self, peer: Peer) -> None:
        identity, ours = peer.identity, self._ctx.identity
        consumer = (identity.instance, identity.dp_rank, identity.tp_size)
        if self.consumer not in (None, consumer):
            raise TransferConflict("another instance reads this transfer", by=str(self.consumer))
        plan = self.rule.plan(ours.tp_size, identity.tp_size)
        if identity.tp_rank not in plan.ack_set(ours.tp_rank):
            raise InvalidTopology(
                "this consumer rank does not read this producer rank",
                consumer_tp_rank=identity.tp_rank,
                consumer_tp_size=identity.tp_size,
                producer_tp_rank=ours.tp_rank,
                producer_tp_size=ours.tp_size,
            )
        if self.consumer is None:
            self.consumer = consumer
            self._take_size(identity.tp_size)

    def _take_size(self, consumer_tp_size: int) -> None:
        """The handshake has the last word on the consumer's TP size (case R1)."""
        if self.fan_in.consumer_tp_size != consumer_tp_size:
            identity = self._ctx.identity
            if self.request.remote_tp_size:
                self._ctx.problem("tp_size_disagrees", f"published {self.request.remote_tp_size}")
            self.fan_in = FanIn(identity.tp_rank, identity.tp_size, consumer_tp_size, self.rule)
        else:
            self.fan_in.announce(consumer_tp_size)

    def _check_blocks(self, message: Claim) -> None:
        """Every block of the claim is one of the lease's (safety rules S3, S5)."""
        if not message.reads:
            return
        claimed = unpack_groups(message.blocks, self.client.registered_layout, distinct=False)
        for group, (wanted, held) in enumerate(zip(claimed, self.blocks, strict=True)):
            strangers = wanted[~np.isin(wanted, held)]
            if strangers.size:
                raise OutOfRange(
                    "a claimed block is not part of the lease",
                    group=group,
                    block=int(strangers[0]),
                )

    # --- Acks ---------------------------------------------------------------------------------

    def acked(self, claim: LeaseClaim, message: Ack) -> None:
        """A consumer attempt is done."""
        if claim.is_closed:
            return
        claim.is_valid = self.is_open
        self._close_claim(claim)
        identity = claim.peer.identity
        ack = TransferAck(self.transfer_id, identity.tp_size, identity.tp_rank)
        self.was_refused_by_consumer |= not message.ok
        self._count(ack)
        self.settle()

    def legacy_acked(self, ack: TransferAck) -> None:
        """An ACK of a peer that does not claim."""
        self._count(ack)
        self.settle()

    def _count(self, ack: TransferAck) -> None:
        verdict = self.fan_in.add(ack)
        if verdict.is_problem:
            self._ctx.problem("ack_" + verdict.value, self.transfer_id)
        elif verdict is not AckVerdict.DUPLICATE:
            detail = f"ack of rank {ack.consumer_tp_rank}, {self.fan_in.n_missing} missing"
            self._ctx.transition(self.transfer_id, self.role, self.state, self.state, detail)

    def _close_claim(self, claim: LeaseClaim) -> None:
        claim.is_closed = True
        self.table.peers.unuse(claim.peer, claim)
        self.table.peers.outbox.confirm(claim.peer.epoch, ("revoke", claim.pull_id))

    def claimant_died(self, claim: LeaseClaim) -> None:
        """A consumer is fenced; its rank will not ack, so the lease ends for all.

        The revocation stays in the outbox: should the consumer come back, it must answer it
        before it is let in again.
        """
        self.revoke(TransferAborted("a consumer's daemon is gone"))
        claim.is_closed = True
        self.table.peers.unuse(claim.peer, claim)
        self.settle()

    # --- End ----------------------------------------------------------------------------------

    def renew(self) -> float:
        """Keep the lease for another full term; return its seconds left."""
        self.expires_at = max(self.expires_at, self._ctx.now + self.lease_s)
        return self.expires_at - self._ctx.now

    def check_expiry(self) -> None:
        """The timer fired: revoke, unless the lease was renewed meanwhile."""
        if self._ctx.now >= self.expires_at:
            self.revoke(LeaseExpired("not read within the lease", lease_s=self.lease_s))
        else:
            self.table.arm_expiry(self)

    def revoke(self, error: MoriiodError) -> None:
        """Take no more claims, and end when no claim is left."""
        if not self.is_open:
            return
        self.error = error
        self.table.disarm_expiry(self)
        self.enter("revoking", error.code)
        for claim in self.open_claims():
            revoke = Revoke(self.transfer_id, claim.pull_id, self.lease_id, to_wire_error(error))
            self.table.peers.post(claim.peer, ("revoke", claim.pull_id), revoke)
            if not claim.peer.is_up and not claim.peer.is_fenced:
                self.table.peers.fence(claim.peer)
        self.settle()

    def worker_lost(self) -> None:
        """The worker is gone; its memory goes when nobody reads it any more."""
        self.revoke(WorkerLost("the producer's worker is gone"))

    def settle(self) -> None:
        """Report the end if this is it."""
        if self.is_ended or self.open_claims():
            return
        if self.is_open and self.fan_in.is_complete:
            reason = "aborted" if self.was_refused_by_consumer else "acked"
            self._end(Ending("released", reason))
        elif self.state == "revoking" and self.error is not None:
            if self.was_aborted_by_worker:
                self._end(Ending("released", "aborted"))
            else:
                self._end(Ending.failure(self.error))

    def _end(self, ending: Ending) -> None:
        self.table.remove(self)
        self.report(ending)
        self._clients.unpin(self.client, self)
