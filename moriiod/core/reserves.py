"""All reservations of this daemon: requests in, the producers' reports matched to their grants."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from moriiod.core.address import endpoint_for_rank
from moriiod.core.blocks import count_blocks, full_positions, unpack_groups
from moriiod.core.clients import Client
from moriiod.core.geometry import CacheLayout
from moriiod.core.headplan import HeadRule
from moriiod.core.ids import AttemptId, TransferId
from moriiod.core.links import Expected
from moriiod.core.messages import GrantAccepted, WriteConfirmed, WriteDone, WriteFailed
from moriiod.core.parts import Parts
from moriiod.core.peers import Peer
from moriiod.core.requests import Reserve as ReserveRequest
from moriiod.core.reserve import GrantLeg, Reserve
from moriiod.core.transfers import is_repeat
from moriiod.errors import MoriiodError, TransferTimedOut, UnknownTransfer


class Reserves:
    """The table of reservations, by transfer id while live, by grant until every leg is over."""

    def __init__(self, parts: Parts) -> None:
        self.ctx = parts.ctx
        self.clients = parts.clients
        self.links = parts.links
        self.peers = parts.peers
        self._admission = parts.admission
        self._live: dict[TransferId, Reserve] = {}
        self._legs: dict[AttemptId, GrantLeg] = {}
        #: Reservations with a leg that is not over, also after their report.
        self._all: dict[Reserve, None] = {}

    def __iter__(self) -> Iterator[Reserve]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    # --- Requests of the worker ---------------------------------------------------------------

    def reserve(self, client: Client, request: ReserveRequest) -> None:
        """Start a reservation.

        Raises:
            MoriiodError: Nothing was started; says why.
        """
        if is_repeat(self._live.get(request.transfer_id), client, request):
            return
        layout = client.registered_layout
        self._admission.check(client, count_blocks(request.blocks))
        unpack_groups(request.blocks, layout, distinct=True)
        full_positions(request.first, len(layout.groups))
        reserve = Reserve(self, client, request)
        has_blocks = count_blocks(request.blocks) > 0
        self._make_legs(reserve, layout, writes=has_blocks)
        self._start(reserve)
        if not has_blocks:  # a full prefix hit: the producers only have to be let go
            self.ctx.later(reserve.receive)

    def _make_legs(self, reserve: Reserve, layout: CacheLayout, *, writes: bool) -> None:
        ours, peer = self.ctx.identity, reserve.request.peer
        remote_tp = peer.tp_size or ours.tp_size
        rule = HeadRule.of_layout(layout, allows_uneven=self.ctx.settings.allow_uneven)
        for target in rule.plan(remote_tp, ours.tp_size).ack_targets(ours.tp_rank):
            endpoint = endpoint_for_rank(peer, peer.dp_rank, target.rank, remote_tp)
            expected = Expected(peer.dp_rank, target.rank, remote_tp)
            reserve.legs.append(GrantLeg(reserve, endpoint, expected, writes and target.reads))

    def _start(self, reserve: Reserve) -> None:
        self._live[reserve.transfer_id] = reserve
        self._all[reserve] = None
        self._admission.active += 1
        self.clients.pin(reserve.client, reserve)
        reserve.enter("active", f"{len(reserve.legs)} legs")
        timeout_s = reserve.request.timeout_s or self.ctx.settings.write_timeout_s
        error = TransferTimedOut("the reservation was not filled in time", timeout_s=timeout_s)
        self.ctx.timers.set(
            ("reserve", reserve.transfer_id),
            self.ctx.now + timeout_s,
            partial(reserve.fail, error),
        )
        for leg in reserve.legs:
            self._legs[leg.grant_id] = leg
            self.links.connect(leg.endpoint, leg.expected, leg)

    def rename_grant(self, leg: GrantLeg) -> None:
        """Give a leg a new grant id: another daemon is about to get it."""
        del self._legs[leg.grant_id]
        leg.grant_id = self.ctx.new_attempt()
        self._legs[leg.grant_id] = leg

    def abort(self, client: Client, transfer_id: TransferId) -> None:
        """The worker gives a reservation up.

        Raises:
            UnknownTransfer: It has no such reservation.
        """
        reserve = self._live.get(transfer_id)
        if reserve is None or reserve.client is not client:
            raise UnknownTransfer("no such reservation", transfer_id=transfer_id)
        reserve.abort()

    # --- Messages of producers ----------------------------------------------------------------

    def _leg(self, peer: Peer, grant_id: AttemptId) -> GrantLeg | None:
        leg = self._legs.get(grant_id)
        return leg if leg is not None and leg.peer is peer else None

    def on_accepted(self, peer: Peer, message: GrantAccepted) -> None:
        """A producer has a grant."""
        leg = self._leg(peer, message.grant_id)
        if leg is not None:
            leg.accepted(peer)

    def on_write_done(self, peer: Peer, message: WriteDone) -> None:
        """A producer has written everything."""
        self._confirm(peer, message)
        leg = self._leg(peer, message.grant_id)
        if leg is not None:
            leg.write_done(message)

    def on_write_failed(self, peer: Peer, message: WriteFailed) -> None:
        """A producer gave up."""
        self._confirm(peer, message)
        leg = self._leg(peer, message.grant_id)
        if leg is not None:
            leg.write_failed(message)

    def _confirm(self, peer: Peer, message: WriteDone | WriteFailed) -> None:
        """Whatever we know of the grant, so that the producer stops repeating."""
        self.peers.outbox.confirm(peer.epoch, ("revoke_grant", message.grant_id))
        self.peers.send(peer.epoch, WriteConfirmed(message.transfer_id, message.grant_id))

    # --- Housekeeping -------------------------------------------------------------------------

    def ended(self, reserve: Reserve) -> None:
        """The reservation is about to report its end; legs that are not written may remain."""
        self._live.pop(reserve.transfer_id, None)
        self.ctx.timers.cancel(("reserve", reserve.transfer_id))

    def remove(self, reserve: Reserve) -> None:
        """Every leg is over."""
        if reserve not in self._all:
            return
        del self._all[reserve]
        self._admission.active -= 1
        for leg in reserve.legs:
            self._legs.pop(leg.grant_id, None)

    def fail_all(self, error: MoriiodError) -> None:
        """Drain every reservation (the daemon is stopping)."""
        for reserve in list(self._live.values()):
            reserve.fail(error)
