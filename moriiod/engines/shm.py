"""The embedded engine: copies between sealed memfds that both daemons of one host have mapped.

Our own data thread does the copying, in slices, so a cancelled operation ends between two slices
and then really touches nothing any more: here a drain is a fence.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from moriiod.core.geometry import RemoteLayout
from moriiod.core.ids import Epoch, Generation, OpId
from moriiod.core.plan import LayerSpans, TransferPlan
from moriiod.engines.base import (
    Completion,
    Direction,
    EngineCapabilities,
    Fence,
    RegionExporter,
    RegionHandle,
    Session,
)
from moriiod.engines.bounds import check_plan
from moriiod.engines.copier import STEP_BYTES, Copier, CopyProgram, compile_program
from moriiod.engines.mapping import MappedRegion
from moriiod.engines.shm_peer import (
    ShmRegion,
    check_reachable,
    decode_region,
    encode_region,
    map_regions,
    read_boot_id,
)
from moriiod.errors import (
    EngineMismatch,
    EngineOpFailed,
    EngineQueueFull,
    RegistrationFailed,
    SessionFailed,
    TransferAborted,
)

NAME: Final = "shm"
#: Setup calls that may run at once; each may wait for a peer that does not answer.
SETUP_THREADS: Final = 4
#: Most operations in flight; more are refused, and posted again later.
MAX_OPS: Final = 4096


@dataclass(frozen=True, slots=True)
class _Registered:
    """A worker's regions and the tokens they are exported under."""

    regions: tuple[MappedRegion, ...]
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ShmSession:
    """A local and a remote generation, both mapped here. The local mappings are not its own."""

    local: tuple[MappedRegion, ...]
    remote: tuple[MappedRegion, ...]


@dataclass(slots=True, eq=False)
class _Op:
    """An operation in flight: which layers, how far it is."""

    op: OpId
    session: ShmSession
    direction: Direction
    layers: tuple[LayerSpans, ...]
    #: One program for each distinct set of spans, by its identity; made when it is needed.
    programs: dict[int, CopyProgram]
    layer: int = 0
    step: int = 0
    n_bytes: int = 0
    is_cancelled: bool = False


