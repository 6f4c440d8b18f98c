"""The units: accepted by systemd's own tools, and saying what the cases ask for."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from moriiod.config.load import load
from moriiod.config.names import SETTINGS

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "systemd"
INSTANCE = "moriiod@3.service"


def directives(path: Path) -> Mapping[str, list[str]]:
    """Return every directive of a unit, in order; comments and sections left out."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@pytest.fixture
def service() -> Mapping[str, list[str]]:
    return directives(SYSTEMD / "moriiod@.service")


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not on this machine")
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A root directory with the units, the daemon, and the system's own targets."""
    units = tmp_path / "usr/lib/systemd/system"
    units.mkdir(parents=True)
    for source in (Path("/usr/lib/systemd/system"), Path("/lib/systemd/system")):
        for path in (*source.glob("*.target"), *source.glob("*.slice")):
            shutil.copy(path, units / path.name)
    for path in (*SYSTEMD.glob("*.service"), *SYSTEMD.glob("*.target")):
        shutil.copy(path, units)
    binary = tmp_path / "usr/bin/moriiod"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    (tmp_path / "etc").mkdir()
    return tmp_path


def run(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout + done.stderr


def verify(tree: Path) -> tuple[int, str]:
    units = tree / "usr/lib/systemd/system"
    names = [str(units / INSTANCE), str(units / "moriiod.target")]
    return run(tool("systemd-analyze"), "verify", "--man=no", f"--root={tree}", *names)


def test_S4_systemd_accepts_the_units_without_a_word(tree: Path) -> None:
    assert verify(tree) == (0, "")


def test_systemd_would_have_complained_about_a_mistake(tree: Path) -> None:
    unit = tree / "usr/lib/systemd/system/moriiod@.service"
    unit.write_text(unit.read_text().replace("WatchdogSec=30", "WatchdogSecs=30"))
    assert "WatchdogSecs" in verify(tree)[1]


def test_the_unit_is_as_closed_as_it_can_be(tree: Path) -> None:
    code, text = run(
        tool("systemd-analyze"), "security", "--no-pager", "--offline=true", f"--root={tree}",
        "--threshold=25", INSTANCE,
    )  # fmt: skip
    if "Unknown" in text or "unrecognized option" in text:
        pytest.skip("this systemd cannot look at units offline")
    assert code == 0, text


def test_sysusers_and_tmpfiles_do_what_they_say(tree: Path) -> None:
    sysusers, tmpfiles = tool("systemd-sysusers"), tool("systemd-tmpfiles")
    users = SYSTEMD / "moriiod.sysusers"
    code, text = run(sysusers, "--dry-run", f"--root={tree}", str(users))
    assert code == 0, text
    assert "moriiod" in text
    code, text = run(sysusers, f"--root={tree}", str(users))
    assert code == 0, text
    assert "moriiod:" in (tree / "etc/passwd").read_text()
    groups = (tree / "etc/group").read_text().splitlines()
    assert any(line.startswith("render:") and line.endswith("moriiod") for line in groups)
    code, text = run(tmpfiles, "--create", f"--root={tree}", str(SYSTEMD / "moriiod.tmpfiles"))
    assert code == 0, text
    assert (tree / "run/moriiod").stat().st_mode & 0o7777 == 0o750


def test_S4_a_rank_that_stops_leaves_the_sockets_of_the_others(
    service: Mapping[str, list[str]],
) -> None:
    assert service["RuntimeDirectory"] == ["moriiod"]
    assert service["RuntimeDirectoryPreserve"] == ["yes"]
    assert service["RuntimeDirectoryMode"] == ["0750"]
    # The unit gives no runtime directory of its own, so the default must be this one.
    paths = {
        load({"daemon.tp_rank": str(n), "daemon.tp_size": "8"}, {}).config.socket_path
        for n in range(8)
    }
    assert paths == {f"/run/moriiod/rank{n}.sock" for n in range(8)}


def test_S3_the_unit_waits_for_ready_and_watches_the_loop(
    service: Mapping[str, list[str]],
) -> None:
    assert service["Type"] == ["notify"]
    assert service["NotifyAccess"] == ["main"]
    assert int(service["WatchdogSec"][0]) >= 10
    drain_s = SETTINGS["daemon.drain_timeout_s"].default
    assert isinstance(drain_s, float)
    assert int(service["TimeoutStopSec"][0]) > drain_s


def test_C1_a_configuration_error_does_not_become_a_restart_storm(
    service: Mapping[str, list[str]],
) -> None:
    assert service["RestartPreventExitStatus"] == ["2 78"]
    assert service["Restart"] == ["on-failure"]
    assert int(service["RestartSec"][0]) >= 1
    assert int(service["StartLimitBurst"][0]) <= 20
    assert int(service["StartLimitIntervalSec"][0]) >= 60


def test_M5_locked_memory_is_not_limited(service: Mapping[str, list[str]]) -> None:
    assert service["LimitMEMLOCK"] == ["infinity"]


def test_the_instance_is_the_rank(service: Mapping[str, list[str]]) -> None:
    assert service["ExecStart"] == ["/usr/bin/moriiod serve --tp-rank %i"]
    assert "-/etc/moriiod/moriiod.env" in service["EnvironmentFile"]
    assert service["PartOf"] == ["moriiod.target"]
    assert service["WantedBy"] == ["moriiod.target"]


def test_hardening_still_lets_the_devices_through(service: Mapping[str, list[str]]) -> None:
    assert service["DevicePolicy"] == ["closed"]
    assert service["PrivateDevices"] == ["no"]
    allowed = {line.split()[0] for line in service["DeviceAllow"]}
    assert {"/dev/kfd", "char-drm", "char-infiniband_verbs", "/dev/infiniband/rdma_cm"} <= allowed
    for family in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"):
        assert family in service["RestrictAddressFamilies"][0]


def test_every_loosened_option_says_why() -> None:
    lines = (SYSTEMD / "moriiod@.service").read_text(encoding="utf-8").splitlines()
    start = lines.index("# Left open, and why:")
    for number, line in enumerate(lines[start:], start):
        if line.endswith(("=no", "=default", "=all")):
            comments = []
            above = number - 1
            while lines[above].startswith("#") or "=" in lines[above]:
                if lines[above].startswith("#"):
                    comments.append(lines[above])
                above -= 1
            assert any(line.split("=")[0] in comment for comment in comments), line


def test_the_syscall_filter_has_what_the_daemon_needs() -> None:
    known = run(tool("systemd-analyze"), "syscall-filter")[1]
    if not known:
        pytest.skip("this systemd lists no filters")
    sets: dict[str, set[str]] = {}
    current = ""
    for line in known.splitlines():
        if line.startswith("@"):
            current = line.strip()
            sets[current] = set()
        elif line.strip() and not line.strip().startswith("#"):
            sets[current].add(line.strip())

    def members(name: str) -> set[str]:
        return {
            call
            for item in sets[name]
            for call in (members(item) if item.startswith("@") else {item})
        }

    needed = {"memfd_create", "pidfd_open", "mlock", "mlock2", "mbind", "madvise", "sendmsg"}
    assert needed <= members("@system-service")
