"""All pulls of this daemon: requests in, messages to their legs, leases kept alive meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from moriiod.core.address import endpoint_for_rank
from moriiod.core.blocks import check_groups, count_blocks, tables_of, unpack_groups
from moriiod.core.clients import Client
from moriiod.core.geometry import CacheLayout
from moriiod.core.headplan import HeadPlan, HeadRule
from moriiod.core.ids import MAX_BLOCK_ID, AttemptId, Epoch, TransferId
from moriiod.core.layout import unpack_blocks
from moriiod.core.links import Expected
from moriiod.core.messages import (
    MAX_RENEWALS,
    Ack,
    AckConfirmed,
    ClaimGranted,
    ClaimRefused,
    Renew,
    Renewed,
    Revoke,
)
from moriiod.core.pairing import BlockTable
from moriiod.core.parts import Parts
from moriiod.core.peers import Peer
from moriiod.core.pull import RENEW_AFTER, LegState, Pull, PullLeg
from moriiod.core.reading import Wanted
from moriiod.core.requests import PeerAddress, Reject
from moriiod.core.requests import Pull as PullRequest
from moriiod.core.transfers import is_repeat
from moriiod.errors import MoriiodError, TransferConflict, TransferTimedOut, UnknownTransfer

#: Never ask for a renewal more often than this, seconds.
_SHORTEST_RENEWAL_S = 0.01


class Pulls:
    """The table of pulls, by transfer id while live and by pull id until every leg is closed."""

    def __init__(self, parts: Parts) -> None:
        self.ctx = parts.ctx
        self.clients = parts.clients
        self.links = parts.links
        self.peers = parts.peers
        self.sessions = parts.sessions
        self.ops = parts.ops
        self.max_span_bytes = parts.max_span_bytes
        self._admission = parts.admission
        self._live: dict[TransferId, Pull] = {}
        self._by_pull: dict[AttemptId, Pull] = {}
        #: Legs that hold a lease, by the producer's epoch and the lease.
        self._holders: dict[Epoch, dict[AttemptId, PullLeg]] = {}

    def __iter__(self) -> Iterator[Pull]:
        return iter(self._by_pull.values())

    def __len__(self) -> int:
        return len(self._by_pull)

    # --- Requests of the worker ---------------------------------------------------------------

    def pull(self, client: Client, request: PullRequest) -> None:
        """Start a pull.

        Raises:
            MoriiodError: Nothing was started; says why.
        """
        if is_repeat(self._live.get(request.transfer_id), client, request):
            return
        layout = client.registered_layout
        self._admission.check(client, count_blocks(request.local_blocks))
        pull = Pull(self, client, request)
        local, remote = _tables(layout, request)
        # Which of the peer's blocks are read depends on their size, which is not known yet.
        pull.claimed_blocks = tuple(
            packed if len(table.ids) else b""
            for packed, table in zip(request.remote_blocks, local, strict=True)
        )
        has_blocks = any(len(table.ids) for table in local)
        heads = self._make_legs(pull, request.peer, layout, reads=has_blocks)
        pull.wanted = Wanted(local, remote, heads)
        self._start(pull)
        timeout_s = request.timeout_s or self.ctx.settings.pull_timeout_s
        error = TransferTimedOut("the pull did not end in time", timeout_s=timeout_s)
        self.ctx.timers.set(
            ("pull", pull.pull_id), self.ctx.now + timeout_s, partial(pull.time_out, error)
        )
        if not has_blocks:  # a full prefix hit: all there is to do is to release the producers
            self.ctx.later(pull.receive)

    def reject(self, client: Client, request: Reject) -> None:
        """Release the producers of a transfer that this rank will never pull.

        Raises:
            MoriiodError: Nothing was started; says why.
        """
        if request.transfer_id in self._live:
            raise TransferConflict("being pulled; abort it", transfer_id=request.transfer_id)
        layout = client.registered_layout
        self._admission.check(client, 0)
        pull = Pull(self, client, request)
        self._make_legs(pull, request.peer, layout, reads=False)
        self._admission.active += 1
        self._by_pull[pull.pull_id] = pull
        pull.is_ended = True  # the worker was answered; there is no outcome to report
        pull.enter("rejecting")
        self._connect(pull)

    def abort(self, client: Client, transfer_id: TransferId) -> None:
        """The worker gives a pull up.

        Raises:
            UnknownTransfer: It has no such pull.
        """
        pull = self._live.get(transfer_id)
        if pull is None or pull.client is not client:
            raise UnknownTransfer("no such pull", transfer_id=transfer_id)
        pull.abort()

    def _make_legs(
        self, pull: Pull, peer: PeerAddress, layout: CacheLayout, *, reads: bool
    ) -> HeadPlan:
        ours = self.ctx.identity
        remote_tp = peer.tp_size or ours.tp_size
        rule = HeadRule.of_layout(layout, allows_uneven=self.ctx.settings.allow_uneven)
        heads = rule.plan(remote_tp, ours.tp_size)
        for target in heads.ack_targets(ours.tp_rank):
            endpoint = endpoint_for_rank(peer, peer.dp_rank, target.rank, remote_tp)
            expected = Expected(peer.dp_rank, target.rank, remote_tp)
            pull.legs.append(PullLeg(pull, endpoint, expected, reads and target.reads))
        return heads

    def _start(self, pull: Pull) -> None:
        self._live[pull.transfer_id] = pull
        self._by_pull[pull.pull_id] = pull
        self._admission.active += 1
        self.clients.pin(pull.client, pull)
        pull.enter("active", f"{len(pull.legs)} legs")
        self._connect(pull)

    def _connect(self, pull: Pull) -> None:
        for leg in pull.legs:
            self.links.connect(leg.endpoint, leg.expected, leg)

    # --- Messages of producers ----------------------------------------------------------------

    def _leg(self, peer: Peer, pull_id: AttemptId) -> PullLeg | None:
        pull = self._by_pull.get(pull_id)
        if pull is None:
            return None
        return next((leg for leg in pull.legs if leg.peer is peer), None)

    def on_granted(self, peer: Peer, message: ClaimGranted) -> None:
        """A producer granted a claim."""
        leg = self._leg(peer, message.pull_id)
        if leg is not None:
            leg.granted(message)
        else:
            self._disown(peer, message.transfer_id, message.pull_id, message.lease_id)

    def on_refused(self, peer: Peer, message: ClaimRefused) -> None:
        """A producer refused a claim."""
        leg = self._leg(peer, message.pull_id)
        if leg is not None:
            leg.refused(message)

    def on_confirmed(self, peer: Peer, message: AckConfirmed) -> None:
        """A producer has an Ack."""
        self.peers.outbox.confirm(peer.epoch, ("ack", message.pull_id))
        leg = self._leg(peer, message.pull_id)
        if leg is not None:
            leg.confirmed(message)

    def on_revoke(self, peer: Peer, message: Revoke) -> None:
        """A producer ends a lease."""
        leg = self._leg(peer, message.pull_id)
        if leg is not None and leg.state is not LegState.CLOSED:
            leg.revoked(message)
        else:
            self._disown(peer, message.transfer_id, message.pull_id, message.lease_id)

    def _disown(
        self, peer: Peer, transfer_id: TransferId, pull_id: AttemptId, lease_id: AttemptId
    ) -> None:
        """Tell a producer that an attempt of ours that we no longer know touches nothing."""
        ours = self.ctx.identity
        ack = Ack(transfer_id, pull_id, lease_id, ours.tp_rank, ours.tp_size, ok=False)
        self.peers.send(peer.epoch, ack)

    # --- Renewal ------------------------------------------------------------------------------

    def hold(self, peer: Peer, leg: PullLeg) -> None:
        """Keep the leg's lease alive until ``let_go``."""
        self._holders.setdefault(peer.epoch, {})[leg.lease_id] = leg
        self._arm_renewal(peer)

    def let_go(self, leg: PullLeg) -> None:
        """The leg's lease need not be kept any more."""
        if leg.peer is None:
            return
        holders = self._holders.get(leg.peer.epoch, {})
        if holders.get(leg.lease_id) is not leg:
            return  # let go already; a later attempt may hold the same lease
        del holders[leg.lease_id]
        if not holders:
            del self._holders[leg.peer.epoch]
            self.ctx.timers.cancel(("renew", leg.peer.epoch))

    def _arm_renewal(self, peer: Peer) -> None:
        holders = self._holders.get(peer.epoch)
        if holders:
            when = min(leg.renew_at for leg in holders.values())
            self.ctx.timers.set(("renew", peer.epoch), when, partial(self._renew, peer))

    def _renew(self, peer: Peer) -> None:
        now = self.ctx.now
        legs = list(self._holders.get(peer.epoch, {}).values())
        for leg in [leg for leg in legs if leg.valid_until <= now]:
            self.let_go(leg)
            leg.lease_lost()
        legs = [leg for leg in legs if leg.valid_until > now]
        for start in range(0, len(legs), MAX_RENEWALS):
            part = legs[start : start + MAX_RENEWALS]
            leases = tuple((leg.pull.transfer_id, leg.lease_id) for leg in part)
            self.peers.send(peer.epoch, Renew(leases))
        for leg in legs:
            if leg.renew_sent_at is None:
                leg.renew_sent_at = now
            leg.renew_at = now + max((leg.valid_until - now) * RENEW_AFTER, _SHORTEST_RENEWAL_S)
        self._arm_renewal(peer)

    def on_renewed(self, peer: Peer, message: Renewed) -> None:
        """A producer kept leases, or does not know them."""
        holders = self._holders.get(peer.epoch, {})
        for _, lease_id, ttl_s in message.leases:
            leg = holders.get(lease_id)
            if leg is not None and leg.renew_sent_at is not None:
                leg.valid_until = max(leg.valid_until, leg.renew_sent_at + ttl_s)
                leg.renew_sent_at = None
                leg.renew_at = self.ctx.now + ttl_s * RENEW_AFTER
        for _, lease_id in message.unknown:
            leg = holders.get(lease_id)
            if leg is not None:
                self.let_go(leg)
                leg.lease_lost()
        self._arm_renewal(peer)

    # --- Housekeeping -------------------------------------------------------------------------

    def ended(self, pull: Pull) -> None:
        """The pull is about to report its end; its legs may still have Acks to deliver."""
        self._live.pop(pull.transfer_id, None)
        self.ctx.timers.cancel(("pull", pull.pull_id))

    def remove(self, pull: Pull) -> None:
        """Every leg is closed."""
        if self._by_pull.pop(pull.pull_id, None) is not None:
            self._admission.active -= 1

    def fail_all(self, error: MoriiodError) -> None:
        """Drain every pull (the daemon is stopping)."""
        for pull in list(self._live.values()):
            pull.fail(error)


def _tables(
    layout: CacheLayout, request: PullRequest
) -> tuple[tuple[BlockTable, ...], tuple[BlockTable, ...]]:
    """Return the local and the remote lists, checked with the block sizes that were said."""
    local = unpack_groups(request.local_blocks, layout, distinct=True)
    # The peer checks its ids against its own cache; here only the packing can be wrong.
    remote = tuple(
        unpack_blocks(packed, MAX_BLOCK_ID, "remote blocks") for packed in request.remote_blocks
    )
    ours, theirs = tables_of(local, request.local_first), tables_of(remote, request.remote_first)
    check_groups(ours, theirs, layout, request.remote_block_tokens)
    return ours, theirs
