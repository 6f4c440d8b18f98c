"""Ports, endpoints, hosts and the addresses routers write. Cases P1 P3 P5 R2 R4 R6."""

from __future__ import annotations

import pytest

from moriiod.core.address import (
    Endpoint,
    PortRange,
    RequestAddresses,
    ZmqAddress,
    check_port_ranges,
    control_port,
    control_ports,
    endpoint_for_rank,
    format_tcp,
    host_of_rank,
    is_loopback_host,
    is_wildcard_host,
    normalise_host,
    parse_port,
    parse_request_id,
    parse_zmq_address,
)
from moriiod.core.requests import PeerAddress
from moriiod.errors import ConfigError, InvalidAddress, InvalidTopology

UNIQUE = "0123456789abcdef0123456789abcdef"
Z_PREFILL = "host:10.0.0.1,handshake:6301,notify:61005"
Z_DECODE = "host:10.0.0.2,handshake:7301,notify:7501"
ROUTED = f"___prefill_addr_{Z_PREFILL}___decode_addr_{Z_DECODE}_{UNIQUE}"


# --- Ports ------------------------------------------------------------------------------------


def test_P1_every_rank_of_dp2_tp4_has_its_own_port():
    ports = [control_port(6105, dp, tp, 4) for dp in range(2) for tp in range(4)]
    assert ports == list(range(6105, 6113))


def test_P1_tp8_from_61005():
    assert [control_port(61005, 0, tp, 8) for tp in range(8)] == list(range(61005, 61013))


def test_P1_ranges_that_overlap_are_refused_naming_both_and_the_port():
    ranges = [
        control_ports("notify_port", 61800, 16, 8),
        control_ports("handshake_port", 61700, 16, 8),
    ]
    with pytest.raises(ConfigError, match=r"handshake_port .* notify_port .* share port 61800"):
        check_port_ranges(ranges)


def test_P1_adjacent_ranges_are_fine():
    check_port_ranges([control_ports("a", 6301, 1, 4), control_ports("b", 6305, 1, 4)])
    check_port_ranges([PortRange("last", 65535, 1)])
    check_port_ranges([])


def test_P1_adjacent_bases_collide_from_tp2_on():
    check_port_ranges([control_ports("a", 5601, 1, 1), control_ports("b", 5602, 1, 1)])
    with pytest.raises(ConfigError, match="share port 5602"):
        check_port_ranges([control_ports("a", 5601, 1, 2), control_ports("b", 5602, 1, 2)])


@pytest.mark.parametrize(
    "item",
    [
        PortRange("metrics_port", 0, 1),
        PortRange("metrics_port", -5, 10),
        PortRange("metrics_port", 65530, 8),
        PortRange("metrics_port", 6301, 0),
        PortRange("metrics_port", True, 1),
    ],
)
def test_ranges_outside_the_ports_are_refused_naming_the_key(item):
    with pytest.raises(ConfigError, match="metrics_port") as caught:
        check_port_ranges([item])
    assert caught.value.fields["key"] == "metrics_port"


@pytest.mark.parametrize("base", [0, 65536, -1, True, "6301", 6301.0])
def test_base_port_that_is_no_port_is_refused(base):
    with pytest.raises(InvalidAddress, match="no port"):
        control_port(base, 0, 0, 1)


def test_rank_whose_port_would_leave_the_range_is_refused():
    assert control_port(65528, 0, 7, 8) == 65535
    with pytest.raises(InvalidAddress, match="port 65536"):
        control_port(65529, 0, 7, 8)


@pytest.mark.parametrize(
    ("dp", "tp", "size"),
    [(0, -1, 4), (0, 4, 4), (-1, 0, 4), (1024, 0, 4), (0, True, 4), (0, 0, 0), (0, 0, True)],
)
def test_R2_port_of_a_rank_that_is_not_there_is_refused(dp, tp, size):
    with pytest.raises(InvalidTopology):
        control_port(6301, dp, tp, size)


# --- Endpoints --------------------------------------------------------------------------------


