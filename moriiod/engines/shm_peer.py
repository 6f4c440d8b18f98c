"""Reaching another process's memory on this host: its descriptors, and fetching what they name."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, NoReturn

from annotated_types import Ge, Le, Len

from moriiod.core.faults import to_error
from moriiod.core.ids import Epoch, PositiveBytes, ShortText
from moriiod.core.requests import Refused
from moriiod.core.strict import Strict
from moriiod.engines.mapping import MappedRegion
from moriiod.errors import MoriiodError, SessionFailed, SharedMemoryUnavailable
from moriiod.wire.codec import Codec
from moriiod.wire.fdsocket import (
    MAX_FDS_PER_PACKET,
    FdRefused,
    FetchRegions,
    Packet,
    Regions,
    Token,
    decode_packet,
    receive_packet,
    send_packet,
)
from moriiod.wire.peercred import read_credentials

#: Longest wait for one step (connect, send, receive) with a peer's fd socket.
FETCH_TIMEOUT_S: Final = 5.0
#: Changes with every boot of the host, and is the same in all containers of one boot.
BOOT_ID_PATH: Final = Path("/proc/sys/kernel/random/boot_id")
_MAX_DESCRIPTOR_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class ShmRegion(Strict):
    """What a peer on the same host needs to map one region.

    Attributes:
        boot_id: Of the host's kernel.
        uid: Effective user of the daemon that exports it.
        address: Path of that daemon's fd socket.
        token: What to ask for there.
        n_bytes: Size of the region.
        inode: Of the memfd; tells a new allocation from the one that was described.
    """

    boot_id: ShortText
    uid: Annotated[int, Ge(0), Le((1 << 32) - 1)]
    address: Annotated[str, Len(1, 256)]
    token: Token
    n_bytes: PositiveBytes
    inode: Annotated[int, Ge(0), Le((1 << 64) - 1)]


_codec: Final[Codec[ShmRegion]] = Codec((ShmRegion,), _MAX_DESCRIPTOR_BYTES)


def encode_region(region: ShmRegion) -> bytes:
    """Return the descriptor of a region."""
    return _codec.encode(region)[1]


def decode_region(descriptor: bytes) -> ShmRegion:
    """Return the region of a descriptor.

    Raises:
        ProtocolError: It is too large or not msgpack.
        InvalidArgument: A field is missing, unknown, of the wrong type or out of range.
    """
    return _codec.decode(ShmRegion.__name__, descriptor)


def read_boot_id() -> str:
    """Return what tells this boot of this host from every other."""
    return BOOT_ID_PATH.read_text(encoding="ascii").strip()


def check_reachable(region: ShmRegion, boot_id: str, uid: int) -> None:
    """Make sure that a region lies on this host and may be opened by this user.

    Raises:
        SharedMemoryUnavailable: It does not, or may not; the fields name both sides.
    """
    if region.boot_id != boot_id:
        raise SharedMemoryUnavailable(
            f"the peer runs on another host (boot id {region.boot_id}, here {boot_id})",
            theirs=region.boot_id,
            ours=boot_id,
        )
    if uid not in (region.uid, 0):
        raise SharedMemoryUnavailable(
            f"the peer runs as another user (uid {region.uid}, here {uid})",
            theirs=region.uid,
            ours=uid,
        )


def map_regions(regions: Sequence[ShmRegion], epoch: Epoch, uid: int) -> tuple[MappedRegion, ...]:
    """Fetch and map a peer's regions; all of them or none.

    Args:
        regions: All exported by one daemon.
        epoch: Of the daemon that asks: ours.
        uid: Effective user of this process.

    Raises:
        SharedMemoryUnavailable: Its socket cannot be reached from here, is another user's, or
            refuses us.
        SessionFailed: It does not answer, or what it hands out is not what it described.
        RegistrationFailed: What it hands out is not sealed, too small, or cannot be mapped.
    """
    mapped: list[MappedRegion] = []
    address = regions[0].address
    if any(region.address != address for region in regions):
        raise SessionFailed("the regions of one worker are exported at several addresses")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(FETCH_TIMEOUT_S)
            _connect(sock, address)
            _check_listener(sock, regions, uid)
            for first in range(0, len(regions), MAX_FDS_PER_PACKET):
                part = regions[first : first + MAX_FDS_PER_PACKET]
                _fetch(sock, part, epoch, mapped)
    except BaseException:
        for region in mapped:
            region.close()
        raise
    return tuple(mapped)


def _connect(sock: socket.socket, address: str) -> None:
    try:
        sock.connect(address)
    except OSError as error:
        raise SharedMemoryUnavailable(
            f"the peer's fd socket {address} cannot be reached: {error}",
            address=address,
            errno=error.errno or 0,
        ) from error


def _check_listener(sock: socket.socket, regions: Sequence[ShmRegion], uid: int) -> None:
    """A descriptor may say whatever it likes about its user; the kernel knows who listens."""
    found = read_credentials(sock).uid
    if found != uid and any(region.uid != found for region in regions):
        raise SharedMemoryUnavailable(
            f"another user than the peer listens at its fd socket (uid {found})",
            theirs=found,
            described=regions[0].uid,
            ours=uid,
        )


def _fetch(
    sock: socket.socket, part: Sequence[ShmRegion], epoch: Epoch, mapped: list[MappedRegion]
) -> None:
    try:
        send_packet(sock, FetchRegions(epoch, tuple(region.token for region in part)))
        packet = receive_packet(sock, len(part))
    except OSError as error:
        raise SessionFailed(
            f"the peer's fd socket does not answer: {error}", errno=error.errno or 0
        ) from error
    try:
        _check_answer(packet, part)
        for region, fd in zip(part, packet.fds, strict=True):
            mapped.append(MappedRegion(fd, region.n_bytes))
            if mapped[-1].inode != region.inode:
                raise SessionFailed(
                    "the peer handed out other memory than it described",
                    described=region.inode,
                    got=mapped[-1].inode,
                )
    finally:
        packet.close_fds()


def _check_answer(packet: Packet, part: Sequence[ShmRegion]) -> None:
    if not packet.data:
        raise SessionFailed("the peer's fd socket closed the connection")
    try:
        answer = decode_packet(packet)
    except MoriiodError as error:
        raise SessionFailed(f"the peer's answer is no message: {error.message}") from error
    if isinstance(answer, FdRefused):
        _raise_refusal(answer)
    if not isinstance(answer, Regions) or len(packet.fds) != len(part):
        raise SessionFailed(
            "the peer did not hand out what was asked for",
            got=type(answer).__name__,
            fds=len(packet.fds),
            expected=len(part),
        )


def _raise_refusal(answer: FdRefused) -> NoReturn:
    error = to_error(Refused(answer.code, answer.message, retryable=False))
    if isinstance(error, SessionFailed):
        raise error
    raise SessionFailed(f"the peer refused: {answer.message}", code=answer.code)
