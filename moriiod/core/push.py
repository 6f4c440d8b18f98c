"""WRITE, producer side: write layers as they get ready into the blocks the consumers granted.

    active --sealed, every expected rank written--> released
       \\--any failure, timeout, abort, worker lost--> draining --no write in flight--> failed

A target for each consumer rank of our ack set. A layer is written to a target as soon as both are
there: the target's grant and the layer's bytes. A target is told ``WriteDone`` when all sealed
layers are in its blocks, or ``WriteFailed`` when nothing of ours writes there any more; both are
repeated until confirmed.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from moriiod.core.blocks import pair_for_write, tables_of, unpack_groups
from moriiod.core.clients import Client
from moriiod.core.faults import to_wire_error
from moriiod.core.headplan import GroupHeads, HeadRule
from moriiod.core.ids import OpId
from moriiod.core.messages import Grant, WriteDone, WriteFailed
from moriiod.core.peers import Peer
from moriiod.core.plan import Int64Array
from moriiod.core.planner import Planner
from moriiod.core.requests import Push as PushRequest
from moriiod.core.sessions import PeerSession
from moriiod.core.transfers import Ending, Transfer
from moriiod.errors import (
    EngineQueueFull,
    InvalidArgument,
    InvalidTopology,
    MoriiodError,
    TransferAborted,
    TransferConflict,
    WorkerLost,
)

if TYPE_CHECKING:
    from moriiod.core.pushes import Pushes


class TargetState(Enum):
    """Where one consumer rank of a push stands."""

    #: Its memory is being paired with ours.
    PREPARING = "preparing"
    WRITING = "writing"
    #: Nothing new is posted; what is in flight is being ended.
    CLOSING = "closing"
    #: Every sealed layer is in its blocks.
    DONE = "done"
    #: It was told that nothing of ours writes there any more, or is gone.
    CLOSED = "closed"


class PushTarget:
    """One consumer rank."""

    def __init__(self, push: Push, peer: Peer, grant: Grant) -> None:
        self.push = push
        self.peer = peer
        self.grant = grant
        self.state = TargetState.PREPARING
        self.session: PeerSession | None = None
        self.planner: Planner | None = None
        self.posted: set[int] = set()
        self.ops: set[OpId] = set()
        self.n_bytes = 0
        #: What it is told when it is closed without its data.
        self.error: MoriiodError | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be written to it."""
        return self.state in (TargetState.DONE, TargetState.CLOSED)

    def start(self) -> None:
        """Pair its memory with ours, if there is anything to write."""
        self.push.table.peers.use(self.peer, self)
        if not self.grant.writes:
            self.state = TargetState.WRITING
            self.push.later_advance()
            return
        layout = self.push.client.registered_layout
        self.push.table.sessions.ensure(self.peer, layout, self.grant.generation, self)

    def session_ready(self, session: PeerSession) -> None:
        """The pair is there: plan, and write what is ready."""
        if self.state is not TargetState.PREPARING:
            return
        push = self.push
        try:
            theirs = unpack_groups(self.grant.blocks, session.remote_layout, distinct=True)
            local = tables_of(push.blocks, push.request.first)
            remote = tables_of(theirs, self.grant.first)
            session.check_groups(remote)
            pairs = pair_for_write(session.local, local, session.remote_layout, remote)
            self.planner = Planner(
                session.local,
                session.remote_layout,
                pairs,
                push.table.max_span_bytes,
                push.heads_of(self.peer),
                push.table.ctx.settings.max_token_spans,
            )
        except MoriiodError as error:
            push.fail(error)
            return
        self.session = session
        session.acquire()
        self.state = TargetState.WRITING
        push.advance()

    def session_failed(self, error: MoriiodError) -> None:
        """Its memory cannot be reached."""
        if self.state is TargetState.PREPARING:
            self.push.fail(error)

    def write(self, ready: set[int]) -> None:
        """Post the layers that are ready and were not posted."""
        layers = ready - self.posted
        if self.state is not TargetState.WRITING or not layers:
            return
        self.posted |= layers
        if self.planner is None or self.session is None:
            return  # this rank takes no bytes from us
        try:
            plan = self.planner.plan(layers)
        except MoriiodError as error:
            self.push.fail(error)
            return
        if plan.n_bytes:
            self.ops.add(self.push.table.ops.post(self, self.session, "write", plan))

    def op_ended(self, op: OpId, n_bytes: int, error: MoriiodError | None) -> None:
        """One write is over."""
        self.ops.discard(op)
        self.n_bytes += n_bytes
        if error is not None and self.state is TargetState.WRITING:
            self.push.fail(error)
        elif self.state is TargetState.CLOSING:
            self._close_when_idle()
        else:
            self.push.advance()

    def finish(self, n_layers: int) -> None:
        """Every sealed layer is there."""
        self.state = TargetState.DONE
        done = WriteDone(self.push.transfer_id, self.grant.grant_id, n_layers, self.n_bytes)
        self._let_go()
        self.push.table.tell_end(self.peer, done)

    def close(self, error: MoriiodError) -> None:
        """Write nothing more; tell the consumer when what is in flight has ended."""
        if self.is_over or self.state is TargetState.CLOSING:
            return
        self.error = error
        self.state = TargetState.CLOSING
        self.push.table.sessions.forget(self)
        for op in self.ops:
            self.push.table.ops.cancel(op)
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        if self.ops or self.error is None:
            return
        self.state = TargetState.CLOSED
        self._let_go()
        failed = WriteFailed(self.push.transfer_id, self.grant.grant_id, to_wire_error(self.error))
        self.push.table.tell_end(self.peer, failed)
        self.push.later_advance()

    def _let_go(self) -> None:
        if self.session is not None:
            self.session.release()
            self.session = None
        self.planner = None
        self.push.table.peers.unuse(self.peer, self)

    def peer_lost(self, error: MoriiodError) -> None:
        """The consumer's daemon is silent or over: end our writes, and the push with them."""
        if not self.is_over:
            self.push.fail(error)

    def peer_forgotten(self) -> None:
        """Our own operations end by themselves."""

    def peer_fenced(self) -> None:
        """Nothing here waits for a fence: our own operations end by themselves."""


