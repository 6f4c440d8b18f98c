"""Packets of the fd socket: the same message comes back, anything else is a typed error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moriiod.core.ids import MAX_REGIONS
from moriiod.errors import Busy, MoriiodError, TooLarge
from moriiod.wire.fdsocket import (
    MAX_FDS_PER_PACKET,
    MAX_PACKET_BYTES,
    FdMessage,
    FdRefused,
    FetchRegions,
    OfferRegion,
    Packet,
    Regions,
    RegionTaken,
    WorkerHello,
    WorkerWelcome,
    decode_packet,
    encode_packet,
    refusal,
)

HEX = "0123456789abcdef" * 2
MESSAGES: list[FdMessage] = [
    WorkerHello(HEX),
    WorkerWelcome(HEX),
    OfferRegion(MAX_REGIONS - 1, 1 << 62),
    RegionTaken(0),
    FetchRegions(HEX, (HEX,) * MAX_FDS_PER_PACKET),
    Regions((1 << 62,) * MAX_FDS_PER_PACKET),
    FdRefused("BUSY", "x" * 2048),
]


def decoded(data: bytes) -> FdMessage:
    return decode_packet(Packet(data, (), is_cut=False))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_message_survives_and_fits_into_a_packet(message: FdMessage) -> None:
    packet = encode_packet(message)
    assert len(packet) <= MAX_PACKET_BYTES
    assert decoded(packet) == message


def test_cut_packet_is_too_large_even_if_it_can_be_read() -> None:
    with pytest.raises(TooLarge):
        decode_packet(Packet(encode_packet(MESSAGES[0]), (), is_cut=True))


def test_refusal_is_bounded() -> None:
    answer = refusal(Busy("x" * 100_000, limit="y"))
    assert answer.code == "BUSY"
    assert decoded(encode_packet(answer)) == answer


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_typed_error(data: bytes) -> None:
    try:
        decoded(data)
    except MoriiodError:
        pass


@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_packet_is_a_message_or_a_typed_error(
    message: FdMessage, data: st.DataObject
) -> None:
    packet = bytearray(encode_packet(message))
    for _ in range(data.draw(st.integers(1, 4))):
        packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(packet)))
    for damaged in (bytes(packet), bytes(packet[:cut]), bytes(packet) + b"\x00"):
        try:
            decoded(damaged)
        except MoriiodError:
            pass
