"""The life of the process: start, signals, what systemd is told, the exit status."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Any, Final

import uvloop

from moriiod.config.load import LoadedConfig
from moriiod.daemon.app import Daemon, Ended, EngineMaker, Phase
from moriiod.daemon.clock import Every, LoopClock
from moriiod.daemon.exitcodes import ExitCode
from moriiod.daemon.notify import Notifier
from moriiod.telemetry import log

_log: Final = logging.getLogger("moriiod.daemon")
#: Added to the number of the signal that ended the process.
_SIGNAL_STATUS: Final = 128


def serve(loaded: LoadedConfig, make: EngineMaker | None = None) -> int:
    """Run one daemon until it is stopped.

    Args:
        loaded: Its configuration.
        make: Makes the engine; None = the one that the configuration names.

    Returns:
        The exit status: 0 after a drain, 70 after a bug, 128 + n if signal n came twice.

    Raises:
        ConfigError: The configuration cannot work on this machine.
        AddressInUse: A live process holds a socket or a port.
        MoriiodError: The daemon does not start.
    """
    config = loaded.config
    daemon = Daemon(config, make)
    bound = {"rank": config.rank_offset, "epoch": daemon.epoch[:8]}
    log.configure(config.telemetry.log_level, config.telemetry.log_format, bound)
    _log.info("starting: %s", loaded.effective_line(), extra={"config_file": loaded.file})
    for warning in loaded.warnings:
        _log.warning("%s", warning)
    notifier = Notifier.from_environment(os.environ)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Lifecycle(daemon, notifier).run())


class Lifecycle:
    """Runs one daemon on the running loop, and obeys signals.

    Args:
        daemon: Not started.
        notifier: Tells systemd.
    """

    def __init__(self, daemon: Daemon, notifier: Notifier) -> None:
        self._daemon = daemon
        self._notifier = notifier
        #: The first signal that asked for a stop, and the second one.
        self._asked: int | None = None
        self._forced: int | None = None

    async def run(self) -> int:
        """Start, serve, stop; return the exit status. See ``serve``."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        try:
            return await self._run()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)

    async def _run(self) -> int:
        daemon, notifier = self._daemon, self._notifier
        await daemon.start()
        self._announce()
        beat = self._start_beat()
        try:
            if self._asked is not None:  # asked to stop while it started
                daemon.drain(0.0 if self._forced is not None else None)
            ended = await daemon.wait_ended()
            if daemon.phase is not Phase.DRAINING:
                notifier.stopping("stopping")
        finally:
            # The beat goes on until everything is closed: what hangs there must be noticed.
            try:
                await daemon.close()
            finally:
                if beat is not None:
                    beat.stop()
        return self._status_of(ended)

    def _announce(self) -> None:
        config, addresses = self._daemon.config, self._daemon.addresses
        _log.info(
            "ready",
            extra={
                "instance": config.instance,
                "tp": f"{config.daemon.tp_rank}/{config.daemon.tp_size}",
                "dp": f"{config.daemon.dp_rank}/{config.daemon.dp_size}",
                "socket": addresses.socket,
                "control": addresses.control,
                "metrics": addresses.metrics or "off",
                "pid": os.getpid(),
            },
        )
        self._notifier.ready(f"serving {addresses.socket}, control {addresses.control}")

    def _start_beat(self) -> Every | None:
        interval_s = self._notifier.watchdog_interval_s
        if interval_s is None:
            return None
        clock = LoopClock(asyncio.get_running_loop())
        beat = Every(clock, interval_s, lambda _late_s: self._notifier.watchdog())
        beat.start()
        return beat

    def _status_of(self, ended: Ended) -> int:
        if ended.bug is not None:
            _log.critical("stopped by a bug")
            return ExitCode.BUG
        if self._forced is not None:
            _log.warning("stopped at once", extra={"signal": _name(self._forced)})
            return _SIGNAL_STATUS + self._forced
        _log.info("stopped", extra={"clean": ended.is_clean})
        return ExitCode.OK

    # --- Signals --------------------------------------------------------------------------------

    def _on_stop(self, number: int) -> None:
        if self._asked is None:
            self._asked = number
            limit = self._daemon.config.daemon.drain_timeout_s
            _log.info("stopping", extra={"signal": _name(number), "drain_timeout_s": limit})
            self._notifier.stopping(f"draining for at most {limit:g} s")
            if self._daemon.phase is Phase.READY:
                self._daemon.drain()
        elif self._forced is None:
            self._forced = number
            _log.warning("asked to stop again: not waiting any more")
            if self._daemon.phase is Phase.DRAINING:
                self._daemon.end()

    def _on_hangup(self) -> None:
        _log.info("SIGHUP: the configuration is read at start only; nothing was changed")

    def _on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised. A broken connection is contained; everything else is a bug."""
        error = context.get("exception")
        _log.error("in the event loop: %s", context.get("message"), exc_info=error)
        if isinstance(error, Exception) and not isinstance(error, OSError):
            self._daemon.on_bug(error)


def _name(number: int) -> str:
    return signal.Signals(number).name
