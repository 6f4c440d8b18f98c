"""How a setting is called in a file, in the environment and as a flag, and what is like it.

One rule: a setting ``key`` of section ``section`` is ``section.key`` in a file,
``MORIIOD_SECTION_KEY`` in the environment and ``--section-key`` as a flag. In the last two, the
sections ``daemon`` and ``telemetry`` and the key ``name`` are left out.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

from pydantic.fields import FieldInfo

from moriiod.config.schema import Config, Section
from moriiod.config.values import ValueKind

ENV_PREFIX: Final = "MORIIOD_"
#: Names in the environment that are not settings: the config file, and tracebacks for developers.
CONFIG_FILE_ENV: Final = "MORIIOD_CONFIG"
TRACEBACK_ENV: Final = "MORIIOD_TRACEBACK"
_LEFT_OUT_SECTIONS: Final = frozenset({"daemon", "telemetry"})
_LEFT_OUT_KEY: Final = "name"

#: What other programs call a thing, and the setting that does it here.
FOREIGN_NAMES: Final[Mapping[str, str]] = {
    "backend": "engine.name",
    "bind": "control.host",
    "defer_timeout": "transfer.lease_s",
    "engine": "engine.name",
    "engine_id": "daemon.instance",
    "handshake_port": "control.base_port",
    "host_ip": "control.advertise",
    "kv_lease_duration": "transfer.lease_s",
    "kv_port": "control.base_port",
    "local_ip": "control.advertise",
    "notify_port": "control.base_port",
    "recv_abort_timeout": "transfer.write_timeout_s",
    "tensor_parallel_size": "daemon.tp_size",
    "tp": "daemon.tp_size",
    "transfer_timeout": "transfer.pull_timeout_s",
}

#: Variables of the in-process connector that no longer count, and what to use instead. An empty
#: text says that nothing replaces it; the sentence is for people.
LEGACY_PREFIX: Final = "VLLM_MORIIO_"
_LEGACY_ENV: Final[Mapping[str, str]] = {
    "VLLM_MORIIO_CONNECTOR_READ_MODE": "READ or WRITE is chosen by each request",
    "VLLM_MORIIO_READ_MODE": "READ or WRITE is chosen by each request",
    "VLLM_MORIIO_TRANSFER_TIMEOUT": "use MORIIOD_TRANSFER_PULL_TIMEOUT_S",
    "VLLM_MORIIO_TRANSFER_TIMEOUT_S": "use MORIIOD_TRANSFER_PULL_TIMEOUT_S",
    "VLLM_MORIIO_DEFERRED_TIMEOUT_S": "use MORIIOD_TRANSFER_LEASE_S",
    "VLLM_MORIIO_DEFER_TIMEOUT_S": "use MORIIOD_TRANSFER_LEASE_S",
    "VLLM_MORIIO_HANDSHAKE_PORT": "use MORIIOD_CONTROL_BASE_PORT",
    "VLLM_MORIIO_NOTIFY_PORT": "use MORIIOD_CONTROL_BASE_PORT",
    "VLLM_MORIIO_HOST_IP": "use MORIIOD_CONTROL_ADVERTISE",
    "VLLM_MORIIO_BACKEND": "use MORIIOD_ENGINE",
}

#: What Kubernetes puts into every container for a service called moriiod or moriiod-something.
_KUBERNETES_NAME: Final = re.compile(
    r"MORIIOD(_\w+?)??_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)\Z"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its names, how its value is read, and what it is for."""

    section: str
    key: str
    kind: ValueKind
    description: str
    required: bool
    default: object

    @property
    def name(self) -> str:
        """As in a file: ``section.key``."""
        return f"{self.section}.{self.key}"

    @property
    def env(self) -> str:
        """As in the environment."""
        return ENV_PREFIX + "_".join(self._short).upper()

    @property
    def flag(self) -> str:
        """As on the command line."""
        return "--" + "-".join(self._short).replace("_", "-")

    @property
    def parameter(self) -> str:
        """As a Python identifier: the flag without its dashes in front."""
        return "_".join(self._short)

    @property
    def _short(self) -> list[str]:
        section = [] if self.section in _LEFT_OUT_SECTIONS else [self.section]
        return section if self.key == _LEFT_OUT_KEY else [*section, self.key]