class ShmEngine:
    """Implements ``TransferEngine`` for memory of one host.

    Args:
        exporter: Hands our regions to peers (the fd socket).
        epoch: Of this daemon start; peers know us by it when we fetch.
        step_bytes: What is copied between two looks at whether an operation was cancelled.
    """

    def __init__(
        self, exporter: RegionExporter, epoch: Epoch, step_bytes: int = STEP_BYTES
    ) -> None:
        self._exporter = exporter
        self._step_bytes = step_bytes
        self._epoch = epoch
        self._boot_id = read_boot_id()
        self._uid = os.geteuid()
        self._registered: dict[Generation, _Registered] = {}
        self._ops: dict[OpId, _Op] = {}
        self._turn: deque[_Op] = deque()
        self._copier = Copier()

    @property
    def capabilities(self) -> EngineCapabilities:
        """See ``TransferEngine``."""
        return EngineCapabilities(
            name=NAME,
            is_local_only=True,
            setup_threads=SETUP_THREADS,
            poll_interval_s=0.0,
            max_op_bytes=0,
        )

    # --- Setup threads ------------------------------------------------------------------------

    def register(
        self, generation: Generation, regions: Sequence[RegionHandle]
    ) -> tuple[bytes, ...]:
        """See ``TransferEngine``. The same memfd may be registered more than once."""
        if generation in self._registered:
            raise RegistrationFailed("this generation is registered", generation=generation)
        with ExitStack() as undo:
            mapped: list[MappedRegion] = []
            tokens: list[str] = []
            for handle in regions:
                region = MappedRegion(handle.fd, handle.n_bytes)
                undo.callback(region.close)
                mapped.append(region)
                token = secrets.token_hex(16)
                self._export(token, handle)
                undo.callback(self._exporter.withdraw, token)
                tokens.append(token)
            undo.pop_all()
        self._registered[generation] = _Registered(tuple(mapped), tuple(tokens))
        return tuple(
            self._describe(region, token) for region, token in zip(mapped, tokens, strict=True)
        )

    def deregister(self, generation: Generation) -> None:
        """See ``TransferEngine``. Unknown generations are ignored."""
        registered = self._registered.pop(generation, None)
        if registered is None:
            return
        for token in registered.tokens:
            self._exporter.withdraw(token)
        for region in registered.regions:
            region.close()

    def open_session(self, peer: Epoch, local: Generation, remote: RemoteLayout) -> Session:
        """See ``TransferEngine``. The peer may be this very daemon."""
        registered = self._registered.get(local)
        if registered is None:
            raise SessionFailed("the local generation is not registered", generation=local)
        if remote.engine != NAME:
            raise EngineMismatch("the peer uses another engine", theirs=remote.engine, ours=NAME)
        regions = [decode_region(descriptor) for descriptor in remote.descriptors]
        sizes = tuple(region.n_bytes for region in regions)
        if sizes != remote.layout.region_bytes or not sizes:
            raise SessionFailed(
                "the peer's descriptors and its layout disagree about its regions",
                regions=len(remote.layout.region_bytes),
                descriptors=len(sizes),
            )
        for region in regions:
            check_reachable(region, self._boot_id, self._uid)
        return ShmSession(registered.regions, map_regions(regions, self._epoch, self._uid))

    def close_session(self, session: Session) -> None:
        """See ``TransferEngine``."""
        for region in _own(session).remote:
            region.close()

    def fence(self, peer: Epoch) -> Fence:
        """See ``TransferEngine``. A process that mapped our memory keeps it until it ends."""
        pidfd = self._exporter.refuse(peer)
        return Fence(confirmed=pidfd is None, watch_fd=pidfd)

    def readmit(self, peer: Epoch) -> None:
        """See ``TransferEngine``."""
        self._exporter.readmit(peer)

    def forget(self, peer: Epoch) -> None:
        """See ``TransferEngine``."""
        self._exporter.forget(peer)

    def close(self) -> None:
        """See ``TransferEngine``."""
        for generation in list(self._registered):
            self.deregister(generation)

    def _export(self, token: str, handle: RegionHandle) -> None:
        try:
            self._exporter.export(token, handle.fd, handle.n_bytes)
        except OSError as error:
            raise RegistrationFailed(
                f"the region cannot be exported: {error.strerror}",
                n_bytes=handle.n_bytes,
                errno=error.errno or 0,
            ) from error

    def _describe(self, region: MappedRegion, token: str) -> bytes:
        address = self._exporter.address
        return encode_region(
            ShmRegion(self._boot_id, self._uid, address, token, region.n_bytes, region.inode)
        )

    # --- Data thread --------------------------------------------------------------------------

    def post(self, op: OpId, session: Session, direction: Direction, plan: TransferPlan) -> None:
        """See ``TransferEngine``. A plan without bytes ends at the next ``progress``."""
        own = _own(session)
        if op in self._ops:
            raise EngineOpFailed("an operation with this id is in flight", op=op)
        if len(self._ops) >= MAX_OPS:
            raise EngineQueueFull("too many operations in flight", limit=MAX_OPS)
        check_plan(
            plan,
            direction,
            [region.n_bytes for region in own.local],
            [region.n_bytes for region in own.remote],
        )
        layers = tuple(layer for layer in plan.layers if len(layer.spans.sizes))
        item = _Op(op, own, direction, layers, {})
        self._ops[op] = item
        self._turn.append(item)

    def cancel(self, op: OpId) -> None:
        """See ``TransferEngine``. Its completion comes with the next ``progress``."""
        item = self._ops.get(op)
        if item is not None and not item.is_cancelled:
            item.is_cancelled = True
            self._turn.remove(item)
            self._turn.appendleft(item)

    def progress(self) -> list[Completion]:
        """See ``TransferEngine``. Copies about one step, taking turns between the operations."""
        ended: list[Completion] = []
        room = self._step_bytes
        while self._turn and room > 0:
            item = self._turn.popleft()
            before = item.n_bytes
            completion = self._advance(item)
            room -= item.n_bytes - before
            if completion is None:
                self._turn.append(item)
            else:
                del self._ops[item.op]
                ended.append(completion)
        return ended

    @property
    def in_flight(self) -> int:
        """See ``TransferEngine``."""
        return len(self._ops)

    def _advance(self, item: _Op) -> Completion | None:
        if item.is_cancelled:
            aborted = TransferAborted("the operation was cancelled", n_bytes=item.n_bytes)
            return Completion(item.op, item.n_bytes, aborted)
        if item.layer < len(item.layers):
            try:
                self._copy_step(item)
            except (MemoryError, OSError, ValueError) as error:
                failed = EngineOpFailed(f"the copy failed: {error}"[:500], n_bytes=item.n_bytes)
                return Completion(item.op, item.n_bytes, failed)
        if item.layer < len(item.layers):
            return None
        return Completion(item.op, item.n_bytes, None)

    def _copy_step(self, item: _Op) -> None:
        layer = item.layers[item.layer]
        local = item.session.local[layer.local_region], layer.local_offset
        remote = item.session.remote[layer.remote_region], layer.remote_offset
        is_read = item.direction == "read"
        program = item.programs.get(id(layer.spans))
        if program is None:
            spans = layer.spans
            source, target = (spans.remote, spans.local) if is_read else (spans.local, spans.remote)
            program = compile_program(source, target, spans.sizes, self._step_bytes)
            item.programs[id(spans)] = program
        source_at, target_at = (remote, local) if is_read else (local, remote)
        item.n_bytes += self._copier.run_step(program, item.step, source_at, target_at)
        item.step += 1
        if item.step == program.n_steps:
            item.layer, item.step = item.layer + 1, 0


def _own(session: Session) -> ShmSession:
    if not isinstance(session, ShmSession):
        raise SessionFailed("the session belongs to another engine", got=type(session).__name__)
    return session
