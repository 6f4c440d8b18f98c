"""The codec: strict, closed, and cheap for whoever is attacked."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from moriiod.core.messages import Ack, Hello
from moriiod.core.requests import LayerReady, Publish, Pull, Request, Seal
from moriiod.errors import InvalidArgument, MalformedFrame, MoriiodError, TooLarge, UnknownMessage
from moriiod.wire.codec import MAX_ARRAY_ITEMS, Codec, codec_for, unpack_map
from tests.support.samples import ATTEMPT, IDENTITY, LEASE, PEER, REQUESTS, TRANSFER, packed

REQUEST_CODEC: Codec[Request] = codec_for(Request, 1 << 20)
PEER_CODEC: Codec[Ack | Hello] = Codec((Ack, Hello), 1 << 20)
PULL = Pull(TRANSFER, PEER, (packed(1),), (packed(2),))


def fields_of(codec: Codec[Any], message: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgpack.unpackb(codec.encode(message)[1])
    return fields


def peak_bytes(body: bytes) -> int:
    """Decode something hopeless and return how much memory that took at its peak."""
    tracemalloc.start()
    try:
        with pytest.raises(MoriiodError):
            REQUEST_CODEC.decode("LayerReady", body)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: type(m).__name__)
def test_encoded_message_decodes_to_its_equal(message: Request) -> None:
    assert REQUEST_CODEC.decode(*REQUEST_CODEC.encode(message)) == message


def test_type_names_follow_the_order_of_the_union() -> None:
    assert REQUEST_CODEC.type_names[:2] == ("Attach", "RegisterCaches")


def test_left_out_optional_fields_take_their_defaults() -> None:
    body = msgpack.packb({"transfer_id": "t", "blocks": [packed(1)]})
    assert REQUEST_CODEC.decode(b"Publish", body) == Publish("t", (packed(1),))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x81",  # a map that ends before its first key
        b"\x80\x00",  # one byte too many
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x81\xa1\xff\x00",  # a key that is not UTF-8
        b"\x81\x01\x02",  # a number as key
        b"\x81\xc4\x01t\x02",  # bytes as key
        b"\x82\xa1a\x01\xa1a\x02",  # the same key twice
        b"\xdd\xff\xff\xff\xff",  # claims 2^32 - 1 items
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffabc",
        b"\x90",  # a list
        b"\xa3abc",
        b"\x07",
        b"\xc0",
        b"\x81\xa1a" + b"\x91" * 2000 + b"\x00",  # nested too deep
        b"\x81\xa1a" + b"\x81\xa1a" * 2000 + b"\x00",
        b"\x81\xa1a\xd4\x05\x00",  # an extension type
        b"\x81\xa1a\xc7\x03\xff\x01\x02\x03",  # a timestamp of three bytes
    ],
    ids=lambda body: repr(body[:12]),
)
def test_bytes_that_are_no_map_are_malformed(body: bytes) -> None:
    with pytest.raises(MalformedFrame):
        unpack_map(body)


def test_timestamp_in_a_field_is_refused_by_name() -> None:
    body = b"\x81\xabtransfer_id\xd6\xff\x00\x00\x00\x00"
    with pytest.raises(InvalidArgument) as caught:
        REQUEST_CODEC.decode("Seal", body)
    assert caught.value.fields["field"] == "transfer_id"


def test_unknown_type_is_named_and_cut() -> None:
    with pytest.raises(UnknownMessage) as caught:
        REQUEST_CODEC.decode(b"Explode\xff" * 100, b"\x80")
    assert str(caught.value.fields["type"]).startswith("Explode\\xff")
    assert len(str(caught.value.fields["type"])) == 64


def test_body_over_the_limit_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(TooLarge) as caught:
        REQUEST_CODEC.decode("Ping", b"\xc1" * 11, max_body_bytes=10)
    assert caught.value.fields == {"limit": "max_body_bytes", "value": 10}


def test_message_over_the_limit_is_not_encoded() -> None:
    with pytest.raises(TooLarge):
        REQUEST_CODEC.encode(PULL, max_body_bytes=10)


def test_Z8_unknown_field_is_refused_by_name() -> None:
    fields = fields_of(REQUEST_CODEC, Seal("t", 1)) | {"color": 1}
    with pytest.raises(InvalidArgument) as caught:
        REQUEST_CODEC.decode("Seal", msgpack.packb(fields))
    assert caught.value.fields["field"] == "color"


def test_missing_field_is_named() -> None:
    with pytest.raises(InvalidArgument) as caught:
        REQUEST_CODEC.decode("Seal", msgpack.packb({"transfer_id": "t"}))
    assert caught.value.fields["field"] == "n_layers"


def test_field_of_a_nested_message_is_named_with_its_path() -> None:
    fields = fields_of(REQUEST_CODEC, PULL)
    fields["peer"]["base_port"] = 0
    with pytest.raises(InvalidArgument) as caught:
        REQUEST_CODEC.decode("Pull", msgpack.packb(fields))
    assert caught.value.fields["field"] == "peer.base_port"


BAD_SIZES = [True, False, 0, -1, None, "8", "8 ", "0x8", 8.0, 8.5, math.nan, math.inf]
BAD_SIZES += [1025, 2**31, 2**63, 2**64 - 1, -(2**63), [8], b"8", {"a": 8}]


@pytest.mark.parametrize("size", BAD_SIZES, ids=repr)
def test_R3_tp_size_that_is_no_size_is_refused_and_named(size: object) -> None:
    ack = fields_of(PEER_CODEC, Ack(TRANSFER, ATTEMPT, LEASE, 3, 8, True))
    hello = fields_of(PEER_CODEC, Hello(ATTEMPT, (1,), IDENTITY, ("shm",)))
    ack["consumer_tp_size"] = size
    hello["identity"]["tp_size"] = size
    for name, fields, field in (
        ("Ack", ack, "consumer_tp_size"),
        ("Hello", hello, "identity.tp_size"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            PEER_CODEC.decode(name, msgpack.packb(fields))
        assert caught.value.fields["field"] == field


@pytest.mark.parametrize("size", [size for size in BAD_SIZES if size != 0 or size is False])
def test_R3_tp_size_of_a_request_is_strict_but_knows_0_as_unknown(size: object) -> None:
    fields = fields_of(REQUEST_CODEC, PULL)
    fields["peer"]["tp_size"] = size
    with pytest.raises(InvalidArgument) as caught:
        REQUEST_CODEC.decode("Pull", msgpack.packb(fields))
    assert caught.value.fields["field"] == "peer.tp_size"


def test_R3_sizes_at_the_limits_are_taken() -> None:
    for size in (1, 1024):
        ack = Ack(TRANSFER, ATTEMPT, LEASE, 0, size, True)
        assert PEER_CODEC.decode(*PEER_CODEC.encode(ack)) == ack


@pytest.mark.parametrize(
    "bad",
    [2**64, "\ud800", float, object()],
    ids=["2**64", "lone surrogate", "a type", "an object"],
)
def test_value_the_wire_cannot_carry_is_an_invalid_argument(bad: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        REQUEST_CODEC.encode(replace(PULL, transfer_id=bad))
    assert caught.value.fields["type"] == "Pull"


def test_wrong_type_in_a_message_we_send_is_found_by_the_receiver() -> None:
    name, body = REQUEST_CODEC.encode(replace(PULL, timeout_s="soon"))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument) as caught:
        REQUEST_CODEC.decode(name, body)
    assert caught.value.fields["field"] == "timeout_s"


@pytest.mark.parametrize("count", [2**31, 10**9, 2**40])
def test_Z7_layer_count_beyond_the_limit_is_refused(count: int) -> None:
    body = msgpack.packb({"transfer_id": "t", "n_layers": count})
    with pytest.raises(InvalidArgument) as caught:
        REQUEST_CODEC.decode("Seal", body)
    assert caught.value.fields["field"] == "n_layers"


def test_Z7_layer_index_beyond_the_limit_is_refused() -> None:
    body = msgpack.packb({"transfer_id": "t", "layers": [0, 2**31]})
    with pytest.raises(InvalidArgument) as caught:
        REQUEST_CODEC.decode("LayerReady", body)
    assert caught.value.fields["field"] == "layers.1"


def test_Z7_ten_thousand_regions_are_refused() -> None:
    fields = fields_of(REQUEST_CODEC, REQUESTS[1]) | {"region_bytes": [1] * 10_000}
    with pytest.raises(InvalidArgument) as caught:
        REQUEST_CODEC.decode("RegisterCaches", msgpack.packb(fields))
    assert caught.value.fields["field"] == "region_bytes"


def test_Z7_million_numbers_in_a_list_are_too_large() -> None:
    body = msgpack.packb({"transfer_id": "t", "layers": [1] * 1_000_000})
    with pytest.raises(TooLarge) as caught:
        REQUEST_CODEC.decode("LayerReady", body)
    assert caught.value.fields["value"] == MAX_ARRAY_ITEMS


def test_Z7_hundred_thousand_packed_block_ids_are_taken() -> None:
    blocks = (packed(*range(100_000)),)
    assert REQUEST_CODEC.decode(*REQUEST_CODEC.encode(Publish("t", blocks))).blocks == blocks


def test_Z7_nested_list_headers_allocate_nothing() -> None:
    """3 kB of headers claim 65,535 items a thousand times: 500 MB, if they were believed."""
    bomb = b"\x81\xa6layers" + b"\xdc\xff\xff" * 1000 + b"\0" * 70_000
    assert peak_bytes(bomb) < 2 * len(bomb)


def test_Z7_list_of_wrong_items_is_not_one_problem_each() -> None:
    body = msgpack.packb({"transfer_id": "t", "layers": ["x"] * MAX_ARRAY_ITEMS})
    with pytest.raises(InvalidArgument) as caught:
        REQUEST_CODEC.decode("LayerReady", body)
    assert caught.value.fields["problems"] <= 2  # the first bad item, and the length


def test_Z7_huge_value_in_the_wrong_place_is_not_printed() -> None:
    value = b"\xff" * 500_000
    body = msgpack.packb({"transfer_id": value, "layers": [1]})
    with pytest.raises(InvalidArgument) as caught:
        REQUEST_CODEC.decode("LayerReady", body)
    assert str(caught.value.fields["got"]).endswith("and 499936 more")
    assert peak_bytes(body) < 3 * len(body)


def test_shown_value_of_a_list_is_its_length() -> None:
    body = msgpack.packb({"transfer_id": [1, 2], "layers": [1]})
    with pytest.raises(InvalidArgument) as caught:
        REQUEST_CODEC.decode("LayerReady", body)
    assert caught.value.fields["got"] == "tuple of 2"


def test_decoded_lists_are_tuples_so_messages_can_be_hashed() -> None:
    message = REQUEST_CODEC.decode(*REQUEST_CODEC.encode(LayerReady("t", (1, 2))))
    assert hash(message) == hash(LayerReady("t", (1, 2)))
