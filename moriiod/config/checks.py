"""What no single value shows: settings that contradict each other, and what looks unwise.

Everything here is known before a socket opens. ``contradictions`` are errors; ``warnings`` are
for the log and for ``moriiod config check``.
"""

from __future__ import annotations

import grp
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moriiod.config.values import MAX_SOCKET_PATH_BYTES
from moriiod.core.address import (
    MAX_PORT,
    PortRange,
    check_port_ranges,
    is_loopback_host,
    is_wildcard_host,
)
from moriiod.errors import ConfigError

if TYPE_CHECKING:
    from moriiod.config.schema import Config

_MIN_BYTES_PER_BLOCK: Final = 8
_ENVELOPE_BYTES: Final = 32768
_DEFAULT_EPHEMERAL: Final = (32768, 60999)


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A setting that cannot be, given the others. ``reason`` is about ``key``."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the warnings have to know about this machine.

    Attributes:
        ephemeral_ports: First and last port the kernel gives to outgoing connections.
        memlock_bytes: Soft limit of locked memory; None = unlimited.
    """

    ephemeral_ports: tuple[int, int]
    memlock_bytes: int | None


def read_host_facts() -> HostFacts:
    """Ask the kernel; where it does not answer, Linux's defaults count."""
    ports = _DEFAULT_EPHEMERAL
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        first, last = text.split()
        ports = (int(first), int(last))
    except (OSError, ValueError):
        pass
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostFacts(ports, None if soft == resource.RLIM_INFINITY else soft)


def first_contradiction(config: Config) -> Contradiction | None:
    """Return the most telling contradiction, None if there is none."""
    for check in _CHECKS:
        for found in check(config):
            return found
    return None


def _ranks(config: Config) -> Iterator[Contradiction]:
    daemon = config.daemon
    for kind, rank, size in (
        ("tp", daemon.tp_rank, daemon.tp_size),
        ("dp", daemon.dp_rank, daemon.dp_size),
    ):
        if not 0 <= rank < size:
            yield Contradiction(f"daemon.{kind}_rank", f"{kind}_rank {rank} not in [0,{size})")


def _used_ports(config: Config) -> list[PortRange]:
    """Return the ports of all ranks; a base port of 0 needs none that are known."""
    bases = {
        "control.base_port": config.control.base_port,
        "telemetry.metrics_base_port": config.telemetry.metrics_base_port,
    }
    return [PortRange(key, base, config.n_ranks) for key, base in bases.items() if base]


def _port_ranges(config: Config) -> Iterator[Contradiction]:
    used = _used_ports(config)
    for item in used:
        if item.last > MAX_PORT:
            yield Contradiction(
                item.name,
                f"{item.count} ranks need ports {item.first} to {item.last}, and {item.last} is "
                f"over {MAX_PORT}",
            )
    try:
        check_port_ranges(used)
    except ConfigError as error:
        yield Contradiction(str(error.fields["key"]), error.message)


def _addresses(config: Config) -> Iterator[Contradiction]:
    control = config.control
    if control.advertise is not None and is_wildcard_host(control.advertise):
        yield Contradiction("control.advertise", "a wildcard is no address that peers can dial")
    hosts = control.node_hosts
    for index, host in enumerate(hosts):
        if is_wildcard_host(host):
            yield Contradiction("control.node_hosts", f"host {index} is a wildcard")
        if host in hosts[:index]:
            yield Contradiction("control.node_hosts", f"{host} is listed twice")
    if hosts and config.daemon.tp_size % len(hosts):
        yield Contradiction(
            "control.node_hosts",
            f"{len(hosts)} hosts do not divide tp_size {config.daemon.tp_size}",
        )
    if is_wildcard_host(config.advertise):
        yield Contradiction(
            "control.advertise",
            f"must be set: control.host {control.host} is a wildcard, peers cannot dial it",
        )
    yield from _unreachable_addresses(config)


def _unreachable_addresses(config: Config) -> Iterator[Contradiction]:
    """A group on several hosts cannot use loopback, unless one machine plays all of them."""
    hosts = config.control.node_hosts
    if all(is_loopback_host(host) for host in hosts):
        return
    for key, host in (
        *(("control.node_hosts", host) for host in hosts),
        ("control.host", config.control.host),
        ("control.advertise", config.advertise),
    ):
        if is_loopback_host(host):
            yield Contradiction(
                key, f"{host} is a loopback address, the other hosts in node_hosts cannot reach it"
            )


