"""Where a daemon's control endpoint is, and how peers' addresses are written and read.

There is one control endpoint per daemon. Both sides compute its port by one formula from the
sizes of the instance it belongs to, so nobody has to be told 64 ports.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moriiod.core.ids import MAX_RANKS
from moriiod.core.requests import PeerAddress
from moriiod.errors import ConfigError, InvalidAddress, InvalidTopology

MAX_PORT: Final = 65535
_MAX_NAME: Final = 253
#: Longest request id that is searched for addresses, in characters.
_MAX_REQUEST_ID: Final = 2048

_LABEL: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_SCOPE: Final = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_PREFILL: Final = "___prefill_addr_"
_DECODE: Final = "___decode_addr_"
_REQUEST_TAIL: Final = re.compile(r"(?P<decode>.+)_(?P<unique>[0-9a-f]{32})(-[0-9A-Za-z-]*)?")
_ZMQ_KEYS: Final = ("host", "handshake", "notify")

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host (normalised, without brackets) and a TCP port."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports that something needs on one host; ``name`` is the setting an operator would change."""

    name: str
    first: int
    count: int

    @property
    def last(self) -> int:
        """The highest port of the range."""
        return self.first + self.count - 1


@dataclass(frozen=True, slots=True)
class ZmqAddress:
    """How routers of the MoRIIO connector write an instance: base ports, not a rank's."""

    host: str
    handshake_port: int
    notify_port: int


@dataclass(frozen=True, slots=True)
class RequestAddresses:
    """What a router encodes in a request id."""

    prefill: ZmqAddress
    decode: ZmqAddress
    #: The router's own unique part: 32 hex digits.
    unique: str


# --- Ports ------------------------------------------------------------------------------------


def control_port(base_port: int, dp_rank: int, tp_rank: int, tp_size: int) -> int:
    """Return the control port of one rank: ``base_port + dp_rank * tp_size + tp_rank``.

    Args:
        base_port: Port of (dp 0, tp 0) of that instance.
        dp_rank: 0 on.
        tp_rank: 0 .. tp_size - 1.
        tp_size: TP size of the instance the port belongs to, never of the one that dials.

    Raises:
        InvalidTopology: A rank or the size is impossible.
        InvalidAddress: The port, or the base port, is not in 1..65535.
    """
    _check_rank("dp_rank", dp_rank, MAX_RANKS)
    if type(tp_size) is not int or not 1 <= tp_size <= MAX_RANKS:
        raise InvalidTopology(
            f"tp_size must be from 1 to {MAX_RANKS}, not {tp_size!r}", tp_size=repr(tp_size)
        )
    _check_rank("tp_rank", tp_rank, tp_size)
    _check_port(base_port)
    port = base_port + dp_rank * tp_size + tp_rank
    if port > MAX_PORT:
        raise InvalidAddress(
            f"base port {base_port} puts dp rank {dp_rank}, tp rank {tp_rank} of TP size "
            f"{tp_size} at port {port}, above {MAX_PORT}",
            base_port=base_port,
            port=port,
        )
    return port


def control_ports(name: str, base_port: int, dp_size: int, tp_size: int) -> PortRange:
    """Return the control ports of all ranks of an instance, for ``check_port_ranges``."""
    return PortRange(name, base_port, dp_size * tp_size)


def check_port_ranges(ranges: Sequence[PortRange]) -> None:
    """Refuse port ranges of one host that collide or leave 1..65535, before anything is bound.

    Raises:
        ConfigError: Names the range, or the two ranges and the first port they share.
    """
    for item in ranges:
        if type(item.first) is not int or item.count < 1 or item.first < 1 or item.last > MAX_PORT:
            raise ConfigError(
                f"{item.name}: {item.count} ports from {item.first!r} do not lie in 1..{MAX_PORT}",
                key=item.name,
                first=repr(item.first),
                count=item.count,
            )
    in_order = sorted(ranges, key=lambda item: item.first)
    for low, high in itertools.pairwise(in_order):
        if high.first <= low.last:
            raise ConfigError(
                f"{low.name} ({low.first}..{low.last}) and {high.name} "
                f"({high.first}..{high.last}) share port {high.first}",
                key=low.name,
                other_key=high.name,
                port=high.first,
            )


# --- Endpoints --------------------------------------------------------------------------------


