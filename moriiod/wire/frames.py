"""The envelope: which frames a ZMQ message has, and what is checked before a body is parsed.

The first frame of every message is two bytes: protocol version and kind. These two bytes mean the
same in every version to come, so two builds that share no version can still tell each other so.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

from moriiod.errors import MalformedFrame, TooLarge, VersionMismatch

#: Versions of the local protocol this build speaks, newest first.
IPC_VERSIONS: Final = (1,)
#: Largest body accepted unless configured otherwise: 4 Mi block ids.
MAX_BODY_BYTES: Final = 16 << 20
#: No message has more frames; longer ones are cut while they are read.
MAX_FRAMES: Final = 5
MAX_TYPE_BYTES: Final = 64
#: Numbers on the wire stay below 2^62, as everywhere (``core.ids.Sequence``).
MAX_SEQUENCE: Final = 1 << 62
EPOCH_BYTES: Final = 32

_SEQUENCE_BYTES: Final = 8
_HEX: Final = frozenset(b"0123456789abcdef")


class Kind(enum.Enum):
    """What a message is; the second byte of its first frame."""

    REQUEST = b"Q"
    REPLY = b"R"
    EVENT = b"E"
    PEER = b"P"


def header(version: int, kind: Kind) -> bytes:
    """Return the first frame."""
    return bytes((version,)) + kind.value


def parse_header(frame: bytes) -> tuple[int, Kind]:
    """Return (version, kind) of a first frame.

    Raises:
        MalformedFrame: It is not two bytes, or the kind is unknown.
    """
    if len(frame) != 2:
        raise MalformedFrame("first frame is not version and kind", n_bytes=len(frame))
    try:
        return frame[0], Kind(frame[1:])
    except ValueError:
        raise MalformedFrame("unknown kind of message", kind=frame[1]) from None


def check_version(got: int, ours: Sequence[int]) -> None:
    """Refuse a version that this build does not speak.

    Raises:
        VersionMismatch: Its fields ``got`` and ``ours`` name both.
    """
    if got not in ours:
        spoken = ", ".join(str(version) for version in ours)
        raise VersionMismatch(
            f"message has protocol version {got}, this build speaks {spoken}",
            got=got,
            ours=spoken,
        )


def check_count(frames: Sequence[bytes], expected: int) -> None:
    """Refuse a message with another number of frames.

    Raises:
        MalformedFrame: The number is another one.
    """
    if len(frames) != expected:
        raise MalformedFrame(
            f"message has {_at_most(len(frames))} frames, not {expected}",
            n_frames=len(frames),
            expected=expected,
        )


def check_type(frame: bytes) -> str:
    """Return a type name.

    Raises:
        MalformedFrame: It is empty, too long or not ASCII.
    """
    if not 0 < len(frame) <= MAX_TYPE_BYTES or not frame.isascii():
        raise MalformedFrame("type frame is not a short ASCII name", n_bytes=len(frame))
    return frame.decode("ascii")


def check_body(frame: bytes, max_body_bytes: int) -> bytes:
    """Return a body that is within the limit.

    Raises:
        TooLarge: It is not.
    """
    if len(frame) > max_body_bytes:
        raise TooLarge(
            f"message body is over the limit of {max_body_bytes} bytes",
            limit="max_body_bytes",
            value=max_body_bytes,
        )
    return frame


def pack_sequence(sequence: int) -> bytes:
    """Return a sequence number as its frame: u64, little-endian."""
    return sequence.to_bytes(_SEQUENCE_BYTES, "little")


def parse_sequence(frame: bytes) -> int:
    """Return a sequence number.

    Raises:
        MalformedFrame: It is not eight bytes, or out of range.
    """
    sequence = int.from_bytes(frame, "little") if len(frame) == _SEQUENCE_BYTES else -1
    if not 0 <= sequence <= MAX_SEQUENCE:
        raise MalformedFrame("sequence frame is not a u64 up to 2^62", n_bytes=len(frame))
    return sequence


def parse_epoch(frame: bytes) -> str:
    """Return a daemon epoch.

    Raises:
        MalformedFrame: It is not 32 lower-case hexadecimal digits.
    """
    if len(frame) != EPOCH_BYTES or not _HEX.issuperset(frame):
        raise MalformedFrame("epoch frame is not 32 hexadecimal digits", n_bytes=len(frame))
    return frame.decode("ascii")


def _at_most(n_frames: int) -> str:
    """Messages are cut one frame past the limit, so a larger count is not known."""
    return str(n_frames) if n_frames <= MAX_FRAMES else f"more than {MAX_FRAMES}"
