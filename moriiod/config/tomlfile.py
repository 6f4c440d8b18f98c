"""Reads a TOML file into (setting name, raw value, line), with one-line errors.

``tomllib`` keeps no positions, so the lines are found by a second look at the text. That look
only serves messages: where it finds nothing, the message has no line.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from moriiod.errors import ConfigError

MAX_FILE_BYTES: Final = 1 << 20
_MAX_EXCERPT: Final = 60
_KEY: Final = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_DOTTED: Final = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER: Final = re.compile(rf"\s*\[\[?\s*({_DOTTED})\s*\]")
_ASSIGNMENT: Final = re.compile(rf"\s*({_DOTTED})\s*=")
_POSITION: Final = re.compile(r" \(at line (\d+), column \d+\)\Z")


@dataclass(frozen=True, slots=True)
class FileContent:
    """A parsed file: the tables as TOML gives them, and where each key stands."""

    path: str
    tables: Mapping[str, Any]
    lines: Mapping[str, int]

    def where(self, name: str) -> str:
        """Return ``path:line`` of a dotted key, or of the closest table around it."""
        while name:
            if name in self.lines:
                return f"{self.path}:{self.lines[name]}"
            name = name.rpartition(".")[0]
        return self.path


def read_toml(path: str) -> FileContent:
    """Read and parse a file.

    Raises:
        ConfigError: It cannot be read, is empty, too large, not text or not TOML.
    """
    text = _decode(path, _read(path))
    if not text.strip():
        _fail(path, None, "the file is empty; without a file the defaults are used")
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        _fail(path, None, "not valid TOML: nested too deeply")
    except ValueError as error:
        reason = str(error)
        position = _POSITION.search(reason)
        line = int(position[1]) if position else None
        near = f" near {_excerpt(text, line)}" if line else ""
        _fail(path, line, f"not valid TOML: {_POSITION.sub('', reason)}{near}")
    return FileContent(path, tables, find_lines(text))


def _excerpt(text: str, line: int) -> str:
    """Return a line of the file, quoted and shortened, for a message."""
    lines = text.split("\n")
    found = lines[line - 1].strip() if line <= len(lines) else ""
    return repr(found if len(found) <= _MAX_EXCERPT else found[: _MAX_EXCERPT - 3] + "...")


def _read(path: str) -> bytes:
    try:
        # Without O_NONBLOCK, opening a FIFO that nobody writes to would wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        _fail(path, None, f"cannot be read: {_os_reason(error)}")
    try:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        content = _read_all(fd) if is_file else b""
    except OSError as error:
        _fail(path, None, f"cannot be read: {_os_reason(error)}")
    finally:
        os.close(fd)
    if not is_file:
        _fail(path, None, "cannot be read: not a regular file")
    if len(content) > MAX_FILE_BYTES:
        _fail(path, None, f"cannot be read: larger than {MAX_FILE_BYTES} bytes")
    return content


def _read_all(fd: int) -> bytes:
    """Return the content, or one byte more than is allowed of it."""
    with open(fd, "rb", closefd=False) as file:
        return file.read(MAX_FILE_BYTES + 1)


def _decode(path: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        _fail(path, line, "not a text file in UTF-8")


def _os_reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return text or str(error)


def _fail(path: str, line: int | None, reason: str) -> NoReturn:
    shown = path if path.isprintable() else ascii(path)
    where = shown if line is None else f"{shown}:{line}"
    raise ConfigError(f"{where}: {reason}", file=path, line=line, reason=reason)


def find_lines(text: str) -> dict[str, int]:
    """Return the line of the first appearance of every dotted key and table header."""
    lines: dict[str, int] = {}
    table = ""
    closing = ""
    for number, line in enumerate(text.splitlines(), 1):
        if closing:
            closing = "" if closing in line else closing
            continue
        header = _HEADER.match(line)
        if header:
            table = _normal(header[1])
            lines.setdefault(table, number)
            continue
        assignment = _ASSIGNMENT.match(line)
        if assignment:
            name = ".".join(filter(None, (table, _normal(assignment[1]))))
            lines.setdefault(name, number)
        closing = next((q for q in ('"""', "'''") if line.count(q) % 2), "")
    return lines


def _normal(dotted: str) -> str:
    return ".".join(key.strip("\"'") for key in re.findall(_KEY, dotted))
