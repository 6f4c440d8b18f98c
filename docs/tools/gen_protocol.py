"""Write the message tables of docs/protocol-*.md from the dataclasses; ``--check`` only compares.

Only what lies between a pair of markers is replaced; the prose around it is written by hand.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types as at

from moriiod.core.messages import PeerBody
from moriiod.core.requests import ClientEvent, Reply, Request
from moriiod.errors import FieldValue

DOCS: Final = Path(__file__).resolve().parents[1]
#: Page -> marker -> the message types whose tables go there.
PAGES: Final[Mapping[str, Mapping[str, tuple[type[Any], ...]]]] = {
    "protocol-ipc.md": {
        "requests": get_args(Request),
        "replies": get_args(Reply),
        "events": (ClientEvent,),
    },
    "protocol-peer.md": {"messages": get_args(PeerBody)},
}
_COMMENTED_FIELD: Final = re.compile(r"((?:^ +#: .*\n)+) +(\w+):", re.MULTILINE)
_ATTRIBUTES: Final = re.compile(r"^\s+(\w+): (.+?)(?=^\s+\w+: |\Z)", re.MULTILINE | re.DOTALL)


def render(page: str, text: str) -> str:
    """Return a page's text with its tables made anew."""
    sections = PAGES[page]
    parts = {name: "\n".join(section(cls) for cls in sections[name]) for name in sections}
    parts["parts"] = "\n".join(section(cls) for cls in nested_of(sections))
    for name, body in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, has_begin, rest = text.partition(begin)
        _, has_end, after = rest.partition(end)
        if not has_begin or not has_end:
            raise ValueError(f"{page} has no markers for {name}")
        text = f"{before}{begin}\n\n{body}\n{end}{after}"
    return text


def section(cls: type[Any]) -> str:
    """Return heading, description and field table of one message type."""
    prose, _, attributes = (inspect.getdoc(cls) or "").partition("Attributes:")
    meanings = {name: one_line(text) for name, text in _ATTRIBUTES.findall(attributes)}
    for comment, name in _COMMENTED_FIELD.findall(inspect.getsource(cls)):
        meanings[name] = one_line(comment.replace("#: ", ""))
    head = f"### {cls.__name__}\n\n{prose.strip()}\n"
    if not fields(cls):
        return head + "\nNo fields.\n"
    hints = get_type_hints(cls, include_extras=True)
    columns = ["field", "value", "default"] + (["meaning"] if meanings else [])
    rows = [columns, ["---"] * len(columns)]
    for item in fields(cls):
        row = [f"`{item.name}`", describe(hints[item.name]), default_of(item)]
        rows.append(row + ([meanings.get(item.name, "")] if meanings else []))
    return head + "\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def nested_of(sections: Mapping[str, tuple[type[Any], ...]]) -> list[type[Any]]:
    """Return the dataclasses inside the messages, each once, outer ones first."""
    tops = {cls for group in sections.values() for cls in group}
    found: dict[type[Any], None] = {}
    queue = [cls for group in sections.values() for cls in group]
    while queue:
        for hint in get_type_hints(queue.pop(0), include_extras=True).values():
            new = [cls for cls in dataclasses_in(hint) if cls not in found and cls not in tops]
            found.update(dict.fromkeys(new))
            queue += new
    return list(found)


def dataclasses_in(hint: Any) -> Iterator[type[Any]]:
    """Yield the dataclasses a type annotation speaks of."""
    if is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for arg in get_args(hint):
        yield from dataclasses_in(arg)


def default_of(item: Field[Any]) -> str:
    """Say what a field that was left out holds."""
    if item.default is not MISSING:
        return f"`{item.default!r}`"
    return "required" if item.default_factory is MISSING else "empty"


def describe(hint: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Say in words what a field may hold."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return describe(args[0], (*args[1:], *metadata))
    if hint == FieldValue:
        return "text, number, boolean or nil"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin is tuple:
        return describe_list(args, metadata)
    if origin is not None and issubclass(origin, Mapping):
        return f"map of text to {describe(args[1])}"
    if is_dataclass(hint) and isinstance(hint, type):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return describe_scalar(hint, metadata)


def describe_list(args: tuple[Any, ...], metadata: tuple[Any, ...]) -> str:
    """Describe a list, or a tuple of fixed parts."""
    if args[-1] is not Ellipsis:
        return "(" + ", ".join(describe(arg) for arg in args) + ")"
    shortest, longest = lengths(metadata)
    bounds = f"{shortest} to {longest}" if shortest else f"up to {longest}"
    return f"list of {bounds}: {describe(args[0])}"


def describe_scalar(hint: Any, metadata: tuple[Any, ...]) -> str:
    """Describe a number, text, bytes, boolean or nil."""
    predicates = {getattr(item.func, "__name__", "") for item in metadata if hasattr(item, "func")}
    shortest, longest = lengths(metadata)
    if hint is str:
        if "_is_hex" in predicates:
            return f"text, {longest} hex digits"
        if longest is None:
            return "text"
        unit = "bytes" if "_is_id_text" in predicates else "characters"
        return f"text, {shortest} to {longest} {unit}"
    if hint is bytes:
        kind = "bytes, packed u32" if "_has_whole_ids" in predicates else "bytes"
        return f"{kind}, up to {longest} bytes"
    names = {int: "integer", float: "number", bool: "boolean", type(None): "nil"}
    return names[hint] + range_of(metadata)


def range_of(metadata: tuple[Any, ...]) -> str:
    """Describe the bounds of a number."""
    low = high = ""
    for item in metadata:
        match item:
            case at.Ge(ge=value):
                low = f", {value} to"
            case at.Gt(gt=value):
                low = f", more than {value:g}, to"
            case at.Le(le=value):
                high = f" {power_of_two(value)}"
            case _:
                pass
    return low + high


def power_of_two(value: Any) -> str:
    """Write large powers of two as such."""
    if isinstance(value, int) and value >= 1 << 31 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def lengths(metadata: tuple[Any, ...]) -> tuple[int, int | None]:
    """Return the least and the most items."""
    for item in metadata:
        if isinstance(item, at.Len):
            return item.min_length, item.max_length
        if isinstance(item, at.MaxLen):
            return 0, item.max_length
    return 0, None


def one_line(text: str) -> str:
    """Join the lines of a paragraph, fit for a table cell."""
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    """Write the pages, or with ``--check`` say whether they are up to date (exit 1 if not)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    is_check = parser.parse_args().check
    stale = []
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        wanted = render(page, text)
        if wanted != text and is_check:
            stale.append(page)
        elif wanted != text:
            (DOCS / page).write_text(wanted, encoding="utf-8")
    if stale:
        print(f"{', '.join(stale)} do not match the messages; run `make docs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
