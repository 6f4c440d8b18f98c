"""The ``moriiod`` command: what it can do, and how its failures become exit codes.

Users see one line on stderr, never a traceback. ``MORIIOD_TRACEBACK=1`` adds it for developers.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

import moriiod
from moriiod.cli.config import config_app
from moriiod.config.names import TRACEBACK_ENV
from moriiod.core.messages import PROTOCOL_VERSIONS
from moriiod.daemon.exitcodes import ExitCode
from moriiod.errors import ConfigError, InvariantViolation, MoriiodError

_EXIT_INTERRUPTED: Final = 130

#: Commands whose modules are heavy or optional: imported when they are called.
_LAZY: Final = {
    "serve": "moriiod.cli.serve",
    "demo": "moriiod.cli.demo",
    "status": "moriiod.cli.admin",
    "plan": "moriiod.cli.plan",
}
#: The base of what typer raises for bad usage. typer has its own since it carries its own click.
_UsageProblem: Final[type[Exception]] = next(
    cls
    for cls in reversed(typer.BadParameter.__mro__)
    if issubclass(cls, Exception) and hasattr(cls, "format_message")
)


class _Commands(TyperGroup):
    """Adds the lazy commands in front of the ones that typer knows."""

    def list_commands(self, ctx: Any) -> list[str]:
        lazy = [name for name, module in _LAZY.items() if importlib.util.find_spec(module)]
        return [*lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        module = _LAZY.get(cmd_name)
        if module is None or importlib.util.find_spec(module) is None:
            return super().get_command(ctx, cmd_name)
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name)(getattr(importlib.import_module(module), cmd_name))
        return typer.main.get_command(single)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    # The panels of rich cut long flags off at 80 columns.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="The same as the command version.")
    ] = False,
) -> None:
    """Moves KV blocks between prefill and decode ranks, one daemon beside each rank."""
    if show_version:
        version()
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(ExitCode.USAGE)


app.add_typer(config_app, name="config")


@app.command("version")
def version() -> None:
    """Print the versions of moriiod and of what it speaks."""
    protocols = ", ".join(str(number) for number in PROTOCOL_VERSIONS)
    typer.echo(
        f"moriiod {moriiod.__version__} (peer protocol {protocols}, "
        f"Python {platform.python_version()})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Without the program's name; None takes the process's own.

    Returns:
        The exit status: see ``moriiod.daemon.exitcodes``.
    """
    command = typer.main.get_command(app)
    args = None if arguments is None else list(arguments)
    try:
        result = command.main(args=args, prog_name="moriiod", standalone_mode=False)
        sys.stdout.flush()
    except _UsageProblem as error:
        return _tell(_usage_text(error), getattr(error, "exit_code", ExitCode.USAGE))
    except MoriiodError as error:
        return _tell_error(error)
    except (KeyboardInterrupt, typer.Abort):
        return _tell("interrupted", _EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILURE
    except Exception as error:  # noqa: BLE001 - the last place that can say it in one line
        return _tell_bug(error)
    return int(result) if isinstance(result, int) else ExitCode.OK


def _usage_text(error: Exception) -> str:
    text = getattr(error, "format_message", lambda: str(error))()
    return " ".join(str(text).split())


def _tell_error(error: MoriiodError) -> int:
    if isinstance(error, InvariantViolation):
        return _tell_bug(error)
    code: int = ExitCode.FAILURE
    if isinstance(error, ConfigError):
        code = ExitCode.USAGE if error.fields.get("missing") else ExitCode.CONFIG
    return _tell(f"{error.code}: {error.message}", code)


def _tell_bug(error: Exception) -> int:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return _tell(
        f"bug: {type(error).__name__}: {error}{place}; please report it "
        f"({TRACEBACK_ENV}=1 shows more)",
        ExitCode.BUG,
    )


def _tell(text: str, code: int) -> int:
    """Print one line for people and return the exit status."""
    if os.environ.get(TRACEBACK_ENV) and sys.exc_info()[0] is not None:
        traceback.print_exc()
    line = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    typer.echo(f"moriiod: {line}", err=True)
    return int(code)
