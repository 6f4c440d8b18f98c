"""Socket options, the same for every socket of a kind, so that none is forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import zmq

#: Sockets beside the dialled ones: two listeners, a monitor each, and room for libzmq's own.
_SPARE_SOCKETS: Final = 64
_RECONNECT_MS: Final = 100
_RECONNECT_MAX_MS: Final = 2000
_KEEPALIVE_IDLE_S: Final = 30
_KEEPALIVE_INTERVAL_S: Final = 10
_KEEPALIVE_COUNT: Final = 3


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """Bounds of one socket.

    Attributes:
        max_frame_bytes: A larger frame ends the connection it comes in on.
        send_hwm: Messages queued for one peer; beyond it a send is refused.
        recv_hwm: Messages of one peer that wait to be read; beyond it the peer is held up.
        handshake_s: A connection that has not finished ZMQ's own handshake by then is cut.
        heartbeat_s: Seconds between ZMQ pings; a connection that is silent for three of them, or
            stops in the middle of a frame, is cut. 0 = no pings.
    """

    max_frame_bytes: int
    send_hwm: int = 1000
    recv_hwm: int = 1000
    handshake_s: float = 5.0
    heartbeat_s: float = 0.0


def new_context(max_dialled: int) -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context for one daemon.

    Args:
        max_dialled: Most sockets that will be dialled at once; libzmq allows 1,023 unless told.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, max_dialled + _SPARE_SOCKETS)
    return context


def new_router(context: zmq.Context[zmq.Socket[bytes]], limits: SocketLimits) -> zmq.Socket[bytes]:
    """Return an unbound ROUTER that refuses what it cannot deliver.

    A client that comes back under its old identity takes it over, so that replies never go to a
    connection that is dead but not yet known to be.
    """
    socket = context.socket(zmq.ROUTER)
    _apply(socket, limits)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return socket


def new_dealer(
    context: zmq.Context[zmq.Socket[bytes]], limits: SocketLimits, routing_id: bytes
) -> zmq.Socket[bytes]:
    """Return an unconnected DEALER that queues nothing while it has no connection.

    Args:
        context: Of the daemon.
        limits: Bounds of this socket.
        routing_id: Keeps the name the other side knows us by through a reconnect.
    """
    socket = context.socket(zmq.DEALER)
    _apply(socket, limits)
    socket.setsockopt(zmq.ROUTING_ID, routing_id)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    return socket


def _apply(socket: zmq.Socket[bytes], limits: SocketLimits) -> None:
    options = {
        zmq.LINGER: 0,
        zmq.MAXMSGSIZE: limits.max_frame_bytes,
        zmq.SNDHWM: limits.send_hwm,
        zmq.RCVHWM: limits.recv_hwm,
        zmq.HANDSHAKE_IVL: round(limits.handshake_s * 1000),
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: _KEEPALIVE_IDLE_S,
        zmq.TCP_KEEPALIVE_INTVL: _KEEPALIVE_INTERVAL_S,
        zmq.TCP_KEEPALIVE_CNT: _KEEPALIVE_COUNT,
    }
    if limits.heartbeat_s > 0:
        interval_ms = round(limits.heartbeat_s * 1000)
        options[zmq.HEARTBEAT_IVL] = interval_ms
        options[zmq.HEARTBEAT_TIMEOUT] = 3 * interval_ms
        options[zmq.HEARTBEAT_TTL] = 3 * interval_ms
    for option, value in options.items():
        socket.setsockopt(option, value)
