"""Every setting moriiod has, with its default, its bounds and what it is for.

The models are frozen and closed. The order of sections and keys here is the order in
``configs/moriiod.toml`` and in ``docs/configuration.md``, which are rendered from this file.
"""

from __future__ import annotations

import socket
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from moriiod.config.checks import first_contradiction
from moriiod.config.values import (
    AbsolutePath,
    Choice,
    Host,
    Hosts,
    Name,
    OctalMode,
    Seconds,
    Switch,
    Whole,
)
from moriiod.core.address import control_port, host_of_rank
from moriiod.core.ids import MAX_BLOCKS_PER_GROUP, MAX_DURATION_S, MAX_GROUPS, MAX_RANKS

MAX_INSTANCE_NAME: Final = 128
_PORT: Final = Whole(0, 65535, metavar="PORT")
#: Ranks are checked against their size, which gives the better message.
_TP_RANK: Final = Whole(-(1 << 31), 1 << 31, allowed="0 to tp_size - 1")
_DP_RANK: Final = Whole(-(1 << 31), 1 << 31, allowed="0 to dp_size - 1")


class Section(BaseModel):
    """Base of the sections: closed, frozen, and defaults are checked like any value."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class DaemonSection(Section):
    """Who this daemon is and where it lives on this machine."""

    tp_rank: Annotated[int, _TP_RANK] = Field(
        description="Tensor-parallel rank of the worker this daemon serves. Required; "
        "usually a flag, because it differs for each daemon of a node."
    )
    tp_size: Annotated[int, Whole(1, MAX_RANKS)] = Field(
        description="Tensor-parallel size of the instance. Required: there is no default, because "
        "a wrong guess gives two ranks the same port."
    )
    dp_rank: Annotated[int, _DP_RANK] = Field(default=0, description="Data-parallel rank.")
    dp_size: Annotated[int, Whole(1, MAX_RANKS)] = Field(
        default=1, description="Data-parallel size of the instance."
    )
    instance: Annotated[str, Name(MAX_INSTANCE_NAME)] | None = Field(
        default=None,
        description="Name of the serving instance; all its ranks share it. Without it: the first "
        "of node_hosts or else the host name, a dash, and base_port. Set it when the "
        "data-parallel ranks of one instance are on several hosts.",
    )
    runtime_dir: Annotated[str, AbsolutePath()] = Field(
        default="/run/moriiod",
        description="Directory of the sockets: rank{N}.sock for workers and rank{N}.fd.sock for "
        "memory handles, N = dp_rank * tp_size + tp_rank. Two instances on one host need two "
        "directories.",
    )
    socket: Annotated[str, AbsolutePath()] | None = Field(
        default=None,
        description="Path of the worker socket instead of the one in runtime_dir. The fd socket "
        "is beside it, with .fd.sock in place of .sock.",
    )
    socket_mode: Annotated[str, OctalMode()] = Field(
        default="0660",
        description="Permissions of both sockets, whatever the umask is.",
    )
    socket_group: Annotated[str, Name(32)] | None = Field(
        default=None,
        description="Group that owns both sockets. Without it: the group of the process.",
    )
    drain_timeout_s: Annotated[float, Seconds(0, 3600)] = Field(
        default=30.0,
        description="How long a stop waits for transfers to end before it aborts them. 0 aborts "
        "them at once.",
    )


class ControlSection(Section):
    """The TCP endpoint where other daemons reach this one."""

    host: Annotated[str, Host()] = Field(
        default="127.0.0.1",
        description="Address to listen on. The default serves peers on this machine, which is as "
        "far as the shm engine reaches.",
    )
    advertise: Annotated[str, Host()] | None = Field(
        default=None,
        description="Address that peers are told. Without it: this rank's entry in node_hosts, or "
        "else host. Required where host is a wildcard.",
    )
    base_port: Annotated[int, _PORT] = Field(
        default=6301,
        description="Control port of rank 0; a daemon listens on base_port + dp_rank * tp_size + "
        "tp_rank. Routers call it remote_handshake_port. 0 lets the kernel choose a port that "
        "peers cannot compute: for tests and single-rank instances.",
    )
    node_hosts: Annotated[tuple[str, ...], Hosts(MAX_RANKS)] = Field(
        default=(),
        description="Hosts of a tensor-parallel group that spans several, in rank order. Their "
        "number must divide tp_size.",
    )
    auth: Annotated[Literal["none"], Choice(("none",))] = Field(
        default="none",
        description="How peers prove who they are. With none, the network must keep strangers "
        "away from the control ports.",
    )
    heartbeat_interval_s: Annotated[float, Seconds(0.05, 60)] = Field(
        default=1.0, description="Pause between two heartbeats of a link; they renew leases too."
    )
    link_timeout_s: Annotated[float, Seconds(0.2, 3600)] = Field(
        default=5.0, description="A peer that was not heard for so long is lost."
    )
    link_idle_s: Annotated[float, Seconds(1, MAX_DURATION_S)] = Field(
        default=300.0, description="A link that no transfer used for so long is closed."
    )
    connect_timeout_s: Annotated[float, Seconds(0.1, 600)] = Field(
        default=10.0, description="A peer that has not answered by then is unreachable."
    )
    peer_forget_s: Annotated[float, Seconds(1, MAX_DURATION_S)] = Field(
        default=60.0, description="A lost peer that nothing waits for is forgotten after so long."
    )
    legacy_acks: Annotated[bool, Switch()] = Field(
        default=False,
        description="Take the ACKs of peers that speak the in-process connector's protocol "
        "(plain transfer ids and its release message). They have no epoch and no claim: whoever "
        "reaches the control port can end a lease that nobody has claimed yet.",
    )


class TransferSection(Section):
    """How long things may take. No deadline frees memory: it starts a drain."""

    lease_s: Annotated[float, Seconds(0.5, MAX_DURATION_S)] = Field(
        default=60.0,
        description="How long published blocks are kept without a sign of life from a consumer; "
        "a publish may ask for another time.",
    )
    pull_timeout_s: Annotated[float, Seconds(0.1, MAX_DURATION_S)] = Field(
        default=120.0, description="A pull that has not ended by then is failed and drained."
    )
    write_timeout_s: Annotated[float, Seconds(0.1, MAX_DURATION_S)] = Field(
        default=120.0, description="The same for push and reserve."
    )
    early_ttl_s: Annotated[float, Seconds(0.1, MAX_DURATION_S)] = Field(
        default=30.0,
        description="How long a claim, grant or ACK waits for the local worker to speak.",
    )
    resend_first_s: Annotated[float, Seconds(0.01, 60)] = Field(
        default=0.25,
        description="First repeat of a message that must arrive; the pause doubles each time.",
    )
    resend_max_s: Annotated[float, Seconds(0.01, 600)] = Field(
        default=5.0, description="Longest pause between two repeats."
    )


class LimitsSection(Section):
    """What the daemon holds at most. At a limit it answers Busy or TooLarge; nothing grows."""

    max_clients: Annotated[int, Whole(1, 64)] = Field(default=16, description="Attached workers.")
    max_peers: Annotated[int, Whole(1, 65536)] = Field(
        default=1024, description="Known peer daemons, and dialled endpoints."
    )
    max_transfers: Annotated[int, Whole(1, 1 << 20)] = Field(
        default=16384, description="Transfers that are live or have messages to deliver."
    )
    max_blocks_per_transfer: Annotated[int, Whole(1, MAX_BLOCKS_PER_GROUP * MAX_GROUPS)] = Field(
        default=1 << 18, description="Block ids of one transfer, all KV groups together."
    )
    max_early: Annotated[int, Whole(1, 1 << 20)] = Field(
        default=4096, description="Claims, grants and ACKs that wait for their transfer."
    )
    max_tombstones: Annotated[int, Whole(16, 1 << 22)] = Field(
        default=8192, description="Ended transfers that are remembered to answer repeats."
    )
    max_ops_in_flight: Annotated[int, Whole(1, 65536)] = Field(
        default=256, description="Operations posted to the engine; more wait in order."
    )
    max_bytes_in_flight: Annotated[int, Whole(1 << 20, 1 << 50, metavar="BYTES")] = Field(
        default=1 << 34,
        description="Bytes of posted operations; one operation is always let through.",
    )
    max_token_spans: Annotated[int, Whole(1, 1 << 26)] = Field(
        default=1 << 20,
        description="Descriptors of one token each in one operation: what it takes to split the "
        "heads of an NHD layout. Above it a transfer is refused.",
    )
    max_unconfirmed_events: Annotated[int, Whole(16, 1 << 22)] = Field(
        default=65536, description="Events that a client has not confirmed, with its transfers."
    )
    max_message_bytes: Annotated[int, Whole(1 << 16, 1 << 30, metavar="BYTES")] = Field(
        default=1 << 24, description="Largest message body, from workers and from peers."
    )
    max_queued_messages: Annotated[int, Whole(16, 1 << 20)] = Field(
        default=4096, description="Messages queued in each direction of a socket (high-water mark)."
    )


class EngineSection(Section):
    """The library that moves the bytes."""

    name: Annotated[
        Literal["shm", "mori", "nixl", "auto"], Choice(("shm", "mori", "nixl", "auto"))
    ] = Field(
        default="shm",
        description="shm copies within one host and needs nothing; mori is RDMA and XGMI through "
        "MoRI-IO; nixl is UCX. auto takes mori where it works, or else nixl, or else shm. mori "
        "and nixl are not in this build yet: serve refuses them.",
    )
    shm_chunk_bytes: Annotated[int, Whole(4096, 1 << 30, metavar="BYTES")] = Field(
        default=1 << 22,
        description="What shm copies between two looks at whether the operation was cancelled.",
    )


class TelemetrySection(Section):
    """What the daemon tells about itself."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Choice(("debug", "info", "warning", "error")),
    ] = Field(default="info", description="debug has one line for each state change of a transfer.")
    log_format: Annotated[Literal["human", "json"], Choice(("human", "json"))] = Field(
        default="human", description="Lines on stderr: key=value, or one JSON object each."
    )
    metrics_host: Annotated[str, Host()] = Field(
        default="127.0.0.1", description="Address of /metrics, /healthz and /readyz."
    )
    metrics_base_port: Annotated[int, _PORT] = Field(
        default=0,
        description="HTTP port of rank 0; a daemon listens on metrics_base_port + dp_rank * "
        "tp_size + tp_rank. 0 turns it off.",
    )
    max_peer_labels: Annotated[int, Whole(0, 1000)] = Field(
        default=64,
        description="Peers that have their own metric series; the others are counted together as "
        "peer=other.",
    )


