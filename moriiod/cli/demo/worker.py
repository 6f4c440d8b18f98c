"""One worker of the demo: a KV cache, a client of its rank's daemon, and a router's commands.

It is what an inference engine would be, with a pattern in place of a model. It runs in a process
of its own, forked by ``zygote`` before anything here has opened a socket or started a thread.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from dataclasses import dataclass
from typing import Final

from moriiod.cli.demo import messages as msg
from moriiod.cli.demo.cache import RankCache, Sources
from moriiod.cli.demo.messages import Channel
from moriiod.cli.demo.params import NOTIFY_PORT
from moriiod.cli.demo.pattern import Origin, canary
from moriiod.cli.demo.plan import HOST
from moriiod.cli.demo.shapes import CacheShape, KvChoice
from moriiod.client import (
    Client,
    PeerAddress,
    TransferEnded,
    TransferParams,
    parse_transfer_params,
    producer_params,
)
from moriiod.client.params import ProducerAddress
from moriiod.core.topology import resolve_remote_tp_size
from moriiod.errors import InvalidArgument, MoriiodError

_LEAVE_S: Final = 10.0


@dataclass(slots=True)
class _Held:
    """A request whose blocks are in use here."""

    number: int
    blocks: list[int]
    #: Of a consumer.
    sources: Sources | None
    started_at: float


class Worker:
    """Serves the coordinator's commands until it is told to leave.

    Args:
        setup: Who this is.
        channel: To the coordinator.
        client: Connected.
    """

    def __init__(self, setup: msg.Setup, channel: Channel, client: Client) -> None:
        self._setup = setup
        self._channel = channel
        self._client = client
        self._kv = KvChoice(setup.kv_heads, setup.layout, setup.head_order, setup.model)
        shape = CacheShape(self._kv, setup.layers, setup.blocks, setup.tp_size)
        self._cache = RankCache(
            shape, canary(setup.seed, setup.side, setup.instance, setup.tp_rank)
        )
        #: By transfer id, until the blocks are free again.
        self._held: dict[str, _Held] = {}
        #: Transfer ids by request number.
        self._ids: dict[int, str] = {}
        #: What is to go wrong, once.
        self._fault = setup.fault

    def register(self) -> None:
        """Make the cache known to the daemon.

        Raises:
            MoriiodError: The daemon, its engine or the kernel refused.
        """
        cache = self._cache
        self._client.register_kv_caches(cache.tensors, cache.specs, self._setup.timeout_s)
        identity = self._client.identity
        self._channel.send(msg.Registered("" if identity is None else identity.engine))

    def serve(self) -> bool:
        """Work until told to leave; False if the coordinator is gone.

        Raises:
            MoriiodError: The daemon or the coordinator asked for something impossible.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._client, selectors.EVENT_READ)
            while not self._channel.is_closed:
                ready = selector.select(self._client.next_poll_s())
                self._report_ends()
                if any(key.fileobj is self._channel for key, _ in ready):
                    for command in self._channel.receive():
                        if isinstance(command, msg.Leave):
                            return True
                        self._obey(command)
        return False

    def leave(self) -> None:
        """Tell what is left to tell, and close the client."""
        self._report_ends()
        problems = [f"{p.request}: {p.code}: {p.message}" for p in self._client.take_problems()]
        is_clean = self._client.close(_LEAVE_S)
        self._channel.send(msg.Left(is_clean, problems))

    def _obey(self, command: msg.Message) -> None:
        match command:
            case msg.Prefill():
                self._prefill(command)
            case msg.Decode():
                self._decode(command)
            case msg.Verify():
                self._verify(command.number)
            case msg.Sweep():
                self._sweep()
            case msg.CountOpen():
                # Its answer comes after every event that was on the way.
                self._client.ping(self._setup.timeout_s)
                self._report_ends()
                self._channel.send(msg.Open(self._client.in_flight))
            case _:
                raise ValueError(f"no command: {type(command).__name__}")

    # --- Transfers ----------------------------------------------------------------------------

    def _prefill(self, command: msg.Prefill) -> None:
        params = self._parse(command, "producer")
        setup = self._setup
        origin = Origin(setup.seed, setup.instance, setup.tp_rank, command.number)
        # A router that gives no address still gives the size.
        consumer_tp = resolve_remote_tp_size(command.params, setup.tp_size)
        layers = range(self._cache.shape.n_layers)
        tables = self._cache.shape.tables(command.blocks)
        self._hold(params.transfer_id, command.number, command.blocks, None)
        if command.mode == "read":
            for layer in layers:
                self._cache.fill(command.blocks, origin, layer)
            self._client.publish(params.transfer_id, tables, remote_tp_size=consumer_tp)
        else:
            self._client.push(params.transfer_id, tables, remote_tp_size=consumer_tp)
            for layer in layers:
                self._cache.fill(command.blocks, origin, layer)
                self._client.layer_ready(params.transfer_id, layer)
            self._client.seal(params.transfer_id, len(layers))
        returned = self._returned_params(params.transfer_id, tables)
        self._channel.send(msg.Prefilled(command.number, returned))

    def _returned_params(
        self, transfer_id: str, tables: list[list[int]]
    ) -> dict[str, object] | None:
        """Return what the engine's first rank answers the router with."""
        setup = self._setup
        if setup.tp_rank:
            return None
        address = ProducerAddress(
            engine_id=f"P{setup.instance}",
            host=HOST,
            base_port=setup.base_port,
            notify_port=NOTIFY_PORT,
            tp_size=setup.tp_size,
        )
        return producer_params(transfer_id, tables, address)

    def _decode(self, command: msg.Decode) -> None:
        params = self._parse(command, "consumer")
        sources = self._sources(command)
        self._hold(params.transfer_id, command.number, command.blocks, sources)
        tables = self._cache.shape.tables(command.blocks)
        peer = _named_peer(params)
        if command.mode == "read":
            if params.remote_blocks is None:
                raise InvalidArgument("the producer handed back no block ids")
            self._client.pull(params.transfer_id, peer, params.remote_blocks, tables)
        else:
            self._client.reserve(params.transfer_id, peer, tables)

    def _sources(self, command: msg.Decode) -> Sources:
        """Return which producer rank wrote which of our heads."""
        setup, there = self._setup, command.producer_tp_size
        rule = self._kv.rule(allows_uneven=setup.allow_uneven)
        return Sources.of_rank(
            rule.plan(there, setup.tp_size),
            setup.tp_rank,
            CacheShape(self._kv, setup.layers, setup.blocks, there),
            lambda rank: Origin(setup.seed, command.producer, rank, command.number),
        )

    def _parse(self, command: msg.Prefill | msg.Decode, role: str) -> TransferParams:
        params = parse_transfer_params(command.params, command.request_id, self._setup.tp_size)
        if params is None or params.role != role:
            raise InvalidArgument(f"the router's parameters name no {role}")
        return params

    def _hold(
        self, transfer_id: str, number: int, blocks: list[int], sources: Sources | None
    ) -> None:
        self._held[transfer_id] = _Held(number, blocks, sources, time.monotonic())
        self._ids[number] = transfer_id

    def _report_ends(self) -> None:
        for event in self._client.poll():
            held = self._held[event.transfer_id]
            ended = _ended(event, held)
            if self._setup.side == "prefill":
                # As an engine does: the blocks are reused at once. A read that was still under
                # way would now see canaries.
                self._cache.blank(held.blocks)
            if self._spoil("lose-release"):
                continue
            if self._spoil("double-release"):
                self._channel.send(ended)
            self._channel.send(ended)

    # --- Checks -------------------------------------------------------------------------------

    def _verify(self, number: int) -> None:
        held = self._held[self._ids[number]]
        if self._spoil("flip-byte"):
            self._cache.flip_byte(held.blocks)
        if held.sources is None:
            raise ValueError("a producer has nothing to compare with")
        wrong = self._cache.find_wrong(held.blocks, held.sources)
        n_bytes = self._cache.shape.request_bytes(held.blocks)
        self._channel.send(msg.Checked(number, n_bytes, wrong))

    def _sweep(self) -> None:
        """Look at the unused blocks, and make all blocks unused."""
        is_decode = self._setup.side == "decode"
        used = {block for held in self._held.values() for block in held.blocks}
        if self._spoil("touch-canary"):
            self._cache.flip_byte([min(set(range(self._setup.blocks)) - used)])
        # A producer's blocks have got their canaries back when they were released.
        tables = [held.blocks for held in self._held.values()] if is_decode else []
        n_bytes, wrong = self._cache.find_touched(tables)
        if wrong:
            used = set(range(self._setup.blocks))  # it was found once, and is not to be again
        if used and (is_decode or wrong):
            self._cache.blank(sorted(used))
        self._held.clear()
        self._ids.clear()
        self._channel.send(msg.Checked(None, n_bytes, wrong))

    def _spoil(self, fault: str) -> bool:
        """Whether to go wrong in this way now; only once."""
        if self._fault != fault:
            return False
        self._fault = "none"
        return True