def test_R6_claimed_sizes_of_the_router_do_not_move_the_port():
    peer = PeerAddress("10.0.0.1", 6301, tp_size=1, dp_size=1, dp_rank=5)
    assert endpoint_for_rank(peer, dp_rank=5, tp_rank=0, tp_size=1) == Endpoint("10.0.0.1", 6306)


def test_R4_ranks_of_two_hosts_dial_their_own_host():
    peer = PeerAddress("h0", 6301, node_hosts=("h0", "h1"))
    got = [endpoint_for_rank(peer, 0, rank, 16) for rank in (0, 7, 8, 15)]
    assert got == [
        Endpoint("h0", 6301),
        Endpoint("h0", 6308),
        Endpoint("h1", 6309),
        Endpoint("h1", 6316),
    ]


def test_R4_hosts_that_do_not_divide_are_refused_not_folded_onto_the_first():
    peer = PeerAddress("h0", 6301, node_hosts=("h0", "h1", "h2"))
    with pytest.raises(InvalidTopology, match=r"16 .* 3 hosts"):
        endpoint_for_rank(peer, 0, 15, 16)


@pytest.mark.parametrize("hosts", [("h0", "h0"), ("::1", "[0:0::1]"), ("h0", "H0.")])
def test_R4_host_named_twice_is_refused(hosts):
    with pytest.raises(InvalidAddress, match="named twice"):
        host_of_rank(hosts, 0, 16)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "[::]", "*", "a b"])
def test_R4_host_that_cannot_be_dialled_is_refused(host):
    with pytest.raises(InvalidAddress):
        host_of_rank(("h0", host), 0, 16)


def test_R4_no_hosts_and_bad_ranks_are_refused():
    with pytest.raises(InvalidTopology, match="0 hosts"):
        host_of_rank((), 0, 16)
    with pytest.raises(InvalidTopology, match="tp_rank"):
        host_of_rank(("h0",), 16, 16)


# --- Hosts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("[FE80::1%eth0.7]", "fe80::1%eth0.7"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("[::ffff:10.0.0.1]", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("Node-7.Example.", "node-7.example"),
        ("prefill_0", "prefill_0"),
        ("7up", "7up"),
    ],
)
def test_P5_every_spelling_of_a_host_becomes_one(host, expected):
    assert normalise_host(host) == expected


@pytest.mark.parametrize(
    "host",
    [
        "",
        "*",
        "[::1]:6301",
        "10.0.0.1:6301",
        "[::1",
        "::1]",
        "[10.0.0.1]",
        "[node]",
        "fe80::1%",
        "fe80::1%a/b",
        "1.2.3",
        "256.0.0.1",
        "6301",
        "a..b",
        ".",
        "-a",
        "a-",
        "a b",
        "tcp://a",
        "a/b",
        "x" * 64,
        "a." * 127 + "b",
        "knöten",
        "a\n",
    ],
)
def test_P5_malformed_hosts_are_refused(host):
    with pytest.raises(InvalidAddress):
        normalise_host(host)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("::1", "tcp://[::1]:6301"),
        ("[::1]", "tcp://[::1]:6301"),
        ("fe80::1%eth0", "tcp://[fe80::1%eth0]:6301"),
        ("::ffff:127.0.0.1", "tcp://127.0.0.1:6301"),
        ("10.0.0.1", "tcp://10.0.0.1:6301"),
        ("Node7", "tcp://node7:6301"),
        ("*", "tcp://*:6301"),
        ("::", "tcp://[::]:6301"),
    ],
)
def test_P5_endpoint_text_has_brackets_exactly_for_ipv6(host, expected):
    assert format_tcp(host, 6301) == expected


def test_P5_endpoint_text_needs_a_host_and_a_port():
    with pytest.raises(InvalidAddress):
        format_tcp("[::1]:6301", 6301)
    with pytest.raises(InvalidAddress):
        format_tcp("::1", 0)


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::", "[::]", "::ffff:0.0.0.0"])
def test_P3_wildcards_are_known(host):
    assert is_wildcard_host(host)
    assert not is_loopback_host(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "::1", "[::1]", "LocalHost"])
