"""Counts connections that never became ZMQ ones: port scanners, HTTP clients, stalled peers."""

from __future__ import annotations

import asyncio
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from moriiod.zmqio.hooks import ShellHooks
from moriiod.zmqio.loopsocket import LoopSocket

#: Kind of problem that is counted.
HANDSHAKE_FAILED: Final = "control_handshake_failed"

_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_ACCEPT_FAILED
)
_FRAMES: Final = 2
_MAX_FRAME_BYTES: Final = 1024


class ListenerMonitor:
    """Reads libzmq's events of a listening socket.

    Args:
        listener: The bound socket; closed by its owner, after this monitor.
        loop: The running loop.
        hooks: The driver.
    """

    def __init__(
        self, listener: zmq.Socket[bytes], loop: asyncio.AbstractEventLoop, hooks: ShellHooks
    ) -> None:
        self._listener = listener
        self._hooks = hooks
        pair = listener.get_monitor_socket(_EVENTS)
        self._socket = LoopSocket(
            pair, loop, self._on_event, hooks.on_bug, _FRAMES, _MAX_FRAME_BYTES
        )

    def close(self) -> None:
        """Stop. Idempotent."""
        if not self._socket.is_closed:
            self._listener.disable_monitor()
            self._socket.close()

    def _on_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)
        name = zmq.Event(event["event"]).name or "unknown"
        self._hooks.count_problem(HANDSHAKE_FAILED, f"{name.lower()} value {event['value']}")
