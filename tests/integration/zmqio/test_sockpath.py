"""Where a socket may be bound, and what is never removed for it."""

from __future__ import annotations

import grp
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moriiod.errors import AddressInUse, ConfigError
from moriiod.zmqio import sockpath
from moriiod.zmqio.sockpath import (
    MAX_PATH_BYTES,
    prepare_socket_path,
    publish_socket,
    remove_socket,
)

TYPES = [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM]


@contextmanager
def bound(path: Path, kind: int = socket.SOCK_STREAM, listen: bool = True) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.bind(str(path))
        if listen and kind != socket.SOCK_DGRAM:
            sock.listen(1)
        yield


def leave_dead(path: Path, kind: int = socket.SOCK_STREAM) -> None:
    with bound(path, kind):
        pass


def test_missing_directory_is_made_for_owner_and_group_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        prepare_socket_path(str(tmp_path / "a" / "s"))
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o750


def test_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    prepare_socket_path(str(tmp_path / "s"))
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o711


@pytest.mark.parametrize("kind", TYPES)
def test_dead_socket_is_removed(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "s"
    leave_dead(path, kind)
    prepare_socket_path(str(path))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", TYPES)
def test_live_socket_of_any_type_is_left_alone(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "s"
    with bound(path, kind):
        inode = path.stat().st_ino
        with pytest.raises(AddressInUse):
            prepare_socket_path(str(path))
        assert path.stat().st_ino == inode
    assert os.listdir(tmp_path) == ["s"]


def test_live_socket_with_a_full_backlog_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    waiting = []
    with bound(path):
        while True:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            waiting.append(client)
            if client.connect_ex(str(path)):
                break
        with pytest.raises(AddressInUse):
            prepare_socket_path(str(path))
    for client in waiting:
        client.close()


def test_socket_bound_but_not_yet_listening_counts_as_dead(tmp_path: Path) -> None:
    """A daemon that has not got to listen() has no clients yet; its own bind notices the loss."""
    path = tmp_path / "s"
    with bound(path, listen=False):
        prepare_socket_path(str(path))
        assert not path.exists()


@pytest.mark.parametrize("what", ["file", "directory", "link", "fifo"])
def test_what_is_not_a_socket_is_never_removed(tmp_path: Path, what: str) -> None:
    path = tmp_path / "s"
    if what == "file":
        path.write_text("precious")
    elif what == "directory":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    else:
        leave_dead(tmp_path / "other")
        path.symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="not a socket"):
        prepare_socket_path(str(path))
    remove_socket(str(path))
    assert os.path.lexists(path)


@pytest.mark.parametrize("length", [MAX_PATH_BYTES, MAX_PATH_BYTES + 1])
def test_path_length_is_checked_in_bytes(tmp_path: Path, length: int) -> None:
    folder = str(tmp_path)
    path = folder + "/" + "é" * ((length - len(folder) - 1) // 2)
    path += "x" * (length - len(path.encode()))
    if length > MAX_PATH_BYTES:
        with pytest.raises(ConfigError, match="107"):
            prepare_socket_path(path)
        return
    leave_dead(Path(path))
    prepare_socket_path(path)
    leave_dead(Path(path))


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_impossible_path_is_a_config_error(path: str) -> None:
    with pytest.raises(ConfigError):
        prepare_socket_path(path)


def test_directory_that_cannot_be_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        prepare_socket_path(str(tmp_path / "file" / "s"))
    with pytest.raises(ConfigError):
        prepare_socket_path(str(tmp_path / "file" / "deeper" / "s"))
    with pytest.raises(ConfigError):
        prepare_socket_path("/proc/nowhere/s")


def test_socket_that_comes_alive_between_the_two_looks_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two daemons start at once; the other one binds after this one found the old socket dead."""
    path = tmp_path / "s"
    leave_dead(path)
    look = sockpath._refuse_if_live
    others = []

    def look_and_be_late(address: str, shown: str) -> None:
        look(address, shown)
        if not others:
            path.unlink()
            others.append(bound(path))
            others[0].__enter__()

    monkeypatch.setattr(sockpath, "_refuse_if_live", look_and_be_late)
    with pytest.raises(AddressInUse):
        prepare_socket_path(str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(path))
    assert os.listdir(tmp_path) == ["s"]
    others[0].__exit__(None, None, None)


def test_published_socket_has_mode_and_group(tmp_path: Path) -> None:
    path = tmp_path / "s"
    name = grp.getgrgid(os.getgid()).gr_name
    with bound(path):
        publish_socket(str(path), 0o660, name)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        publish_socket(str(path), 0o600, None)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_group_or_socket_that_does_not_exist_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bound(path), pytest.raises(ConfigError, match="no-such-group"):
        publish_socket(str(path), 0o660, "no-such-group")
    with pytest.raises(ConfigError):
        publish_socket(str(tmp_path / "gone"), 0o660, None)


def test_removed_socket_is_gone_and_a_missing_one_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "s"
    leave_dead(path)
    remove_socket(str(path))
    remove_socket(str(path))
    assert os.listdir(tmp_path) == []