def _socket_paths(config: Config) -> Iterator[Contradiction]:
    key = "daemon.socket" if config.daemon.socket else "daemon.runtime_dir"
    # Of the two sockets, this one has the longer name.
    path = config.fd_socket_path
    n_bytes = len(path.encode("utf-8", "surrogateescape"))
    if n_bytes > MAX_SOCKET_PATH_BYTES:
        yield Contradiction(
            key,
            f"the socket path {path} has {n_bytes} bytes, the kernel takes {MAX_SOCKET_PATH_BYTES}",
        )


def _times(config: Config) -> Iterator[Contradiction]:
    heartbeat = config.control.heartbeat_interval_s
    for key, value in (
        ("control.link_timeout_s", config.control.link_timeout_s),
        ("control.link_idle_s", config.control.link_idle_s),
        ("transfer.lease_s", config.transfer.lease_s),
    ):
        if heartbeat * 2 > value:
            yield Contradiction(
                key,
                f"{value:g} s is less than two heartbeats "
                f"(control.heartbeat_interval_s is {heartbeat:g} s)",
            )
    if config.transfer.resend_first_s > config.transfer.resend_max_s:
        yield Contradiction(
            "transfer.resend_max_s",
            f"{config.transfer.resend_max_s:g} s is less than "
            f"transfer.resend_first_s, {config.transfer.resend_first_s:g} s",
        )


def _limits(config: Config) -> Iterator[Contradiction]:
    limits = config.limits
    need = limits.max_blocks_per_transfer * _MIN_BYTES_PER_BLOCK + _ENVELOPE_BYTES
    if limits.max_message_bytes < need:
        yield Contradiction(
            "limits.max_message_bytes",
            f"a pull of limits.max_blocks_per_transfer = {limits.max_blocks_per_transfer} blocks "
            f"needs {need} bytes",
        )


def _uneven_sizes(config: Config) -> Iterator[Contradiction]:
    # Nothing acts on it yet. A switch that seems to be on and is not would mislead.
    if config.topology.allow_uneven:
        yield Contradiction("topology.allow_uneven", "not in this build: peers would be refused")


_CHECKS: Final[tuple[Callable[[Config], Iterator[Contradiction]], ...]] = (
    _ranks,
    _port_ranges,
    _addresses,
    _socket_paths,
    _times,
    _limits,
    _uneven_sizes,
)


def warnings(config: Config, facts: HostFacts) -> list[str]:
    """Say what will run but may surprise, one sentence each."""
    return [
        *_port_warnings(config, facts),
        *_address_warnings(config),
        *_host_warnings(config, facts),
    ]


def _port_warnings(config: Config, facts: HostFacts) -> Iterator[str]:
    low, high = facts.ephemeral_ports
    for item in _used_ports(config):
        if item.first <= high and item.last >= low:
            yield (
                f"{item.name} = {item.first}: ports {item.first} to {item.last} lie in the "
                f"ephemeral range {low} to {high}, an outgoing connection may hold one of them "
                "at start"
            )
    if not config.control.base_port and config.n_ranks > 1:
        yield (
            "control.base_port = 0: peers cannot compute the ports of the "
            f"{config.n_ranks} ranks of this instance"
        )


def _address_warnings(config: Config) -> Iterator[str]:
    control, engine = config.control, config.engine.name
    if engine != "shm" and is_loopback_host(config.advertise):
        yield (
            f"control.advertise is {config.advertise}: engine {engine} can reach other hosts, "
            "but they cannot dial a loopback address"
        )
    node_host = config.node_host
    if node_host is not None and config.advertise != node_host:
        yield (
            f"control.advertise = {config.advertise} differs from this rank's entry in "
            f"control.node_hosts, {node_host}"
        )
    if control.auth == "none" and not is_loopback_host(control.host):
        yield (
            f"control.host = {control.host} with control.auth = none: whoever reaches port "
            f"{config.control_port} can talk to this daemon"
        )
    if config.instance.startswith("localhost-") and config.daemon.instance is None:
        yield "this machine's host name is localhost: set daemon.instance, or peers mix it up"


def _host_warnings(config: Config, facts: HostFacts) -> Iterator[str]:
    if config.engine.name != "shm" and facts.memlock_bytes is not None:
        yield (
            f"the locked-memory limit is {facts.memlock_bytes} bytes: engine {config.engine.name} "
            "cannot register a KV cache under it (systemd: LimitMEMLOCK=infinity, "
            "shell: ulimit -l unlimited)"
        )
    if config.socket_permissions & 0o007:
        yield (
            f"daemon.socket_mode = {config.daemon.socket_mode}: every user of this machine "
            "can use the sockets"
        )
    group = config.daemon.socket_group
    if group is not None and not _group_exists(group):
        yield f"daemon.socket_group = {group}: no such group on this machine"


def _group_exists(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True
