"""Messages of the fd socket: a Unix SOCK_SEQPACKET beside the ZMQ one, because ZMQ carries no fds.

One packet = one message: msgpack ``[type, body]``, with file descriptors as ancillary data where
the message says so. Workers use it to introduce themselves (the daemon learns pid and uid from
the kernel, and the end of the connection is the end of the worker) and to hand over their KV
memory; peers on the same host use it to fetch regions that a handshake entitles them to.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgpack
from annotated_types import Ge, Le, Len

from moriiod.core.faults import to_refused
from moriiod.core.ids import (
    MAX_REGIONS,
    Epoch,
    Generation,
    MessageText,
    PositiveBytes,
    ShortText,
)
from moriiod.core.strict import Strict
from moriiod.errors import MalformedFrame, MoriiodError, TooLarge
from moriiod.wire.codec import Codec, codec_for

#: Most regions one FetchRegions may name (the kernel passes at most 253 fds in a packet).
MAX_FDS_PER_PACKET: Final = 128
#: Largest packet either side accepts.
MAX_PACKET_BYTES: Final = 65536

#: Hexadecimal, from a cryptographic source: whoever knows it may have the region.
Token = Annotated[str, Len(32, 32)]
RegionIndex = Annotated[int, Ge(0), Le(MAX_REGIONS - 1)]


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

    region: RegionIndex
    n_bytes: PositiveBytes


@dataclass(frozen=True, slots=True)
class RegionTaken(Strict):
    """Daemon -> worker: the region is held."""

    region: RegionIndex


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

_codec: Final[Codec[FdMessage]] = codec_for(FdMessage, MAX_PACKET_BYTES)
#: Most fds the kernel passes in one packet.
_SCM_MAX_FDS: Final = 253
_FD_BYTES: Final = struct.calcsize("i")


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet as it came in. Whoever receives it owns the fds and closes what it does not keep.

    Attributes:
        data: Empty = the other side closed the connection.
        fds: All that came with it, close-on-exec.
        is_cut: The packet was larger than any packet may be, or fds were lost (there were more
            than asked for, or this process has no room for them).
    """

    data: bytes
    fds: tuple[int, ...]
    is_cut: bool

    def close_fds(self) -> None:
        """Close every fd that came with the packet."""
        for fd in self.fds:
            os.close(fd)


def encode_packet(message: FdMessage) -> bytes:
    """Return the packet of a message.

    Raises:
        TooLarge: It does not fit into a packet.
    """
    packet: bytes = msgpack.packb(_codec.encode(message), use_bin_type=True)
    if len(packet) > MAX_PACKET_BYTES:
        raise TooLarge(
            f"a packet of {len(packet)} bytes is over the limit",
            limit="max_packet_bytes",
            value=MAX_PACKET_BYTES,
        )
    return packet


def decode_packet(packet: Packet) -> FdMessage:
    """Return the message of a packet.

    Raises:
        TooLarge: It was cut because it is too large, or has too many fds.
        MalformedFrame: It is not ``[type, body]``, or the body is not a map.
        UnknownMessage: No such type.
        InvalidArgument: A field is missing, unknown, of the wrong type or out of range.
    """
    if packet.is_cut:
        raise TooLarge(
            f"a packet is over {MAX_PACKET_BYTES} bytes, or has more fds than there is room for",
            limit="max_packet_bytes",
            value=MAX_PACKET_BYTES,
        )
    try:
        pair = msgpack.unpackb(packet.data, use_list=False, max_array_len=2, max_map_len=0)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        reason = str(error)[:200] or type(error).__name__
        raise MalformedFrame("a packet is not msgpack", reason=reason) from None
    match pair:
        case (str(name), bytes(body)):
            return _codec.decode(name, body)
        case _:
            raise MalformedFrame("a packet is not [type, body]", got=type(pair).__name__)


def receive_packet(sock: socket.socket, max_fds: int) -> Packet:
    """Receive one packet; waits as long as the socket's own timeout says.

    Args:
        sock: A connected SOCK_SEQPACKET.
        max_fds: Most fds that may come with it; more are closed by the kernel.

    Raises:
        OSError: As ``recvmsg``; BlockingIOError where a non-blocking socket has nothing.
    """
    data, ancillary, flags, _ = sock.recvmsg(
        MAX_PACKET_BYTES,
        socket.CMSG_SPACE(min(max_fds, _SCM_MAX_FDS) * _FD_BYTES),
        socket.MSG_CMSG_CLOEXEC,
    )
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return Packet(data, tuple(fds), bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)))


def send_packet(sock: socket.socket, message: FdMessage, fds: Sequence[int] = ()) -> None:
    """Send one message, with fds where it says so; the fds stay the caller's.

    Raises:
        TooLarge: The message does not fit into a packet.
        OSError: As ``sendmsg``; BlockingIOError where a non-blocking socket has no room now.
    """
    packet = encode_packet(message)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([packet], rights, socket.MSG_NOSIGNAL)


def refusal(error: MoriiodError) -> FdRefused:
    """Return the answer that carries an error, bounded."""
    refused = to_refused(error)
    return FdRefused(refused.code, refused.message)
