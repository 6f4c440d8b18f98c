"""One real machine, and a test that plays everybody else by hand: worker, engine and peers.

Where ``sim.World`` shows that the safety rules hold whatever happens, ``Lone`` shows exactly what
a machine does about one event. Nothing happens by itself: no message is answered, no operation
ends and no time passes unless the test says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TypeVar

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.core.geometry import CacheLayout, KvGroup, RemoteLayout
from moriiod.core.machine import Machine
from moriiod.core.messages import Identity, PeerBody
from moriiod.core.settings import CoreSettings
from moriiod.errors import MoriiodError
from tests.support.sim import BASE_PORT, SETTINGS, make_groups, pack

HOST = "127.0.0.1"

_EffectT = TypeVar("_EffectT")
_BodyT = TypeVar("_BodyT")
_ids = itertools.count(1)


def new_id() -> str:
    """Return an id in the form of a uuid's hex, never the same twice."""
    return f"{next(_ids):032x}"


def bytes_of(groups: Iterable[KvGroup]) -> int:
    """Return how large the one region of these groups must be."""
    return max(
        layer.offset
        + (layer.pieces - 1) * layer.kv_stride
        + (group.num_blocks - 1) * layer.block_stride
        + layer.piece_bytes
        for group in groups
        for layer in group.layers
    )


class Lone:
    """One daemon's machine.

    Attributes:
        now: The machine's time, seconds.
        effects: What the last ``step`` or ``wait`` ordered.
        log: Everything that was ever ordered.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        instance: str = "P",
        dp: tuple[int, int] = (0, 1),
        settings: CoreSettings = SETTINGS,
        max_span_bytes: int = 0,
    ) -> None:
        self.identity = Identity(instance, *dp, rank, size, new_id())
        self.settings = settings
        self.machine = Machine(self.identity, settings, "shm", max_span_bytes)
        self.now = 100.0
        self.effects: tuple[ef.Effect, ...] = ()
        self.log: list[ef.Effect] = []

    # --- Moving it ------------------------------------------------------------------------------

    def step(self, event: ev.Event) -> tuple[ef.Effect, ...]:
        """Let one thing happen now."""
        self.effects = self.machine.step(event, self.now)
        self.log += self.effects
        return self.effects

    def wait(self, seconds: float) -> tuple[ef.Effect, ...]:
        """Let time pass; every timer fires when it is due."""
        end = self.now + seconds
        effects: list[ef.Effect] = []
        while (when := self.machine.next_deadline()) is not None and when <= end:
            self.now = max(when, self.now)
            effects += self.step(ev.TimerFired())
        self.now, self.effects = end, tuple(effects)
        return self.effects

    # --- Looking at it --------------------------------------------------------------------------

    def of(self, kind: type[_EffectT]) -> list[_EffectT]:
        """Effects of one kind in what was ordered last."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def one(self, kind: type[_EffectT]) -> _EffectT:
        """The only effect of one kind in what was ordered last."""
        (effect,) = self.of(kind)
        return effect

    def ever(self, kind: type[_EffectT]) -> list[_EffectT]:
        """Effects of one kind in everything that was ever ordered."""
        return [effect for effect in self.log if isinstance(effect, kind)]

    @property
    def problems(self) -> list[str]:
        """Kinds of the problems that were counted last."""
        return [effect.kind for effect in self.of(ef.CountProblem)]

    @property
    def sent(self) -> list[PeerBody]:
        """Messages that were sent last, to whomever."""
        return [effect.body for effect in self.of(ef.SendToPeer)]

    def ever_sent(self, kind: type[_EffectT]) -> list[_EffectT]:
        """Messages of one kind that were ever sent, to whomever."""
        return [effect.body for effect in self.ever(ef.SendToPeer) if isinstance(effect.body, kind)]

    @property
    def ended(self) -> list[tuple[str, str, str, str]]:
        """(role, transfer id, outcome, reason) of every end that was told last."""
        return [
            (event.role, event.transfer_id, event.outcome, event.reason)
            for event in (effect.body for effect in self.of(ef.SendEvent))
        ]

    # --- Engine ---------------------------------------------------------------------------------

    def op_ended(
        self, op: ef.PostOp, error: MoriiodError | None = None, n_bytes: int | None = None
    ) -> tuple[ef.Effect, ...]:
        """The engine is done with an operation."""
        if n_bytes is None:
            n_bytes = 0 if error else op.plan.n_bytes
        return self.step(ev.OpEnded(op.op, n_bytes, error))

    def open_sessions(self) -> tuple[ef.Effect, ...]:
        """The engine opens every session that the last step asked for."""
        asked, wanted = self.effects, self.of(ef.OpenSession)
        for effect in wanted:
            asked += self.step(ev.SessionOpened(effect.session))
        self.effects = asked
        return asked


