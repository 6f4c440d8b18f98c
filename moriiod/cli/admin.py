"""``moriiod status``: ask running daemons how they are."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from moriiod.cli.document import render_document
from moriiod.cli.options import GivenSettings, settings_options
from moriiod.client.admin import fetch_status
from moriiod.config.load import LoadedConfig
from moriiod.errors import DaemonLost, MoriiodError

_RANK_SOCKET: Final = re.compile(r"rank(\d+)\.sock\Z")
_PIPE_WIDTH: Final = 160


@settings_options
def status(
    given: GivenSettings,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the daemon's own JSON document.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Ask every daemon in the runtime directory.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, max=600, help="Patience.")
    ] = 5.0,
) -> int:
    """Ask a running daemon for its state.

    Without --tp-rank or --socket: the one daemon whose socket is in the runtime directory. With
    --all and --json: one document on each line.
    """
    loaded = given.load(partial=True)
    sockets = _sockets(loaded) if every else [_one_socket(loaded)]
    if not sockets:
        raise DaemonLost(f"no daemon has a socket in {loaded.config.daemon.runtime_dir}")
    failures = 0
    for path in sockets:
        try:
            document = _ask(path, timeout_s)
        except MoriiodError as error:
            if not every:
                raise
            typer.echo(f"moriiod: {path}: {error.code}: {error.message}", err=True)
            failures += 1
            continue
        _print(document, as_json, on_one_line=every)
    return 1 if failures else 0


def _one_socket(loaded: LoadedConfig) -> str:
    named = ("daemon.tp_rank", "daemon.socket")
    if any(loaded.origins[name].source not in ("default", "unset") for name in named):
        return loaded.config.socket_path
    found = _sockets(loaded)
    if len(found) == 1:
        return found[0]
    directory = loaded.config.daemon.runtime_dir
    if not found:
        raise DaemonLost(f"no daemon has a socket in {directory}; give --socket or --tp-rank")
    raise typer.BadParameter(
        f"{len(found)} daemons have sockets in {directory}; give --tp-rank, --socket or --all"
    )


def _sockets(loaded: LoadedConfig) -> list[str]:
    """Return the worker sockets in the runtime directory, by rank."""
    return [str(path) for _, path in sorted(_ranked(Path(loaded.config.daemon.runtime_dir)))]


def _ranked(directory: Path) -> Iterator[tuple[int, Path]]:
    try:
        entries = list(directory.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise DaemonLost(f"cannot look into {directory}: {error.strerror}") from error
    for path in entries:
        match = _RANK_SOCKET.match(path.name)
        if match is not None:
            yield int(match[1]), path


def _ask(path: str, timeout_s: float) -> dict[str, Any]:
    # ZMQ would wait for the socket to appear; whoever asks wants to know that it is not there.
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise DaemonLost(f"no daemon answers at {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise DaemonLost(f"{path} is not a socket")
    try:
        document = json.loads(fetch_status(path, timeout_s))
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise DaemonLost(f"what listens at {path} does not answer like a moriiod")
    return document


def _print(document: dict[str, Any], as_json: bool, on_one_line: bool) -> None:
    if as_json:
        typer.echo(json.dumps(document, indent=None if on_one_line else 2, ensure_ascii=True))
        return
    # A pipe has no width of its own; rich would fold everything into 80 columns.
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    render_document(document, Console(width=width, highlight=False))
