"""Rules about our own source that no linter checks: sizes, tasks, waiting, imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "moriiod"

MAX_PYTHON_LINES = 400
MAX_C_LINES = 800

#: Calls by the last part of their name that the concurrency rules do without.
BANNED_CALLS = frozenset({"create_task", "ensure_future", "wait_for", "shield", "sleep"})
#: (file below moriiod/, call) -> why it must be there. A line that is not needed any more fails.
ALLOWED_CALLS: dict[tuple[str, str], str] = {}

#: Packages outside the standard library that the core may import.
CORE_MAY_IMPORT = frozenset({"annotated_types", "moriiod", "numpy"})


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def last_name(node: ast.expr | None) -> str:
    """The last part of a dotted name: ``group`` for ``self.group``; "" for anything else."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Constant(value=str(text)):  # an annotation in quotes
            return text.rsplit(".", 1)[-1]
        case _:
            return ""


def task_groups(tree: ast.Module) -> set[str]:
    """Names that are bound to an asyncio.TaskGroup in this file."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.withitem(context_expr=ast.Call(func=func), optional_vars=ast.expr() as target):
                if last_name(func) == "TaskGroup":
                    names.add(last_name(target))
            case ast.arg(arg=name, annotation=annotation):
                if last_name(annotation) == "TaskGroup":
                    names |= {name, f"_{name}"}
            case ast.AnnAssign(target=target, annotation=annotation):
                if last_name(annotation) == "TaskGroup":
                    names.add(last_name(target))
    return names


def banned_calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each banned call; a TaskGroup's own create_task is what we want."""
    groups = task_groups(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = last_name(node.func)
        if name not in BANNED_CALLS:
            continue
        owner = last_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if not (name == "create_task" and owner in groups):
            yield node.lineno, name


def imported_roots(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield node.lineno, alias.name.split(".")[0]
            case ast.ImportFrom(module=str(module)):
                yield node.lineno, module.split(".")[0]


def too_long(files: list[Path], limit: int) -> list[str]:
    counts = [(path, len(path.read_text(encoding="utf-8").splitlines())) for path in files]
    return [
        f"{path.relative_to(ROOT)}: {n} lines, limit {limit}" for path, n in counts if n > limit
    ]


def test_files_stay_small_enough_to_read() -> None:
    c_files = [p for suffix in ("*.c", "*.h") for p in (ROOT / "tests").rglob(suffix)]
    found = too_long(python_files(PACKAGE), MAX_PYTHON_LINES) + too_long(c_files, MAX_C_LINES)
    assert not found, "\n".join(found)


def test_package_has_no_bare_task_no_timeout_on_a_receive_and_no_sleep() -> None:
    found: dict[tuple[str, str], list[int]] = {}
    for path in python_files(PACKAGE):
        for line, name in banned_calls(tree_of(path)):
            found.setdefault((str(path.relative_to(PACKAGE)), name), []).append(line)
    unknown = {key: lines for key, lines in found.items() if key not in ALLOWED_CALLS}
    assert not unknown, f"banned calls at {unknown}; see docs/testing.md"
    stale = set(ALLOWED_CALLS) - set(found)
    assert not stale, f"allowed but not there any more: {stale}"


def test_tests_never_sleep() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files(ROOT / "tests")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and last_name(node.func) == "sleep"
    ]
    assert not found, f"wait for a condition or a gate instead: {found}"


def test_core_imports_only_the_standard_library_and_what_is_agreed() -> None:
    allowed = CORE_MAY_IMPORT | sys.stdlib_module_names
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {root}"
        for path in python_files(PACKAGE / "core")
        for line, root in imported_roots(tree_of(path))
        if root not in allowed
    ]
    assert not found, "\n".join(found)


def test_import_layers_hold() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [lint, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "module", ["moriiod.daemon.app", "moriiod.cli.main", "moriiod.engines.shm"]
)
def test_serving_over_shm_does_not_import_torch(module: str) -> None:
    path = ROOT.joinpath(*module.split("."))
    if not path.with_suffix(".py").exists():
        pytest.skip(f"{module} is not part of this build")
    loaded = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert {name.split(".")[0] for name in loaded}.isdisjoint({"torch", "mori", "nixl", "vllm"})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("asyncio.create_task(f())", ["create_task"]),
        ("loop.create_task(f())", ["create_task"]),
        ("async def f():\n async with asyncio.TaskGroup() as g:\n  g.create_task(f())", []),
        ("def f(tasks: asyncio.TaskGroup):\n tasks.create_task(g())", []),
        ("class A:\n _tasks: TaskGroup\n def f(self):\n  self._tasks.create_task(g())", []),
        (
            "class A:\n def __init__(self, tasks: asyncio.TaskGroup):\n  self._tasks = tasks\n"
            " def f(self):\n  self._tasks.create_task(g())",
            [],
        ),
        ("await asyncio.wait_for(x, 1)", ["wait_for"]),
        ("from time import sleep\nsleep(1)", ["sleep"]),
        ("'asyncio.sleep(1)'  # asyncio.sleep(1)", []),
    ],
)
def test_planted_calls_are_told_apart(source: str, expected: list[str]) -> None:
    assert [name for _, name in banned_calls(ast.parse(source))] == expected
