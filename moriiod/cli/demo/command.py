"""``moriiod demo``: its options, its directory, its signals and its exit status."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer
from rich.console import Console

from moriiod.cli.demo.plan import DemoOptions, Fault, Mode, Side
from moriiod.cli.demo.progress import show_progress
from moriiod.cli.demo.report import outcome_document, print_outcome
from moriiod.cli.demo.run import STOP_SIGNALS, Outcome, run_demo
from moriiod.cli.demo.shapes import KvChoice
from moriiod.cli.models import LAYOUTS, MODELS, LayoutChoice, OrderChoice
from moriiod.config.load import load
from moriiod.daemon.exitcodes import ExitCode
from moriiod.errors import MoriiodError

EXIT_FAIL: Final = 1
_PREFIX: Final = "moriiod-demo-"
#: A socket path has at most 107 bytes; this is what the demo needs below its directory.
_LONGEST_DIRECTORY: Final = 107 - len("/D63/rank63.notify")
_RANDOM_PART: Final = 10
#: mkdtemp makes a private directory in it.
_SHORT: Final = "/tmp"
_PIPE_WIDTH: Final = 110
_SIDES: Final[tuple[Side, ...]] = ("prefill", "decode")
_MODES: Final[dict[str, tuple[Mode, ...]]] = {
    "read": ("read",),
    "write": ("write",),
    "both": ("read", "write"),
}


class ModeChoice(enum.Enum):
    """Who moves the bytes."""

    READ = "read"
    WRITE = "write"
    BOTH = "both"


class FaultChoice(enum.Enum):
    """See ``plan.Fault``."""

    NONE = "none"
    FLIP_BYTE = "flip-byte"
    TOUCH_CANARY = "touch-canary"
    LOSE_RELEASE = "lose-release"
    DOUBLE_RELEASE = "double-release"


_FAULTS: Final[dict[FaultChoice, Fault]] = {
    FaultChoice.NONE: "none",
    FaultChoice.FLIP_BYTE: "flip-byte",
    FaultChoice.TOUCH_CANARY: "touch-canary",
    FaultChoice.LOSE_RELEASE: "lose-release",
    FaultChoice.DOUBLE_RELEASE: "double-release",
}


class _Interrupted(BaseException):
    """A signal asks to stop. No Exception, so that nothing on the way takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def demo(  # noqa: PLR0913 - one argument for each option
    prefill_tp: Annotated[
        int, typer.Option(min=1, max=64, metavar="N", help="TP size of prefill instances.")
    ] = 4,
    decode_tp: Annotated[
        int, typer.Option(min=1, max=64, metavar="N", help="TP size of decode instances.")
    ] = 8,
    prefill_instances: Annotated[
        int, typer.Option(min=1, max=8, metavar="N", help="Prefill instances.")
    ] = 1,
    decode_instances: Annotated[
        int,
        typer.Option(
            min=1, max=8, metavar="N", help="Decode instances; each gets from every prefill one."
        ),
    ] = 1,
    layers: Annotated[
        int, typer.Option(min=1, max=512, metavar="N", help="Layers of the model.")
    ] = 8,
    blocks: Annotated[
        int, typer.Option(min=8, max=65536, metavar="N", help="KV blocks of each layer and rank.")
    ] = 128,
    requests: Annotated[
        int, typer.Option(min=1, max=10000, metavar="N", help="Requests for each mode.")
    ] = 32,
    mode: Annotated[
        ModeChoice,
        typer.Option(help="read: decode pulls; write: prefill pushes, layer by layer."),
    ] = ModeChoice.BOTH,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="Transfer engine of the daemons.")
    ] = "shm",
    kv_heads: Annotated[
        int,
        typer.Option(
            min=0,
            max=1024,
            metavar="N",
            help="KV heads of the model; 0 = an MLA latent, which suits any pair of sizes.",
        ),
    ] = 0,
    layout: Annotated[
        LayoutChoice, typer.Option(help="Where K and V lie in a tensor, with --kv-heads.")
    ] = LayoutChoice.KV_FIRST,
    head_order: Annotated[
        OrderChoice, typer.Option(help="Heads outermost in a block, or tokens.")
    ] = OrderChoice.HND,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help=f"KV groups of a known model instead: {', '.join(MODELS)}."
        ),
    ] = "",
    allow_uneven: Annotated[
        bool, typer.Option("--allow-uneven", help="Set topology.allow_uneven on both sides.")
    ] = False,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=1 << 32, metavar="N", help="Chooses bytes, sizes and block tables."
        ),
    ] = 1,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", min=1, max=3600, metavar="SECONDS", help="Longest wait for anything."
        ),
    ] = 60.0,
    keep_dir: Annotated[
        bool, typer.Option("--keep-dir", help="Keep settings and logs, with debug lines.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; progress goes to stderr.")
    ] = False,
    fault: Annotated[
        FaultChoice, typer.Option(hidden=True, help="Go wrong on purpose; must exit 1.")
    ] = FaultChoice.NONE,
) -> int:
    """Run real prefill/decode transfers on this machine and check every byte.

    Starts a daemon and a worker process for every rank of every instance, sends requests through
    them as a router does, compares all that arrives with what was sent, and ends everything again.
    Exits 1 if one byte is wrong or one transfer was not released exactly once.
    """
    options = DemoOptions(
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prefill_instances=prefill_instances,
        decode_instances=decode_instances,
        layers=layers,
        blocks=blocks,
        requests=requests,
        modes=_MODES[mode.value],
        engine=engine,
        kv=KvChoice(
            0 if layout is LayoutChoice.MLA else kv_heads,
            LAYOUTS[layout],
            "HND" if head_order is OrderChoice.HND else "NHD",
            model,
        ),
        allow_uneven=allow_uneven,
        seed=seed,
        timeout_s=timeout_s,
        fault=_FAULTS[fault],
    )
    _check(options)
    width = None if _has_terminal(as_json) else _PIPE_WIDTH
    console = Console(stderr=as_json, width=width, highlight=False)
    try:
        with _stoppable(), _directory() as directory:
            with show_progress(console) as progress:
                level = "debug" if keep_dir else "info"
                outcome = run_demo(options, directory.path, progress, level)
            directory.is_kept = keep_dir or bool(outcome.problems)
            _show(outcome, console, as_json)
            if directory.is_kept:
                console.print(f"settings and logs are in {directory.path}")
    except _Interrupted as interruption:
        console.print(f"stopped by {signal.Signals(interruption.number).name}")
        return 128 + interruption.number
    return EXIT_FAIL if outcome.problems else ExitCode.OK


