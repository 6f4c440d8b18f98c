"""Messages between a worker and its daemon: frames of the ZMQ socket <-> typed frames.

    request   [version + "Q", type, sequence, body]           worker -> daemon
    reply     [version + "R", type, sequence, epoch, body]    daemon -> worker, the request's number
    event     [version + "E", type, sequence, epoch, body]    daemon -> worker, counted apart

``docs/protocol-ipc.md`` is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moriiod.core.ids import Epoch
from moriiod.core.requests import ClientEvent, Reply, Request
from moriiod.errors import MalformedFrame
from moriiod.wire.codec import Codec, codec_for
from moriiod.wire.frames import (
    IPC_VERSIONS,
    MAX_BODY_BYTES,
    Kind,
    check_count,
    check_type,
    check_version,
    header,
    pack_sequence,
    parse_epoch,
    parse_header,
    parse_sequence,
)

REQUEST_FRAMES: Final = 4
REPLY_FRAMES: Final = 5

_VERSION: Final = IPC_VERSIONS[0]
_REQUEST_HEADER: Final = header(_VERSION, Kind.REQUEST)
_REPLY_HEADER: Final = header(_VERSION, Kind.REPLY)
_EVENT_HEADER: Final = header(_VERSION, Kind.EVENT)

_REQUESTS: Final[Codec[Request]] = codec_for(Request, MAX_BODY_BYTES)
_REPLIES: Final[Codec[Reply]] = codec_for(Reply, MAX_BODY_BYTES)
_EVENTS: Final[Codec[ClientEvent]] = Codec((ClientEvent,), MAX_BODY_BYTES)


@dataclass(frozen=True, slots=True)
class RequestFrame:
    """A request with the number its client gave it."""

    sequence: int
    body: Request


@dataclass(frozen=True, slots=True)
class ReplyFrame:
    """The one answer to the request with this number, by the daemon start ``epoch``."""

    sequence: int
    epoch: Epoch
    body: Reply


@dataclass(frozen=True, slots=True)
class EventFrame:
    """Something that happened; ``sequence`` counts the events of one client."""

    sequence: int
    epoch: Epoch
    body: ClientEvent


def encode_request(frame: RequestFrame, max_body_bytes: int = MAX_BODY_BYTES) -> list[bytes]:
    """Return a request as ZMQ frames.

    Raises:
        InvalidArgument: A field holds what the wire cannot carry.
        TooLarge: The body is over the limit.
    """
    name, body = _REQUESTS.encode(frame.body, max_body_bytes)
    return [_REQUEST_HEADER, name.encode("ascii"), pack_sequence(frame.sequence), body]


def decode_request(frames: Sequence[bytes], max_body_bytes: int = MAX_BODY_BYTES) -> RequestFrame:
    """Return the request that these frames are (without the routing id).

    Raises:
        MalformedFrame: They are no request, or the body is not one msgpack map.
        VersionMismatch: Another protocol version.
        UnknownMessage: No such request.
        TooLarge: The body is over the limit.
        InvalidArgument: A field is wrong; the error names it.
    """
    check_count(frames, REQUEST_FRAMES)
    version, kind = parse_header(frames[0])
    check_version(version, IPC_VERSIONS)
    if kind is not Kind.REQUEST:
        raise MalformedFrame("message is not a request", kind=kind.name)
    sequence = parse_sequence(frames[2])
    body = _REQUESTS.decode(check_type(frames[1]), frames[3], max_body_bytes)
    return RequestFrame(sequence, body)


def answerable_sequence(frames: Sequence[bytes]) -> int | None:
    """Return the number under which a bad request can be answered, None if it cannot.

    Holds for requests of every protocol version: the sequence stays the third of four frames.
    """
    try:
        check_count(frames, REQUEST_FRAMES)
        _, kind = parse_header(frames[0])
        return parse_sequence(frames[2]) if kind is Kind.REQUEST else None
    except MalformedFrame:
        return None


def encode_reply(
    frame: ReplyFrame | EventFrame, max_body_bytes: int = MAX_BODY_BYTES
) -> list[bytes]:
    """Return a reply or event as ZMQ frames.

    Raises:
        InvalidArgument: A field holds what the wire cannot carry.
        TooLarge: The body is over the limit.
    """
    if isinstance(frame, ReplyFrame):
        first = _REPLY_HEADER
        name, body = _REPLIES.encode(frame.body, max_body_bytes)
    else:
        first = _EVENT_HEADER
        name, body = _EVENTS.encode(frame.body, max_body_bytes)
    epoch = frame.epoch.encode("ascii")
    return [first, name.encode("ascii"), pack_sequence(frame.sequence), epoch, body]


def decode_reply(
    frames: Sequence[bytes], max_body_bytes: int = MAX_BODY_BYTES
) -> ReplyFrame | EventFrame:
    """Return the reply or event that these frames are.

    Raises:
        MalformedFrame: They are neither, or the body is not one msgpack map.
        VersionMismatch: Another protocol version; also how a daemon that refused our version
            is noticed.
        UnknownMessage: No such reply or event.
        TooLarge: The body is over the limit.
        InvalidArgument: A field is wrong; the error names it.
    """
    check_count(frames, REPLY_FRAMES)
    version, kind = parse_header(frames[0])
    check_version(version, IPC_VERSIONS)
    sequence = parse_sequence(frames[2])
    epoch = parse_epoch(frames[3])
    name = check_type(frames[1])
    if kind is Kind.REPLY:
        return ReplyFrame(sequence, epoch, _REPLIES.decode(name, frames[4], max_body_bytes))
    if kind is Kind.EVENT:
        return EventFrame(sequence, epoch, _EVENTS.decode(name, frames[4], max_body_bytes))
    raise MalformedFrame("message is neither reply nor event", kind=kind.name)
