"""The demo's router says what real routers say, and the client library understands it."""

from __future__ import annotations

import json

import pytest

from moriiod.cli.demo.params import forward, route
from moriiod.cli.demo.plan import DemoOptions, DemoRequest, Mode
from moriiod.client.params import ProducerAddress, parse_transfer_params, producer_params
from moriiod.core.requests import PeerAddress

OPTIONS = DemoOptions(prefill_tp=4, decode_tp=8)


def request_of(mode: Mode) -> DemoRequest:
    return DemoRequest(
        number=0,
        mode=mode,
        transfer_id="tx-0b6e",
        unique="a" * 32,
        producer=0,
        consumer=0,
        prefill_blocks=(7, 3),
        decode_blocks=(1, 4),
    )


@pytest.mark.parametrize("mode", ["read", "write"])
def test_prefill_leg_has_the_keys_of_the_routers(mode: Mode) -> None:
    routed = route(request_of(mode), OPTIONS, 20001, 20101)
    assert routed.prefill == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "transfer_id": "tx-0b6e",
        "remote_dp_size": 1,
        "remote_tp_size": 8,
    }
    parsed = parse_transfer_params(routed.prefill, routed.request_id, 4)
    assert parsed is not None
    assert (parsed.role, parsed.transfer_id) == ("producer", "tx-0b6e")


def test_read_takes_the_decode_leg_from_what_the_producer_hands_back() -> None:
    routed = route(request_of("read"), OPTIONS, 20001, 20101)
    assert routed.decode is None
    address = ProducerAddress("P0", "127.0.0.1", 20001, 61005, tp_size=4)
    returned = producer_params("tx-0b6e", [(7, 3)], address)
    parsed = parse_transfer_params(forward(returned), routed.request_id, 8)
    assert parsed is not None
    assert parsed.role == "consumer"
    assert parsed.remote_blocks == ((7, 3),)
    assert parsed.peer == PeerAddress("127.0.0.1", 20001, tp_size=4)


def test_write_puts_both_addresses_into_the_request_id() -> None:
    routed = route(request_of("write"), OPTIONS, 20001, 20101)
    assert routed.decode is not None
    producer = parse_transfer_params(routed.prefill, routed.request_id, 4)
    consumer = parse_transfer_params(json.loads(json.dumps(routed.decode)), routed.request_id, 8)
    assert producer is not None
    assert consumer is not None
    assert producer.peer == PeerAddress("127.0.0.1", 20101, tp_size=8)
    assert consumer.peer == PeerAddress("127.0.0.1", 20001, tp_size=4)
    assert consumer.remote_blocks is None
