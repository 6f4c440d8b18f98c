"""Frames between daemons, and how builds of different versions understand each other."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from moriiod.core.messages import PROTOCOL_VERSIONS, Goodbye, PeerBody
from moriiod.errors import (
    InvalidArgument,
    MalformedFrame,
    TooLarge,
    UnknownMessage,
    VersionMismatch,
)
from moriiod.wire.frames import Kind, header
from moriiod.wire.peer import (
    HANDSHAKE_TYPES,
    HANDSHAKE_VERSION,
    PeerFrame,
    decode_peer,
    encode_peer,
)
from tests.support.samples import EPOCH, PEER_BODIES

OTHER_EPOCH = "0123456789abcdef" * 2
GOODBYE = encode_peer(PeerFrame(EPOCH, Goodbye(), OTHER_EPOCH))
HANDSHAKE = [body for body in PEER_BODIES if isinstance(body, HANDSHAKE_TYPES)]
OTHERS = [body for body in PEER_BODIES if not isinstance(body, HANDSHAKE_TYPES)]


def name_of(message: object) -> str:
    return type(message).__name__


def fields_of(frames: list[bytes]) -> dict[str, Any]:
    fields: dict[str, Any] = msgpack.unpackb(frames[4])
    return fields


@pytest.mark.parametrize("body", PEER_BODIES, ids=name_of)
def test_message_survives_the_wire(body: PeerBody) -> None:
    frame = PeerFrame(EPOCH, body, OTHER_EPOCH)
    assert decode_peer(encode_peer(frame)) == frame


def test_message_has_the_documented_frames() -> None:
    assert GOODBYE == [b"\x01P", b"Goodbye", EPOCH.encode(), OTHER_EPOCH.encode(), b"\x80"]


@pytest.mark.parametrize("body", HANDSHAKE, ids=name_of)
def test_handshake_travels_in_the_version_everybody_reads(body: PeerBody) -> None:
    assert encode_peer(PeerFrame(EPOCH, body), version=1)[0] == header(HANDSHAKE_VERSION, Kind.PEER)


@pytest.mark.parametrize("body", HANDSHAKE, ids=name_of)
def test_handshake_of_a_newer_build_with_more_fields_is_understood(body: PeerBody) -> None:
    frames = encode_peer(PeerFrame(EPOCH, body))
    fields = fields_of(frames) | {"compression": ["zstd"]}
    for nested in ("identity", "error"):
        if nested in fields:
            fields[nested]["rack"] = 7
    assert decode_peer([*frames[:4], msgpack.packb(fields)]).body == body


def test_handshake_with_something_else_than_a_map_inside_is_refused() -> None:
    frames = encode_peer(PeerFrame(EPOCH, HANDSHAKE[0]))
    fields = fields_of(frames) | {"identity": 7}
    with pytest.raises(InvalidArgument) as caught:
        decode_peer([*frames[:4], msgpack.packb(fields)])
    assert caught.value.fields["field"] == "identity"


@pytest.mark.parametrize("body", OTHERS, ids=name_of)
def test_message_of_a_version_is_closed(body: PeerBody) -> None:
    frames = encode_peer(PeerFrame(EPOCH, body))
    fields = fields_of(frames) | {"compression": 1}
    with pytest.raises(InvalidArgument) as caught:
        decode_peer([*frames[:4], msgpack.packb(fields)])
    assert caught.value.fields["field"] == "compression"


def test_message_in_the_version_of_the_handshake_is_unknown_there() -> None:
    with pytest.raises(UnknownMessage):
        decode_peer([header(HANDSHAKE_VERSION, Kind.PEER), *GOODBYE[1:]])


def test_handshake_in_a_protocol_version_is_unknown_there() -> None:
    frames = encode_peer(PeerFrame(EPOCH, HANDSHAKE[0]))
    with pytest.raises(UnknownMessage):
        decode_peer([header(PROTOCOL_VERSIONS[0], Kind.PEER), *frames[1:]])


@pytest.mark.parametrize(
    ("index", "frame", "error"),
    [
        (0, b"P", MalformedFrame),
        (0, header(1, Kind.REQUEST), MalformedFrame),
        (0, header(2, Kind.PEER), VersionMismatch),
        (0, header(ord("1"), Kind.PEER), VersionMismatch),
        (1, b"\xff", MalformedFrame),
        (1, b"Explode", UnknownMessage),
        (2, b"", MalformedFrame),
        (3, b"", MalformedFrame),
        (4, b"", MalformedFrame),
    ],
)
def test_message_with_one_wrong_frame_is_refused(
    index: int, frame: bytes, error: type[Exception]
) -> None:
    with pytest.raises(error):
        decode_peer([*GOODBYE[:index], frame, *GOODBYE[index + 1 :]])


@pytest.mark.parametrize("n_frames", [0, 1, 2, 3, 4, 6])
def test_other_number_of_frames_is_malformed(n_frames: int) -> None:
    with pytest.raises(MalformedFrame):
        decode_peer((GOODBYE * 2)[:n_frames])


def test_body_over_the_limit_is_refused_on_both_sides() -> None:
    frame = PeerFrame(EPOCH, OTHERS[0])
    with pytest.raises(TooLarge):
        encode_peer(frame, max_body_bytes=4)
    with pytest.raises(TooLarge):
        decode_peer(encode_peer(frame), max_body_bytes=4)


def test_handshake_has_its_own_small_limit() -> None:
    frames = encode_peer(PeerFrame(EPOCH, HANDSHAKE[0]))
    with pytest.raises(TooLarge):
        decode_peer([*frames[:4], b"\x80" * (65 << 10)])