def _check(options: DemoOptions) -> None:
    """Refuse what cannot work while it is still a matter of the command line."""
    try:
        options.check()
        for side in _SIDES:
            flags = {
                "daemon.tp_rank": "0",
                "daemon.tp_size": str(options.tp_size(side)),
                "engine.name": options.engine,
            }
            load(flags, {})
    except MoriiodError as error:
        raise typer.BadParameter(error.message) from error


def _has_terminal(as_json: bool) -> bool:
    return (sys.stderr if as_json else sys.stdout).isatty()


def _show(outcome: Outcome, console: Console, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(outcome_document(outcome), indent=2))
    else:
        print_outcome(outcome, console)


@dataclass(slots=True)
class _Directory:
    """Where a demo keeps its sockets, settings and logs."""

    path: Path
    is_kept: bool = False


@contextlib.contextmanager
def _directory() -> Iterator[_Directory]:
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) + len(_PREFIX) + _RANDOM_PART > _LONGEST_DIRECTORY:
        parent = _SHORT
    directory = _Directory(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)))
    try:
        yield directory
    finally:
        if directory.is_kept:
            # Whatever is no file (a socket of a process that was killed) is of no use any more.
            for path in directory.path.rglob("*"):
                if path.is_socket():
                    path.unlink()
        else:
            shutil.rmtree(directory.path)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Turn a signal that asks to stop into an exception, so that everything is ended on the way."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise _Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
