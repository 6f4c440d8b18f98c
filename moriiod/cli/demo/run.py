"""One whole demo: processes up, all modes, checks, processes down; the verdict is returned."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from moriiod.cli.demo import messages as msg
from moriiod.cli.demo.audit import Audit
from moriiod.cli.demo.figures import DaemonFigures, read_figures
from moriiod.cli.demo.fleet import DemoFailed, Fleet
from moriiod.cli.demo.hub import Hub, HungUp, Said
from moriiod.cli.demo.plan import DemoOptions, Rank
from moriiod.cli.demo.router import ModeResult, Progress, Router
from moriiod.client.admin import fetch_status
from moriiod.errors import InvalidArgument, MoriiodError

#: Signals that end a demo early.
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TAIL_LINES: Final = 15
_MAX_TAILS: Final = 3
_MEMINFO: Final = Path("/proc/meminfo")


@dataclass(slots=True)
class Outcome:
    """What a demo came to.

    Attributes:
        problems: What went wrong; empty = PASS.
        tails: For each suspect process its name and the end of its log.
        figures: What each daemon says it did.
        start_s: Until every daemon was ready and every worker registered.
        seconds: In all, until every process had ended.
    """

    options: DemoOptions
    audit: Audit
    modes: list[ModeResult] = field(default_factory=list)
    figures: dict[Rank, DaemonFigures] = field(default_factory=dict)
    tails: list[tuple[str, str]] = field(default_factory=list)
    start_s: float = 0.0
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        """What went wrong, in words."""
        return self.audit.problems


def run_demo(
    options: DemoOptions, directory: Path, progress: Progress, log_level: str = "info"
) -> Outcome:
    """Run a demo and end every process that it started, whatever happens.

    Args:
        options: Checked.
        directory: Empty; gets sockets, settings and logs. Its path must be short.
        progress: Gets how far it is.
        log_level: Of the daemons.

    Raises:
        InvalidArgument: The caches do not fit this machine's free memory.
    """
    _check_memory(options)
    outcome = Outcome(options, Audit(options))
    started_at = time.monotonic()
    with Hub() as hub:
        fleet = Fleet(options, directory, hub, log_level)
        with _closing(fleet, progress):
            try:
                _run(fleet, hub, outcome, progress)
            except (DemoFailed, MoriiodError) as error:
                _note_failure(fleet, outcome, error)
    outcome.seconds = time.monotonic() - started_at
    return outcome


@contextmanager
def _closing(fleet: Fleet, progress: Progress) -> Iterator[None]:
    """End the processes on the way out, however we get there."""
    try:
        yield
    finally:
        # A second Ctrl-C must not leave half of them behind; this takes a bounded time.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            progress.step("ending the processes")
            fleet.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(fleet: Fleet, hub: Hub, outcome: Outcome, progress: Progress) -> None:
    options, audit = outcome.options, outcome.audit
    n_ranks = len(options.ranks)
    started_at = time.monotonic()
    progress.step(f"starting {n_ranks} daemons")
    fleet.start_daemons()
    progress.step(f"starting {n_ranks} workers")
    fleet.start_workers()
    outcome.start_s = time.monotonic() - started_at
    router = Router(fleet, hub, audit, progress)
    for mode in options.modes:
        outcome.modes.append(router.run(mode))
    progress.step("comparing the books of workers and daemons")
    audit.judge_transfers()
    outcome.figures = _read_daemons(fleet)
    audit.judge_daemons(outcome.figures)
    _dismiss_workers(fleet, hub, audit)
    audit.problems += fleet.stop_daemons()


def _read_daemons(fleet: Fleet) -> dict[Rank, DaemonFigures]:
    figures = {}
    for rank in fleet.daemons:
        path = fleet.instance_of(rank).socket_path(rank)
        document = fetch_status(str(path), fleet.options.timeout_s)
        try:
            figures[rank] = read_figures(document)
        except ValueError as error:
            raise DemoFailed(f"daemon {rank.name}: {error}", (fleet.daemons[rank],)) from error
    return figures


def _dismiss_workers(fleet: Fleet, hub: Hub, audit: Audit) -> None:
    """Let every worker leave in good order, and hear what it still has to say."""
    for rank in fleet.workers:
        hub.send(rank, msg.Leave())
    here = set(fleet.workers)
    said_goodbye: set[Rank] = set()
    deadline = time.monotonic() + fleet.options.timeout_s
    while here:
        match hub.next(deadline):
            case Said(rank, msg.Ended() as end):
                audit.problems.append(f"{rank.name}: a late {end.role} {end.outcome}")
            case Said(rank, msg.Left() as left):
                said_goodbye.add(rank)
                audit.problems += [f"{rank.name}: refused: {text}" for text in left.problems]
                if not left.is_clean:
                    audit.problems.append(f"{rank.name}: its daemon did not let go of its memory")
            case HungUp(rank) if rank in said_goodbye:
                here.discard(rank)
            case None:
                raise DemoFailed(
                    f"{len(here)} workers did not leave within {fleet.options.timeout_s:g} s",
                    tuple(fleet.workers[rank] for rank in sorted(here)),
                )
            case event:
                raise fleet.unexpected(event)


def _note_failure(fleet: Fleet, outcome: Outcome, error: DemoFailed | MoriiodError) -> None:
    if isinstance(error, MoriiodError):
        outcome.problems.append(f"{error.code}: {error.message}")
        return
    outcome.problems.append(str(error))
    for child in list(dict.fromkeys(error.suspects))[:_MAX_TAILS]:
        # What it wrote last is on its way while it still runs; what is there is shown.
        outcome.tails.append((child.name, child.tail(_TAIL_LINES)))


def _check_memory(options: DemoOptions) -> None:
    wanted = sum(options.shape(rank.side).cache_bytes for rank in options.ranks)
    free = _available_bytes()
    if free is not None and wanted > free:
        raise InvalidArgument(
            f"the KV caches need {wanted >> 20} MiB, {free >> 20} MiB of memory are free; use "
            "fewer --blocks or --layers",
            got=wanted,
            limit=free,
        )


def _available_bytes() -> int | None:
    """Return what the kernel thinks it can give without swapping; None if it does not say."""
    with suppress(OSError, ValueError):
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return None
