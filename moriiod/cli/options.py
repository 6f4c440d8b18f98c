"""Gives a command one flag for every setting, without naming any of them here."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from moriiod.config.flags import load_from_flags
from moriiod.config.load import LoadedConfig
from moriiod.config.names import CONFIG_FILE_ENV, SETTINGS

_GIVEN = "given"
_CONFIG = "config"


@dataclass(frozen=True, slots=True)
class GivenSettings:
    """What the command line said about settings, not yet looked at.

    Attributes:
        values: Text by ``Setting.parameter``; None where the flag was not given.
        file: The value of ``--config``.
    """

    values: Mapping[str, str | None]
    file: str | None

    def load(self, *, partial: bool = False, file: str | None = None) -> LoadedConfig:
        """Build the configuration from the file, the environment and these flags.

        Args:
            partial: Accept that required settings are missing; see ``config.load.load``.
            file: A file to read instead of the one given with ``--config``.

        Raises:
            ConfigError: A setting is missing, unknown, malformed or contradicts another.
        """
        path = self.file if file is None else file
        return load_from_flags(self.values, os.environ, path, partial=partial)


def settings_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn ``function(given: GivenSettings, ...)`` into a command with a flag for every setting.

    The other parameters stay options and arguments of the command.
    """

    @functools.wraps(function)
    def command(**arguments: Any) -> Any:
        values = {s.parameter: arguments.pop(s.parameter) for s in SETTINGS.values()}
        given = GivenSettings(values, arguments.pop(_CONFIG))
        return function(given=given, **arguments)

    own = inspect.signature(function, eval_str=True).parameters.values()
    parameters = [
        *(p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name != _GIVEN),
        _config_parameter(),
        *_setting_parameters(),
    ]
    # typer reads a command's options from its signature; functools.wraps made it look like the
    # wrapped function, which has others.
    del command.__wrapped__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _config_parameter() -> inspect.Parameter:
    option = typer.Option(
        None,
        "--config",
        metavar="FILE",
        help=f"TOML file with settings; without it, the one named by {CONFIG_FILE_ENV}.",
    )
    return _optional_text(_CONFIG, option)


def _setting_parameters() -> list[inspect.Parameter]:
    return [
        _optional_text(
            setting.parameter,
            typer.Option(
                None,
                setting.flag,
                metavar=setting.kind.metavar,
                help=setting.description,
                show_default=False,
            ),
        )
        for setting in SETTINGS.values()
    ]


def _optional_text(name: str, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=str | None
    )
