"""All pushes of this daemon: requests in, grants matched, ends told to the consumers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from moriiod.core.blocks import count_blocks, unpack_groups
from moriiod.core.clients import Client
from moriiod.core.early import Early
from moriiod.core.faults import to_wire_error
from moriiod.core.headplan import HeadRule
from moriiod.core.ids import AttemptId, Epoch, TransferId
from moriiod.core.messages import (
    Grant,
    GrantAccepted,
    RevokeGrant,
    WriteConfirmed,
    WriteDone,
    WriteFailed,
)
from moriiod.core.parts import Parts
from moriiod.core.peers import Peer
from moriiod.core.push import Push
from moriiod.core.requests import LayerReady, Seal
from moriiod.core.requests import Push as PushRequest
from moriiod.core.transfers import Memorial, is_repeat
from moriiod.errors import (
    MoriiodError,
    TransferAborted,
    TransferTimedOut,
    UnknownTransfer,
)

_EndMessage = WriteDone | WriteFailed
#: Which grant of which consumer daemon.
_GrantKey = tuple[Epoch, AttemptId]


class Pushes:
    """The table of pushes, by transfer id; ended grants are remembered to answer repeats."""

    def __init__(self, parts: Parts) -> None:
        self.ctx = parts.ctx
        self.clients = parts.clients
        self.peers = parts.peers
        self.sessions = parts.sessions
        self.ops = parts.ops
        self.max_span_bytes = parts.max_span_bytes
        self._admission = parts.admission
        self._live: dict[TransferId, Push] = {}
        self._early: Early[Grant] = Early(self.ctx, "grant", self._give_up_grant)
        #: What each ended grant was told.
        self._told: Memorial[_GrantKey, _EndMessage] = Memorial(self.ctx.settings.max_tombstones)
        #: Why a transfer id is not live any more.
        self._reasons: Memorial[TransferId, MoriiodError] = Memorial(
            self.ctx.settings.max_tombstones
        )

    def __iter__(self) -> Iterator[Push]:
        return iter(self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    @property
    def early_grants(self) -> int:
        """Grants that wait for a push."""
        return len(self._early)

    @property
    def early_dropped(self) -> int:
        """Grants that waited for a push in vain, or found no room, since the start."""
        return self._early.dropped

    # --- Requests of the worker ---------------------------------------------------------------

    def push(self, client: Client, request: PushRequest) -> None:
        """Start a push.

        Raises:
            MoriiodError: Nothing was started; says why.
        """
        if is_repeat(self._live.get(request.transfer_id), client, request):
            return
        layout = client.registered_layout
        self._admission.check(client, count_blocks(request.blocks))
        ours = self.ctx.identity
        rule = HeadRule.of_layout(layout, allows_uneven=self.ctx.settings.allow_uneven)
        rule.check(ours.tp_size, request.remote_tp_size or ours.tp_size)
        blocks = unpack_groups(request.blocks, layout, distinct=False)
        push = Push(self, client, request, blocks)
        self._live[push.transfer_id] = push
        self._admission.active += 1
        self._reasons.discard(push.transfer_id)
        self.clients.pin(client, push)
        push.enter("active", f"{count_blocks(request.blocks)} blocks")
        timeout_s = request.timeout_s or self.ctx.settings.write_timeout_s
        error = TransferTimedOut("the push did not end in time", timeout_s=timeout_s)
        self.ctx.timers.set(
            ("push", push.transfer_id), self.ctx.now + timeout_s, partial(push.time_out, error)
        )
        for peer, grant in self._early.take(push.transfer_id):
            self._take_grant(push, peer, grant)

    def layers_ready(self, client: Client, request: LayerReady) -> None:
        """Layers of a push hold their final bytes.

        Raises:
            UnknownTransfer: No such push of this client is active.
            InvalidArgument: The layers do not fit the push.
        """
        self._active(client, request.transfer_id).layers_ready(request.layers)

    def seal(self, client: Client, request: Seal) -> None:
        """A push is complete once so many layers are ready.

        Raises:
            UnknownTransfer: No such push of this client is active.
            InvalidArgument: The number does not fit the push.
        """
        self._active(client, request.transfer_id).seal(request.n_layers)

    def abort(self, client: Client, transfer_id: TransferId) -> None:
        """The worker gives a push up.

        Raises:
            UnknownTransfer: It has no such push.
        """
        push = self._live.get(transfer_id)
        if push is None or push.client is not client:
            raise UnknownTransfer("no such push", transfer_id=transfer_id)
        push.fail(TransferAborted("aborted by the producer's worker"))

    def _active(self, client: Client, transfer_id: TransferId) -> Push:
        push = self._live.get(transfer_id)
        if push is None or push.client is not client or not push.is_active:
            raise UnknownTransfer("no such push is active", transfer_id=transfer_id)
        return push

    # --- Messages of consumers ----------------------------------------------------------------

    def on_grant(self, peer: Peer, grant: Grant) -> None:
        """A consumer rank granted blocks."""
        told = self._told.get((peer.epoch, grant.grant_id))
        if told is not None:
            self.peers.send(peer.epoch, told)
            return
        push = self._live.get(grant.transfer_id)
        reason = self._reasons.get(grant.transfer_id)
        if push is not None:
            self._take_grant(push, peer, grant)
        elif reason is not None:
            self._refuse(peer, grant, reason)
        elif self.ctx.is_draining or not self._early.put(
            grant.transfer_id, grant.grant_id, peer, grant, sum(map(len, grant.blocks))
        ):
            self._refuse(peer, grant, UnknownTransfer("no push of this name here"))
        else:
            self._accept(peer, grant)

    def _take_grant(self, push: Push, peer: Peer, grant: Grant) -> None:
        target = push.targets.get(peer.identity.tp_rank)
        if target is not None and target.grant.grant_id == grant.grant_id:
            self._accept(peer, grant)  # a repeat; its end is told when its writes have ended
            return
        if not push.is_active:
            self._refuse(peer, grant, push.error or TransferAborted("the push is ending"))
            return
        try:
            push.granted(peer, grant)
        except MoriiodError as error:
            self._refuse(peer, grant, error)
            return
        self._accept(peer, grant)

    def _accept(self, peer: Peer, grant: Grant) -> None:
        self.peers.send(peer.epoch, GrantAccepted(grant.transfer_id, grant.grant_id))

    def _refuse(self, peer: Peer, grant: Grant, error: MoriiodError) -> None:
        self._answer_once(
            peer, WriteFailed(grant.transfer_id, grant.grant_id, to_wire_error(error))
        )

    def _answer_once(self, peer: Peer, failed: WriteFailed) -> None:
        """Answer what the consumer repeats until it is answered: nothing of it is kept here."""
        self._told.put((peer.epoch, failed.grant_id), failed)
        self.peers.send(peer.epoch, failed)

    def _give_up_grant(self, peer: Peer, grant: Grant) -> None:
        """The grant was accepted, so the consumer asks no more: it has to be told."""
        error = UnknownTransfer("no push of this name here in time")
        failed = WriteFailed(grant.transfer_id, grant.grant_id, to_wire_error(error))
        if self.peers.outbox.count(peer.epoch) < self.ctx.settings.max_early:
            self.tell_end(peer, failed)
        else:
            self._answer_once(peer, failed)

    def on_revoke_grant(self, peer: Peer, message: RevokeGrant) -> None:
        """A consumer rank takes its grant back: answered when nothing writes there any more."""
        told = self._told.get((peer.epoch, message.grant_id))
        if isinstance(told, WriteFailed):
            self.peers.send(peer.epoch, told)
            return
        if told is None and self._revoke_target(peer, message):
            return
        # Never seen, or long forgotten: remembered from now on, so that a late copy of the grant
        # cannot start anything. Or written, and WriteDone does not get through: the consumer no
        # longer hopes for its data, all it needs to hear is that nothing writes there (case T4).
        failed = WriteFailed(
            message.transfer_id,
            message.grant_id,
            to_wire_error(TransferAborted("the grant was taken back")),
        )
        self.peers.outbox.confirm(peer.epoch, ("write_end", message.grant_id))
        self._answer_once(peer, failed)

    def _revoke_target(self, peer: Peer, message: RevokeGrant) -> bool:
        """End the writes of a grant; False if there are none to end."""
        self._early.discard(message.transfer_id, message.grant_id, peer)
        push = self._live.get(message.transfer_id)
        target = None if push is None else push.targets.get(peer.identity.tp_rank)
        if push is None or target is None or target.grant.grant_id != message.grant_id:
            return False
        push.revoked(target)
        return True

    def tell_end(self, peer: Peer, message: _EndMessage) -> None:
        """Tell a consumer rank that its grant is over, until it confirms."""
        self._told.put((peer.epoch, message.grant_id), message)
        self.peers.post(peer, ("write_end", message.grant_id), message)

    def on_confirmed(self, peer: Peer, message: WriteConfirmed) -> None:
        """A consumer rank knows that its grant is over."""
        self.peers.outbox.confirm(peer.epoch, ("write_end", message.grant_id))

    # --- Housekeeping -------------------------------------------------------------------------

    def ended(self, push: Push) -> None:
        """The push is about to report its end."""
        del self._live[push.transfer_id]
        self._admission.active -= 1
        self.ctx.timers.cancel(("push", push.transfer_id))
        reason = push.error or TransferAborted("this push has ended already")
        self._reasons.put(push.transfer_id, reason)

    def fail_all(self, error: MoriiodError) -> None:
        """Drain every push (the daemon is stopping)."""
        for push in list(self._live.values()):
            push.fail(error)
