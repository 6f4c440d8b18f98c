"""Shows a nested JSON document as tables, whatever is in it.

The daemon decides what its status holds; nothing here names a field, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

_MAX_CELL: Final = 200
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def render_document(document: Mapping[str, Any], console: Console) -> None:
    """Print an object: its plain values first, then one table for each nested part."""
    _render_object("", document, console)


def _render_object(title: str, value: Mapping[str, Any], console: Console) -> None:
    plain = {k: v for k, v in value.items() if not _is_nested(v)}
    if plain:
        _print_table(title, [], [[k, _cell(k, v)] for k, v in plain.items()], console)
    for key, part in value.items():
        if _is_nested(part):
            _render_part(f"{title}.{key}" if title else key, part, console)


def _render_part(title: str, part: Any, console: Console) -> None:
    if isinstance(part, Mapping):
        if _are_rows(part.values()):
            keys = _columns(part.values())
            rows = [[name, *(_cell(k, row.get(k)) for k in keys)] for name, row in part.items()]
            _print_table(title, ["", *keys], rows, console)
        else:
            _render_object(title, part, console)
    elif _are_rows(part):
        keys = _columns(part)
        rows = [[_cell(k, row.get(k)) for k in keys] for row in part]
        _print_table(title, keys, rows, console)
    else:
        for index, item in enumerate(part):
            _render_object(f"{title}[{index}]", {"": item}, console)


def _is_nested(value: Any) -> bool:
    """Whether a value needs a table of its own; empty ones and lists of plain values do not."""
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value)


def _are_rows(values: Iterable[Any]) -> bool:
    rows = list(values)
    return bool(rows) and all(
        isinstance(row, Mapping) and row and not any(_is_nested(v) for v in row.values())
        for row in rows
    )


def _columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys of all rows, in the order in which they first appear."""
    return list(dict.fromkeys(key for row in rows for key in row))


def _print_table(title: str, header: list[str], rows: list[list[str]], console: Console) -> None:
    if title:
        console.print(Text(f"\n{_plain(title)}", style="bold"))
    table = Table(box=None, show_header=bool(header), pad_edge=False, padding=(0, 2, 0, 0))
    for name in header or ["", ""]:
        table.add_column(Text(_plain(name), style="dim"), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_plain(cell)) for cell in row))
    console.print(table)


def _cell(key: str, value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_cell(key, item) for item in value)
    if isinstance(value, int) and "bytes" in key.split("_"):
        return _with_unit(value)
    if isinstance(value, float):
        value = f"{value:.6g}"
    return f"{value} s" if key.endswith("_s") else str(value)


def _with_unit(n_bytes: int) -> str:
    size, unit = float(n_bytes), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{n_bytes} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def _plain(text: str) -> str:
    """Return text that cannot steer a terminal, of bounded length."""
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text[:_MAX_CELL])
    return shown + "..." if len(text) > _MAX_CELL else shown
