"""A world of daemons, workers, memory and a network, all in one object and without a clock.

The daemons are real ``core.Machine`` objects; everything around them is a small model that a test
moves by hand: which message is delivered, lost or repeated, which copy goes on, who dies. After
every move ``World.check`` looks at the safety rules from outside:

* S1: no copy in flight touches a block that its worker has got back.
* S2: every accepted transfer ends exactly once.
* S3: what is reported as received is what was published, byte for byte.
* S4: a producer rank is acked only after every consumer rank of its ack set has ended.

A worker reuses a block the moment it gets it back: it fills it with noise, and any later change of
that noise is somebody writing into memory that is not his.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import requests as req
from moriiod.core.geometry import CacheLayout, KvGroup, KvLayer
from moriiod.core.headplan import REPLICATED, HeadRule, HeadShape
from moriiod.core.machine import Machine
from moriiod.core.messages import Identity, PeerBody
from moriiod.core.plan import TransferPlan
from moriiod.core.settings import CoreSettings
from moriiod.errors import EngineOpFailed, MoriiodError, TransferAborted

N_BLOCKS = 12
N_LAYERS = 2
PIECE = 8
BASE_PORT = 6301

SETTINGS = CoreSettings(
    lease_s=20.0,
    pull_timeout_s=15.0,
    write_timeout_s=15.0,
    early_ttl_s=8.0,
    heartbeat_interval_s=1.0,
    link_timeout_s=4.0,
    connect_timeout_s=5.0,
    link_idle_s=60.0,
    peer_forget_s=30.0,
)


def make_groups(
    n_blocks: int = N_BLOCKS, n_layers: int = N_LAYERS, *, heads: int = 0, tp_size: int = 1
) -> tuple[KvGroup, ...]:
    """One group. Without heads it is MLA: every rank holds all of it; else heads are split."""
    piece = PIECE * max(1, heads // tp_size)
    layer_bytes = n_blocks * piece
    layers = tuple(
        KvLayer(f"layer.{i}", 0, i * layer_bytes, piece, 0, piece) for i in range(n_layers)
    )
    if heads:
        return (KvGroup("kv", "fused", "HND", "uint8", 1, n_blocks, heads, PIECE // 2, layers),)
    return (KvGroup("kv", "mla", "NHD", "uint8", 1, n_blocks, 1, PIECE, layers),)


def pack(*ids: int) -> bytes:
    """Block ids as they travel."""
    return np.array(ids, dtype="<u4").tobytes()


@dataclass(eq=False)
class Held:
    """A transfer of a worker that has not ended: its blocks are not the worker's."""

    role: str
    transfer_id: str
    blocks: tuple[int, ...]
    peer: req.PeerAddress | None = None
    epoch: str = ""
    #: For a publish or push: the bytes [layer, block index, PIECE] that were promised.
    content: np.ndarray | None = None
    #: For a push or reserve: which layers were announced as ready.
    layers: set[int] = field(default_factory=set)


