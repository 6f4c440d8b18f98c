"""The project's own files agree with each other: commands, pins, generated pages, links."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
#: Folders that any machine has; a file may speak of these.
STANDARD_FOLDERS = {Path(p) for p in ("/", "/home", "/opt", "/srv", "/tmp", "/usr", "/usr/local")}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), flags=re.MULTILINE))


def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def tracked_texts() -> list[tuple[str, str]]:
    texts = []
    for path in tracked_files():
        raw = path.read_bytes()
        if b"\0" not in raw:
            texts.append((str(path.relative_to(ROOT)), raw.decode("utf-8", "replace")))
    return texts


def pins() -> dict[str, str]:
    lines = [line for line in read("constraints.txt").splitlines() if line and line[0] != "#"]
    return {canonicalize_name(name): version for name, version in (x.split("==") for x in lines)}


def test_documented_make_commands_exist() -> None:
    pages = ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
    for page in pages:
        named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", read(page), flags=re.MULTILINE))
        assert named <= make_targets(), f"{page} names {named - make_targets()}"


def test_ci_runs_the_commands_of_the_readme() -> None:
    ci = read(".ci/run")
    for command in ("make check", "make test", "make demo"):
        assert re.search(rf"^step {command}$", ci, flags=re.MULTILINE), command
    for command in ("make demo", "make test"):
        assert re.search(rf"^{command}$", read("README.md"), flags=re.MULTILINE), command


def test_make_help_names_every_target() -> None:
    result = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    shown = set(re.findall(r"^  ([a-z][a-z-]*)", result.stdout, flags=re.MULTILINE))
    assert shown == make_targets()


def test_every_development_requirement_is_pinned() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    pinned = pins()
    for text in [*project["dependencies"], *extras["dev"], *extras["docs"]]:
        requirement = Requirement(text)
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} has no line in constraints.txt"
        assert requirement.specifier.contains(version), f"{text} does not allow {version}"


def test_package_ranges_stay_open() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for text in (text for group in groups for text in group):
        assert not re.search(r"==|<|~=", text), f"{text}: pins belong in constraints.txt"


def test_package_ships_its_types() -> None:
    assert (ROOT / "moriiod" / "py.typed").exists()


def test_error_page_matches_the_classes() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "docs" / "tools" / "gen_errors.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def links_of(page: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return [target for target in targets if "://" not in target]


def test_links_between_pages_resolve() -> None:
    broken = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for target in links_of(page)
        if not (page.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)


def test_no_file_names_a_path_of_this_machine() -> None:
    here = {ROOT, ROOT.parent, Path.home(), Path(sys.base_prefix)} - STANDARD_FOLDERS
    found = [
        f"{name}: {path}/" for name, text in tracked_texts() for path in here if f"{path}/" in text
    ]
    assert not found, "\n".join(found)


def test_no_file_names_a_package_registry() -> None:
    hosts = re.compile(r"(?:pypi|pythonhosted|npmjs|debian)\.(?:org|com)|--(?:extra-)?index-url")
    found = [
        f"{name}: {match.group()}"
        for name, text in tracked_texts()
        if name != "tests/meta/test_tooling.py" and (match := hosts.search(text))
    ]
    assert not found, "\n".join(found)
