"""Builds the one ``Config``: file < environment < flags, and remembers where each value is from.

All problems end as a ``ConfigError`` with one line: where, key, value, reason, and for an unknown
key the nearest known one. What is only unwise ends as a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import ValidationError

from moriiod.config.checks import read_host_facts, warnings
from moriiod.config.names import (
    CONFIG_FILE_ENV,
    ENV_PREFIX,
    LEGACY_PREFIX,
    SETTINGS,
    SETTINGS_BY_ENV,
    TRACEBACK_ENV,
    Setting,
    is_from_kubernetes,
    legacy_env_advice,
    nearest_env,
    nearest_section,
    nearest_setting,
    section_classes,
    toml_text,
)
from moriiod.config.schema import Config
from moriiod.config.tomlfile import read_toml
from moriiod.errors import ConfigError

Source = Literal["default", "file", "env", "flag", "unset"]
_MAX_SHOWN: Final = 80
_TP_SIZE: Final = "daemon.tp_size"
_TP_RANK: Final = "daemon.tp_rank"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an effective value is from.

    Attributes:
        source: ``unset``: required, not given, and only assumed for a partial check.
        where: ``file:line``, the variable or the flag; empty for defaults.
    """

    source: Source
    where: str = ""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid configuration, where its values are from, and what is unwise about it.

    Attributes:
        config: All settings.
        origins: By setting name, for every setting.
        warnings: One sentence each.
        file: The configuration file, None if there was none.
    """

    config: Config
    origins: Mapping[str, Origin]
    warnings: tuple[str, ...]
    file: str | None

    def value(self, name: str) -> Any:
        """Return the effective value of ``section.key``."""
        section, _, key = name.partition(".")
        return getattr(getattr(self.config, section), key)

    def effective_line(self) -> str:
        """Return every effective value on one line; what is not a default with its source."""
        parts = []
        for name in SETTINGS:
            origin = self.origins[name]
            mark = "" if origin.source == "default" else f"[{origin.source}]"
            parts.append(f"{name}={toml_text(self.value(name)) or 'unset'}{mark}")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value that somebody gave, read but not yet compared with others."""

    value: Any
    origin: Origin


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why a configuration cannot be used; becomes the ConfigError."""

    where: str
    key: str
    reason: str
    value: str = ""
    nearest: str = ""


class _Layers:
    """Collects what the layers give, later ones over earlier ones, and all problems."""

    def __init__(self) -> None:
        self.given: dict[str, _Given] = {}
        self.problems: list[_Problem] = []
        self.warnings: list[str] = []

    def take(self, setting: Setting, raw: Any, origin: Origin) -> None:
        try:
            value = setting.kind(raw)
        except ValueError as error:
            self.problems.append(
                _Problem(_shown_where(origin), setting.name, str(error), _shown(raw))
            )
            return
        self.given[setting.name] = _Given(value, origin)

    def take_file(self, path: str) -> None:
        content = read_toml(path)
        sections = section_classes()
        for section, table in content.tables.items():
            if section not in sections:
                self._unknown_top(content.where(section), section, table)
            elif not isinstance(table, dict):
                self.problems.append(
                    _Problem(content.where(section), section, f"must be a table, [{section}]")
                )
            else:
                self._take_table(content.where, section, table)

    def _unknown_top(self, where: str, name: str, value: Any) -> None:
        if isinstance(value, dict):
            self.problems.append(
                _Problem(where, name, "unknown section", nearest=f"[{nearest_section(name)}]")
            )
            return
        self.problems.append(
            _Problem(where, name, "outside any section", _shown(value), nearest_setting(name))
        )

    def _take_table(self, where: Callable[[str], str], section: str, table: dict[str, Any]) -> None:
        for key, raw in table.items():
            name = f"{section}.{key}"
            setting = SETTINGS.get(name)
            if setting is None:
                self.problems.append(
                    _Problem(where(name), name, "unknown key", "", nearest_setting(name))
                )
            else:
                self.take(setting, raw, Origin("file", where(name)))

    def take_env(self, env: Mapping[str, str]) -> None:
        for name in sorted(env):
            if name.startswith(LEGACY_PREFIX):
                self.warnings.append(f"{_plain(name)} is ignored: {legacy_env_advice(name)}")
            if not name.startswith(ENV_PREFIX) or name in {CONFIG_FILE_ENV, TRACEBACK_ENV}:
                continue
            setting = SETTINGS_BY_ENV.get(name)
            if setting is not None:
                self.take(setting, env[name], Origin("env", name))
            elif is_from_kubernetes(name, env[name]):
                self.warnings.append(f"{name} is ignored: it describes a Kubernetes service")
            else:
                reason, nearest = "unknown variable", nearest_env(name)
                self.problems.append(_Problem("environment", _plain(name), reason, nearest=nearest))

    def take_flags(self, flags: Mapping[str, str]) -> None:
        for name, raw in flags.items():
            setting = SETTINGS[name]
            self.take(setting, raw, Origin("flag", setting.flag))


def load(
    flags: Mapping[str, str],
    env: Mapping[str, str],
    file: str | None = None,
    *,
    partial: bool = False,
) -> LoadedConfig:
    """Build the configuration from a file, the environment and flags.

    Args:
        flags: Values by setting name, as typed.
        env: The environment; only ``MORIIOD_*`` and ``VLLM_MORIIO_*`` are looked at.
        file: Path of the TOML file. None means the one in ``MORIIOD_CONFIG``, if that is set.
        partial: Fill in required settings that nobody gave, so that the rest can be checked or
            shown; their origin is ``unset``.

    Raises:
        ConfigError: With fields ``key``, ``value``, ``reason``, ``nearest``. The field ``missing``
            is true when a required setting was not given at all, which is a usage error.
    """
    layers = _Layers()
    path = file if file is not None else env.get(CONFIG_FILE_ENV)
    if path is not None:
        layers.take_file(path)
    layers.take_env(env)
    layers.take_flags(flags)
    if layers.problems:
        raise _as_error(layers.problems[0], len(layers.problems) - 1)
    if partial:
        _assume_missing(layers.given)
    else:
        _require(layers.given)
    config = _build(layers.given)
    origins = {
        name: layers.given[name].origin if name in layers.given else Origin("default")
        for name in SETTINGS
    }
    found = [*layers.warnings, *warnings(config, read_host_facts())]
    return LoadedConfig(config, origins, tuple(found), path)


def _require(given: Mapping[str, _Given]) -> None:
    for setting in SETTINGS.values():
        if setting.required and setting.name not in given:
            reason = (
                f"not set: give {setting.flag}, {setting.env}, or {setting.key} in "
                f"[{setting.section}] of the file"
            )
            raise ConfigError(
                f"{setting.name}: {reason}", key=setting.name, reason=reason, missing=True
            )


def _assume_missing(given: dict[str, _Given]) -> None:
    """Assume the smallest group the other values allow, and its last rank: it has the longest
    socket path and the highest ports."""
    hosts = given.get("control.node_hosts")
    step = max(1, len(hosts.value)) if hosts else 1
    if _TP_SIZE not in given:
        rank = max(0, given[_TP_RANK].value) if _TP_RANK in given else 0
        given[_TP_SIZE] = _Given((rank // step + 1) * step, Origin("unset"))
    if _TP_RANK not in given:
        given[_TP_RANK] = _Given(given[_TP_SIZE].value - 1, Origin("unset"))


def _build(given: Mapping[str, _Given]) -> Config:
    tables: dict[str, dict[str, Any]] = {}
    for name, item in given.items():
        section, _, key = name.partition(".")
        tables.setdefault(section, {})[key] = item.value
    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        context = details.get("ctx", {})
        key, reason = str(context.get("key", "")), str(context.get("reason", details["msg"]))
    item_given = given.get(key)
    if item_given is None:
        raise _as_error(_Problem("", key, reason), 0)
    where = _shown_where(item_given.origin)
    raise _as_error(_Problem(where, key, reason, toml_text(item_given.value)), 0)


def _as_error(problem: _Problem, more: int) -> ConfigError:
    subject = f"{problem.key} = {problem.value}" if problem.value else problem.key
    parts = [problem.where, subject, problem.reason]
    text = ": ".join(part for part in parts if part)
    if problem.nearest:
        text += f"; nearest known: {problem.nearest}"
    if more:
        text += f" (and {more} more problem{'s' if more > 1 else ''})"
    return ConfigError(
        text,
        where=problem.where,
        key=problem.key,
        value=problem.value,
        reason=problem.reason,
        nearest=problem.nearest,
    )


def _shown_where(origin: Origin) -> str:
    if origin.source == "env":
        return f"environment {origin.where}"
    if origin.source == "flag":
        return f"flag {origin.where}"
    return origin.where


def _shown(raw: Any) -> str:
    """Return a raw value so that it fits on the line and cannot break out of it."""
    try:
        text = str(raw).lower() if isinstance(raw, bool) else repr(raw)
    except ValueError:
        # An integer of thousands of digits: Python refuses to print it.
        text = f"a {type(raw).__name__} too long to print"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _plain(name: str) -> str:
    return name if name.isprintable() else ascii(name)
