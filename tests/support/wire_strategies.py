"""Hypothesis strategies for every message type, from the annotations the wire checks."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types as at
from hypothesis import strategies as st

from moriiod.errors import FieldValue

_DEFAULT_MAX: Final = 4
#: Texts that differ only where lengths are counted in bytes, not in characters.
_TEXT: Final = st.characters(codec="utf-8", exclude_categories=("C", "Z"))


def messages(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Return valid messages of one type."""
    hints = get_type_hints(cls, include_extras=True)
    return st.builds(cls, **{item.name: _values(hints[item.name]) for item in fields(cls)})


def bodies(union: Any) -> st.SearchStrategy[Any]:
    """Return valid messages of all types of a union, or of the one type it is."""
    return st.one_of([messages(cls) for cls in get_args(union) or (union,)])


def _values(hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) is Annotated:
        return _constrained(*get_args(hint))
    return _plain(hint, _Bounds(()))


def _constrained(hint: Any, *metadata: Any) -> st.SearchStrategy[Any]:
    return _plain(hint, _Bounds(metadata))


class _Bounds:
    """What ``annotated_types`` says about a value."""

    def __init__(self, metadata: tuple[Any, ...]) -> None:
        self.low: int | None = None
        self.high: int | float | None = None
        self.min_length = 0
        self.max_length = _DEFAULT_MAX
        self.predicates: list[Any] = []
        for item in metadata:
            match item:
                case at.Ge(ge=int(low)):
                    self.low = low
                case at.Le(le=int() | float() as high):
                    self.high = high
                case at.Len(min_length=shortest, max_length=longest):
                    self.min_length = shortest
                    self.max_length = min(longest or _DEFAULT_MAX, max(shortest, _DEFAULT_MAX))
                case at.Predicate(func=func):
                    self.predicates.append(func)
                case _:
                    pass

    def has(self, name: str) -> bool:
        return any(getattr(func, "__name__", "") == name for func in self.predicates)


def _plain(hint: Any, bounds: _Bounds) -> st.SearchStrategy[Any]:
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        return _tuples(args, bounds)
    if origin in (Union, types.UnionType):
        return st.one_of([_values(arg) for arg in args])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is not None and issubclass(origin, Mapping):
        values = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(_TEXT)
        return st.dictionaries(st.text(_TEXT, max_size=8), values, max_size=3)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return messages(hint)
    return _scalars(hint, bounds)


def _tuples(args: tuple[Any, ...], bounds: _Bounds) -> st.SearchStrategy[Any]:
    if args[-1] is not Ellipsis:
        return st.tuples(*[_values(arg) for arg in args])
    items = st.lists(
        _values(args[0]), min_size=bounds.min_length, max_size=min(bounds.max_length, 3)
    )
    return items.map(tuple)


def _scalars(hint: Any, bounds: _Bounds) -> st.SearchStrategy[Any]:
    if hint is bool:
        return st.booleans()
    if hint is type(None):
        return st.none()
    if hint is int:
        return st.integers(bounds.low or 0, None if bounds.high is None else int(bounds.high))
    if hint is float:
        return st.floats(0.001, bounds.high, allow_nan=False)
    if hint is bytes:
        if bounds.has("_has_whole_ids"):
            return st.lists(st.binary(min_size=4, max_size=4), max_size=4).map(b"".join)
        return st.binary(min_size=bounds.min_length, max_size=8)
    if hint is str:
        if bounds.has("_is_hex"):
            return st.text("0123456789abcdef", min_size=32, max_size=32)
        return st.text(_TEXT, min_size=bounds.min_length, max_size=bounds.max_length)
    if hint == FieldValue:
        return st.none()
    raise TypeError(f"no strategy for {hint!r}")
