"""Whatever bytes come in: a valid message, or an error of the protocol. Never anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moriiod.core.fanin import TransferAck
from moriiod.core.messages import PeerBody
from moriiod.core.requests import ClientEvent, Reply, Request
from moriiod.errors import InvalidArgument, MoriiodError, ProtocolError
from moriiod.wire.ipc import (
    EventFrame,
    ReplyFrame,
    RequestFrame,
    answerable_sequence,
    decode_reply,
    decode_request,
)
from moriiod.wire.legacy import decode_legacy_ack
from moriiod.wire.peer import PeerFrame, decode_peer
from tests.support import golden
from tests.support.samples import EPOCH
from tests.support.wire_strategies import bodies

Decode = Callable[[list[bytes]], Any]

SEQUENCES = st.integers(0, 2**62)
TYPED = st.one_of(
    st.builds(RequestFrame, SEQUENCES, bodies(Request)),
    st.builds(ReplyFrame, SEQUENCES, st.just(EPOCH), bodies(Reply)),
    st.builds(EventFrame, SEQUENCES, st.just(EPOCH), bodies(ClientEvent)),
    st.builds(PeerFrame, st.just(EPOCH), bodies(PeerBody)),
)
DECODERS: tuple[Decode, ...] = (decode_request, decode_reply, decode_peer)
#: Frames that get past the first checks more often than any bytes would.
PLAUSIBLE = st.one_of(
    st.binary(max_size=64),
    st.sampled_from([part for frames in golden.load(1).values() for part in frames]),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=12), inner),
        max_leaves=8,
    ).map(msgpack.packb),
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=8).filter(lambda text: text.encode("utf-8", "ignore").decode() == text),
    st.binary(max_size=8),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 3), max_size=2),
)


def decode_of(frame: golden.TypedFrame) -> Decode:
    match frame:
        case RequestFrame():
            return decode_request
        case PeerFrame():
            return decode_peer
        case _:
            return decode_reply


def outcome_of(decode: Callable[[Any], Any], frames: Any) -> tuple[Any, MoriiodError | None]:
    """Decode; the only errors let through are those that say what is wrong with the input."""
    try:
        return decode(frames), None
    except (ProtocolError, InvalidArgument) as error:
        return None, error


def survives(decode: Callable[[Any], Any], frames: Any) -> Any:
    message, error = outcome_of(decode, frames)
    assert error is None or 0 < len(error.message) <= 600
    return message


@given(TYPED)
@settings(max_examples=200)
def test_any_valid_message_survives_the_wire(frame: golden.TypedFrame) -> None:
    assert decode_of(frame)(golden.encode(frame)) == frame


@pytest.mark.parametrize("decode", DECODERS, ids=lambda d: d.__name__)
@given(frames=st.lists(PLAUSIBLE, max_size=9))
@settings(max_examples=300)
def test_Z6_any_frames_are_a_message_or_an_error(decode: Decode, frames: list[bytes]) -> None:
    survives(decode, frames)
    answerable_sequence(frames)


@given(TYPED, st.data())
@settings(max_examples=300)
def test_Z6_valid_frames_with_bytes_changed_are_a_message_or_an_error(
    frame: golden.TypedFrame, data: st.DataObject
) -> None:
    frames = golden.encode(frame)
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(frames) - 1))
        part = bytearray(frames[index])
        at = data.draw(st.integers(0, len(part)))
        part[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        frames[index] = bytes(part)
    survives(decode_of(frame), frames)


@given(TYPED, st.data())
@settings(max_examples=300)
def test_R3_valid_message_with_a_field_replaced_is_a_message_or_names_the_field(
    frame: golden.TypedFrame, data: st.DataObject
) -> None:
    frames = golden.encode(frame)
    fields = msgpack.unpackb(frames[-1])
    if not fields:
        return
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(VALUES)
    changed = [*frames[:-1], msgpack.packb(fields)]
    _, error = outcome_of(decode_of(frame), changed)
    assert error is None or str(error.fields["field"]).split(".")[0] == name


@given(
    st.binary(max_size=300)
    | PLAUSIBLE
    | st.text(max_size=64).map(lambda t: t.encode("utf-8", "ignore"))
)
@example(b"t")
@example(b"7")
@example(b"")
@settings(max_examples=1000)
def test_Z8_any_single_frame_is_an_ack_or_an_error(frame: bytes) -> None:
    ack = survives(lambda part: decode_legacy_ack(part, "a:00"), frame)
    if ack is not None:
        assert isinstance(ack, TransferAck)
        assert ack.is_well_formed


@given(
    st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=64)
)
def test_Z8_every_printable_text_is_a_plain_ack(text: str) -> None:
    assert decode_legacy_ack(text.encode(), "a:00") == TransferAck.plain(text, "a:00")
