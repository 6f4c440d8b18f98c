"""The stateful test over a whole world: a P group and a D group with a wire that cannot be trusted.

Kept apart from the test that runs it, so that the planted-bug tests can run the same machine and
show that it finds them.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from moriiod.core import requests as req
from moriiod.errors import EngineOpFailed
from tests.support.sim import N_LAYERS, SETTINGS, World

IDS = ("t0", "t1", "t2")
RANGES = ((0, 1, 2), (3, 4, 5), (2, 3), (6, 7, 8, 9), (10, 11))
#: Prefill TP, decode TP, KV heads (0 = MLA, the same on every rank).
SIZES = (
    *((1, 1, 0), (1, 2, 0), (2, 1, 0), (2, 4, 0), (4, 2, 0), (2, 2, 0)),
    # Split heads: parts of one rank, gathered from several, replicas on one side only, uneven.
    *((1, 2, 2), (2, 1, 2), (4, 2, 4), (2, 4, 2), (4, 1, 2), (2, 3, 6), (3, 2, 6)),
)
UNEVEN = replace(SETTINGS, allow_uneven=True)

ids = st.sampled_from(IDS)
ranges = st.sampled_from(RANGES)
small = st.integers(0, 63)


class WorldMachine(RuleBasedStateMachine):
    """Moves of a hostile world. The world itself checks the safety rules after each."""

    @initialize(sizes=st.sampled_from(SIZES), seed=st.integers(0, 999))
    def start(self, sizes: tuple[int, int, int], seed: int) -> None:
        self.world = World(*sizes[:2], heads=sizes[2], seed=seed, settings=UNEVEN)
        self.kills = 0

    # --- What workers ask ---------------------------------------------------------------

    @rule(name=ids, blocks=ranges, mask=small, size=st.sampled_from((0, 0, 1, 4)))
    def publish(self, name: str, blocks: tuple[int, ...], mask: int, size: int) -> None:
        for rank, worker in enumerate(self.world.p_workers):
            if worker.is_alive and worker.daemon.is_alive and not mask >> rank & 1:
                worker.publish(name, blocks, remote_tp_size=size)

    @rule(name=ids, remote=ranges, local=ranges, mask=small)
    def pull(self, name: str, remote: tuple[int, ...], local: tuple[int, ...], mask: int) -> None:
        n = min(len(remote), len(local))
        for rank, worker in enumerate(self.world.d_workers):
            if worker.is_alive and worker.daemon.is_alive and not mask >> rank & 1:
                first = (len(remote) - n,)
                worker.pull(name, self.world.p_address, remote, local[:n], local_first=first)

    @rule(name=ids, blocks=ranges, mask=small)
    def push(self, name: str, blocks: tuple[int, ...], mask: int) -> None:
        for rank, worker in enumerate(self.world.p_workers):
            if worker.is_alive and worker.daemon.is_alive and not mask >> rank & 1:
                worker.push(name, blocks)

    @rule(name=ids, layer=st.integers(0, N_LAYERS - 1))
    def layer_ready(self, name: str, layer: int) -> None:
        for worker in self._live(self.world.p_workers):
            worker.ask(req.LayerReady(name, (layer,)))

    @rule(name=ids)
    def seal(self, name: str) -> None:
        for worker in self._live(self.world.p_workers):
            worker.ask(req.Seal(name, N_LAYERS))

    @rule(name=ids, blocks=ranges, mask=small)
    def reserve(self, name: str, blocks: tuple[int, ...], mask: int) -> None:
        for rank, worker in enumerate(self.world.d_workers):
            if worker.is_alive and worker.daemon.is_alive and not mask >> rank & 1:
                worker.reserve(name, self.world.p_address, blocks)

    @rule(name=ids, pick=small)
    def reject(self, name: str, pick: int) -> None:
        live = self._live(self.world.d_workers)
        if live:
            live[pick % len(live)].ask(req.Reject(name, self.world.p_address))

    @rule(name=ids, role=st.sampled_from(("publish", "pull", "push", "reserve")), pick=small)
    def abort(self, name: str, role: str, pick: int) -> None:
        live = self._live(self.world.workers)
        if live:
            live[pick % len(live)].ask(req.Abort(name, role))  # type: ignore[arg-type]

    def _live(self, workers: list) -> list:  # type: ignore[type-arg]
        return [w for w in workers if w.is_alive and w.daemon.is_alive]

    @rule(name=ids, blocks=ranges, local=ranges)
    def read_under_way(self, name: str, blocks: tuple[int, ...], local: tuple[int, ...]) -> None:
        """Bring a READ of the whole group to where copies are in flight."""
        self.publish(name, blocks, 0, 0)
        self.pull(name, blocks, local, 0)
        self.world.run(copies=False)

    @rule(name=ids, blocks=ranges, local=ranges, seals=st.booleans())
    def write_under_way(
        self, name: str, blocks: tuple[int, ...], local: tuple[int, ...], seals: bool
    ) -> None:
        """Bring a WRITE of the whole group to where copies are in flight."""
        self.reserve(name, local[: len(blocks)], 0)
        self.push(name, blocks[: len(local)], 0)
        self.world.run(copies=False)
        for layer in range(N_LAYERS):
            self.layer_ready(name, layer)
        if seals:
            self.seal(name)

    # --- What the wire does -------------------------------------------------------------

    @precondition(lambda self: self.world.net)
    @rule(picks=st.lists(small, min_size=1, max_size=6))
    def deliver(self, picks: list[int]) -> None:
        for pick in picks:
            if self.world.net:
                self.world.deliver(pick % len(self.world.net))

    @precondition(lambda self: self.world.net)
    @rule(pick=small)
    def lose(self, pick: int) -> None:
        self.world.lose(pick % len(self.world.net))

    @precondition(lambda self: self.world.net)
    @rule(pick=small)
    def repeat(self, pick: int) -> None:
        self.world.deliver(pick % len(self.world.net), keep=True)

    @rule(copies=st.booleans())
    def run(self, copies: bool) -> None:
        self.world.run(copies=copies)

    @precondition(lambda self: self.world.ops or self.world.cut)
    @rule(p=small, d=small)
    def cut(self, p: int, d: int) -> None:
        world = self.world
        ports = (
            world.prefill[p % len(world.prefill)].port,
            world.decode[d % len(world.decode)].port,
        )
        world.cut ^= {frozenset(ports)}

    # --- What the engine does -----------------------------------------------------------

    @precondition(lambda self: any(d.local_events for d in self.world.daemons))
    @rule()
    def local(self) -> None:
        self.world.local_step()

    @precondition(lambda self: self.world.ops)
    @rule(pick=small, spans=st.integers(1, 4), fails=st.integers(0, 9))
    def copy(self, pick: int, spans: int, fails: int) -> None:
        ops = list(self.world.ops.values())
        error = EngineOpFailed("made to fail") if fails == 0 else None
        self.world.copy(ops[pick % len(ops)], spans=spans, error=error)

    @rule(times=st.integers(1, 3))
    def refuse_posts(self, times: int) -> None:
        self.world.engine_refusals = times

    # --- Time and death -----------------------------------------------------------------

    @rule(seconds=st.sampled_from((0.1, 0.3, 1.0, 3.0, 6.0, 25.0)))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @precondition(lambda self: self.kills < 4 and self.world.ops)
    @rule(pick=small)
    def kill_worker(self, pick: int) -> None:
        workers = self._live(self.world.workers)
        if workers:
            self.kills += 1
            self.world.kill_worker(workers[pick % len(workers)])

    @precondition(lambda self: self.kills < 4 and (self.world.ops or self.world.net))
    @rule(pick=small)
    def kill_daemon(self, pick: int) -> None:
        daemons = self.world.daemons
        if daemons:
            self.kills += 1
            self.world.kill_daemon(daemons[pick % len(daemons)])

    @precondition(lambda self: self.kills)
    @rule()
    def recover(self) -> None:
        self._recover()

    @precondition(lambda self: self.world.ops or any(d.is_stopped for d in self.world.daemons))
    @rule(pick=small)
    def freeze_or_thaw(self, pick: int) -> None:
        daemons = self.world.daemons
        if daemons:
            daemon = daemons[pick % len(daemons)]
            daemon.is_stopped = not daemon.is_stopped

    def _recover(self) -> None:
        world = self.world
        for daemon in (*world.prefill, *world.decode):
            if not daemon.is_alive:
                world.restart_daemon(daemon)
        for worker in (*world.p_workers, *world.d_workers):
            if not worker.is_alive:
                world.replace_worker(worker)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for daemon in world.daemons:
            daemon.is_stopped = False
        world.cut.clear()
        world.engine_refusals = 0
        self._recover()
        world.settle(45.0, step=1.0)
        for worker in world.workers:
            for held in list(worker.held.values()):
                if held.role == "push":  # a push without seal or grant is only ended by its timeout
                    raise AssertionError(f"{held.role} {held.transfer_id} never ended")
        world.assert_empty()