def host_of_rank(hosts: Sequence[str], tp_rank: int, tp_size: int) -> str:
    """Return which of the hosts of one TP group has a rank: equal shares, in order.

    Raises:
        InvalidTopology: The ranks cannot be shared out evenly, or the rank is not in the group.
        InvalidAddress: A host is empty, a wildcard, malformed or named twice.
    """
    _check_rank("tp_rank", tp_rank, tp_size)
    names = [_dialable(host) for host in hosts]
    if len(set(names)) != len(names):
        raise InvalidAddress(f"a host is named twice in {', '.join(names)}", hosts=",".join(names))
    if not names or tp_size % len(names):
        raise InvalidTopology(
            f"TP size {tp_size} cannot be shared out evenly over {len(names)} hosts",
            tp_size=tp_size,
            hosts=len(names),
        )
    return names[tp_rank * len(names) // tp_size]


def endpoint_for_rank(peer: PeerAddress, dp_rank: int, tp_rank: int, tp_size: int) -> Endpoint:
    """Return the control endpoint of one rank of a peer instance.

    Args:
        peer: The instance as the router names it; its claimed sizes are not used here.
        dp_rank: DP rank that holds the request. The peer's handshake tells whether it exists.
        tp_rank: TP rank in the peer's group.
        tp_size: The peer's TP size, resolved (not 0).

    Raises:
        InvalidTopology: A rank is outside its group, or the hosts do not divide it.
        InvalidAddress: A host cannot be dialled, or the port leaves 1..65535.
    """
    port = control_port(peer.base_port, dp_rank, tp_rank, tp_size)
    return Endpoint(host_of_rank(peer.node_hosts or (peer.host,), tp_rank, tp_size), port)


def format_tcp(host: str, port: int) -> str:
    """Return the ZMQ endpoint of a host and port; IPv6 literals get their brackets.

    Raises:
        InvalidAddress: Host or port cannot be used.
    """
    _check_port(port)
    name = host if host == "*" else normalise_host(host)
    return f"tcp://[{name}]:{port}" if ":" in name else f"tcp://{name}:{port}"


# --- Hosts ------------------------------------------------------------------------------------


def normalise_host(host: str) -> str:
    """Return the one spelling of a host name or IP literal that is used for comparing.

    Brackets go, IPv6 is compressed and keeps its scope id (``fe80::1%eth0``), an IPv4 address in
    IPv6 clothing becomes IPv4, names become lower case.

    Raises:
        InvalidAddress: Empty, ``*``, malformed, or with a port.
    """
    text = _without_brackets(host)
    ip = _parse_ip(text)
    if ip is not None and (text == host or ip.version == 6):
        return str(_unmapped(ip))
    labels = text.removesuffix(".").split(".")
    is_name = (
        text == host
        and len(text) <= _MAX_NAME
        and all(_LABEL.fullmatch(label) for label in labels)
        # A last label of digits can only be a broken IPv4 literal.
        and not labels[-1].isdigit()
    )
    if not is_name:
        raise InvalidAddress(
            f"{host[:_MAX_NAME]!r} is no host name or IP literal (give the port apart from it)",
            host=host[:_MAX_NAME],
        )
    return text.removesuffix(".").lower()


def is_wildcard_host(host: str) -> bool:
    """Say whether a host means "any interface": good for binding, useless to a peer."""
    text = _without_brackets(host)
    ip = _parse_ip(text)
    return text in ("", "*") or (ip is not None and _unmapped(ip).is_unspecified)


def is_loopback_host(host: str) -> bool:
    """Say whether a host can only be reached from this machine (as far as its text tells)."""
    text = _without_brackets(host)
    ip = _parse_ip(text)
    return text.lower() == "localhost" or (ip is not None and _unmapped(ip).is_loopback)


# --- Parsing ----------------------------------------------------------------------------------


def parse_zmq_address(text: str) -> ZmqAddress:
    """Parse ``host:IP,handshake:PORT,notify:PORT``; the IP may be IPv6, with or without brackets.

    Raises:
        InvalidAddress: A part is missing, empty, repeated, out of order or malformed.
    """
    values = []
    parts = text.split(",")
    for key, part in zip(_ZMQ_KEYS, parts, strict=False):
        name, _, value = part.partition(":")
        if name == key and value:
            values.append(value)
    if len(parts) != len(_ZMQ_KEYS) or len(values) != len(_ZMQ_KEYS):
        raise InvalidAddress(
            f"{text[:_MAX_NAME]!r} is not of the form host:IP,handshake:PORT,notify:PORT",
            address=text[:_MAX_NAME],
        )
    return ZmqAddress(_dialable(values[0]), parse_port(values[1]), parse_port(values[2]))


def parse_port(text: str) -> int:
    """Return a port written in decimal digits.

    Raises:
        InvalidAddress: Anything else, or not in 1..65535.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        raise InvalidAddress(f"{text[:32]!r} is no port", port=text[:32])
    _check_port(int(text))
    return int(text)


def parse_request_id(request_id: str) -> RequestAddresses | None:
    """Return the two addresses that a router put into a request id, None if there are none.

    The form is ``___prefill_addr_{Z}___decode_addr_{Z}_{32 hex}`` with Z as in
    ``parse_zmq_address``. The serving engine may have put ``cmpl-`` before it and ``-0-1a2b3c4d``
    behind it.

    Raises:
        InvalidAddress: It has the marks of such an id, but cannot be parsed.
    """
    _, has_prefill, rest = request_id.partition(_PREFILL)
    prefill, has_decode, tail = rest.partition(_DECODE)
    if not has_prefill and _DECODE not in request_id:
        return None
    match = _REQUEST_TAIL.fullmatch(tail) if len(request_id) <= _MAX_REQUEST_ID else None
    if not has_prefill or not has_decode or match is None:
        raise InvalidAddress(
            "the request id starts like one that carries addresses, but is none",
            request_id=request_id[:_MAX_NAME],
        )
    return RequestAddresses(
        parse_zmq_address(prefill), parse_zmq_address(match["decode"]), match["unique"]
    )


def _without_brackets(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _parse_ip(text: str) -> _Ip | None:
    _, has_scope, scope = text.partition("%")
    if has_scope and not _SCOPE.fullmatch(scope):
        return None
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _unmapped(ip: _Ip) -> _Ip:
    """A v4-mapped literal is dialled as IPv4 by the kernel, so it is the same host."""
    return getattr(ip, "ipv4_mapped", None) or ip


def _dialable(host: str) -> str:
    if is_wildcard_host(host):
        raise InvalidAddress(f"{host!r} names no host that can be dialled", host=host)
    return normalise_host(host)


def _check_rank(what: str, rank: int, size: int) -> None:
    if type(rank) is not int or not 0 <= rank < size:
        raise InvalidTopology(
            f"{what} {rank!r} is not in 0..{size - 1}", rank=repr(rank), size=size
        )


def _check_port(port: int) -> None:
    if type(port) is not int or not 1 <= port <= MAX_PORT:
        raise InvalidAddress(f"{port!r} is no port from 1 to {MAX_PORT}", port=repr(port))
