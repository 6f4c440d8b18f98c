"""Errors as they cross a process boundary, bounded whatever they were raised with.

A code, a sentence and a few plain values; never a traceback, never an object of a library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from moriiod.core.messages import WireError
from moriiod.core.requests import Refused
from moriiod.errors import FieldValue, MoriiodError, error_classes, error_from_code

#: Limits of ``core.ids.MessageText`` and ``ShortText``, and what is sensible for the fields.
MAX_MESSAGE_CHARS: Final = 2048
MAX_CODE_CHARS: Final = 256
MAX_FIELDS: Final = 32
MAX_FIELD_CHARS: Final = 512
#: What msgpack can carry.
_INT_RANGE: Final = (-(1 << 63), (1 << 64) - 1)


def to_refused(error: MoriiodError) -> Refused:
    """Return an error as the answer to a local request."""
    return Refused(
        _code(error), _text(error.message, MAX_MESSAGE_CHARS), _retryable(error), _fields(error)
    )


def to_wire_error(error: MoriiodError) -> WireError:
    """Return an error as a peer is told of it."""
    return WireError(
        _code(error), _text(error.message, MAX_MESSAGE_CHARS), _retryable(error), _fields(error)
    )


def to_error(received: Refused | WireError) -> MoriiodError:
    """Return what was received as an exception of its type.

    A code of a newer build becomes a plain ``MoriiodError`` with the fields ``foreign_code`` and
    ``foreign_retryable``.
    """
    bounded = dict(list(received.fields.items())[:MAX_FIELDS])
    if received.code not in error_classes():
        bounded["foreign_retryable"] = received.retryable
    return error_from_code(received.code, received.message, bounded)


def _code(error: MoriiodError) -> str:
    """A code that only passes through keeps its name."""
    foreign = error.fields.get("foreign_code")
    if type(error) is MoriiodError and isinstance(foreign, str) and foreign.isprintable():
        return foreign[:MAX_CODE_CHARS] or error.code
    return error.code


def _retryable(error: MoriiodError) -> bool:
    if type(error) is MoriiodError and "foreign_retryable" in error.fields:
        return error.fields["foreign_retryable"] is True
    return error.retryable


def _fields(error: MoriiodError) -> Mapping[str, FieldValue]:
    items = list(error.fields.items())[:MAX_FIELDS]
    return {_text(key, 64): _value(value) for key, value in items}


def _value(value: FieldValue) -> FieldValue:
    if isinstance(value, str):
        return _text(value, MAX_FIELD_CHARS)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and not _INT_RANGE[0] <= value <= _INT_RANGE[1]:
        return hex(value)[:MAX_FIELD_CHARS]
    return value


def _text(text: str, limit: int) -> str:
    """Cut, and replace what is not valid Unicode (file names with stray bytes)."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return cut.encode("utf-8", "replace").decode("utf-8")
