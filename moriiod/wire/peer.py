"""Messages between daemons: frames of the ZMQ socket <-> typed frames.

    [version + "P", type, sender's epoch, receiver's epoch, body]

The handshake (``HANDSHAKE_TYPES``) always travels as version 0, whose format never changes except
by added fields that older builds ignore: builds without a common version must be able to find
that out. Everything else travels in a version both sides speak and is closed.
``docs/protocol-peer.md`` is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, get_args

from moriiod.core.ids import ANY_EPOCH, Epoch
from moriiod.core.messages import (
    PROTOCOL_VERSIONS,
    Hello,
    HelloRefused,
    PeerBody,
    UnknownEpoch,
    Welcome,
)
from moriiod.errors import MalformedFrame, UnknownMessage
from moriiod.wire.codec import Codec
from moriiod.wire.frames import (
    MAX_BODY_BYTES,
    Kind,
    check_count,
    check_type,
    check_version,
    header,
    parse_epoch,
    parse_header,
)

PEER_FRAMES: Final = 5
#: The version byte of the handshake, whatever versions the two sides speak.
HANDSHAKE_VERSION: Final = 0
HANDSHAKE_TYPES: Final = (Hello, Welcome, HelloRefused, UnknownEpoch)

_HANDSHAKE: Final[Codec[PeerBody]] = Codec(HANDSHAKE_TYPES, 64 << 10, is_tolerant=True)
_MESSAGES: Final[Codec[PeerBody]] = Codec(
    [cls for cls in get_args(PeerBody) if cls not in HANDSHAKE_TYPES], MAX_BODY_BYTES
)


@dataclass(frozen=True, slots=True)
class PeerFrame:
    """A message with the epochs of the daemon starts that sent it and that it is meant for.

    The handshake is meant for whoever is there (``ANY_EPOCH``).
    """

    epoch: Epoch
    body: PeerBody
    to: Epoch = ANY_EPOCH


def encode_peer(
    frame: PeerFrame, max_body_bytes: int = MAX_BODY_BYTES, version: int = PROTOCOL_VERSIONS[0]
) -> list[bytes]:
    """Return a message as ZMQ frames.

    Args:
        frame: What to send.
        max_body_bytes: Larger bodies are refused.
        version: The version agreed on for the link; handshake messages ignore it.

    Raises:
        InvalidArgument: A field holds what the wire cannot carry.
        TooLarge: The body is over the limit.
    """
    is_handshake = isinstance(frame.body, HANDSHAKE_TYPES)
    if is_handshake:
        name, body = _HANDSHAKE.encode(frame.body)
    else:
        name, body = _MESSAGES.encode(frame.body, max_body_bytes)
    first = header(HANDSHAKE_VERSION if is_handshake else version, Kind.PEER)
    epochs = [frame.epoch.encode("ascii"), frame.to.encode("ascii")]
    return [first, name.encode("ascii"), *epochs, body]


def decode_peer(frames: Sequence[bytes], max_body_bytes: int = MAX_BODY_BYTES) -> PeerFrame:
    """Return the message that these frames are (without the routing id).

    Raises:
        MalformedFrame: They are no peer message, or the body is not one msgpack map.
        VersionMismatch: A version this build does not speak.
        UnknownMessage: No such message in that version.
        TooLarge: The body is over the limit.
        InvalidArgument: A field is wrong; the error names it.
    """
    check_count(frames, PEER_FRAMES)
    version, kind = parse_header(frames[0])
    if kind is not Kind.PEER:
        raise MalformedFrame("message is not from a peer", kind=kind.name)
    name = check_type(frames[1])
    if version == HANDSHAKE_VERSION:
        codec = _HANDSHAKE
    else:
        check_version(version, PROTOCOL_VERSIONS)
        codec = _MESSAGES
    epoch, to = parse_epoch(frames[2]), parse_epoch(frames[3])
    if name not in codec.type_names:
        raise UnknownMessage(
            f"unknown message type {name} in version {version}", type=name, version=version
        )
    limit = None if codec is _HANDSHAKE else max_body_bytes
    return PeerFrame(epoch, codec.decode(name, frames[4], limit), to)
