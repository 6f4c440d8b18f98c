"""The socket file: where it may lie, who may use it, and whose it is."""

from __future__ import annotations

import errno
import grp
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zmq

from moriiod.core.effects import ReplyToClient
from moriiod.core.events import RequestReceived
from moriiod.core.requests import Done, Ping
from moriiod.errors import AddressInUse, ConfigError
from moriiod.ipc.server import IpcServer, IpcSettings
from moriiod.wire.ipc import ReplyFrame, RequestFrame, decode_reply, encode_request
from tests.support.samples import EPOCH
from tests.support.shell import RawClient, Recorder

Context = zmq.Context[zmq.Socket[bytes]]
NOBODY = 65534


@contextmanager
def serving(context: Context, recorder: Recorder, settings: IpcSettings) -> Iterator[IpcServer]:
    server = IpcServer(context, settings, EPOCH, recorder.hooks)
    server.open()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def umask(value: int) -> Iterator[None]:
    old = os.umask(value)
    try:
        yield
    finally:
        os.umask(old)


def connect_as(uid: int, gid: int, path: str) -> int:
    """Connect as another user; return the error number."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(gid)
    os.seteuid(uid)
    try:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(path)
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def path_of_length(folder: Path, n_bytes: int) -> str:
    """Return a path of so many bytes, fewer characters."""
    room = n_bytes - len(os.fsencode(str(folder))) - 1
    name = "\N{BLACK STAR}" + "s" * (room - 3)
    return str(folder / name)


@pytest.mark.parametrize("n_bytes", [106, 107])
async def test_Z1_longest_paths_are_served(
    context: Context, recorder: Recorder, tmp_path: Path, n_bytes: int
) -> None:
    path = path_of_length(tmp_path, n_bytes)
    with serving(context, recorder, IpcSettings(path)):
        client = RawClient(context, f"ipc://{path}")
        client.send(encode_request(RequestFrame(1, Ping())))
        await recorder.first(RequestReceived)
        client.close()


@pytest.mark.parametrize("n_bytes", [108, 200])
async def test_Z1_longer_path_is_a_config_error_with_limit_and_length(
    context: Context, recorder: Recorder, tmp_path: Path, n_bytes: int
) -> None:
    path = path_of_length(tmp_path, n_bytes)
    with pytest.raises(ConfigError) as caught, serving(context, recorder, IpcSettings(path)):
        pass
    assert "107" in caught.value.message
    assert str(n_bytes) in caught.value.message
    assert os.listdir(tmp_path) == []


async def test_Z1_missing_directory_is_made(
    context: Context, recorder: Recorder, tmp_path: Path
) -> None:
    path = tmp_path / "a" / "b" / "rank0.sock"
    with serving(context, recorder, IpcSettings(str(path))) as server:
        assert server.is_path_intact()
    assert not path.exists()


async def test_Z1_file_in_the_place_of_the_directory_is_a_config_error(
    context: Context, recorder: Recorder, tmp_path: Path
) -> None:
    (tmp_path / "run").write_text("")
    settings = IpcSettings(str(tmp_path / "run" / "rank0.sock"))
    with pytest.raises(ConfigError), serving(context, recorder, settings):
        pass


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
async def test_Z3_mode_is_the_configured_one_under_every_umask(
    context: Context, recorder: Recorder, tmp_path: Path, mask: int
) -> None:
    path = tmp_path / "run" / "rank0.sock"
    with umask(mask), serving(context, recorder, IpcSettings(str(path), mode=0o660)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")
async def test_Z3_group_member_connects_and_others_get_errno_13(
    context: Context, recorder: Recorder
) -> None:
    group = grp.getgrall()[1]
    # Not tmp_path: pytest makes its folders for the owner only.
    with (
        TemporaryDirectory(prefix="moriiod-") as folder,
        serving(
            context,
            recorder,
            IpcSettings(path := f"{folder}/rank0.sock", mode=0o660, group=group.gr_name),
        ),
    ):
        os.chmod(folder, 0o755)
        assert connect_as(NOBODY, group.gr_gid, path) == 0
        assert connect_as(NOBODY, NOBODY, path) == errno.EACCES
        assert connect_as(0, 0, path) == 0


async def test_Z3_unknown_group_is_a_config_error_and_leaves_no_socket(
    context: Context, recorder: Recorder, tmp_path: Path
) -> None:
    path = tmp_path / "rank0.sock"
    settings = IpcSettings(str(path), group="no-such-group")
    with pytest.raises(ConfigError), serving(context, recorder, settings):
        pass
    assert not path.exists()


async def test_live_socket_of_another_daemon_is_left_alone(
    context: Context, recorder: Recorder, tmp_path: Path
) -> None:
    settings = IpcSettings(str(tmp_path / "rank0.sock"))
    with serving(context, recorder, settings) as first:
        with pytest.raises(AddressInUse), serving(context, recorder, settings):
            pass
        assert first.is_path_intact()
        client = RawClient(context, f"ipc://{settings.path}")
        client.send(encode_request(RequestFrame(1, Ping())))
        await recorder.first(RequestReceived)
        client.close()


async def test_socket_of_a_dead_daemon_is_replaced(
    context: Context, recorder: Recorder, tmp_path: Path
) -> None:
    path = tmp_path / "rank0.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with serving(context, recorder, IpcSettings(str(path))) as server:
        assert server.is_path_intact()


async def test_removed_or_replaced_socket_file_is_noticed_and_not_removed(
    context: Context, recorder: Recorder, tmp_path: Path
) -> None:
    path = tmp_path / "rank0.sock"
    with serving(context, recorder, IpcSettings(str(path))) as server:
        assert server.is_path_intact()
        path.unlink()
        assert not server.is_path_intact()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            assert not server.is_path_intact()
    assert path.is_socket()


STOPPED_WORKER = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.routing_id = b"w0"
socket.connect(sys.argv[1])
socket.send_multipart([bytes.fromhex(part) for part in sys.argv[2:]])
while True:
    print(socket.recv_multipart(), flush=True)
"""


