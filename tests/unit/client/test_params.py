"""Routers' parameters: tolerant of how numbers are written, strict about what they say."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from moriiod.client.params import ProducerAddress, parse_transfer_params, producer_params
from moriiod.core.requests import PeerAddress
from moriiod.errors import InvalidAddress, InvalidArgument, MoriiodError

HEX = "0" * 31 + "7"
P_ADDRESS = "host:10.0.0.1,handshake:6301,notify:61005"
D_ADDRESS = "host:10.0.0.2,handshake:7301,notify:7501"
REQUEST_ID = f"cmpl-___prefill_addr_{P_ADDRESS}___decode_addr_{D_ADDRESS}_{HEX}-0-1a2b3c4d"

TO_PRODUCER: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "transfer_id": "tx-1",
    "remote_dp_size": 1,
    "remote_tp_size": 8,
}
TO_CONSUMER: dict[str, object] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "P0",
    "remote_host": "10.0.0.9",
    "remote_handshake_port": "6301",
    "remote_notify_port": "61005",
    "remote_dp_rank": "1",
    "remote_dp_rank_override": True,
    "remote_dp_size": 2,
    "remote_dp_size_local": 2,
    "tp_size": "4",
    "transfer_id": "tx-1",
}


def test_producer_finds_the_decode_side_in_the_request_id() -> None:
    parsed = parse_transfer_params(TO_PRODUCER, REQUEST_ID, 4)
    assert parsed is not None
    assert (parsed.role, parsed.transfer_id) == ("producer", "tx-1")
    assert parsed.peer == PeerAddress("10.0.0.2", 7301, 8)
    assert parsed.remote_blocks is None


def test_consumer_finds_the_prefill_side_in_the_request_id() -> None:
    parsed = parse_transfer_params(TO_CONSUMER, REQUEST_ID, 8)
    assert parsed is not None
    assert parsed.role == "consumer"
    assert parsed.peer == PeerAddress("10.0.0.1", 6301, 4, 2, 1)
    assert parsed.remote_blocks == ((1, 2, 3),)
    assert parsed.remote_engine_id == "P0"


def test_without_addresses_in_the_request_id_the_parameters_name_the_peer() -> None:
    parsed = parse_transfer_params(TO_CONSUMER, "cmpl-1", 8)
    assert parsed is not None
    assert parsed.peer == PeerAddress("10.0.0.9", 6301, 4, 2, 1)


def test_peer_that_nobody_names_is_none() -> None:
    parsed = parse_transfer_params(TO_PRODUCER, "cmpl-1", 4)
    assert parsed is not None
    assert parsed.peer is None


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"x": 1}])
def test_request_without_a_transfer_is_none(params: dict[str, object] | None) -> None:
    assert parse_transfer_params(params, REQUEST_ID, 4) is None


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, 4),
        ({"remote_tp_size": 0, "tp_size": None}, 4),
        ({"remote_tp_size": "8", "tp_size": 2}, 8),
        ({"remote_tp_size": 0, "tp_size": "2"}, 2),
        ({"remote_tp_size": None, "tp_size": 2}, 2),
    ],
)
def test_tp_size_is_resolved_as_upstream_does(sizes: dict[str, object], expected: int) -> None:
    params = {k: v for k, v in TO_CONSUMER.items() if "tp_size" not in k} | sizes
    parsed = parse_transfer_params(params, REQUEST_ID, 4)
    assert parsed is not None
    assert parsed.peer is not None
    assert parsed.peer.tp_size == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remote_tp_size", -1),
        ("remote_tp_size", "-8"),
        ("tp_size", 4.0),
        ("tp_size", True),
        ("tp_size", "four"),
        ("tp_size", 1025),
        ("remote_dp_size", -2),
        ("remote_dp_rank", 1024),
        ("remote_dp_rank", [1]),
        ("transfer_id", None),
        ("transfer_id", ""),
        ("transfer_id", 7),
        ("remote_block_ids", "1,2"),
        ("remote_block_ids", [[1, -2]]),
        ("remote_block_ids", [[1, True]]),
        ("remote_block_ids", [1, 2.0]),
        ("remote_block_ids", 7),
        ("remote_block_ids", [[1], 2]),
        ("remote_engine_id", 7),
        ("remote_host", ""),
        ("remote_host", "*"),
        ("remote_host", "0.0.0.0"),
        ("remote_host", "10.0.0.1:6301"),
        ("remote_host", None),
        ("remote_handshake_port", 0),
        ("remote_handshake_port", "65536"),
        ("remote_handshake_port", None),
        ("remote_handshake_port", " 6301"),
        ("remote_hosts", "a,b"),
        ("remote_hosts", [1]),
        ("remote_hosts", ["*"]),
        ("do_remote_prefill", "true"),
        ("do_remote_decode", True),
    ],
)
def test_C2_nonsense_is_refused_with_a_typed_error(key: str, value: object) -> None:
    with pytest.raises((InvalidArgument, InvalidAddress)):
        parse_transfer_params(TO_CONSUMER | {key: value}, "cmpl-1", 4)


def test_broken_request_id_is_refused() -> None:
    with pytest.raises(InvalidAddress):
        parse_transfer_params(TO_CONSUMER, "___prefill_addr_x___decode_addr_y_z", 4)


def test_plain_list_of_ids_is_that_of_the_only_group() -> None:
    for given, expected in [([4, 5], ((4, 5),)), ([], ((),)), ([[4], [5, 6]], ((4,), (5, 6)))]:
        parsed = parse_transfer_params(TO_CONSUMER | {"remote_block_ids": given}, REQUEST_ID, 4)
        assert parsed is not None
        assert parsed.remote_blocks == expected


def test_hosts_of_a_tp_group_over_several_nodes_are_kept() -> None:
    params = TO_CONSUMER | {"remote_hosts": ["10.0.0.9", "Node-2"]}
    parsed = parse_transfer_params(params, "cmpl-1", 4)
    assert parsed is not None
    assert parsed.peer is not None
    assert parsed.peer.node_hosts == ("10.0.0.9", "node-2")


def test_producer_without_a_transfer_id_makes_one() -> None:
    parsed = parse_transfer_params(TO_PRODUCER | {"transfer_id": None}, "cmpl-1", 4)
    assert parsed is not None
    assert parsed.transfer_id == "sidecar-cmpl-1"


ADDRESS = ProducerAddress("P0", "10.0.0.9", 6301, 61005, tp_size=4, dp_size=2, dp_rank=1)


def test_what_a_producer_returns_is_what_a_consumer_reads_after_json() -> None:
    blocks: list[Any] = [[1, 2], np.array([3, 4, 5])]
    returned = json.loads(json.dumps(producer_params("tx-9", blocks, ADDRESS)))
    parsed = parse_transfer_params(returned, "cmpl-1", 8)
    assert parsed is not None
    assert parsed.transfer_id == "tx-9"
    assert parsed.remote_blocks == ((1, 2), (3, 4, 5))
    assert parsed.peer == PeerAddress("10.0.0.9", 6301, 4, 2, 1)


def test_returned_hosts_of_several_nodes_survive() -> None:
    address = ProducerAddress("P0", "a", 6301, 61005, tp_size=4, node_hosts=("a", "b"))
    parsed = parse_transfer_params(producer_params("t", [[1]], address), "cmpl-1", 8)
    assert parsed is not None
    assert parsed.peer is not None
    assert parsed.peer.node_hosts == ("a", "b")


@pytest.mark.parametrize(
    ("transfer_id", "blocks", "host"),
    [("", [[1]], "a"), ("t", [[-1]], "a"), ("t", [[1]], "*"), ("t", [[1]], "a b")],
)
def test_producer_cannot_return_nonsense(
    transfer_id: str, blocks: list[list[int]], host: str
) -> None:
    address = ProducerAddress("P0", host, 6301, 61005, tp_size=4)
    with pytest.raises(MoriiodError):
        producer_params(transfer_id, blocks, address)


def test_block_sizes_of_the_producer_reach_the_consumer() -> None:
    returned = json.loads(json.dumps(producer_params("t", [[1], [2]], ADDRESS, [64, 16])))
    parsed = parse_transfer_params(returned, "cmpl-1", 8)
    assert parsed is not None
    assert parsed.remote_block_tokens == (64, 16)
    for bad in ("64", 64, [0], ["64"], [True], b"64"):
        with pytest.raises(InvalidArgument, match="remote_block_tokens"):
            parse_transfer_params({**returned, "remote_block_tokens": bad}, "cmpl-1", 8)
