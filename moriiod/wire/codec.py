"""Bytes <-> message dataclasses: the only place that raises errors about bytes from outside.

A body is one msgpack map; the type name travels beside it. Decoding is strict and closed: unknown
keys, duplicate keys, wrong types, numbers out of range, trailing bytes and extension types are
all refused, and memory is only ever allocated in proportion to the input (safety rules S5, S6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from typing import Any, Final, Generic, TypeVar, get_args, get_type_hints

import msgpack
from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from moriiod.errors import InvalidArgument, MalformedFrame, TooLarge, UnknownMessage
from moriiod.wire.frames import check_body

MessageT = TypeVar("MessageT")

#: Longest list in any message (orphans of an attach).
MAX_ARRAY_ITEMS: Final = 65536
#: No message has so many fields, no error so many values.
MAX_MAP_ITEMS: Final = 256
#: How much of a refused value an error shows.
_MAX_SHOWN: Final = 64


class Codec(Generic[MessageT]):
    """Encodes and decodes the members of one union of message dataclasses.

    Args:
        types: The members; a message's type name is its class name.
        max_body_bytes: Larger bodies are refused before they are parsed.
        is_tolerant: Ignore fields this build does not know, instead of refusing them. Only for
            the handshake, which builds of all versions must be able to read.
    """

    def __init__(
        self, types: Iterable[type[MessageT]], max_body_bytes: int, is_tolerant: bool = False
    ) -> None:
        members = list(types)
        self._max_body_bytes = max_body_bytes
        self._adapters: dict[str, TypeAdapter[Any]] = {t.__name__: TypeAdapter(t) for t in members}
        self._validators = {
            name: SchemaValidator(_fail_fast(adapter.core_schema))
            for name, adapter in self._adapters.items()
        }
        self._strippers = {t.__name__: _stripper(t) for t in members} if is_tolerant else {}

    @property
    def type_names(self) -> tuple[str, ...]:
        """Names of all message types, in the order of the union."""
        return tuple(self._adapters)

    def encode(self, message: MessageT, max_body_bytes: int | None = None) -> tuple[str, bytes]:
        """Return (type name, body).

        Args:
            message: What to send.
            max_body_bytes: Overrides the codec's own limit.

        Raises:
            InvalidArgument: A field holds what the wire cannot carry.
            TooLarge: The body is over the limit.
        """
        name = type(message).__name__
        plain = self._adapters[name].dump_python(message, warnings="none")
        try:
            body: bytes = msgpack.packb(plain, use_bin_type=True)
        except (ValueError, TypeError, OverflowError) as error:
            raise InvalidArgument(f"{name} cannot be encoded: {error}"[:200], type=name) from None
        return name, check_body(body, max_body_bytes or self._max_body_bytes)

    def decode(
        self, type_name: bytes | str, body: bytes, max_body_bytes: int | None = None
    ) -> MessageT:
        """Return the message of this type and body.

        Args:
            type_name: As ``encode`` returned it.
            body: As ``encode`` returned it.
            max_body_bytes: Overrides the codec's own limit.

        Raises:
            UnknownMessage: No such type.
            TooLarge: The body is over the limit.
            MalformedFrame: The body is not one msgpack map.
            InvalidArgument: A field is missing, unknown, of the wrong type or out of range; the
                error's ``field`` names it.
        """
        name = _as_text(type_name)
        validator = self._validators.get(name)
        if validator is None:
            raise UnknownMessage(f"unknown message type {name}", type=name)
        values = unpack_map(check_body(body, max_body_bytes or self._max_body_bytes))
        if self._strippers:
            values = self._strippers[name](values)
        try:
            message: MessageT = validator.validate_python(values)
        except ValidationError as error:
            raise _invalid_argument(name, error) from None
        return message


def codec_for(union: Any, max_body_bytes: int) -> Codec[Any]:
    """Return the codec of a ``A | B | ...`` alias; annotate the variable with the alias."""
    return Codec(get_args(union), max_body_bytes)


def unpack_map(body: bytes) -> dict[str, Any]:
    """Parse exactly one msgpack map with distinct string keys.

    Raises:
        MalformedFrame: It is anything else.
        TooLarge: A list or map in it is longer than any message needs.
    """
    try:
        _check_claims(body)
        value = msgpack.unpackb(
            body,
            use_list=False,
            strict_map_key=True,
            object_pairs_hook=_distinct,
            ext_hook=_refuse_extension,
            max_array_len=MAX_ARRAY_ITEMS,
            max_map_len=MAX_MAP_ITEMS,
        )
    except MalformedFrame:
        raise
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise _unpack_error(error) from None
    if not isinstance(value, dict):
        raise MalformedFrame("body is not a map", got=type(value).__name__)
    return value


def _check_claims(body: bytes) -> None:
    """Walk the structure once without building it.

    A header may claim any number of items, and nested ones multiply: three kilobytes of list
    headers make the builder allocate gigabytes before it notices that the items are missing.
    """
    unpacker = msgpack.Unpacker(None, read_size=len(body) or 1, max_buffer_size=len(body) or 1)
    unpacker.feed(body)
    unpacker.skip()


def _unpack_error(error: Exception) -> MalformedFrame | TooLarge:
    reason = str(error)[:200]
    if "exceeds max_array_len" in reason or "exceeds max_map_len" in reason:
        return TooLarge(
            "a list in the message is longer than any message needs",
            limit="max_array_items",
            value=MAX_ARRAY_ITEMS,
            reason=reason,
        )
    return MalformedFrame("body is not msgpack", reason=reason or type(error).__name__)


def _distinct(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise MalformedFrame("a map has the same key twice")
    if not all(isinstance(key, str) for key in result):
        raise MalformedFrame("a map has a key that is not text")
    return result


def _refuse_extension(code: int, _data: bytes) -> None:
    raise MalformedFrame("extension types are not part of the protocol", code=code)


def _as_text(name: bytes | str) -> str:
    text = name if isinstance(name, str) else name[:_MAX_SHOWN].decode("ascii", "backslashreplace")
    return text[:_MAX_SHOWN]


def _fail_fast(schema: Any) -> Any:
    """Make lists stop at their first bad item.

    Otherwise a list of 65,536 wrong items becomes as many error records.
    """
    if isinstance(schema, list):
        return [_fail_fast(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: _fail_fast(value) for key, value in schema.items()}
    if copy.get("type") in ("tuple", "list"):
        copy["fail_fast"] = True
    return copy


def _stripper(cls: type[Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that drops the keys ``cls`` does not have, also in nested messages."""
    hints = get_type_hints(cls)
    nested = {
        item.name: _stripper(hints[item.name]) if is_dataclass(hints[item.name]) else None
        for item in dataclass_fields(cls)
    }

    def strip(values: Mapping[str, Any]) -> dict[str, Any]:
        known: dict[str, Any] = {}
        for key, value in values.items():
            if key in nested:
                inner = nested[key]
                known[key] = inner(value) if inner and isinstance(value, dict) else value
        return known

    return strip


def _invalid_argument(type_name: str, error: ValidationError) -> InvalidArgument:
    first = error.errors(include_url=False, include_context=False, include_input=True)[0]
    where = ".".join(str(part) for part in first["loc"])[:200]
    return InvalidArgument(
        f"{type_name}: {where}: {first['msg']}"[:500],
        field=where,
        got=_shown(first["input"]),
        problems=error.error_count(),
    )


def _shown(value: Any) -> str:
    """Describe a refused value without copying more than a little of it."""
    if isinstance(value, bytes | str):
        rest = len(value) - _MAX_SHOWN
        return repr(value[:_MAX_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
    if isinstance(value, tuple | dict):
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)[:_MAX_SHOWN]
