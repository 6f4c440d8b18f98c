"""``moriiod config``: show what is in effect, check a file, print the reference texts."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated

import typer

from moriiod.cli.options import GivenSettings, settings_options
from moriiod.config.load import LoadedConfig
from moriiod.config.names import SETTINGS
from moriiod.config.render import (
    render_effective,
    render_env,
    render_table,
    render_toml,
    replace_generated,
)
from moriiod.engines.factory import why_missing
from moriiod.telemetry.catalog import render_metrics_table

config_app = typer.Typer(
    help="Show, check and explain the configuration.",
    add_completion=False,
    rich_markup_mode=None,
)


class Text(enum.Enum):
    """What ``config render`` can print."""

    TOML = "toml"
    ENV = "env"
    TABLE = "table"
    METRICS = "metrics"


_RENDERERS = {
    Text.TOML: render_toml,
    Text.ENV: render_env,
    Text.TABLE: render_table,
    Text.METRICS: render_metrics_table,
}


@config_app.command("show")
@settings_options
def show(
    given: GivenSettings,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print every effective setting and where its value is from."""
    loaded = given.load(partial=True)
    _warn(loaded)
    typer.echo(_as_json(loaded) if as_json else render_effective(loaded).rstrip())


@config_app.command("check")
@settings_options
def check(
    given: GivenSettings,
    path: Annotated[
        str | None, typer.Argument(metavar="FILE", help="File to check, as with --config.")
    ] = None,
) -> None:
    """Check a file together with the environment and the flags, as serve would see them.

    Exit status 78 and one line if it is wrong. tp_rank and tp_size may be missing.
    """
    loaded = given.load(partial=True, file=path)
    _warn(loaded)
    missing = [name for name in SETTINGS if loaded.origins[name].source == "unset"]
    note = f" (to be given at start: {', '.join(missing)})" if missing else ""
    typer.echo(f"{loaded.file or 'configuration'}: ok{note}")


@config_app.command("render")
def render(
    text: Annotated[Text, typer.Argument(help="Which text.")] = Text.TOML,
    update: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Instead of printing, bring all generated files in DIR up to date."
        ),
    ] = None,
) -> None:
    """Print a reference text: the full file, all variables, or a table for the documentation."""
    if update is None:
        typer.echo(_RENDERERS[text]().rstrip())
        return
    for path, content in generated_files(update).items():
        path.write_text(content, encoding="utf-8")
        typer.echo(str(path))


def generated_files(root: Path) -> dict[Path, str]:
    """Return what the generated files of a source tree should contain.

    Args:
        root: The directory with ``configs/`` and ``docs/``.

    Raises:
        ValueError: A document has lost its markers.
    """
    tables = {"configuration": render_table(), "metrics": render_metrics_table()}
    files = {
        root / "configs" / "moriiod.toml": render_toml(),
        root / "configs" / "moriiod.env": render_env(),
    }
    for name, content in tables.items():
        path = root / "docs" / f"{name}.md"
        files[path] = replace_generated(path.read_text(encoding="utf-8"), name, content)
    return files


def _as_json(loaded: LoadedConfig) -> str:
    rows = {}
    for name in SETTINGS:
        origin = loaded.origins[name]
        value = None if origin.source == "unset" else loaded.value(name)
        rows[name] = {"value": value, "source": origin.source, "where": origin.where}
    return json.dumps(rows, indent=2, ensure_ascii=False)


def _warn(loaded: LoadedConfig) -> None:
    missing = why_missing(loaded.config.engine.name)
    # serve, which may run where another build is installed, says so as an error.
    for warning in [*loaded.warnings, *([missing] if missing else [])]:
        typer.echo(f"moriiod: warning: {warning}", err=True)
