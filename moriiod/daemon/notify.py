"""Tells systemd how the daemon is: READY, STOPPING, STATUS and the watchdog's beat.

The protocol is one datagram of ``NAME=value`` lines to the socket that ``NOTIFY_SOCKET`` names.
Without that variable nothing is sent; a socket that cannot be reached is a warning, once, because
a daemon must not fail for want of a supervisor.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import Final

_log: Final = logging.getLogger("moriiod.notify")
_MAX_STATUS: Final = 256


class Notifier:
    """Sends notifications for this process.

    Args:
        address: ``NOTIFY_SOCKET``: a path, or ``@name`` in the abstract namespace; "" = nobody
            listens and nothing is sent.
        watchdog_interval_s: How often ``watchdog`` should be called, in seconds; None = never.
    """

    def __init__(self, address: str = "", watchdog_interval_s: float | None = None) -> None:
        self._address: Final = address
        #: Half of the time after which systemd takes the daemon for dead; None = no watchdog.
        self.watchdog_interval_s: Final = watchdog_interval_s
        #: A forked helper must not speak for the daemon.
        self._pid: Final = os.getpid()
        self._is_ready = False
        self._has_warned = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Notifier:
        """Build from ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID``.

        Values that make no sense are logged and count as not set.
        """
        address = environment.get("NOTIFY_SOCKET", "")
        if address and address[0] not in "/@":
            _log.warning("NOTIFY_SOCKET is of a kind that is not supported: %s", address)
            address = ""
        return cls(address, _watchdog_interval_s(environment) if address else None)

    def ready(self, status: str = "") -> None:
        """Say that start-up is complete. Only the first call does something."""
        if not self._is_ready:
            self._is_ready = True
            self._send("READY=1", status)

    def stopping(self, status: str = "") -> None:
        """Say that the daemon is on its way out."""
        self._send("STOPPING=1", status)

    def status(self, status: str) -> None:
        """Set the line that ``systemctl status`` shows."""
        self._send("", status)

    def watchdog(self) -> None:
        """Say that the loop is alive. Call it from the loop itself, never from a thread."""
        if self.watchdog_interval_s is not None:
            self._send("WATCHDOG=1", "")

    def _send(self, state: str, status: str) -> None:
        if not self._address or os.getpid() != self._pid:
            return
        lines = [state] if state else []
        if status:
            # A line break would start another assignment.
            lines.append("STATUS=" + " ".join(status.split())[:_MAX_STATUS])
        if not lines:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        try:
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as notify_socket:
                notify_socket.sendto("\n".join(lines).encode("utf-8"), address)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "systemd cannot be told how the daemon is: %s",
                error.strerror or error,
                extra={"address": self._address},
            )


def _watchdog_interval_s(environment: Mapping[str, str]) -> float | None:
    text = environment.get("WATCHDOG_USEC")
    if text is None:
        return None
    pid = environment.get("WATCHDOG_PID")
    if pid is not None and pid != str(os.getpid()):
        return None
    if not (text.isascii() and text.isdecimal()) or int(text[:20]) == 0:
        _log.warning("WATCHDOG_USEC is not a number of microseconds: %s", text[:32])
        return None
    return int(text[:20]) / 2 / 1_000_000