class TopologySection(Section):
    """Which pairs of instances may work together."""

    allow_uneven: Annotated[bool, Switch()] = Field(
        default=False,
        description="Accept peers whose tensor-parallel size is not a multiple or a divisor of "
        "ours. Must be set on both sides.",
    )


class Config(Section):
    """All settings of one daemon, consistent with each other.

    Raises:
        pydantic.ValidationError: A value is out of bounds or contradicts another. ``config.load``
            turns it into a ``ConfigError`` that says where the value came from.
    """

    daemon: DaemonSection
    control: ControlSection = ControlSection()
    transfer: TransferSection = TransferSection()
    limits: LimitsSection = LimitsSection()
    engine: EngineSection = EngineSection()
    telemetry: TelemetrySection = TelemetrySection()
    topology: TopologySection = TopologySection()

    @model_validator(mode="after")
    def _is_consistent(self) -> Config:
        found = first_contradiction(self)
        if found is not None:
            raise PydanticCustomError(
                "contradiction", "{key}: {reason}", {"key": found.key, "reason": found.reason}
            )
        return self

    @property
    def n_ranks(self) -> int:
        """Number of daemons of the instance, data-parallel and tensor-parallel ranks together."""
        return self.daemon.dp_size * self.daemon.tp_size

    @property
    def rank_offset(self) -> int:
        """Index of this daemon in its instance; what is added to every base port."""
        return self.daemon.dp_rank * self.daemon.tp_size + self.daemon.tp_rank

    @property
    def instance(self) -> str:
        """Name of the instance, given or derived."""
        if self.daemon.instance is not None:
            return self.daemon.instance
        hosts = self.control.node_hosts
        suffix = f"-{self.control.base_port}"
        host = hosts[0] if hosts else own_host_name()
        return host[: MAX_INSTANCE_NAME - len(suffix)] + suffix

    @property
    def socket_path(self) -> str:
        """Where workers connect."""
        return self.daemon.socket or f"{self.daemon.runtime_dir}/rank{self.rank_offset}.sock"

    @property
    def fd_socket_path(self) -> str:
        """Where file descriptors are handed over; beside ``socket_path``."""
        return self.socket_path.removesuffix(".sock") + ".fd.sock"

    @property
    def socket_permissions(self) -> int:
        """Permission bits of both sockets."""
        return int(self.daemon.socket_mode, 8)

    @property
    def control_port(self) -> int:
        """Port peers dial; 0 if the kernel is to choose one."""
        return self._port(self.control.base_port)

    @property
    def metrics_port(self) -> int:
        """Port of the HTTP endpoint; 0 if there is none."""
        return self._port(self.telemetry.metrics_base_port)

    def _port(self, base: int) -> int:
        daemon = self.daemon
        return base and control_port(base, daemon.dp_rank, daemon.tp_rank, daemon.tp_size)

    @property
    def advertise(self) -> str:
        """Host that peers are told, without brackets."""
        if self.control.advertise is not None:
            return self.control.advertise
        return self.node_host or self.control.host

    @property
    def node_host(self) -> str | None:
        """This rank's entry in ``node_hosts``, None if the group is on one host."""
        hosts = self.control.node_hosts
        if not hosts:
            return None
        return host_of_rank(hosts, self.daemon.tp_rank, self.daemon.tp_size)


def own_host_name() -> str:
    """Return the name of this machine, reduced to what an instance name may hold."""
    name = "".join(c for c in socket.gethostname() if c.isprintable() and not c.isspace())
    return name or "localhost"
