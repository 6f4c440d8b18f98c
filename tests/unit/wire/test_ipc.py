"""Frames between worker and daemon."""

from __future__ import annotations

import pytest

from moriiod.core.requests import ClientEvent, Done, Ping, Reply, Request, TransferEnded
from moriiod.errors import (
    InvalidArgument,
    MalformedFrame,
    TooLarge,
    UnknownMessage,
    VersionMismatch,
)
from moriiod.wire.frames import Kind, header, pack_sequence
from moriiod.wire.ipc import (
    EventFrame,
    ReplyFrame,
    RequestFrame,
    answerable_sequence,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from tests.support.samples import EPOCH, EVENTS, REPLIES, REQUESTS

PING = encode_request(RequestFrame(9, Ping()))
DONE = encode_reply(ReplyFrame(9, EPOCH, Done()))


def name_of(message: object) -> str:
    return type(message).__name__


@pytest.mark.parametrize("body", REQUESTS, ids=name_of)
def test_request_survives_the_wire(body: Request) -> None:
    frame = RequestFrame(3, body)
    assert decode_request(encode_request(frame)) == frame


@pytest.mark.parametrize("body", REPLIES, ids=name_of)
def test_reply_survives_the_wire(body: Reply) -> None:
    frame = ReplyFrame(3, EPOCH, body)
    assert decode_reply(encode_reply(frame)) == frame


@pytest.mark.parametrize("body", EVENTS, ids=name_of)
def test_event_survives_the_wire_as_an_event(body: ClientEvent) -> None:
    frame = EventFrame(3, EPOCH, body)
    assert decode_reply(encode_reply(frame)) == frame


def test_request_has_the_documented_frames() -> None:
    assert PING == [b"\x01Q", b"Ping", b"\x09\0\0\0\0\0\0\0", b"\x80"]


def test_reply_has_the_documented_frames() -> None:
    assert DONE == [b"\x01R", b"Done", b"\x09\0\0\0\0\0\0\0", EPOCH.encode(), b"\x80"]


@pytest.mark.parametrize("n_frames", [0, 1, 2, 3, 9])
def test_Z6_request_of_another_number_of_frames_cannot_be_answered(n_frames: int) -> None:
    frames = (PING * 3)[:n_frames]
    with pytest.raises(MalformedFrame):
        decode_request(frames)
    assert answerable_sequence(frames) is None


@pytest.mark.parametrize(
    ("index", "frame", "error"),
    [
        (0, b"", MalformedFrame),
        (0, b"1", MalformedFrame),
        (0, header(1, Kind.REPLY), MalformedFrame),
        (0, header(1, Kind.PEER), MalformedFrame),
        (0, header(0, Kind.REQUEST), VersionMismatch),
        (0, header(2, Kind.REQUEST), VersionMismatch),
        (0, header(ord("1"), Kind.REQUEST), VersionMismatch),
        (1, b"", MalformedFrame),
        (1, b"Explode", UnknownMessage),
        (1, b"Done", UnknownMessage),
        (2, b"\x09", MalformedFrame),
        (2, b"\xff" * 8, MalformedFrame),
        (3, b"\xc1", MalformedFrame),
        (3, b"\x81\xa1a\x01", InvalidArgument),
    ],
)
def test_Z8_request_with_one_wrong_frame_is_refused(
    index: int, frame: bytes, error: type[Exception]
) -> None:
    frames = [*PING[:index], frame, *PING[index + 1 :]]
    with pytest.raises(error):
        decode_request(frames)


@pytest.mark.parametrize(
    "frames",
    [
        [header(2, Kind.REQUEST), b"Ping", pack_sequence(9), b"\x80"],
        [header(1, Kind.REQUEST), b"\xff", pack_sequence(9), b"\x80"],
        [header(1, Kind.REQUEST), b"Ping", pack_sequence(9), b"\xc1"],
    ],
    ids=["version", "type", "body"],
)
def test_Z8_bad_request_with_a_readable_number_can_be_answered(frames: list[bytes]) -> None:
    assert answerable_sequence(frames) == 9


def test_bad_request_with_an_unreadable_number_cannot_be_answered() -> None:
    assert answerable_sequence([PING[0], PING[1], b"?", PING[3]]) is None
    assert answerable_sequence([header(1, Kind.PEER), *PING[1:]]) is None


@pytest.mark.parametrize(
    ("index", "frame", "error"),
    [
        (0, header(2, Kind.REPLY), VersionMismatch),
        (0, header(1, Kind.REQUEST), MalformedFrame),
        (0, header(1, Kind.EVENT), UnknownMessage),
        (1, b"TransferEnded", UnknownMessage),
        (2, b"", MalformedFrame),
        (3, EPOCH.upper().encode(), MalformedFrame),
        (4, b"", MalformedFrame),
    ],
)
def test_reply_with_one_wrong_frame_is_refused(
    index: int, frame: bytes, error: type[Exception]
) -> None:
    with pytest.raises(error):
        decode_reply([*DONE[:index], frame, *DONE[index + 1 :]])


def test_reply_of_four_frames_is_malformed() -> None:
    with pytest.raises(MalformedFrame):
        decode_reply(DONE[:4])


def test_Z7_body_over_the_limit_is_refused_on_both_sides() -> None:
    frame = RequestFrame(1, REQUESTS[0])
    with pytest.raises(TooLarge):
        encode_request(frame, max_body_bytes=16)
    with pytest.raises(TooLarge):
        decode_request(encode_request(frame), max_body_bytes=16)
    with pytest.raises(TooLarge):
        encode_reply(ReplyFrame(1, EPOCH, REPLIES[1]), max_body_bytes=16)


def test_end_of_a_transfer_over_4_gib_survives_the_wire() -> None:
    """Found by a new user: it was a count, and the worker was never told of the end."""
    ended = TransferEnded("t", "pull", "received", "acked", n_bytes=(1 << 32) + 1)
    frame = EventFrame(1, EPOCH, ended)
    assert decode_reply(encode_reply(frame)) == frame
