"""The base of every dataclass that crosses a process boundary."""

from __future__ import annotations

from typing import Any, ClassVar


class Strict:
    """Marks a frozen dataclass as a wire type: closed, strict, finite.

    pydantic reads ``__pydantic_config__`` and ``__get_pydantic_core_schema__`` from stdlib
    dataclasses, so the core can say how its types are to be checked without importing pydantic.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
    }

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Build from a map although the fields are strict (msgpack knows no dataclasses)."""
        schema = handler(source)
        schema["strict"] = False
        return schema
