"""Writes what people read about the settings, so that it cannot differ from the schema.

``moriiod config render`` prints each of these; a test compares the files in ``configs/`` and
``docs/`` with them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Final

from moriiod.config.load import LoadedConfig
from moriiod.config.names import SETTINGS, Setting, section_classes, toml_text

_WIDTH: Final = 96
_BEGIN: Final = "<!-- generated: {name} -->"
_END: Final = "<!-- end of generated: {name} -->"
#: What a setting that has no default could look like.
_EXAMPLES: Final[Mapping[str, str]] = {
    "daemon.tp_rank": "0",
    "daemon.tp_size": "8",
    "daemon.instance": '"prefill-0"',
    "daemon.socket": '"/run/moriiod/rank0.sock"',
    "daemon.socket_group": '"moriiod"',
    "control.advertise": '"10.0.0.1"',
    "control.node_hosts": '"10.0.0.1,10.0.0.2"',
}
_TOML_HEAD: Final = """\
# Every setting of moriiod, at its default. Written by `moriiod config render toml`.
#
# The environment overrides this file, and a flag overrides both. A key without a default is
# commented out. `moriiod config check FILE` tells whether a file is right.
"""
_ENV_HEAD: Final = """\
# Every variable moriiod reads. Written by `moriiod config render env`.
#
# A variable overrides the configuration file; a flag overrides the variable. Any other variable
# that begins with MORIIOD_ is an error.

# Path of the configuration file.
#MORIIOD_CONFIG=/etc/moriiod/moriiod.toml
"""


def render_toml() -> str:
    """Return the commented configuration file with every setting at its default."""
    return "\n".join([_TOML_HEAD, *_toml_sections()])


def _toml_sections() -> Iterator[str]:
    for section, cls in section_classes().items():
        lines = [*_comment(cls.__doc__ or ""), f"[{section}]"]
        for setting in _settings_of(section):
            lines += ["", *_comment(f"{setting.description} ({setting.kind.describe()})")]
            default = toml_text(setting.default)
            lines.append(
                f"{setting.key} = {default}"
                if default
                else f"#{setting.key} = {_EXAMPLES[setting.name]}"
            )
        yield "\n".join([*lines, ""])


def render_env() -> str:
    """Return an environment file with every variable, commented out, at its default."""
    parts = [_ENV_HEAD]
    for setting in SETTINGS.values():
        # An example is for what has no default, and for a list: an empty one cannot be said.
        value = _EXAMPLES.get(setting.name) or toml_text(setting.default)
        lines = [*_comment(setting.description), f"#{setting.env}={value.strip(chr(34))}", ""]
        parts.append("\n".join(lines))
    return "\n".join(parts)


def render_table() -> str:
    """Return the settings as Markdown: one table for each section."""
    return "\n".join(_table_sections())


def _table_sections() -> Iterator[str]:
    for section, cls in section_classes().items():
        yield f"### [{section}]\n"
        yield f"{cls.__doc__}\n"
        yield "| Key | Default | Allowed | Meaning | Environment | Flag |"
        yield "|---|---|---|---|---|---|"
        for setting in _settings_of(section):
            yield _table_row(setting)
        yield ""


def _table_row(setting: Setting) -> str:
    if setting.required:
        default = "required"
    elif setting.default is None:
        default = "unset"
    else:
        default = f"`{toml_text(setting.default)}`"
    cells = [
        f"`{setting.key}`",
        default,
        setting.kind.describe(),
        setting.description.replace("|", "\\|"),
        f"`{setting.env}`",
        f"`{setting.flag}`",
    ]
    return "| " + " | ".join(cells) + " |"


def render_effective(loaded: LoadedConfig) -> str:
    """Return the effective values as TOML, with the source of each as a comment."""
    parts = []
    for section in section_classes():
        rows = []
        for setting in _settings_of(section):
            origin = loaded.origins[setting.name]
            value = toml_text(loaded.value(setting.name))
            # A value that was only assumed, or none, must not look like one that is set.
            is_set = bool(value) and origin.source != "unset"
            left = f"{setting.key} = {value}" if is_set else f"#{setting.key} ="
            source = "required, not set" if origin.source == "unset" else origin.source
            rows.append((left, f"{source} {origin.where}".rstrip()))
        width = min(48, max(len(left) for left, _ in rows))
        lines = [f"{left:<{width}}  # {source}" for left, source in rows]
        parts.append("\n".join([f"[{section}]", *lines, ""]))
    return "\n".join(parts)


def replace_generated(document: str, name: str, content: str) -> str:
    """Return a document with what stands between its two markers replaced.

    Raises:
        ValueError: The document does not have both markers.
    """
    begin, end = _BEGIN.format(name=name), _END.format(name=name)
    head, found_begin, rest = document.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"no markers for {name}")
    return f"{head}{begin}\n\n{content.strip()}\n\n{end}{tail}"


def _settings_of(section: str) -> list[Setting]:
    return [setting for setting in SETTINGS.values() if setting.section == section]


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")
