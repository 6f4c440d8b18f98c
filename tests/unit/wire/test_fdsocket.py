"""Packets of the fd socket: the same message comes back, anything else is a typed error."""

from __future__ import annotations

import array
import os
import socket
from typing import Any

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
    receive_packet,
    refusal,
    send_packet,
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


class Wire:
    """Stands in for a socket: keeps what is sent, gives what it was told to."""

    def __init__(self, data: bytes = b"", ancillary: Any = (), flags: int = 0) -> None:
        self.sent: list[tuple[Any, Any, int]] = []
        self._incoming = (data, list(ancillary), flags, None)

    def sendmsg(self, buffers: Any, ancillary: Any, flags: int) -> None:
        self.sent.append((buffers, ancillary, flags))

    def recvmsg(self, size: int, ancillary_size: int, flags: int) -> Any:
        assert flags == socket.MSG_CMSG_CLOEXEC
        return self._incoming


def rights(*fds: int) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes() + b"\x00"


def test_fds_of_all_control_messages_are_received_and_closed() -> None:
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    other = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, b"\x00" * 12)
    wire: Any = Wire(b"x", [rights(*fds[:2]), other, rights(fds[2])])
    packet = receive_packet(wire, 3)
    assert packet == Packet(b"x", tuple(fds), is_cut=False)
    packet.close_fds()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


@pytest.mark.parametrize("flag", [socket.MSG_TRUNC, socket.MSG_CTRUNC])
def test_packet_that_lost_bytes_or_fds_is_cut(flag: int) -> None:
    wire: Any = Wire(b"x", flags=flag | socket.MSG_EOR)
    assert receive_packet(wire, 1).is_cut


def test_message_is_sent_with_its_fds_and_without_a_signal() -> None:
    wire: Any = Wire()
    send_packet(wire, RegionTaken(1))
    send_packet(wire, Regions((1, 2)), [7, 8])
    assert wire.sent == [
        ([encode_packet(RegionTaken(1))], [], socket.MSG_NOSIGNAL),
        (
            [encode_packet(Regions((1, 2)))],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [7, 8]))],
            socket.MSG_NOSIGNAL,
        ),
    ]


def test_message_that_fits_no_packet_is_not_sent() -> None:
    wire: Any = Wire()
    with pytest.raises(TooLarge):
        send_packet(wire, FdRefused("X", "y" * MAX_PACKET_BYTES))
    with pytest.raises(TooLarge):
        send_packet(wire, FdRefused("X", "y" * (MAX_PACKET_BYTES - 25)))
    assert not wire.sent
