"""The core as one object: ``step(event, now) -> effects`` is the only way to change its state.

It composes the parts and routes events to them. The same machine serves both roles of both flows,
so a test can join two of them in memory and drop, delay, repeat and reorder what passes between.
"""

from __future__ import annotations

from typing import assert_never

from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core.clients import Clients
from moriiod.core.context import Context
from moriiod.core.effects import DrainEnded, Effect, SendToPeer
from moriiod.core.geometry import RemoteLayout
from moriiod.core.ids import Epoch, Generation, PeerRoute
from moriiod.core.leases import Leases
from moriiod.core.links import Links
from moriiod.core.ops import Ops
from moriiod.core.orphans import Orphans
from moriiod.core.parts import Parts
from moriiod.core.peers import Peer, Peers
from moriiod.core.pulls import Pulls
from moriiod.core.pushes import Pushes
from moriiod.core.reserves import Reserves
from moriiod.core.service import Service
from moriiod.core.sessions import Sessions
from moriiod.core.settings import CoreSettings
from moriiod.core.transfers import Admission
from moriiod.errors import (
    Draining,
    PeerLost,
    PeerRestarted,
)

_EngineEvent = (
    ev.OpEnded
    | ev.OpRefused
    | ev.SessionOpened
    | ev.SessionRefused
    | ev.PeerFenced
    | ev.MemoryRegistered
    | ev.MemoryRefused
    | ev.MemoryReleased
)


