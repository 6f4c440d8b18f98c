"""READ, consumer side: claim the producer's lease, read, and report only what was confirmed.

    active --all read--> confirming --producer says the lease held--> received
       \\--any failure, timeout, abort, worker lost--> draining --no read in flight--> failed

A leg for each producer rank in our ack targets: the ranks we read from, and those that nobody
reads and that we release. A claim is granted before a read is posted, so the producer always knows
who may be reading (safety rule S1). ``received`` is reported only when the producer, in the same
epoch, confirms that the lease was open when the read had ended (S3). After the report a leg lives
on until its producer has confirmed the Ack.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from moriiod.core.address import Endpoint
from moriiod.core.blocks import unpack_groups
from moriiod.core.clients import Client
from moriiod.core.faults import to_error
from moriiod.core.ids import OpId
from moriiod.core.links import Expected
from moriiod.core.messages import Ack, AckConfirmed, Claim, ClaimGranted, ClaimRefused, Revoke
from moriiod.core.peers import Peer
from moriiod.core.reading import Wanted
from moriiod.core.requests import Pull as PullRequest
from moriiod.core.requests import Reject
from moriiod.core.sessions import PeerSession
from moriiod.core.transfers import Ending, Transfer
from moriiod.errors import (
    EngineQueueFull,
    LeaseExpired,
    MoriiodError,
    PeerRestarted,
    TransferAborted,
    WorkerLost,
)

if TYPE_CHECKING:
    from moriiod.core.pulls import Pulls


#: Which part of a lease may pass before it is renewed. Of a lease of 3 s more than 2 s are then
#: always left, so a loop that stands still for 2 s loses none (case S1).
RENEW_AFTER: Final = 0.25


class LegState(Enum):
    """Where one leg of a pull stands."""

    DIALING = "dialing"
    CLAIMING = "claiming"
    #: The lease is ours; nothing is posted (yet, or never: a leg that does not read).
    HOLDING = "holding"
    READING = "reading"
    READ = "read"
    #: The Ack is on its way; the leg does nothing else any more.
    ACKING = "acking"
    CLOSED = "closed"


class PullLeg:
    """One producer rank of a pull."""

    def __init__(self, pull: Pull, endpoint: Endpoint, expected: Expected, reads: bool) -> None:
        self.pull = pull
        self.endpoint = endpoint
        self.expected = expected
        self.reads = reads
        self.state = LegState.DIALING
        self.peer: Peer | None = None
        self.lease_id = ""
        #: Local time until which the lease surely holds, counted from when we asked.
        self.valid_until = 0.0
        #: When to ask for more, and when the oldest unanswered question was sent.
        self.renew_at = 0.0
        self.renew_sent_at: float | None = None
        self.op: OpId | None = None

    @property
    def claim_key(self) -> tuple[str, str]:
        """Outbox key of the claim."""
        return "claim", self.pull.pull_id

    # --- Link ---------------------------------------------------------------------------------

    def link_up(self, peer: Peer) -> None:
        """The producer rank is there: claim its lease."""
        if self.state is not LegState.DIALING:
            return
        if peer.is_void:
            self.link_failed(LeaseExpired("the producer restarted"))
            return
        self.peer = peer
        self.state = LegState.CLAIMING
        self.pull.table.peers.use(peer, self)
        self._claim(peer)

    def link_failed(self, error: MoriiodError) -> None:
        """The producer rank cannot be reached."""
        if self.state is LegState.DIALING:
            self._close()
            self._failed(error)

    def peer_lost(self, error: MoriiodError) -> None:
        """The producer's daemon is silent or over.

        A silent one may still keep blocks for us, so we go on telling it that we are done; the
        link is kept for that. One whose epoch is over keeps nothing.
        """
        if self.state is LegState.CLOSED:
            return
        is_unanswered = self.state is LegState.CLAIMING and self.pull.is_active
        if is_unanswered and isinstance(error, PeerRestarted) and self.peer is not None:
            self._claim_of_next(self.peer)
            return
        was_reading = self.state is LegState.READING
        self._failed(error)
        if self._is_peer_void and not was_reading:
            self._close()

    def _claim_of_next(self, old: Peer) -> None:
        """Another daemon answers at the endpoint: the one we asked took its claims with it."""
        self.pull.table.peers.unuse(old, self)
        self.peer = None
        self.state = LegState.DIALING
        self.pull.table.links.connect(self.endpoint, self.expected, self)

    def peer_fenced(self) -> None:
        """Nothing here waits for a fence: our own operations end by themselves."""

    def peer_forgotten(self) -> None:
        """The producer was told often enough; its lease is its own affair now."""
        if self.state in (LegState.CLAIMING, LegState.ACKING):
            self._close()

    @property
    def _is_peer_void(self) -> bool:
        return self.peer is None or self.peer.is_void

    # --- Claim --------------------------------------------------------------------------------

    def _claim(self, peer: Peer) -> None:
        pull = self.pull
        blocks = pull.claimed_blocks if self.reads else ()
        claim = Claim(pull.transfer_id, pull.pull_id, self.reads, blocks)
        pull.table.peers.post(peer, self.claim_key, claim)

    def granted(self, message: ClaimGranted) -> None:
        """The lease is ours for a while."""
        pull, peer = self.pull, self.peer
        if self.state is not LegState.CLAIMING or peer is None:
            return  # a repeat
        now = pull.now
        asked_at = pull.table.peers.outbox.first_sent(peer.epoch, self.claim_key) or now
        valid_until = asked_at + message.ttl_s
        if pull.is_active and valid_until <= now:
            # Our claim waited there for the publish, and nobody knows how long the grant was on its
            # way. The answer to a new question is worth its time.
            self._claim(peer)
            return
        pull.table.peers.outbox.confirm(peer.epoch, self.claim_key)
        self.lease_id = message.lease_id
        self.valid_until = valid_until
        self.renew_at = now + (valid_until - now) * RENEW_AFTER
        self.state = LegState.HOLDING
        if not pull.is_active:
            self._ack(peer, ok=pull.is_received)
            return
        pull.table.hold(peer, self)
        if self.reads:
            pull.table.sessions.ensure(peer, pull.layout, message.generation, self)

    def refused(self, message: ClaimRefused) -> None:
        """The producer has no such lease for us."""
        if self.state is LegState.CLAIMING:
            self._close()
            self._failed(to_error(message.error))

    def revoked(self, message: Revoke) -> None:
        """The producer ends the lease; our Ack is what it waits for."""
        if self.state is LegState.CLAIMING:  # the grant was lost or is late
            self.lease_id = message.lease_id
            self.state = LegState.HOLDING
        if self.state in (LegState.HOLDING, LegState.READING, LegState.READ):
            self._failed(to_error(message.error))
            if self.state is LegState.HOLDING and self.peer is not None:
                self._ack(self.peer, ok=False)

    def lease_lost(self) -> None:
        """The producer does not know the lease any more, or did not answer in time."""
        if self.state in (LegState.HOLDING, LegState.READING, LegState.READ):
            self._failed(LeaseExpired("the lease ended before the data was confirmed"))

    # --- Read ---------------------------------------------------------------------------------

    def session_ready(self, session: PeerSession) -> None:
        """Local and remote memory are paired: read."""
        table, wanted = self.pull.table, self.pull.wanted
        if self.state is not LegState.HOLDING or not self.pull.is_active or wanted is None:
            return
        try:
            # The producer has granted these blocks; that its description has them is another thing.
            unpack_groups(self.pull.claimed_blocks, session.remote_layout, distinct=False)
            ranks = self.expected.tp_rank, table.ctx.identity.tp_rank
            max_token_spans = table.ctx.settings.max_token_spans
            plan = wanted.plan(session, ranks, table.max_span_bytes, max_token_spans)
        except MoriiodError as error:
            self._failed(error)
            return
        if not plan.n_bytes:  # what is to be read is in groups that other ranks hold
            self.state = LegState.READ
            self.pull.leg_read()
            return
        self.state = LegState.READING
        self.op = table.ops.post(self, session, "read", plan)

    def session_failed(self, error: MoriiodError) -> None:
        """Local and remote memory cannot be paired."""
        if self.state is LegState.HOLDING:
            self._failed(error)

    def op_ended(self, op: OpId, n_bytes: int, error: MoriiodError | None) -> None:
        """The read is over, one way or the other."""
        self.op = None
        self.state = LegState.READ
        pull = self.pull
        if pull.is_active and error is None and pull.now <= self.valid_until:
            pull.n_bytes += n_bytes
            pull.leg_read()
            return
        self._failed(error or LeaseExpired("the lease ended during the read"))
        self.give_up()
        pull.settle()

    # --- End ----------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Come to rest as fast as is safe, and tell the producer."""
        table = self.pull.table
        if self.state is LegState.DIALING:
            table.links.forget(self, self.endpoint)
            self._close()
        elif self.state is LegState.READING and self.op is not None:
            table.ops.cancel(self.op)
        elif self.state in (LegState.HOLDING, LegState.READ):
            table.sessions.forget(self)
            if self.peer is None or self.peer.is_void:
                self._close()
            else:
                self._ack(self.peer, ok=False)

    def finish(self) -> None:
        """The pull has its data: the lease is not needed any more."""
        if self.state in (LegState.HOLDING, LegState.READ) and self.peer is not None:
            self._ack(self.peer, ok=True)

    def _ack(self, peer: Peer, *, ok: bool) -> None:
        pull = self.pull
        self.state = LegState.ACKING
        pull.table.let_go(self)
        identity = pull.table.ctx.identity
        ack = Ack(
            pull.transfer_id,
            pull.pull_id,
            self.lease_id,
            identity.tp_rank,
            identity.tp_size,
            ok,
        )
        pull.table.peers.post(peer, ("ack", pull.pull_id), ack)

    def confirmed(self, message: AckConfirmed) -> None:
        """The producer has our Ack."""
        if self.state is not LegState.ACKING:
            return
        self._close()
        self.pull.leg_confirmed(self, valid=message.valid)

    def _failed(self, error: MoriiodError) -> None:
        """A leg that does not read is only a courtesy: its failure fails nothing."""
        if self.reads:
            self.pull.fail(error)
        elif self.state is LegState.CLOSED:
            self.pull.settle()

    def _close(self) -> None:
        table, peer = self.pull.table, self.peer
        self.state = LegState.CLOSED
        table.let_go(self)
        if peer is not None:
            table.peers.outbox.confirm(peer.epoch, self.claim_key)
            table.peers.outbox.confirm(peer.epoch, ("ack", self.pull.pull_id))
            table.peers.unuse(peer, self)
        self.pull.settle()


