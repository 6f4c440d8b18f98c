"""Forks the demo's workers from one process that has imported torch once.

Importing torch takes a second of CPU time and 200 MB; twelve workers that each do it make a demo
that is mostly imports. So one process imports everything, and forks a worker for each descriptor
it is sent. That is safe because of what it has *not* done: it has no thread but its first (which is
checked before every fork, so no lock can be held by a thread that the child does not have), no ZMQ
context, no event loop and no socket but its own. A worker opens all of that after the fork.

The protocol, on a Unix stream socket: the coordinator sends one byte with two descriptors, the
worker's end of its channel and its log; the answer is the worker's pid as 8 bytes with a pidfd.
The end of the stream is the order to reap what was forked, and to exit.
"""

from __future__ import annotations

import gc
import os
import socket
import struct
import sys
from typing import Final

from moriiod.cli.demo import worker
from moriiod.cli.demo.tether import die_with_parent

PID: Final = struct.Struct("<q")


def main(argv: list[str]) -> int:
    """Serve fork requests; the arguments are the socket's descriptor and our parent's pid."""
    die_with_parent(int(argv[2]))
    # What the workers share stays shared: a collection would write to every object's header.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(argv[1])) as control:
        while True:
            data, fds, _, _ = socket.recv_fds(control, 1, 2)
            if not data:
                break
            _check_alone()
            stream_fd, log_fd = fds
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                _be_worker(control, stream_fd, log_fd, parent)
            os.close(stream_fd)
            os.close(log_fd)
            _answer(control, pid)
    _reap()
    return 0


def _check_alone() -> None:
    n_threads = len(os.listdir("/proc/self/task"))
    if n_threads != 1:
        raise RuntimeError(f"cannot fork with {n_threads} threads")


def _be_worker(control: socket.socket, stream_fd: int, log_fd: int, parent: int) -> None:
    """Run a worker in this process, and end it without the zygote's clean-up."""
    status = 70
    try:
        die_with_parent(parent)
        control.close()
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        with socket.socket(fileno=stream_fd) as stream:
            status = worker.run(stream)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _answer(control: socket.socket, pid: int) -> None:
    # The zygote has not reaped it, so the pid cannot belong to anybody else yet.
    pidfd = os.pidfd_open(pid)
    socket.send_fds(control, [PID.pack(pid)], [pidfd])
    os.close(pidfd)


def _reap() -> None:
    try:
        while True:
            os.wait()
    except ChildProcessError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv))