def run(stream: socket.socket) -> int:
    """Be a worker; return the exit status of its process."""
    channel = Channel(stream)
    waiting: list[msg.Message] = []
    while not waiting and not channel.is_closed:
        waiting = channel.receive()
    if not waiting:
        return 1
    (setup,) = waiting
    if not isinstance(setup, msg.Setup):
        raise ValueError(f"not a beginning: {setup}")
    try:
        with Client(setup.socket_path, name=f"demo-{setup.tp_rank}") as client:
            worker = Worker(setup, channel, client)
            worker.register()
            if not worker.serve():
                return 1
            worker.leave()
    except MoriiodError as error:
        # The coordinator sees the end of the stream and shows this line.
        sys.stderr.write(f"{error.code}: {error.message}\n")
        return 1
    return 0


def _named_peer(params: TransferParams) -> PeerAddress:
    if params.peer is None:
        raise InvalidArgument("the router's parameters name no peer")
    return params.peer


def _ended(event: TransferEnded, held: _Held) -> msg.Ended:
    return msg.Ended(
        number=held.number,
        role=event.role,
        outcome=event.outcome,
        reason=event.reason,
        text=event.message,
        n_bytes=event.n_bytes,
        started_at=held.started_at,
        ended_at=time.monotonic(),
    )