class LoneWorker:
    """A worker of a lone machine.

    Args:
        groups: What it registers; with ``None`` it only attaches.
    """

    def __init__(
        self,
        lone: Lone,
        groups: tuple[KvGroup, ...] | None = None,
        *,
        name: str = "w",
        register: bool = True,
    ) -> None:
        self.lone = lone
        self.groups = make_groups() if groups is None else groups
        self.generation = new_id()
        self.name = name
        self.route = name.encode() + self.generation.encode()
        self.region_bytes = (bytes_of(self.groups),)
        self._sequence = 0
        lone.step(ev.WorkerConnected(self.generation, 4711, 1000))
        self.offer()
        attached = self.ask(req.Attach(self.generation, name))
        assert isinstance(attached, req.Attached), attached
        if register:
            self.register()

    @property
    def layout(self) -> CacheLayout:
        """What it registers."""
        return CacheLayout(self.generation, self.groups, self.region_bytes)

    def offer(self) -> None:
        """Hand the region over on the fd socket."""
        self.lone.step(ev.RegionOffered(self.generation, 0, self.region_bytes[0]))

    def send(self, body: req.Request) -> tuple[ef.Effect, ...]:
        """Send a request."""
        self._sequence += 1
        return self.lone.step(ev.RequestReceived(self.route, self._sequence, body))

    def ask(self, body: req.Request) -> req.Reply:
        """Send a request that is answered within the step; return the answer."""
        self.send(body)
        return self.answer

    @property
    def answer(self) -> req.Reply:
        """The one answer in what was ordered last; it is that of the newest request."""
        answer = self.lone.one(ef.ReplyToClient)
        assert (answer.route, answer.sequence) == (self.route, self._sequence)
        return answer.body

    def register(self) -> None:
        """Register the cache; the engine takes it."""
        self.send(req.RegisterCaches(self.groups, self.region_bytes))
        self.lone.step(ev.MemoryRegistered(self.generation, (b"region",)))
        assert self.answer == req.Done()

    def refusal(self, body: req.Request) -> req.Refused:
        """Send a request that is refused; return the refusal."""
        answer = self.ask(body)
        assert isinstance(answer, req.Refused), answer
        return answer