class Worker:
    """One inference worker: its memory, and what it has asked for."""

    def __init__(self, world: World, daemon: Daemon) -> None:
        self.world = world
        self.daemon = daemon
        self.generation = world.new_id()
        #: Bytes of one block in one layer: PIECE for each head that the rank holds.
        self.piece = PIECE * max(1, world.heads // daemon.size)
        self.memory = self._draw(range(world.n_blocks))
        #: What the memory must hold as long as nobody may write to it; masked where busy.
        self.noise = self.memory.copy()
        self.busy: dict[int, Held] = {}
        self.held: dict[tuple[str, str], Held] = {}
        self.ended: list[req.TransferEnded] = []
        self.sequence = 0
        self.replies: dict[int, req.Reply] = {}
        self.seen_event = 0
        self.is_alive = True
        #: (epoch, orphans) for the next attach after a daemon was lost.
        self.lost_epoch: str | None = None
        self.orphans: list[req.Orphan] = []

    @property
    def route(self) -> bytes:
        """The ZMQ routing id this attach uses."""
        return self.generation.encode()

    # --- Asking ---------------------------------------------------------------------------------

    def send(self, body: req.Request) -> int:
        """Send a request; the reply is in ``replies`` when it came."""
        self.sequence += 1
        self.daemon.step(ev.RequestReceived(self.route, self.sequence, body))
        return self.sequence

    def ask(self, body: req.Request) -> req.Reply:
        """Send a request that is answered within the step."""
        return self.replies[self.send(body)]

    def attach(self) -> None:
        """Introduce ourselves, hand over the memory and register it."""
        self.daemon.step(ev.WorkerConnected(self.generation, 1000, 0))
        self.daemon.step(ev.RegionOffered(self.generation, 0, self.memory.nbytes))
        orphans = tuple(self.orphans)
        self.orphans = []
        reply = self.ask(req.Attach(self.generation, "w", self.lost_epoch, orphans))
        assert isinstance(reply, req.Attached), reply
        groups = make_groups(self.world.n_blocks, heads=self.world.heads, tp_size=self.daemon.size)
        self.send(req.RegisterCaches(groups, (self.memory.nbytes,)))

    def hold(self, held: Held, body: req.Request) -> req.Reply | None:
        """Ask for a transfer; if it is accepted, its blocks are not ours until it ends.

        A repeat of a live id is sent on; what would use a busy block is not (workers do not).
        """
        held.epoch = self.daemon.epoch
        key = (held.role, held.transfer_id)
        fresh = key not in self.held
        if fresh and any(block in self.busy for block in held.blocks):
            return None
        if fresh and held.content is not None:
            self.memory[:, list(held.blocks)] = held.content
            promise = (held.role, held.transfer_id, self.daemon.rank)
            self.world.promises.setdefault(promise, []).append(held.content)
        if fresh:  # before the send: its end may be told within the step
            self.held[key] = held
            self.busy.update(dict.fromkeys(held.blocks, held))
        reply = self.ask(body)
        if fresh and isinstance(reply, req.Refused):
            self._give_back(held)
        return reply

    def publish(
        self, transfer_id: str, blocks: tuple[int, ...], **more: object
    ) -> req.Reply | None:
        """Publish blocks with fresh content."""
        content = self._draw(blocks)
        held = Held("publish", transfer_id, blocks, content=content)
        return self.hold(held, req.Publish(transfer_id, (pack(*blocks),), **more))  # type: ignore[arg-type]

    def push(self, transfer_id: str, blocks: tuple[int, ...], **more: object) -> req.Reply | None:
        """Start a push; its content is decided now and written layer by layer."""
        content = self._draw(blocks)
        held = Held("push", transfer_id, blocks, content=content)
        return self.hold(held, req.Push(transfer_id, (pack(*blocks),), **more))  # type: ignore[arg-type]

    def pull(
        self,
        transfer_id: str,
        peer: req.PeerAddress,
        remote: tuple[int, ...],
        local: tuple[int, ...],
        **more: object,
    ) -> req.Reply | None:
        """Pull remote blocks into local ones."""
        held = Held("pull", transfer_id, local, peer)
        body = req.Pull(transfer_id, peer, (pack(*remote),), (pack(*local),), **more)  # type: ignore[arg-type]
        return self.hold(held, body)

    def reserve(
        self, transfer_id: str, peer: req.PeerAddress, blocks: tuple[int, ...], **more: object
    ) -> req.Reply | None:
        """Reserve blocks for a push."""
        held = Held("reserve", transfer_id, blocks, peer)
        return self.hold(held, req.Reserve(transfer_id, peer, (pack(*blocks),), **more))  # type: ignore[arg-type]

    def _draw(self, blocks: Sequence[int]) -> np.ndarray:
        return self.world.rng.integers(0, 256, (N_LAYERS, len(blocks), self.piece), dtype=np.uint8)

    def blocks_at(self, offset: int, n_bytes: int) -> range:
        """Return the blocks that some bytes of the memory belong to; they are of one layer."""
        first = offset // self.piece % self.world.n_blocks
        return range(first, first + (offset % self.piece + n_bytes - 1) // self.piece + 1)

    # --- Being told -----------------------------------------------------------------------------

    def take(self, sequence: int, event: req.TransferEnded) -> None:
        """An event arrived; repeats are recognised by their sequence."""
        if sequence <= self.seen_event:
            return
        assert sequence == self.seen_event + 1, "events were lost"
        self.seen_event = sequence
        self.end(event)

    def end(self, event: req.TransferEnded) -> None:
        """A transfer ended: check it, and take the blocks back."""
        held = self.held.get((event.role, event.transfer_id))
        assert held is not None, f"S2: {event.role} {event.transfer_id} ended twice or never began"
        if event.outcome == "received":
            self.world.check_received(self, held)
        if event.role == "publish" and event.reason == "acked":
            self.world.check_acked(self, held)
        self.ended.append(event)
        self._give_back(held)

    def _give_back(self, held: Held) -> None:
        del self.held[held.role, held.transfer_id]
        for block in held.blocks:
            if self.busy.get(block) is held:
                del self.busy[block]
                noise = self.world.rng.integers(0, 256, (N_LAYERS, self.piece), dtype=np.uint8)
                self.memory[:, block] = noise
                self.noise[:, block] = noise

    def lose_daemon(self) -> None:
        """What the client library does when its daemon's epoch is over."""
        lost = self.daemon.epoch
        for held in list(self.held.values()):
            if held.role == "reserve":
                assert held.peer is not None
                self.orphans.append(req.Orphan(held.transfer_id, held.peer, held.epoch))
            else:
                self.end(req.TransferEnded(held.transfer_id, held.role, "failed", "DAEMON_LOST"))  # type: ignore[arg-type]
        self.lost_epoch = lost
        self.seen_event = 0

    def check_noise(self) -> None:
        """Nobody wrote into a block that is ours."""
        ours = [b for b in range(self.world.n_blocks) if b not in self.busy]
        assert (self.memory[:, ours] == self.noise[:, ours]).all(), "S1: a free block was written"


@dataclass(eq=False)
class Op:
    """A copy in flight at one daemon."""

    daemon: Daemon
    op: int
    direction: str
    plan: TransferPlan
    local: Worker
    remote: Worker
    #: The peer daemon that described the remote memory.
    peer: Daemon
    done: int = 0
    is_cancelled: bool = False

    def spans(self) -> list[tuple[int, int, int]]:
        """(local offset, remote offset, bytes) of the whole plan."""
        return [
            (layer.local_offset + int(a), layer.remote_offset + int(b), int(n))
            for layer in self.plan.layers
            for a, b, n in zip(
                layer.spans.local, layer.spans.remote, layer.spans.sizes, strict=True
            )
        ]

    def remote_blocks(self) -> list[int]:
        """Blocks of the remote worker that the copy may still touch."""
        return [
            block
            for _, offset, n in self.spans()[self.done :]
            for block in self.remote.blocks_at(offset, n)
        ]


@dataclass(eq=False)
class InFlight:
    """A message between two daemons; ``reply_to`` is the route the receiver sees."""

    source: str
    target: str
    route: str
    body: PeerBody
    to: str


class Daemon:
    """One start of one daemon, with its model of a shell."""

    def __init__(self, world: World, instance: str, rank: int, size: int, port: int) -> None:
        self.world = world
        self.instance, self.rank, self.size, self.port = instance, rank, size, port
        self.epoch = world.new_id()
        identity = Identity(instance, 0, 1, rank, size, self.epoch)
        self.machine = Machine(identity, world.settings, "shm")
        self.is_alive = True
        self.is_stopped = False
        #: Dialled routes: route -> port of the endpoint.
        self.routes: dict[str, int] = {}
        self.sessions: dict[int, tuple[str, str, str]] = {}
        self.registered: dict[str, Worker] = {}
        self.fences: set[str] = set()
        #: Epochs that ever opened a session with our memory.
        self.visitors: set[str] = set()
        self.local_events: deque[ev.Event] = deque()
        self.problems: list[str] = []
        self.drained: bool | None = None
        self.workers: dict[str, Worker] = {}

    def step(self, event: ev.Event) -> None:
        """Let the machine take one event and carry out its effects."""
        if not self.is_alive:
            return
        for effect in self.machine.step(event, self.world.now):
            self._carry_out(effect)
        self.world.after_step(self)

    def _carry_out(self, effect: ef.Effect) -> None:
        match effect:
            case ef.SendToPeer():
                self.world.transmit(self, effect)
            case ef.OpenRoute():
                self.routes[effect.route] = effect.port
            case ef.CloseRoute():
                self.routes.pop(effect.route, None)
            case ef.ReplyToClient():
                worker = self.workers.get(effect.route.decode())
                if worker is not None and worker.is_alive:
                    worker.replies[effect.sequence] = effect.body
            case ef.SendEvent():
                worker = self.workers.get(effect.route.decode())
                if worker is not None and worker.is_alive:
                    worker.take(effect.sequence, effect.body)
                    self.local_events.append(
                        ev.RequestReceived(effect.route, 0, req.ConfirmEvents(effect.sequence))
                    )
            case _:
                self._carry_out_engine(effect)

    def _carry_out_engine(self, effect: ef.Effect) -> None:
        later = self.local_events.append
        match effect:
            case ef.RegisterMemory():
                self.registered[effect.layout.generation] = self.workers[effect.layout.generation]
                later(ev.MemoryRegistered(effect.layout.generation, (b"region",)))
            case ef.ReleaseMemory():
                self.registered.pop(effect.generation)
                later(ev.MemoryReleased(effect.generation))
            case ef.OpenSession():
                self.world.open_session(self, effect)
            case ef.CloseSession():
                self.sessions.pop(effect.session, None)
            case ef.PostOp():
                self.world.post(self, effect)
            case ef.CancelOp():
                op = self.world.ops.get((self.epoch, effect.op))
                if op is not None:
                    op.is_cancelled = True
            case _:
                self._note(effect)

    def _note(self, effect: ef.Effect) -> None:
        match effect:
            case ef.FencePeer():
                self.fences.add(effect.peer)
            case ef.ReadmitPeer():
                self.fences.discard(effect.peer)
            case ef.CountProblem():
                self.problems.append(effect.kind)
            case ef.DrainEnded():
                self.drained = effect.clean
            case _:
                pass


class World:
    """Everything, and the moves a test can make."""

    def __init__(
        self,
        prefill_tp: int,
        decode_tp: int,
        *,
        heads: int = 0,
        seed: int = 0,
        settings: CoreSettings = SETTINGS,
        n_blocks: int = N_BLOCKS,
    ) -> None:
        self.settings = settings
        self.n_blocks = n_blocks
        #: KV heads of the model; 0 = MLA.
        self.heads = heads
        shape = HeadShape(heads) if heads else REPLICATED
        rule = HeadRule((shape,), allows_uneven=settings.allow_uneven)
        self.head_plan = rule.plan(prefill_tp, decode_tp)
        self.rng = np.random.default_rng(seed)
        self.now = 100.0
        self._ids = 0
        self.net: list[InFlight] = []
        self.ops: dict[tuple[str, int], Op] = {}
        self.by_port: dict[int, Daemon] = {}
        self.by_epoch: dict[str, Daemon] = {}
        self.cut: set[frozenset[int]] = set()
        self.engine_refusals = 0
        self.on_check: Callable[[], None] = lambda: None
        #: What producers promised: (role, transfer id, rank) -> bytes, one for each incarnation.
        self.promises: dict[tuple[str, str, int], list[np.ndarray]] = {}
        #: Whose memory a generation names, also after its worker attached anew or died.
        self.by_generation: dict[str, Worker] = {}
        self.p_workers: list[Worker] = []
        self.d_workers: list[Worker] = []
        self.prefill = [self._start("P", r, prefill_tp, BASE_PORT + r) for r in range(prefill_tp)]
        self.decode = [
            self._start("D", r, decode_tp, BASE_PORT + 100 + r) for r in range(decode_tp)
        ]
        for daemon in self.prefill:
            self.p_workers.append(Worker(self, daemon))
            self._employ(daemon, self.p_workers[-1])
        for daemon in self.decode:
            self.d_workers.append(Worker(self, daemon))
            self._employ(daemon, self.d_workers[-1])
        self.p_address = req.PeerAddress("127.0.0.1", BASE_PORT, tp_size=prefill_tp)
        self.run()

    def new_id(self) -> str:
        """A fresh uuid-like id."""
        self._ids += 1
        return hashlib.md5(str(self._ids).encode(), usedforsecurity=False).hexdigest()

    def _start(self, instance: str, rank: int, size: int, port: int) -> Daemon:
        daemon = Daemon(self, instance, rank, size, port)
        self.by_port[port] = daemon
        self.by_epoch[daemon.epoch] = daemon
        return daemon

    def _employ(self, daemon: Daemon, worker: Worker) -> Worker:
        worker.daemon = daemon
        daemon.workers[worker.generation] = worker
        self.by_generation[worker.generation] = worker
        worker.attach()
        return worker

    @property
    def daemons(self) -> list[Daemon]:
        """All daemons that run."""
        return [d for d in self.by_port.values() if d.is_alive]

    @property
    def workers(self) -> list[Worker]:
        """All workers that live."""
        return [w for w in (*self.p_workers, *self.d_workers) if w.is_alive]

    # --- Network --------------------------------------------------------------------------------

    def transmit(self, source: Daemon, effect: ef.SendToPeer) -> None:
        """Put a message on the wire, if its route leads anywhere."""
        route = effect.route
        if route.startswith("d:"):
            target = self.by_port.get(source.routes.get(route, 0))
            back = f"a:{source.epoch}:{route}"
        else:
            _, epoch, dialled = route.split(":", 2)
            target = self.by_epoch.get(epoch)
            back = dialled
        if target is not None and target.is_alive:
            self.net.append(InFlight(source.epoch, target.epoch, back, effect.body, effect.to))

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        """Deliver one message; with ``keep`` a copy stays on the wire."""
        message = self.net[index] if keep else self.net.pop(index)
        source, target = self.by_epoch[message.source], self.by_epoch[message.target]
        if not target.is_alive or target.is_stopped:
            return
        if frozenset((source.port, target.port)) in self.cut:
            return
        is_reply = message.route.startswith("d:")
        if is_reply and message.route not in target.routes:
            return
        target.step(ev.PeerMessageReceived(message.route, message.source, message.body, message.to))

    def lose(self, index: int = 0) -> None:
        """Lose one message."""
        self.net.pop(index)

    # --- Engine ---------------------------------------------------------------------------------

    def open_session(self, daemon: Daemon, effect: ef.OpenSession) -> None:
        """Pair two generations, if the peer still has that one registered."""
        peer = self.by_epoch[effect.peer]
        generation = effect.remote.layout.generation
        if not peer.is_alive or generation not in peer.registered or daemon.epoch in peer.fences:
            error = EngineOpFailed("no such memory")
            daemon.local_events.append(ev.SessionRefused(effect.session, error))
            return
        peer.visitors.add(daemon.epoch)
        daemon.sessions[effect.session] = (effect.local_generation, generation, effect.peer)
        daemon.local_events.append(ev.SessionOpened(effect.session))

    def post(self, daemon: Daemon, effect: ef.PostOp) -> None:
        """Start a copy, unless the engine is made to have no room."""
        if self.engine_refusals:
            self.engine_refusals -= 1
            daemon.local_events.append(ev.OpRefused(effect.op))
            return
        local, remote, peer = daemon.sessions[effect.session]
        self.ops[daemon.epoch, effect.op] = Op(
            daemon,
            effect.op,
            effect.direction,
            effect.plan,
            self.by_generation[local],
            self.by_generation[remote],
            self.by_epoch[peer],
        )

    def copy(self, op: Op, *, spans: int = 1, error: MoriiodError | None = None) -> None:
        """Let a copy go on for some spans, or fail; tell its daemon when it is over."""
        todo = op.spans()
        stop = op.done if op.is_cancelled or error else min(op.done + spans, len(todo))
        for a, b, n in todo[op.done : stop]:
            here = op.local.memory.reshape(-1)[a : a + n]
            there = op.remote.memory.reshape(-1)[b : b + n]
            if op.direction == "read":
                here[:] = there
            else:
                there[:] = here
        op.done = stop
        if error is None and op.is_cancelled:
            error = TransferAborted("cancelled")
        if error is not None or op.done == len(todo):
            del self.ops[op.daemon.epoch, op.op]
            n_bytes = sum(n for _, _, n in todo[: op.done])
            op.daemon.step(ev.OpEnded(op.op, n_bytes, error))
        else:
            self.check()

    # --- Time and death -------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        """Let time pass, firing every timer on the way; messages stay where they are."""
        end = self.now + seconds
        while True:
            due = [
                (deadline, d)
                for d in self.daemons
                if not d.is_stopped
                and (deadline := d.machine.next_deadline()) is not None
                and deadline <= end
            ]
            if not due:
                break
            self.now, daemon = (
                min(due, key=lambda pair: pair[0])[0],
                min(due, key=lambda pair: pair[0])[1],
            )
            daemon.step(ev.TimerFired())
        self.now = end

    def kill_daemon(self, daemon: Daemon) -> None:
        """SIGKILL: its copies stop where they are; its workers notice."""
        daemon.is_alive = False
        for key in [k for k in self.ops if k[0] == daemon.epoch]:
            del self.ops[key]
        for worker in self.workers:
            if worker.daemon is daemon:
                worker.lose_daemon()
        self.check()

    def restart_daemon(self, daemon: Daemon) -> Daemon:
        """Start a new daemon in the place of a dead one; its worker attaches again."""
        fresh = self._start(daemon.instance, daemon.rank, daemon.size, daemon.port)
        group = self.prefill if daemon.instance == "P" else self.decode
        group[daemon.rank] = fresh
        for worker in self.workers:
            if worker.daemon is daemon:
                worker.generation = self.new_id()
                worker.sequence, worker.replies = 0, {}
                self._employ(fresh, worker)
        return fresh

    def kill_worker(self, worker: Worker) -> None:
        """SIGKILL of a worker; its daemon sees it through the pidfd."""
        worker.is_alive = False
        worker.daemon.step(ev.WorkerDied(worker.generation))

    def replace_worker(self, worker: Worker) -> Worker:
        """Start a new worker process in the place of a dead one."""
        group = self.p_workers if worker in self.p_workers else self.d_workers
        daemons = self.prefill if group is self.p_workers else self.decode
        daemon = daemons[worker.daemon.rank]
        fresh = Worker(self, daemon)
        group[group.index(worker)] = fresh
        return self._employ(daemon, fresh)

    # --- Running --------------------------------------------------------------------------------

    def local_step(self) -> bool:
        """Deliver one event of a daemon's own shells; False if there is none."""
        for daemon in self.daemons:
            if daemon.local_events and not daemon.is_stopped:
                daemon.step(daemon.local_events.popleft())
                return True
            for epoch in list(daemon.fences):
                other = self.by_epoch.get(epoch)
                if other is None or not other.is_alive or daemon.epoch not in self._visits(epoch):
                    daemon.fences.discard(epoch)
                    daemon.step(ev.PeerFenced(epoch))
                    return True
        return False

    def _visits(self, epoch: str) -> set[str]:
        """Epochs of the daemons whose memory this epoch may have mapped."""
        return {d.epoch for d in self.by_epoch.values() if epoch in d.visitors}

    def run(self, limit: int = 20000, *, copies: bool = True) -> None:
        """Deliver everything in order and let every copy finish; no time passes.

        Without ``copies`` every copy stays where it is.
        """
        for _ in range(limit):
            if self.local_step():
                continue
            if self.net:
                self.deliver()
            elif self.ops and copies:
                self.copy(next(iter(self.ops.values())), spans=1000)
            else:
                return
        raise AssertionError("the world does not come to rest")

    def settle(self, seconds: float = 60.0, step: float = 0.5) -> None:
        """Let the world run undisturbed for a while."""
        end = self.now + seconds
        while self.now < end:
            self.run()
            self.pass_time(step)
        self.run()

    # --- Looking at it --------------------------------------------------------------------------

    def after_step(self, daemon: Daemon) -> None:
        """After every step of a machine."""
        self.check()

    def check(self) -> None:
        """The safety rules, from outside."""
        for op in self.ops.values():
            self._check_op(op)
        for worker in self.workers:
            worker.check_noise()
        self.on_check()

    def _check_op(self, op: Op) -> None:
        """S1: every block a copy may still touch belongs to a transfer that has not ended.

        One exception, by design: a producer's worker whose daemon is dead gets its published
        blocks back at once. Nobody writes to them, and who still reads them can never report it,
        because the dead daemon will never confirm (docs/architecture.md).
        """
        sides = ((op.local, 0), (op.remote, 1))
        roles = {"read": ("pull", "publish"), "write": ("push", "reserve")}[op.direction]
        for span in op.spans()[op.done :]:
            for worker, side in sides:
                is_orphaned_source = side and op.direction == "read" and not op.peer.is_alive
                if not worker.is_alive or is_orphaned_source:
                    continue
                for block in worker.blocks_at(span[side], span[2]):
                    held = worker.busy.get(block)
                    assert held is not None, f"S1: {op.direction} touches free block {block}"
                    assert held.role == roles[side], f"S1: block {block} is in a {held.role}"

    def check_received(self, worker: Worker, held: Held) -> None:
        """S3: every head is what its source rank promised, and the promise still stood."""
        source_role = "publish" if held.role == "pull" else "push"
        if not held.blocks:
            return
        got = worker.memory[:, list(held.blocks)]
        n = len(held.blocks)
        for one in self.head_plan.slices(0, worker.daemon.rank):
            promises = self.promises.get((source_role, held.transfer_id, one.producer_rank), [])
            here = slice(PIECE * one.consumer_head, PIECE * (one.consumer_head + one.count))
            there = slice(PIECE * one.producer_head, PIECE * (one.producer_head + one.count))
            assert any(
                np.array_equal(got[..., here], wanted[:, wanted.shape[1] - n :, there])
                for wanted in promises
            ), "S3: wrong bytes were received"

    def check_acked(self, worker: Worker, held: Held) -> None:
        """S4: every consumer rank of the ack set has ended its pull (or rejected it)."""
        for rank in self.head_plan.readers(worker.daemon.rank):
            consumer = self.d_workers[rank]
            reading = any(
                op.local is consumer
                and op.remote is worker
                and op.peer is worker.daemon
                and op.direction == "read"
                and set(op.remote_blocks()) & set(held.blocks)
                for op in self.ops.values()
            )
            assert not reading, f"S4: released while rank {rank} is reading"

    def outcomes(self, workers: list[Worker]) -> list[list[tuple[str, str, str]]]:
        """(role, outcome, reason) of everything that ended, by worker."""
        return [[(e.role, e.outcome, e.reason) for e in w.ended] for w in workers]

    def assert_empty(self) -> None:
        """Nothing is left: no transfer, no operation, no session user, no message to deliver."""
        for daemon in self.daemons:
            machine = daemon.machine
            left = [
                (t.role, t.transfer_id, t.state)
                for table in (machine.leases, machine.pulls, machine.pushes, machine.reserves)
                for t in table
            ]
            assert not left, f"transfers are left: {left}"
            assert machine.admission.active == 0, "a transfer is still counted"
            assert len(machine.ops) == 0
            assert machine.ops.in_flight == 0
            assert machine.ops.in_flight_bytes == 0
            assert len(machine.orphans) == 0
            for peer in machine.peers:
                assert not peer.users, "a peer has users"
                if peer.is_up:
                    assert machine.peers.outbox.count(peer.epoch) == 0, "undelivered messages"
            for client in machine.clients:
                assert not client.pins
                assert not client.unconfirmed
        for worker in self.workers:
            assert not worker.held
            assert not worker.busy


def make_layout(generation: str) -> CacheLayout:
    """The layout every worker of the world registers."""
    return CacheLayout(generation, make_groups(), (N_LAYERS * N_BLOCKS * PIECE,))
