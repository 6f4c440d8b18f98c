"""What the configuration means for each part of the daemon."""

from __future__ import annotations

from typing import Final

from moriiod.config.schema import Config
from moriiod.control.endpoint import ControlSettings
from moriiod.core.ids import Epoch
from moriiod.core.messages import Identity
from moriiod.core.settings import CoreSettings
from moriiod.ipc.server import IpcSettings
from moriiod.memory.fdserver import FdServerSettings
from moriiod.telemetry.metrics import DaemonInfo

#: An event that finds no room is sent again, a reply is not, and its client would wait for ever.
#: So there is room for an answer to everything that a client may have asked (the library: 16,384
#: requests), and for the events it is sent ahead.
_MIN_QUEUED_REPLIES: Final = 1 << 15


def identity_of(config: Config, epoch: Epoch) -> Identity:
    """Return who this daemon start is."""
    return Identity(
        instance=config.instance,
        dp_rank=config.daemon.dp_rank,
        dp_size=config.daemon.dp_size,
        tp_rank=config.daemon.tp_rank,
        tp_size=config.daemon.tp_size,
        epoch=epoch,
    )


def core_settings(config: Config) -> CoreSettings:
    """Return the times and limits the core decides by; what is no setting has its default."""
    transfer, control, limits = config.transfer, config.control, config.limits
    return CoreSettings(
        lease_s=transfer.lease_s,
        pull_timeout_s=transfer.pull_timeout_s,
        write_timeout_s=transfer.write_timeout_s,
        early_ttl_s=transfer.early_ttl_s,
        resend_first_s=transfer.resend_first_s,
        resend_max_s=transfer.resend_max_s,
        heartbeat_interval_s=control.heartbeat_interval_s,
        link_timeout_s=control.link_timeout_s,
        connect_timeout_s=control.connect_timeout_s,
        peer_forget_s=control.peer_forget_s,
        link_idle_s=control.link_idle_s,
        max_clients=limits.max_clients,
        max_peers=limits.max_peers,
        max_transfers=limits.max_transfers,
        max_blocks_per_transfer=limits.max_blocks_per_transfer,
        max_early=limits.max_early,
        max_tombstones=limits.max_tombstones,
        max_ops_in_flight=limits.max_ops_in_flight,
        max_bytes_in_flight=limits.max_bytes_in_flight,
        max_unconfirmed_events=limits.max_unconfirmed_events,
        max_token_spans=limits.max_token_spans,
        allow_uneven=config.topology.allow_uneven,
    )


def ipc_settings(config: Config) -> IpcSettings:
    """Return where workers connect."""
    return IpcSettings(
        path=config.socket_path,
        mode=config.socket_permissions,
        group=config.daemon.socket_group,
        max_message_bytes=config.limits.max_message_bytes,
        max_queued_messages=config.limits.max_queued_messages,
        min_queued_replies=_MIN_QUEUED_REPLIES,
    )


def fd_settings(config: Config) -> FdServerSettings:
    """Return where file descriptors are handed over."""
    return FdServerSettings(
        path=config.fd_socket_path,
        mode=config.socket_permissions,
        group=config.daemon.socket_group,
    )


def control_settings(config: Config) -> ControlSettings:
    """Return where peers connect."""
    return ControlSettings(
        host=config.control.host,
        port=config.control_port,
        advertise=config.advertise,
        accept_legacy_acks=config.control.legacy_acks,
        max_message_bytes=config.limits.max_message_bytes,
        max_queued_messages=config.limits.max_queued_messages,
        max_routes=config.limits.max_peers,
    )


def daemon_info(config: Config, engine: str, epoch: Epoch) -> DaemonInfo:
    """Return the constant labels of the metrics."""
    return DaemonInfo(
        instance=config.instance,
        tp_rank=config.daemon.tp_rank,
        tp_size=config.daemon.tp_size,
        dp_rank=config.daemon.dp_rank,
        dp_size=config.daemon.dp_size,
        engine=engine,
        epoch=epoch,
    )