def test_P4_loopback_is_known(host):
    assert is_loopback_host(host)
    assert not is_wildcard_host(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "node", "fe80::1%eth0", "a b"])
def test_other_hosts_are_neither_wildcard_nor_loopback(host):
    assert not is_wildcard_host(host)
    assert not is_loopback_host(host)


# --- Parsing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:::1,handshake:6301,notify:61005", ZmqAddress("::1", 6301, 61005)),
        ("host:[::1],handshake:6301,notify:61005", ZmqAddress("::1", 6301, 61005)),
        ("host:fe80::1%eth0,handshake:1,notify:65535", ZmqAddress("fe80::1%eth0", 1, 65535)),
        (Z_PREFILL, ZmqAddress("10.0.0.1", 6301, 61005)),
        (
            "host:node-7.example,handshake:6301,notify:61005",
            ZmqAddress("node-7.example", 6301, 61005),
        ),
    ],
)
def test_P5_combined_address_parses(text, expected):
    assert parse_zmq_address(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:::1",
        "host:::1,handshake:,notify:61005",
        "host:,handshake:6301,notify:61005",
        "host:::1,notify:61005,handshake:6301",
        "host:6301,handshake:::1,notify:61005",
        "host:::1,handshake:abc,notify:61005",
        "host:::1,handshake:6301,handshake:6301",
        "host:::1,host:::1,handshake:6301,notify:61005",
        "host:::1,handshake:6301,notify:61005,",
        "host:::1,handshake:6301,notify:0",
        "host:::1,handshake:65536,notify:61005",
        "host:::1,handshake:6301 ,notify:61005",
        "host:0.0.0.0,handshake:6301,notify:61005",
        "HOST:::1,handshake:6301,notify:61005",
    ],
)
def test_P5_malformed_combined_addresses_are_refused(text):
    with pytest.raises(InvalidAddress):
        parse_zmq_address(text)


@pytest.mark.parametrize("text", ["", "abc", "-1", "+1", "6_301", "٣", "0", "065536", "1e3", " 1"])
def test_P5_ports_are_plain_decimal_numbers(text):
    with pytest.raises(InvalidAddress):
        parse_port(text)


@pytest.mark.parametrize(
    "wrapped",
    [ROUTED, f"cmpl-{ROUTED}-0-1a2b3c4d", f"chatcmpl-{ROUTED}", f"cmpl-{ROUTED}-0"],
)
def test_request_id_of_a_router_gives_both_addresses(wrapped):
    assert parse_request_id(wrapped) == RequestAddresses(
        ZmqAddress("10.0.0.1", 6301, 61005), ZmqAddress("10.0.0.2", 7301, 7501), UNIQUE
    )


@pytest.mark.parametrize("request_id", ["", "cmpl-abc-0-1a2b3c4d", UNIQUE, "prefill_addr_"])
def test_request_id_without_addresses_is_none(request_id):
    assert parse_request_id(request_id) is None


@pytest.mark.parametrize(
    "request_id",
    [
        f"___prefill_addr_{Z_PREFILL}_{UNIQUE}",
        f"___decode_addr_{Z_DECODE}_{UNIQUE}",
        f"___decode_addr_{Z_DECODE}___prefill_addr_{Z_PREFILL}_{UNIQUE}",
        f"___prefill_addr_{Z_PREFILL}___decode_addr_{Z_DECODE}_{UNIQUE[:-1]}",
        f"___prefill_addr_{Z_PREFILL}___decode_addr_{Z_DECODE}_{UNIQUE.upper()}",
        f"___prefill_addr_{Z_PREFILL}___decode_addr_{Z_DECODE}_{UNIQUE}.tail",
        f"___prefill_addr_oops___decode_addr_{Z_DECODE}_{UNIQUE}",
        f"___prefill_addr_{Z_PREFILL}___decode_addr_oops_{UNIQUE}",
        f"{'x' * 4096}{ROUTED}",
    ],
)
def test_request_id_with_broken_addresses_is_refused(request_id):
    with pytest.raises(InvalidAddress):
        parse_request_id(request_id)