class Machine:
    """All state of one daemon.

    Args:
        identity: Which rank of which instance this is, and its epoch.
        settings: Times and limits.
        engine: Name of the transfer engine, as in the handshake.
        max_span_bytes: Largest size of one span of a plan; 0 = no limit.
    """

    def __init__(
        self,
        identity: msg.Identity,
        settings: CoreSettings,
        engine: str,
        max_span_bytes: int = 0,
    ) -> None:
        self.ctx = ctx = Context(identity, settings)
        self.engine = engine
        self.peers = Peers(ctx, on_void=self._close_sessions_of_peer)
        self.sessions = Sessions(ctx, self.peers, engine)
        self.clients = Clients(ctx, self.sessions.close_of_generation)
        self.links = Links(ctx, self.peers, (engine,), self._generations)
        self.ops = Ops(ctx)
        self.admission = Admission(ctx, self.clients)
        parts = Parts(
            ctx,
            self.clients,
            self.links,
            self.peers,
            self.sessions,
            self.ops,
            self.admission,
            max_span_bytes,
        )
        self.leases = Leases(parts)
        self.pulls = Pulls(parts)
        self.pushes = Pushes(parts)
        self.reserves = Reserves(parts)
        self.orphans = Orphans(parts)
        self.service = Service(self)
        self._drain_reported = False

    # --- The interface ------------------------------------------------------------------------

    def step(self, event: ev.Event, now: float) -> tuple[Effect, ...]:
        """Take one event; return what is to be done about it, in order.

        Args:
            event: What happened.
            now: Local monotonic time in seconds; never less than in the step before.
        """
        self.ctx.now = max(now, self.ctx.now)
        self._handle(event)
        self.ctx.run_deferred()
        self._check_drained()
        return self.ctx.take_effects()

    def next_deadline(self) -> float | None:
        """When ``TimerFired`` is due, None if nothing waits for time."""
        return self.ctx.timers.next_deadline()

    def _handle(self, event: ev.Event) -> None:
        match event:
            case ev.RequestReceived():
                self.service.on_request(event)
            case ev.PeerMessageReceived():
                self._on_peer_message(event)
            case ev.TimerFired():
                self._fire_timers()
            case ev.RouteFailed():
                self.links.route_failed(event.route, event.error)
            case ev.LegacyAckReceived():
                self.leases.legacy_ack(event.ack)
            case ev.DrainRequested():
                self._start_drain(event.timeout_s)
            case (
                ev.WorkerConnected() | ev.RegionOffered() | ev.WorkerDied() | ev.EventUndelivered()
            ):
                self._on_worker_event(event)
            case _:
                self._on_engine_event(event)

    def _on_worker_event(
        self, event: ev.WorkerConnected | ev.RegionOffered | ev.WorkerDied | ev.EventUndelivered
    ) -> None:
        match event:
            case ev.WorkerConnected():
                self.clients.worker_connected(event.generation, event.pid, event.uid)
            case ev.RegionOffered():
                self.clients.region_offered(event.generation, event.region, event.n_bytes)
            case ev.WorkerDied():
                self.clients.worker_died(event.generation)
            case ev.EventUndelivered():
                self.clients.event_undelivered(event.route, event.sequence)
            case _:
                assert_never(event)

    def _on_engine_event(self, event: _EngineEvent) -> None:
        match event:
            case ev.OpEnded():
                self.ops.ended(event.op, event.n_bytes, event.error)
            case ev.OpRefused():
                self.ops.refused(event.op)
            case ev.SessionOpened():
                self.sessions.opened(event.session)
            case ev.SessionRefused():
                self.sessions.refused(event.session, event.error)
            case ev.PeerFenced():
                self.peers.fenced(event.epoch)
            case ev.MemoryRegistered():
                self.clients.memory_registered(event.generation, event.descriptors)
            case ev.MemoryRefused():
                self.clients.memory_refused(event.generation, event.error)
            case ev.MemoryReleased():
                self.clients.memory_released(event.generation)
            case _:
                assert_never(event)

    def _fire_timers(self) -> None:
        while (action := self.ctx.timers.pop_due(self.ctx.now)) is not None:
            action()
            self.ctx.run_deferred()

    # --- Messages of peers --------------------------------------------------------------------

    def _on_peer_message(self, event: ev.PeerMessageReceived) -> None:
        route, epoch, body = event.route, event.epoch, event.body
        match body:
            case msg.Hello():
                self.links.on_hello(route, epoch, body)
            case msg.Welcome():
                self.links.on_welcome(route, epoch, body)
            case msg.HelloRefused():
                self.links.on_hello_refused(route, body)
            case msg.UnknownEpoch():
                self.links.on_unknown_epoch(route, body)
            case _:
                is_ours = event.to == self.ctx.identity.epoch
                peer = self.peers.get(epoch) or (
                    self.links.admit(route, epoch) if is_ours else None
                )
                if peer is None or not is_ours:
                    self._on_stranger(route, epoch, body)
                    return
                self.peers.heard(peer, route)
                self._on_known_peer(peer, route, body)

    def _on_stranger(self, route: PeerRoute, epoch: Epoch, body: msg.PeerBody) -> None:
        kind = "stale_epoch" if self.peers.is_void(epoch) else "unknown_epoch"
        self.ctx.problem(kind, type(body).__name__)
        if kind == "unknown_epoch":
            self.ctx.emit(SendToPeer(route, msg.UnknownEpoch(epoch)))

    def _on_known_peer(self, peer: Peer, route: PeerRoute, body: msg.PeerBody) -> None:
        match body:
            case msg.Heartbeat():
                self.links.on_heartbeat(peer, route, body)
                self.sessions.close_unregistered(peer)
            case msg.HeartbeatReply():
                self.links.on_heartbeat_reply(peer, body)
                self.sessions.close_unregistered(peer)
            case msg.Goodbye():
                self.peers.void(peer, PeerLost("the peer has stopped"), is_fenced=True)
            case msg.LayoutRequest():
                self._describe(peer, body.generation)
            case msg.LayoutReply():
                self.sessions.on_layout(peer, body)
            case msg.FenceRequest():
                self._on_fence_request(peer, body)
            case msg.Fenced():
                self.orphans.on_fenced(peer, body)
            case _:
                self._on_transfer_message(peer, body)

    def _on_transfer_message(self, peer: Peer, body: msg.PeerBody) -> None:
        match body:
            case msg.Claim():
                self.leases.on_claim(peer, body)
            case msg.Ack():
                self.leases.on_ack(peer, body)
            case msg.Renew():
                self.leases.on_renew(peer, body)
            case msg.ClaimGranted():
                self.pulls.on_granted(peer, body)
            case msg.ClaimRefused():
                self.pulls.on_refused(peer, body)
            case msg.AckConfirmed():
                self.pulls.on_confirmed(peer, body)
            case msg.Renewed():
                self.pulls.on_renewed(peer, body)
            case msg.Revoke():
                self.pulls.on_revoke(peer, body)
            case _:
                self._on_write_message(peer, body)

    def _on_write_message(self, peer: Peer, body: msg.PeerBody) -> None:
        match body:
            case msg.Grant():
                self.pushes.on_grant(peer, body)
            case msg.RevokeGrant():
                self.pushes.on_revoke_grant(peer, body)
            case msg.WriteConfirmed():
                self.pushes.on_confirmed(peer, body)
            case msg.GrantAccepted():
                self.reserves.on_accepted(peer, body)
            case msg.WriteDone():
                self.reserves.on_write_done(peer, body)
            case msg.WriteFailed():
                self.reserves.on_write_failed(peer, body)
            case _:
                self.ctx.problem("unexpected_message", type(body).__name__)

    def _describe(self, peer: Peer, generation: Generation) -> None:
        client = self.clients.get(generation)
        remote = None
        if client is not None and client.usable_layout is not None and not peer.fence_requested:
            remote = RemoteLayout(client.usable_layout, self.engine, client.descriptors)
        self.peers.send(peer.epoch, msg.LayoutReply(generation, remote))

    def _generations(self) -> tuple[Generation, ...]:
        return tuple(client.generation for client in self.clients.registered())

    def _close_sessions_of_peer(self, peer: Peer) -> None:
        self.sessions.close_of_peer(peer)

    # --- Fence requests -----------------------------------------------------------------------

    def _on_fence_request(self, peer: Peer, body: msg.FenceRequest) -> None:
        """A restarted daemon wants to be sure that nothing reaches its worker any more.

        It repeats the question until it is answered, so nothing is kept of one that is too early.
        It can end epochs of its own rank, and of another only once that one is silent.
        """
        old = self.peers.get(body.old_epoch)
        if old is not None and old is not peer:
            if old.is_up and old.rank_key != peer.rank_key:
                self.ctx.problem("fence_not_of_sender", peer.identity.instance)
                return
            error = PeerRestarted(
                "the peer restarted", old_epoch=body.old_epoch, new_epoch=peer.epoch
            )
            self.peers.void(old, error)
            self.ctx.run_deferred()  # so that operations that were never posted are gone
        elif old is None:
            self.peers.mark_void(body.old_epoch, peer.rank_key)
        if not self.ops.count_with(body.old_epoch):
            self.peers.send(peer.epoch, msg.Fenced(body.fence_id, body.old_epoch))

    # --- Drain --------------------------------------------------------------------------------

    def _start_drain(self, timeout_s: float) -> None:
        if self._drain_reported:
            return
        if self.ctx.is_draining:
            timeout_s = 0.0  # asked again: do not wait for anybody
        self.ctx.is_draining = True
        self.ctx.timers.set(("drain",), self.ctx.now + timeout_s, self._end_transfers)

    def _end_transfers(self) -> None:
        error = Draining("the daemon is stopping")
        self.pulls.fail_all(error)
        self.pushes.fail_all(error)
        self.reserves.fail_all(error)
        self.leases.revoke_all(error)
        when = self.ctx.now + self.ctx.settings.drain_grace_s
        self.ctx.timers.set(("drain",), when, self._end_drain)

    @property
    def is_quiet(self) -> bool:
        """Whether no transfer is live and no engine operation or promise is open."""
        return not (self.admission.active or len(self.orphans) or len(self.ops))

    def _check_drained(self) -> None:
        is_waiting = self.ctx.is_draining and not self._drain_reported
        # Somebody may not have confirmed the end of a transfer yet.
        if is_waiting and self.is_quiet and not self.peers.outbox.count():
            self._end_drain()

    def _end_drain(self) -> None:
        self._drain_reported = True
        self.ctx.timers.cancel(("drain",))
        if not len(self.ops):  # else it would not be true
            for peer in self.peers:
                self.peers.send(peer.epoch, msg.Goodbye())
        self.ctx.emit(DrainEnded(self.is_quiet))