def start_worker(endpoint: str, frames: list[str]) -> subprocess.Popen[bytes]:
    """Run a worker that sends one message and then only reads."""
    command = [sys.executable, "-c", STOPPED_WORKER, endpoint, *frames]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


async def test_Z4_replacement_under_the_identity_of_a_stopped_worker_is_served(
    context: Context, recorder: Recorder, tmp_path: Path
) -> None:
    settings = IpcSettings(str(tmp_path / "rank0.sock"))
    endpoint = f"ipc://{settings.path}"
    ping = [part.hex() for part in encode_request(RequestFrame(1, Ping()))]
    with (
        serving(context, recorder, settings) as server,
        start_worker(endpoint, ping) as worker,
    ):
        try:
            stopped = await recorder.first(RequestReceived)
            worker.send_signal(signal.SIGSTOP)
            replacement = RawClient(context, endpoint, routing_id=b"w0")
            replacement.send(encode_request(RequestFrame(2, Ping())))
            event = await recorder.first(RequestReceived, n=2)
            assert event.route == stopped.route == b"w0"
            assert server.send(ReplyToClient(event.route, event.sequence, Done()))
            assert decode_reply(await replacement.reply()) == ReplyFrame(2, EPOCH, Done())
            replacement.close()
        finally:
            worker.kill()
        assert worker.stdout is not None
        assert worker.stdout.read() == b""


async def test_Z4_workers_that_leave_their_identity_to_zmq_have_different_routes(
    context: Context, recorder: Recorder, tmp_path: Path
) -> None:
    settings = IpcSettings(str(tmp_path / "rank0.sock"))
    with serving(context, recorder, settings):
        dealers = [context.socket(zmq.DEALER) for _ in range(3)]
        for dealer in dealers:
            dealer.connect(f"ipc://{settings.path}")
            dealer.send_multipart(encode_request(RequestFrame(1, Ping())))
        await recorder.first(RequestReceived, n=3)
        assert len({event.route for event in recorder.of(RequestReceived)}) == 3
        for dealer in dealers:
            dealer.close(linger=0)