class Push(Transfer):
    """One push of this rank, to all its consumer ranks."""

    role = "push"

    def __init__(
        self,
        table: Pushes,
        client: Client,
        request: PushRequest,
        blocks: tuple[Int64Array, ...],
    ) -> None:
        super().__init__(table.ctx, table.clients, client, request.transfer_id)
        self.table = table
        self.request = request
        self.blocks = blocks
        self.rule = HeadRule.of_layout(
            client.registered_layout, allows_uneven=table.ctx.settings.allow_uneven
        )
        self.consumer_tp_size = request.remote_tp_size
        #: (instance, dp rank, tp size) of the one consumer group that may grant.
        self.consumer: tuple[str, int, int] | None = None
        self.targets: dict[int, PushTarget] = {}
        self.ready: set[int] = set()
        self.sealed_layers: int | None = None
        self.error: MoriiodError | None = None
        self.was_refused_by_consumer = False
        self._advance_is_due = False

    @property
    def is_active(self) -> bool:
        """Whether it may still succeed."""
        return self.state == "active"

    @property
    def expected_ranks(self) -> frozenset[int]:
        """Consumer ranks that must grant before this rank is done."""
        ours = self._ctx.identity
        size = self.consumer_tp_size or ours.tp_size
        return self.rule.plan(ours.tp_size, size).ack_set(ours.tp_rank)

    def heads_of(self, peer: Peer) -> tuple[GroupHeads, ...]:
        """Return what we share of each group with a consumer rank."""
        ours, theirs = self._ctx.identity, peer.identity
        plan = self.rule.plan(ours.tp_size, theirs.tp_size)
        return plan.heads_for_write(ours.tp_rank, theirs.tp_rank)

    # --- From the worker ----------------------------------------------------------------------

    def layers_ready(self, layers: tuple[int, ...]) -> None:
        """These layers hold their final bytes.

        Raises:
            InvalidArgument: No such layer, or more layers than were sealed.
        """
        n_layers = sum(len(group.layers) for group in self.client.registered_layout.groups)
        if max(layers) >= n_layers:
            raise InvalidArgument("no such layer", layer=max(layers), limit=n_layers)
        ready = self.ready | set(layers)
        if self.sealed_layers is not None and len(ready) > self.sealed_layers:
            raise InvalidArgument(
                "more layers than were sealed", sealed=self.sealed_layers, ready=len(ready)
            )
        self.ready = ready
        self.advance()

    def seal(self, n_layers: int) -> None:
        """No more than these layers belong to the transfer.

        Raises:
            InvalidArgument: More are ready already, or another number was sealed.
        """
        if self.sealed_layers not in (None, n_layers) or len(self.ready) > n_layers:
            raise InvalidArgument(
                "sealed with another number of layers",
                n_layers=n_layers,
                sealed=self.sealed_layers,
                ready=len(self.ready),
            )
        self.sealed_layers = n_layers
        self.advance()

    # --- From consumers -----------------------------------------------------------------------

    def granted(self, peer: Peer, grant: Grant) -> None:
        """A consumer rank granted its blocks.

        Raises:
            MoriiodError: It is not one of ours; says why.
        """
        if peer.identity.tp_rank in self.targets:
            raise TransferConflict("this consumer rank has granted already")
        identity, ours = peer.identity, self._ctx.identity
        consumer = (identity.instance, identity.dp_rank, identity.tp_size)
        if self.consumer not in (None, consumer):
            raise TransferConflict("another instance takes this transfer", by=str(self.consumer))
        plan = self.rule.plan(ours.tp_size, identity.tp_size)
        if identity.tp_rank not in plan.ack_set(ours.tp_rank):
            raise InvalidTopology(
                "this consumer rank takes nothing from this producer rank",
                consumer_tp_rank=identity.tp_rank,
                consumer_tp_size=identity.tp_size,
                producer_tp_rank=ours.tp_rank,
                producer_tp_size=ours.tp_size,
            )
        self.consumer = consumer
        self.consumer_tp_size = identity.tp_size  # the handshake has the last word (case R1)
        target = PushTarget(self, peer, grant)
        self.targets[identity.tp_rank] = target
        target.start()

    def revoked(self, target: PushTarget) -> None:
        """A consumer rank takes its grant back."""
        self.was_refused_by_consumer = True
        target.close(TransferAborted("the consumer gave the transfer up"))
        self.advance()

    # --- Progress -----------------------------------------------------------------------------

    def later_advance(self) -> None:
        """Look for progress once the present handler has returned."""
        if not self._advance_is_due:
            self._advance_is_due = True
            self._ctx.later(self.advance)

    def advance(self) -> None:
        """Post what can be posted; report the end if this is it."""
        self._advance_is_due = False
        if self.is_ended:
            return
        if self.is_active:
            for target in self.targets.values():
                target.write(self.ready)
            self._finish_targets()
        self._settle()

    def _finish_targets(self) -> None:
        if self.sealed_layers is None or len(self.ready) != self.sealed_layers:
            return
        for target in self.targets.values():
            if target.state is TargetState.WRITING and not target.ops:
                target.finish(self.sealed_layers)

    def _settle(self) -> None:
        is_quiet = all(target.is_over for target in self.targets.values())
        if not is_quiet:
            return
        n_bytes = sum(target.n_bytes for target in self.targets.values())
        if self.error is not None:
            self._end(Ending.failure(self.error))
        elif self.targets and self.expected_ranks <= self.targets.keys():
            reason = "aborted" if self.was_refused_by_consumer else "acked"
            n_layers = self.sealed_layers or 0
            self._end(Ending("released", reason, n_bytes=n_bytes, n_layers=n_layers))

    def fail(self, error: MoriiodError) -> None:
        """Drain: post nothing more, end what is in flight, then report."""
        if not self.is_active:
            return
        self.error = error
        self.enter("draining", error.code)
        for target in self.targets.values():
            target.close(error)
        self.later_advance()

    def time_out(self, error: MoriiodError) -> None:
        """The push took too long."""
        ops = [op for target in self.targets.values() for op in target.ops]
        if any(self.table.ops.has_no_room(op) for op in ops):
            error = EngineQueueFull("the engine had no room for a write until its time was over")
        self.fail(error)

    def worker_lost(self) -> None:
        """Our own worker is gone."""
        self.fail(WorkerLost("the producer's worker is gone"))

    def _end(self, ending: Ending) -> None:
        self.table.ended(self)
        self.report(ending)
        self._clients.unpin(self.client, self)
