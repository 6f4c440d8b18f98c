"""Messages of the fd socket: a Unix SOCK_SEQPACKET beside the ZMQ one, because ZMQ carries no fds.

One packet = one message: msgpack ``[type, body]``, with file descriptors as ancillary data where
the message says so. Workers use it to introduce themselves (the daemon learns pid and uid from
the kernel, and the end of the connection is the end of the worker) and to hand over their KV
memory; peers on the same host use it to fetch regions that a handshake entitles them to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from annotated_types import Len

from moriiod.core.ids import Epoch, Generation, MessageText, PositiveBytes, Rank, ShortText
from moriiod.core.strict import Strict

#: Most regions one FetchRegions may name (the kernel passes at most 253 fds in a packet).
MAX_FDS_PER_PACKET: Final = 128
#: Largest packet either side accepts.
MAX_PACKET_BYTES: Final = 65536

Token = Annotated[str, Len(32, 32)]


@dataclass(frozen=True, slots=True)
class WorkerHello(Strict):
    """Worker -> daemon, first packet: the generation of this attach."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class WorkerWelcome(Strict):
    """Daemon -> worker: the epoch of this daemon start."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class OfferRegion(Strict):
    """Worker -> daemon, with one fd: a sealed memfd of at least ``n_bytes``."""

    region: Rank
    n_bytes: PositiveBytes


@dataclass(frozen=True, slots=True)
class RegionTaken(Strict):
    """Daemon -> worker: the region is held."""

    region: Rank


@dataclass(frozen=True, slots=True)
class FetchRegions(Strict):
    """Peer daemon -> daemon: fds for these tokens. Answered by Regions with as many fds."""

    epoch: Epoch
    tokens: Annotated[tuple[Token, ...], Len(1, MAX_FDS_PER_PACKET)]


@dataclass(frozen=True, slots=True)
class Regions(Strict):
    """Daemon -> peer daemon, with one fd for each token, in order."""

    n_bytes: Annotated[tuple[PositiveBytes, ...], Len(1, MAX_FDS_PER_PACKET)]


@dataclass(frozen=True, slots=True)
class FdRefused(Strict):
    """Daemon -> anyone: the packet was not accepted; the connection closes."""

    code: ShortText
    message: MessageText


FdMessage = (
    WorkerHello | WorkerWelcome | OfferRegion | RegionTaken | FetchRegions | Regions | FdRefused
)
