"""Settings as command-line flags, for the commands that take them all."""

from __future__ import annotations

import os
from collections.abc import Mapping

from moriiod.config.load import LoadedConfig, load
from moriiod.config.names import SETTINGS
from moriiod.config.values import AbsolutePath


def load_from_flags(
    values: Mapping[str, str | None],
    env: Mapping[str, str],
    file: str | None = None,
    *,
    partial: bool = False,
) -> LoadedConfig:
    """Build the configuration from what a command line gave.

    Args:
        values: By ``Setting.parameter``; None where the flag was not given.
        env: The environment.
        file: The value of ``--config``.
        partial: As in ``load``.

    Raises:
        ConfigError: As in ``load``.
    """
    flags = {}
    for name, setting in SETTINGS.items():
        raw = values.get(setting.parameter)
        if raw is None:
            continue
        # A path typed at a prompt is meant from where the prompt is.
        is_path = isinstance(setting.kind, AbsolutePath) and raw
        flags[name] = os.path.abspath(raw) if is_path else raw
    return load(flags, env, file, partial=partial)
