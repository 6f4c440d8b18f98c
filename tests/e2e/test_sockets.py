"""The socket files of a daemon: where they may lie, who may use them, whose they are."""

from __future__ import annotations

import grp
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.children import clean_environment
from tests.support.process_fixtures import DaemonMaker

#: Somebody who is neither owner nor member of the group.
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

CONNECT = """
import os, socket, sys
groups, uid = [int(g) for g in sys.argv[3].split(",") if g], int(sys.argv[2])
os.setgroups(groups); os.setgid(uid); os.setuid(uid)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sys.exit(sock.connect_ex(sys.argv[1]))
"""


def mode(path: str | Path) -> str:
    return f"{stat.S_IMODE(os.lstat(path).st_mode):04o}"


def connect_as(path: str, uid: int, *groups: int) -> int:
    """Return the errno of a connection that somebody else tries to make."""
    names = ",".join(map(str, groups))
    command = [sys.executable, "-c", CONNECT, path, str(uid), names]
    return subprocess.run(command, env=clean_environment(), check=False).returncode


# --- Z1: where ------------------------------------------------------------------------------------


def path_of(folder: Path, n_bytes: int) -> str:
    """Return a socket path whose fd socket beside it has so many bytes, not all of them ASCII."""
    beside, plain = ".fd.sock", ".sock"
    stem = f"{folder}/ö"
    stem += "x" * (n_bytes - len(os.fsencode(stem + beside)))
    return stem + plain


def test_Z1_longest_path_is_bound(make_daemon: DaemonMaker, folder: Path) -> None:
    daemon = make_daemon("p", {"daemon.socket": path_of(folder, 107)}).start()
    assert daemon.status()["state"] == "ready"
    assert len(os.fsencode(daemon.status()["addresses"]["fd_socket"])) == 107


def test_Z1_path_too_long_is_a_configuration_error_that_names_the_limit(
    make_daemon: DaemonMaker, folder: Path
) -> None:
    daemon = make_daemon("p", {"daemon.socket": path_of(folder, 108)})
    daemon.launch()
    assert daemon.process.wait_ended() == 78
    last = daemon.process.text().splitlines()[-1]
    assert "107" in last
    assert "108" in last
    assert daemon.notify.take_all() == []


def test_Z1_missing_directory_is_made_for_the_group_alone(
    make_daemon: DaemonMaker, folder: Path
) -> None:
    runtime_dir = folder / "a" / "b"
    daemon = make_daemon("p", {"daemon.runtime_dir": str(runtime_dir)}, umask=0).start()
    assert daemon.status()["state"] == "ready"
    assert mode(runtime_dir) == "0750"


def test_Z1_relative_directory_counts_from_where_the_daemon_starts(
    make_daemon: DaemonMaker, folder: Path
) -> None:
    daemon = make_daemon("p", {"daemon.runtime_dir": "run/here"}, cwd=folder).start()
    assert sorted(path.name for path in (folder / "run/here").iterdir()) == [
        "rank0.fd.sock",
        "rank0.sock",
    ]
    assert daemon.stop() == 0


def test_Z1_directory_that_is_a_file_is_a_configuration_error(
    make_daemon: DaemonMaker, folder: Path
) -> None:
    (folder / "taken").write_text("x")
    daemon = make_daemon("p", {"daemon.runtime_dir": str(folder / "taken")})
    daemon.launch()
    assert daemon.process.wait_ended() == 78
    assert f"{folder}/taken is not a directory" in daemon.process.text()
    assert (folder / "taken").read_text() == "x"


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no setpriv")
def test_Z1_directory_without_permission_is_a_configuration_error(
    make_daemon: DaemonMaker, folder: Path
) -> None:
    runtime_dir = folder / "p"
    runtime_dir.mkdir(mode=0o755)
    os.chown(runtime_dir, NOBODY, NOBODY)
    # Root without its capabilities is somebody who may read the sources, and no more.
    powerless = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    daemon = make_daemon("p", wrapper=powerless)
    daemon.launch()
    assert daemon.process.wait_ended() == 78
    assert f"no permission to create a socket in {runtime_dir}" in daemon.process.text()


# --- Z2: whose ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("rank0.sock", socket.SOCK_STREAM),
        ("rank0.sock", socket.SOCK_DGRAM),
        ("rank0.fd.sock", socket.SOCK_SEQPACKET),
    ],
)
def test_Z2_socket_of_a_live_process_is_never_taken_over(
    make_daemon: DaemonMaker, name: str, kind: socket.SocketKind
) -> None:
    daemon = make_daemon()
    daemon.folder.mkdir(mode=0o750)
    with socket.socket(socket.AF_UNIX, kind) as live:
        live.bind(str(daemon.folder / name))
        if kind != socket.SOCK_DGRAM:
            live.listen(0)
        before = os.lstat(daemon.folder / name).st_ino
        daemon.launch()
        assert daemon.process.wait_ended() == 1
        assert "ADDRESS_IN_USE" in daemon.process.text()
        assert os.lstat(daemon.folder / name).st_ino == before
    assert [path.name for path in daemon.folder.iterdir()] == [name]


def test_Z2_regular_file_is_kept(make_daemon: DaemonMaker) -> None:
    daemon = make_daemon()
    daemon.folder.mkdir(mode=0o750)
    (daemon.folder / "rank0.sock").write_text("precious")
    daemon.launch()
    assert daemon.process.wait_ended() == 78
    assert "rank0.sock" in daemon.process.text().splitlines()[-1]
    assert (daemon.folder / "rank0.sock").read_text() == "precious"


def test_Z2_dead_sockets_of_a_killed_daemon_are_replaced(make_daemon: DaemonMaker) -> None:
    daemon = make_daemon().start()
    first = daemon.status()["identity"]["epoch"]
    daemon.kill()
    assert sorted(path.name for path in daemon.folder.iterdir()) == ["rank0.fd.sock", "rank0.sock"]
    daemon.start()
    assert daemon.status()["identity"]["epoch"] != first
    assert daemon.stop() == 0
    assert list(daemon.folder.iterdir()) == []


# --- Z3: who --------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_Z3_modes_are_the_same_under_every_umask(make_daemon: DaemonMaker, umask: int) -> None:
    daemon = make_daemon("p", umask=umask).start()
    assert mode(daemon.folder) == "0750"
    assert {mode(path) for path in daemon.folder.iterdir()} == {"0660"}


@needs_root
def test_Z3_group_may_connect_and_others_may_not(make_daemon: DaemonMaker, folder: Path) -> None:
    group = next(g for g in grp.getgrall() if g.gr_gid not in (0, NOBODY))
    folder.chmod(0o755)
    daemon = make_daemon("p", {"daemon.socket_group": group.gr_name}).start()
    # As systemd's RuntimeDirectory would be: of the service's group.
    os.chown(daemon.folder, 0, group.gr_gid)
    for path in daemon.folder.iterdir():
        assert (mode(path), path.stat().st_gid) == ("0660", group.gr_gid)
    fd_socket = str(daemon.folder / "rank0.fd.sock")
    assert connect_as(fd_socket, NOBODY) == 13
    assert connect_as(fd_socket, NOBODY, group.gr_gid) == 0
    daemon.folder.chmod(0o755)
    assert connect_as(fd_socket, NOBODY) == 13, "the socket itself keeps others out"
