"""What a demo does, worked out before anything is started: instances, caches, requests, waves."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from moriiod.cli.demo.shapes import CacheShape, KvChoice
from moriiod.core.headplan import HeadPlan
from moriiod.errors import InvalidArgument

Side = Literal["prefill", "decode"]
Mode = Literal["read", "write"]
#: How the demo can be made to go wrong, to show that it notices.
Fault = Literal["none", "flip-byte", "touch-canary", "lose-release", "double-release"]

HOST: Final = "127.0.0.1"
#: A request takes at most this share of a cache, so that many fit side by side.
_LARGEST_SHARE: Final = 8
_MANY_RANKS: Final = 64


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """One rank of one instance: a daemon and its worker."""

    side: Side
    instance: int
    tp_rank: int

    @property
    def instance_name(self) -> str:
        """``P0``, ``D1``."""
        return f"{self.side[0].upper()}{self.instance}"

    @property
    def name(self) -> str:
        """``P0/3``."""
        return f"{self.instance_name}/{self.tp_rank}"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line asks for; see ``moriiod demo --help``."""

    prefill_tp: int = 4
    decode_tp: int = 8
    prefill_instances: int = 1
    decode_instances: int = 1
    layers: int = 8
    blocks: int = 128
    requests: int = 32
    modes: tuple[Mode, ...] = ("read", "write")
    engine: str = "shm"
    kv: KvChoice = field(default_factory=KvChoice)
    allow_uneven: bool = False
    seed: int = 1
    timeout_s: float = 60.0
    fault: Fault = "none"

    def check(self) -> None:
        """Refuse what cannot work, before any process is started.

        Raises:
            InvalidTopology: The TP sizes do not fit each other, or the number of heads.
            InvalidArgument: No such model, too many ranks for one machine, or too few requests.
        """
        for group in self.kv.groups(self.layers):
            for tp_size in (self.prefill_tp, self.decode_tp):
                group.shape.heads_of_rank(0, tp_size)
        self.kv.rule(allows_uneven=self.allow_uneven).check(self.prefill_tp, self.decode_tp)
        n_ranks = len(self.ranks)
        if n_ranks > _MANY_RANKS:
            raise InvalidArgument(
                f"{n_ranks} ranks are {2 * n_ranks} processes; the demo stops at {_MANY_RANKS} "
                "ranks",
                got=n_ranks,
                limit=_MANY_RANKS,
            )
        if self.requests < self.n_pairs:
            raise InvalidArgument(
                f"{self.n_pairs} pairs of instances need at least as many requests, not "
                f"{self.requests}",
                got=self.requests,
                limit=self.n_pairs,
            )

    @property
    def n_pairs(self) -> int:
        """Number of pairs of a prefill and a decode instance."""
        return self.prefill_instances * self.decode_instances

    @property
    def faulty_rank(self) -> Rank:
        """The rank whose worker goes wrong, if one is to."""
        return Rank("prefill" if "release" in self.fault else "decode", 0, 0)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Every rank of every instance."""
        return tuple(self.ranks_of("prefill")) + tuple(self.ranks_of("decode"))

    def ranks_of(self, side: Side, instance: int | None = None) -> list[Rank]:
        """Return the ranks of one instance, or of all instances of one side."""
        count = self.prefill_instances if side == "prefill" else self.decode_instances
        chosen = range(count) if instance is None else (instance,)
        return [Rank(side, i, tp_rank) for i in chosen for tp_rank in range(self.tp_size(side))]

    def tp_size(self, side: Side) -> int:
        """Return the TP size of the instances of one side."""
        return self.prefill_tp if side == "prefill" else self.decode_tp

    def shape(self, side: Side) -> CacheShape:
        """Return the KV cache of each rank of one side."""
        return CacheShape(self.kv, self.layers, self.blocks, self.tp_size(side))

    @property
    def heads(self) -> HeadPlan:
        """Who takes which heads from whom."""
        rule = self.kv.rule(allows_uneven=self.allow_uneven)
        return rule.plan(self.prefill_tp, self.decode_tp)


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One prompt on its way from a prefill to a decode instance.

    Attributes:
        number: Counted over the whole demo; part of the bytes that are written.
        mode: ``read``: decode pulls; ``write``: prefill pushes.
        transfer_id: As the router made it.
        unique: 32 hex digits that the router puts into the request id.
        producer: Index of the prefill instance.
        consumer: Index of the decode instance.
        prefill_blocks: Block ids there, in the order of the prompt.
        decode_blocks: Block ids here; position i holds the same tokens as in the other list.
    """

    number: int
    mode: Mode
    transfer_id: str
    unique: str
    producer: int
    consumer: int
    prefill_blocks: tuple[int, ...]
    decode_blocks: tuple[int, ...]


class _Tables:
    """Free blocks of each instance of one side; a table's blocks are scattered by the dice."""

    def __init__(self, dice: random.Random, instances: int, blocks: int) -> None:
        self._dice = dice
        # Some blocks are never part of a request, to see that nobody writes there.
        kept_free = max(1, blocks // _LARGEST_SHARE)
        self._free = [dice.sample(range(blocks), blocks - kept_free) for _ in range(instances)]

    def room(self, instance: int) -> int:
        return len(self._free[instance])

    def take(self, instance: int, n_blocks: int) -> tuple[int, ...]:
        free = self._free[instance]
        return tuple(free.pop(self._dice.randrange(len(free))) for _ in range(n_blocks))


def plan_waves(options: DemoOptions, mode: Mode) -> Iterator[tuple[DemoRequest, ...]]:
    """Yield the requests of one mode in waves: all of a wave are in flight at once.

    A wave is as many requests as the caches hold side by side; the next one reuses their blocks.
    Requests go round: every decode instance gets some from every prefill instance.

    Args:
        options: The whole demo.
        mode: Which of its modes.
    """
    # A string is hashed the same way in every process; a tuple is not.
    dice = random.Random(f"{options.seed} {mode}")
    first = options.modes.index(mode) * options.requests
    largest = max(1, options.blocks // _LARGEST_SHARE)
    smallest = max(1, largest // 2)
    wave: list[DemoRequest] = []
    prefill, decode = _new_tables(options, dice)
    for index in range(options.requests):
        n_blocks = dice.randint(smallest, largest)
        producer = index % options.prefill_instances
        consumer = index // options.prefill_instances % options.decode_instances
        if min(prefill.room(producer), decode.room(consumer)) < n_blocks:
            yield tuple(wave)
            wave = []
            prefill, decode = _new_tables(options, dice)
        wave.append(
            DemoRequest(
                number=first + index,
                mode=mode,
                transfer_id=f"tx-{uuid.UUID(int=dice.getrandbits(128), version=4)}",
                unique=f"{dice.getrandbits(128):032x}",
                producer=producer,
                consumer=consumer,
                prefill_blocks=prefill.take(producer, n_blocks),
                decode_blocks=decode.take(consumer, n_blocks),
            )
        )
    yield tuple(wave)


def _new_tables(options: DemoOptions, dice: random.Random) -> tuple[_Tables, _Tables]:
    return (
        _Tables(dice, options.prefill_instances, options.blocks),
        _Tables(dice, options.decode_instances, options.blocks),
    )