def toml_text(value: object) -> str:
    """Return a value as TOML; None, which TOML cannot say, as an empty text."""
    if value is None:
        return ""
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_text(item) for item in value) + "]"
    # JSON's strings, numbers and bools are TOML's too.
    return json.dumps(value, ensure_ascii=False, default=str)


def section_classes() -> Mapping[str, type[Section]]:
    """Return the sections in their order."""
    return {
        name: cast(type[Section], field.annotation) for name, field in Config.model_fields.items()
    }


def _read_setting(section: str, key: str, field: FieldInfo) -> Setting:
    kinds = [item for item in field.metadata if callable(item) and hasattr(item, "describe")]
    return Setting(
        section=section,
        key=key,
        kind=cast(ValueKind, kinds[0] if kinds else _kind_of_optional(field)),
        description=field.description or "",
        required=field.is_required(),
        default=None if field.is_required() else field.default,
    )


def _kind_of_optional(field: FieldInfo) -> object:
    """Find the kind in ``Annotated[X, kind] | None``, where pydantic leaves it in the type."""
    for member in getattr(field.annotation, "__args__", ()):
        for item in getattr(member, "__metadata__", ()):
            return item
    raise TypeError("a setting without a value kind")


#: Every setting by its name in a file, in order.
SETTINGS: Final[Mapping[str, Setting]] = {
    setting.name: setting
    for section, cls in section_classes().items()
    for setting in (_read_setting(section, key, f) for key, f in cls.model_fields.items())
}
SETTINGS_BY_ENV: Final[Mapping[str, Setting]] = {s.env: s for s in SETTINGS.values()}


def nearest_setting(unknown: str) -> str:
    """Return the name of the setting that an unknown ``section.key`` or ``key`` most resembles."""
    tail = unknown.rpartition(".")[2].casefold()
    if tail in FOREIGN_NAMES:
        return FOREIGN_NAMES[tail]
    names: dict[str, str] = {
        **{setting.key: setting.name for setting in reversed(list(SETTINGS.values()))},
        **FOREIGN_NAMES,
    }
    whole = difflib.get_close_matches(unknown.casefold(), SETTINGS, n=1, cutoff=0.8)
    if whole:
        return whole[0]
    return names[difflib.get_close_matches(tail, names, n=1, cutoff=0.0)[0]]


def nearest_section(unknown: str) -> str:
    """Return the section that an unknown one most resembles."""
    return difflib.get_close_matches(unknown.casefold(), section_classes(), n=1, cutoff=0.0)[0]


def nearest_env(unknown: str) -> str:
    """Return the variable that an unknown ``MORIIOD_...`` most resembles."""
    tail = unknown.removeprefix(ENV_PREFIX).casefold()
    if tail in FOREIGN_NAMES:
        return SETTINGS[FOREIGN_NAMES[tail]].env
    return difflib.get_close_matches(unknown, SETTINGS_BY_ENV, n=1, cutoff=0.0)[0]


def legacy_env_advice(name: str) -> str:
    """Say what replaces a variable of the in-process connector."""
    return _LEGACY_ENV.get(name, "nothing replaces it")


def is_from_kubernetes(name: str, value: str) -> bool:
    """Whether a variable describes a Kubernetes service, and is no misspelt setting."""
    match = _KUBERNETES_NAME.match(name)
    if match is None:
        return False
    # MORIIOD_BASE_PORT=6301 has the shape of a service's name but not the value of one.
    return match[2] != "PORT" or "://" in value
