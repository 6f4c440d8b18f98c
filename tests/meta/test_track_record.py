"""docs/track-record.md names only tests that exist, and no case is without one."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "track-record.md"

#: Every published case; those to show first are in CORE.
CASES = frozenset(
    "R1 R2 R3 R4 R5 R6 R7 A1 A4 A5 A7 A8 A9 A10 G1 G3 G4 G5 G7 G8 G9 M1 M2 M3 M4 M5 M6 M7 M8 M9 "
    "T1 T2 T3 T4 T6 T7 T8 P1 P2 P3 P4 P5 P6 L2 L3 L4 L5 L8 L9 Z1 Z3 Z4 Z5 Z6 Z7 Z8 Z9 "
    "C1 C2 C3 C4 C5 S1 S2 S3 S4 S5".split()
)
CORE = frozenset(
    "R1 R2 R3 R5 A1 A4 A5 A8 A10 G1 G4 G5 G7 M1 M4 M6 M9 T1 T2 T3 T4 P1 P3 P5 L2 L5 Z1 Z5 Z6 "
    "C1 C2 S1 S3".split()
)


@dataclass(frozen=True)
class Row:
    """One case of the page."""

    case: str
    is_core: bool
    tests: tuple[str, ...]


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        match = re.match(r"\| ([A-Z]\d+)( \(core\))? \|.*\|.*\| (.*) \|$", line)
        if match:
            tests = tuple(re.findall(r"`(tests/[^`]+)`", match[3]))
            found.append(Row(match[1], match[2] is not None, tests))
    return found


@cache
def functions_of(path: str) -> frozenset[str]:
    """Names of the test functions of a file; empty if there is no such file."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"), filename=path)
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_every_case_is_listed_once_and_marked_if_it_is_core() -> None:
    listed = [row.case for row in rows()]
    assert sorted(listed) == sorted(CASES)
    assert {row.case for row in rows() if row.is_core} == CORE


def test_every_case_is_replayed() -> None:
    assert [row.case for row in rows() if not row.tests] == []


def test_every_test_that_is_named_exists_and_carries_the_id_of_its_case() -> None:
    missing = []
    for row in rows():
        for test in row.tests:
            path, _, name = test.partition("::")
            if name not in functions_of(path) or not name.startswith(f"test_{row.case}_"):
                missing.append(f"{row.case}: {test}")
    assert missing == [], "not there (any more); name others in docs/track-record.md"
