"""ACKs of peers without our protocol: a bare transfer id, or upstream's ``release``."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from moriiod.core.fanin import TransferAck
from moriiod.errors import InvalidArgument, MalformedFrame, TooLarge, UnknownMessage
from moriiod.wire.legacy import decode_legacy_ack

SOURCE = "a:00"


def release(**fields: Any) -> bytes:
    packed: bytes = msgpack.packb({"type": "release", "transfer_id": "tx-1"} | fields)
    return packed


@pytest.mark.parametrize(
    "text",
    [
        "tx-1",
        "t",  # msgpack would read the number 116
        "7",
        "0",
        "tx-…",
        "\N{ARABIC LETTER BEH}",
        "\N{THAANA LETTER HAA}1",  # starts with 0xde, like a map16
        "\N{NKO LETTER A}",  # starts with 0xdf, like a map32
        "x" * 256,
    ],
)
def test_Z8_plain_string_is_one_ack_without_rank(text: str) -> None:
    ack = decode_legacy_ack(text.encode(), SOURCE)
    assert ack == TransferAck(text, source=SOURCE)
    assert ack.is_plain


@pytest.mark.parametrize("byte", [b for b in range(0x20, 0x7F)], ids=chr)
def test_Z8_every_one_byte_string_is_a_transfer_id(byte: int) -> None:
    assert decode_legacy_ack(bytes([byte]), SOURCE).transfer_id == chr(byte)


@pytest.mark.parametrize("size", [1, 8, 1024])
def test_Z8_release_states_a_size_and_no_rank(size: int) -> None:
    ack = decode_legacy_ack(release(consumer_tp_size=size), SOURCE)
    assert ack == TransferAck.release("tx-1", size, SOURCE)
    assert not ack.is_plain


@pytest.mark.parametrize("fields", [{}, {"consumer_tp_size": None}])
def test_Z8_release_without_a_size_is_a_plain_ack(fields: dict[str, Any]) -> None:
    assert decode_legacy_ack(release(**fields), SOURCE) == TransferAck.plain("tx-1", SOURCE)


def test_Z8_release_in_the_old_msgpack_spec_is_understood() -> None:
    frame = msgpack.packb(
        {"type": "release", "transfer_id": "tx-1", "consumer_tp_size": 8}, use_bin_type=False
    )
    assert decode_legacy_ack(frame, SOURCE).consumer_tp_size == 8


def test_Z8_release_in_a_map16_is_understood() -> None:
    frame = b"\xde\x00\x03" + release(consumer_tp_size=8)[1:]
    assert decode_legacy_ack(frame, SOURCE).consumer_tp_size == 8


def test_Z8_unknown_keys_of_a_release_are_ignored() -> None:
    assert decode_legacy_ack(release(decode_rank=3), SOURCE).transfer_id == "tx-1"


BAD_SIZES = [True, False, 0, -1, "8", "8 ", "0x8", 8.0, 8.5, float("nan"), 1025, 2**63, [8], b"8"]


@pytest.mark.parametrize("size", BAD_SIZES, ids=repr)
def test_R3_size_that_is_no_size_is_refused_and_named(size: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode_legacy_ack(release(consumer_tp_size=size), SOURCE)
    assert caught.value.fields["field"] == "consumer_tp_size"


@pytest.mark.parametrize("name", [None, 7, "", "a\nb", "x" * 257, "\N{BLACK STAR}" * 86, b"tx-1"])
def test_transfer_id_of_a_release_is_checked(name: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode_legacy_ack(release(transfer_id=name), SOURCE)
    assert caught.value.fields["field"] == "transfer_id"


@pytest.mark.parametrize("text", ["a\nb", "\x00", "\x7f", "x" * 257])
def test_plain_string_that_is_no_transfer_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        decode_legacy_ack(text.encode(), SOURCE)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff\xfe",
        b"\xc1",
        b"tx\xff",
        b"\x83\xa4type",  # a map that ends too early
        b"\xde",
        b"\xdf\x00\x00\x00\x01",
        b"\x81\xc4\x04type\xa7release",  # keys as bytes
    ],
)
def test_Z8_frame_that_is_neither_is_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode_legacy_ack(frame, SOURCE)


def test_Z8_release_with_the_size_twice_is_malformed() -> None:
    frame = (
        b"\x84\xa4type\xa7release\xabtransfer_id\xa4tx-1"
        b"\xb0consumer_tp_size\x08\xb0consumer_tp_size\x01"
    )
    with pytest.raises(MalformedFrame):
        decode_legacy_ack(frame, SOURCE)


@pytest.mark.parametrize("kind", ["write_done", "remote_blocks", None, 7, ["release"]])
def test_Z8_map_of_another_type_is_unknown(kind: object) -> None:
    with pytest.raises(UnknownMessage):
        decode_legacy_ack(release(type=kind), SOURCE)


def test_map_without_a_type_is_unknown() -> None:
    with pytest.raises(UnknownMessage):
        decode_legacy_ack(msgpack.packb({"transfer_id": "tx-1"}), SOURCE)


def test_frame_longer_than_any_ack_is_too_large() -> None:
    with pytest.raises(TooLarge):
        decode_legacy_ack(b"x" * 5000, SOURCE)
