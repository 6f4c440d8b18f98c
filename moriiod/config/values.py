"""The kinds of values a setting can have: how each is read, and how it is described.

People write numbers as strings (``"6301"``) in files and always in the environment, so that is
accepted. What is never accepted is a guess: a bool is not a number, ``yes`` is not a bool, ``010``
and ``0x10`` are not numbers, and nothing that is not finite is a duration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from moriiod.core.address import normalise_host
from moriiod.errors import InvalidAddress

_WHOLE: Final = re.compile(r"-?(0|[1-9][0-9]{0,19})\Z", re.ASCII)
_DECIMAL: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?\Z", re.ASCII)
_OCTAL: Final = re.compile(r"0?[0-7]{3}\Z", re.ASCII)
_MAX_HOST_NAME: Final = 253
#: Most that the kernel takes as the path of a Unix socket, in bytes, without the closing NUL.
MAX_SOCKET_PATH_BYTES: Final = 107
_BOOLS: Final = {"true": True, "1": True, "false": False, "0": False}


class ValueKind(Protocol):
    """Reads a raw value (from TOML, the environment or a flag); raises ValueError with a reason."""

    @property
    def metavar(self) -> str:
        """What stands for the value in ``--help``."""
        ...

    def __call__(self, raw: Any) -> Any:
        """Return the value, or raise ValueError saying what is wrong with it."""
        ...

    def describe(self) -> str:
        """Say in a few words what is allowed."""
        ...


class _Kind:
    """Lets a kind stand in ``Annotated[...]`` of a pydantic field as its whole validation."""

    def __call__(self, raw: Any) -> Any:
        raise NotImplementedError

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        call: Callable[[Any], Any] = self
        return core_schema.no_info_plain_validator_function(call)


@dataclass(frozen=True, slots=True)
class Whole(_Kind):
    """A whole number from ``low`` to ``high``, both included."""

    low: int
    high: int
    metavar: str = "N"
    #: Says what is allowed where another setting narrows it.
    allowed: str = ""

    def __call__(self, raw: Any) -> int:
        if isinstance(raw, str) and _WHOLE.match(raw.strip()):
            raw = int(raw.strip())
        if isinstance(raw, bool) or not isinstance(raw, int):
            raise ValueError("not a whole number")
        if not self.low <= raw <= self.high:
            raise ValueError(f"not in [{self.low}, {self.high}]")
        return raw

    def describe(self) -> str:
        return self.allowed or f"{self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Seconds(_Kind):
    """A finite duration in seconds from ``low`` to ``high``, both included."""

    low: float
    high: float
    metavar: str = "SECONDS"

    def __call__(self, raw: Any) -> float:
        if isinstance(raw, str) and _DECIMAL.match(raw.strip()):
            raw = float(raw.strip())
        if isinstance(raw, bool) or not isinstance(raw, int | float):
            raise ValueError("not a number of seconds")
        # Only a float is asked: math.isfinite overflows on an int that is large enough.
        if isinstance(raw, float) and not math.isfinite(raw):
            raise ValueError("not a finite number of seconds")
        if not self.low <= raw <= self.high:
            raise ValueError(f"not in [{self.low:g}, {self.high:g}] seconds")
        return float(raw)

    def describe(self) -> str:
        return f"{self.low:g} to {self.high:g} s"


@dataclass(frozen=True, slots=True)
class Switch(_Kind):
    """True or false, as ``true``, ``false``, ``1`` or ``0``."""

    metavar: str = "BOOL"

    def __call__(self, raw: Any) -> bool:
        if isinstance(raw, bool):
            return raw
        text = str(raw).strip().casefold() if isinstance(raw, str | int) else ""
        if text not in _BOOLS:
            raise ValueError("not true, false, 1 or 0")
        return _BOOLS[text]

    def describe(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Choice(_Kind):
    """One of a fixed set of words."""

    words: tuple[str, ...]

    @property
    def metavar(self) -> str:
        return "|".join(self.words)

    def __call__(self, raw: Any) -> str:
        word = raw.strip().casefold() if isinstance(raw, str) else None
        if word not in self.words:
            raise ValueError(f"not one of {', '.join(self.words)}")
        return word

    def describe(self) -> str:
        return ", ".join(f"`{word}`" for word in self.words)


@dataclass(frozen=True, slots=True)
class Name(_Kind):
    """Printable text of 1 to ``high`` characters, without blanks at its ends."""

    high: int
    metavar: str = "NAME"

    def __call__(self, raw: Any) -> str:
        return _printable(raw, self.high)

    def describe(self) -> str:
        return f"printable text, at most {self.high} characters"


@dataclass(frozen=True, slots=True)
class AbsolutePath(_Kind):
    """An absolute file name. Its length is checked where its use is known."""

    metavar: str = "PATH"

    def __call__(self, raw: Any) -> str:
        if not isinstance(raw, str) or not raw:
            raise ValueError("not a path")
        if "\0" in raw or not raw.isprintable():
            raise ValueError("has characters that do not belong in a path")
        if not raw.startswith("/"):
            raise ValueError("not an absolute path")
        return raw.rstrip("/") or "/"

    def describe(self) -> str:
        return "an absolute path"


@dataclass(frozen=True, slots=True)
class OctalMode(_Kind):
    """Permission bits of a socket, as a string of octal digits such as ``"0660"``."""

    metavar: str = "MODE"

    def __call__(self, raw: Any) -> str:
        # TOML's 660 is decimal and its 0o660 prints as 432; only text leaves no doubt.
        if not isinstance(raw, str) or not _OCTAL.match(raw.strip()):
            raise ValueError('not a string of octal digits such as "0660"')
        mode = int(raw, 8)
        if mode & 0o111 or mode & 0o600 != 0o600:
            raise ValueError("must let the owner read and write, and have no execute bits")
        return f"{mode:04o}"

    def describe(self) -> str:
        return 'octal digits in quotes, such as `"0660"`'


@dataclass(frozen=True, slots=True)
class Host(_Kind):
    """A host name or an IP literal, without port; brackets around IPv6 are taken off.

    ``*`` as a wildcard means all IPv4 addresses, as in ZMQ.
    """

    metavar: str = "HOST"

    def __call__(self, raw: Any) -> str:
        return _read_host(raw)

    def describe(self) -> str:
        return "a host name or IP address, without port"


@dataclass(frozen=True, slots=True)
class Hosts(_Kind):
    """A list of hosts; in the environment and in flags, separated by commas."""

    high: int
    metavar: str = "HOST,..."

    def __call__(self, raw: Any) -> tuple[str, ...]:
        if isinstance(raw, str):
            raw = raw.split(",")
        if not isinstance(raw, list | tuple):
            raise ValueError("not a list of hosts")
        if len(raw) > self.high:
            raise ValueError(f"more than {self.high} hosts")
        hosts = []
        for index, item in enumerate(raw):
            try:
                hosts.append(_read_host(item))
            except ValueError as error:
                raise ValueError(f"host {index}: {error}") from None
        return tuple(hosts)

    def describe(self) -> str:
        return "a list of hosts"


def _printable(raw: Any, high: int) -> str:
    if not isinstance(raw, str):
        raise ValueError("not a text")
    text = raw.strip()
    if not text:
        raise ValueError("empty")
    if len(text) > high:
        raise ValueError(f"longer than {high} characters")
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


def _read_host(raw: Any) -> str:
    """Return a host in its one spelling; ``*`` as the IPv4 wildcard it is to ZMQ."""
    text = _printable(raw, _MAX_HOST_NAME)
    try:
        return normalise_host("0.0.0.0" if text == "*" else text)
    except InvalidAddress:
        raise ValueError("not a host name or IP address (a port goes into base_port)") from None
