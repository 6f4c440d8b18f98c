"""Who is at the other end of a Unix socket."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moriiod.wire.peercred import Credentials, open_pidfd, read_credentials

ROOT = Path(__file__).parents[3]
#: Connects, and says whom it sees and whether it can wait for that process's end.
_VISITOR = """
import socket, sys
from moriiod.client.channel import _watch_peer
from moriiod.wire.peercred import read_credentials
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
    sock.connect(sys.argv[1])
    print(read_credentials(sock).pid, _watch_peer(sock) is not None)
"""


def test_both_ends_are_named_by_the_kernel() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert read_credentials(ours) == Credentials(os.getpid(), os.geteuid())
        pidfd = open_pidfd(ours)
        assert select.select([pidfd], [], [], 0)[0] == []
        assert not os.get_inheritable(pidfd)
        os.close(pidfd)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="makes a pid namespace"
)
def test_daemon_outside_of_the_workers_pid_namespace_can_be_watched(tmp_path: Path) -> None:
    """Without its pidfd a client would take the end of a connection for the end of the daemon."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        done = subprocess.run(
            ["unshare", "--pid", "--fork", sys.executable, "-c", _VISITOR, path],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.split() == ["0", "True"]