class FarPeer:
    """Another daemon, played by a test."""

    def __init__(
        self,
        lone: Lone,
        rank: int = 0,
        size: int = 1,
        *,
        instance: str = "D",
        dp: tuple[int, int] = (0, 1),
        groups: tuple[KvGroup, ...] | None = None,
    ) -> None:
        self.lone = lone
        self.identity = Identity(instance, *dp, rank, size, new_id())
        self.route = f"a:{instance}{rank}"
        #: Of its one worker.
        self.generation = new_id()
        self.groups = make_groups() if groups is None else groups
        self._beats = 0

    @property
    def epoch(self) -> str:
        """Its epoch."""
        return self.identity.epoch

    @property
    def port(self) -> int:
        """Where it listens."""
        return BASE_PORT + self.identity.dp_rank * self.identity.tp_size + self.identity.tp_rank

    @property
    def address(self) -> req.PeerAddress:
        """How a router names its instance."""
        return req.PeerAddress(
            HOST, BASE_PORT, self.identity.tp_size, self.identity.dp_size, self.identity.dp_rank
        )

    @property
    def layout(self) -> CacheLayout:
        """What its worker registered."""
        return CacheLayout(self.generation, self.groups, (bytes_of(self.groups),))

    @property
    def remote_layout(self) -> RemoteLayout:
        """Its worker's layout as it is described to others."""
        return RemoteLayout(self.layout, "shm", (b"region",))

    def restarted(self) -> FarPeer:
        """Another start of the same daemon: a new epoch at the same place."""
        fresh = FarPeer(self.lone, groups=self.groups)
        fresh.identity = Identity(
            self.identity.instance,
            self.identity.dp_rank,
            self.identity.dp_size,
            self.identity.tp_rank,
            self.identity.tp_size,
            fresh.epoch,
        )
        fresh.route = self.route
        return fresh

    # --- Speaking -------------------------------------------------------------------------------

    def say(self, body: PeerBody, *, to: str | None = None) -> tuple[ef.Effect, ...]:
        """Let a message of this peer arrive."""
        to = self.lone.identity.epoch if to is None else to
        return self.lone.step(ev.PeerMessageReceived(self.route, self.epoch, body, to))

    def dial(self) -> FarPeer:
        """Say Hello to the machine, and a first heartbeat: from there on it knows us."""
        self.say(msg.Hello(new_id(), (1,), self.identity, ("shm",)))
        assert isinstance(self.lone.sent[-1], msg.Welcome), self.lone.sent
        self.beat()
        return self

    def beat(self) -> tuple[ef.Effect, ...]:
        """Send a heartbeat."""
        self._beats += 1
        return self.say(msg.Heartbeat(self._beats, (self.generation,)))

    def reply_beat(self) -> tuple[ef.Effect, ...]:
        """Answer a heartbeat."""
        self._beats += 1
        return self.say(msg.HeartbeatReply(self._beats, (self.generation,)))

    def welcome(self) -> tuple[ef.Effect, ...]:
        """Answer the newest Hello that was sent to where we listen."""
        routes = {x.route for x in self.lone.ever(ef.OpenRoute) if x.port == self.port}
        route, hello = next(
            (effect.route, effect.body)
            for effect in reversed(self.lone.log)
            if isinstance(effect, ef.SendToPeer)
            and effect.route in routes
            and isinstance(effect.body, msg.Hello)
        )
        self.route = route
        return self.say(msg.Welcome(hello.nonce, 1, self.identity, ("shm",)))

    def describe(self, generation: str | None = None) -> tuple[ef.Effect, ...]:
        """Answer a LayoutRequest; the engine opens the session that is asked for then."""
        self.say(msg.LayoutReply(generation or self.generation, self.remote_layout))
        return self.lone.open_sessions()

    # --- Reading what the machine published -----------------------------------------------------

    def claim(self, transfer_id: str, *blocks: int, reads: bool = True) -> msg.ClaimGranted:
        """Claim a lease that is open; return the grant."""
        packed = (pack(*blocks),) if reads else ()
        self.say(msg.Claim(transfer_id, new_id(), reads, packed))
        return self.got(msg.ClaimGranted)

    def ack(self, granted: msg.ClaimGranted, *, ok: bool = True) -> tuple[ef.Effect, ...]:
        """Say that we are done with a lease."""
        me = self.identity
        ack = msg.Ack(
            granted.transfer_id, granted.pull_id, granted.lease_id, me.tp_rank, me.tp_size, ok
        )
        return self.say(ack)

    # --- Publishing what the machine pulls --------------------------------------------------------

    def grant(self, ttl_s: float = 20.0) -> tuple[ef.Effect, ...]:
        """Grant the newest claim that was made to us."""
        claim = self.last(msg.Claim)
        return self.say(
            msg.ClaimGranted(claim.transfer_id, claim.pull_id, new_id(), self.generation, ttl_s)
        )

    def confirm(self, *, valid: bool = True) -> tuple[ef.Effect, ...]:
        """Confirm the newest Ack that was sent to us."""
        ack = self.last(msg.Ack)
        return self.say(msg.AckConfirmed(ack.transfer_id, ack.pull_id, valid))

    # --- Taking what the machine pushes -----------------------------------------------------------

    def reserve(self, transfer_id: str, *blocks: int, writes: bool = True) -> msg.Grant:
        """Grant blocks of ours to a push; return the grant."""
        packed = (pack(*blocks),) if writes else ()
        grant = msg.Grant(transfer_id, new_id(), self.generation, writes, packed, ())
        self.say(grant)
        return grant

    # --- Pushing what the machine reserved --------------------------------------------------------

    def accept(self) -> tuple[ef.Effect, ...]:
        """Accept the newest grant that was made to us."""
        grant = self.last(msg.Grant)
        return self.say(msg.GrantAccepted(grant.transfer_id, grant.grant_id))

    def write_done(self, n_layers: int = 2, n_bytes: int = 32) -> tuple[ef.Effect, ...]:
        """Say that everything is in the blocks of the newest grant."""
        grant = self.last(msg.Grant)
        return self.say(msg.WriteDone(grant.transfer_id, grant.grant_id, n_layers, n_bytes))

    def write_failed(self, code: str = "ABORTED") -> tuple[ef.Effect, ...]:
        """Say that nothing of ours writes to the blocks of the newest grant any more."""
        grant = self.last(msg.Grant)
        error = msg.WireError(code, "gave up", False, {})
        return self.say(msg.WriteFailed(grant.transfer_id, grant.grant_id, error))

    # --- Listening ------------------------------------------------------------------------------

    def heard(self, kind: type[_BodyT]) -> list[_BodyT]:
        """Messages of one kind that were sent to us last."""
        return [
            effect.body
            for effect in self.lone.of(ef.SendToPeer)
            if effect.to in (self.epoch, "0" * 32)
            and effect.route == self.route
            and isinstance(effect.body, kind)
        ]

    def last(self, kind: type[_BodyT]) -> _BodyT:
        """The newest message of one kind that was ever sent to us."""
        return next(
            effect.body
            for effect in reversed(self.lone.log)
            if isinstance(effect, ef.SendToPeer)
            and effect.to == self.epoch
            and isinstance(effect.body, kind)
        )

    def got(self, kind: type[_BodyT]) -> _BodyT:
        """The one message of one kind that was sent to us last."""
        (body,) = self.heard(kind)
        return body