class Pull(Transfer):
    """One pull of this rank, from all its producer ranks."""

    role = "pull"

    def __init__(
        self,
        table: Pulls,
        client: Client,
        request: PullRequest | Reject,
    ) -> None:
        super().__init__(table.ctx, table.clients, client, request.transfer_id)
        self.table = table
        self.request = request
        #: None of a Reject.
        self.wanted: Wanted | None = None
        self.layout = client.registered_layout
        self.pull_id = table.ctx.new_attempt()
        self.legs: list[PullLeg] = []
        self.n_bytes = 0
        self.error: MoriiodError | None = None
        self.is_received = False
        #: Remote ids that are read, packed; what the claim states.
        self.claimed_blocks: tuple[bytes, ...] = ()

    @property
    def now(self) -> float:
        """Time of the present step."""
        return self._ctx.now

    @property
    def is_active(self) -> bool:
        """Whether it may still succeed."""
        return self.state in ("active", "confirming")

    def leg_read(self) -> None:
        """One leg has its bytes; when all have, ask every producer for its confirmation."""
        readers = [leg for leg in self.legs if leg.reads]
        if all(leg.state is LegState.READ for leg in readers):
            self.enter("confirming")
            for leg in self.legs:
                leg.finish()

    def leg_confirmed(self, leg: PullLeg, *, valid: bool) -> None:
        """One producer has our Ack, and says whether its lease held until then."""
        if not self.is_active:
            return
        if leg.reads and not valid:
            self.fail(LeaseExpired("the producer's lease was over before the read had ended"))
        elif all(leg.state is LegState.CLOSED for leg in self.legs if leg.reads):
            self.receive()

    def receive(self) -> None:
        """Every byte is there and was valid."""
        self.is_received = True
        n_layers = sum(len(group.layers) for group in self.layout.groups) if self.n_bytes else 0
        self._end(Ending("received", "acked", n_bytes=self.n_bytes, n_layers=n_layers))
        for leg in self.legs:
            leg.finish()
        self.settle()

    def fail(self, error: MoriiodError) -> None:
        """Drain: no new work, end what is in flight, then report."""
        if not self.is_active:
            return
        self.error = error
        self.enter("draining", error.code)
        for leg in self.legs:
            leg.give_up()
        self.settle()

    def worker_lost(self) -> None:
        """Our own worker is gone."""
        self.fail(WorkerLost("the consumer's worker is gone"))

    def time_out(self, error: MoriiodError) -> None:
        """The pull took too long."""
        ops = [leg.op for leg in self.legs if leg.op is not None]
        if any(self.table.ops.has_no_room(op) for op in ops):
            error = EngineQueueFull("the engine had no room for the read until its time was over")
        self.fail(error)

    def abort(self) -> None:
        """The worker gives it up."""
        self.fail(TransferAborted("aborted by the consumer's worker"))

    def settle(self) -> None:
        """Report a failure once nothing is in flight; forget the pull once every leg is closed."""
        if self.state == "draining" and not any(leg.state is LegState.READING for leg in self.legs):
            self._end(Ending.failure(self.error or TransferAborted("aborted")))
        if self.is_ended and all(leg.state is LegState.CLOSED for leg in self.legs):
            self.table.remove(self)

    def _end(self, ending: Ending) -> None:
        self.table.ended(self)
        self.report(ending)
        self._clients.unpin(self.client, self)
