"""What is special about shm: seals, hosts and users, what a rogue peer may hand out."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from moriiod.core.geometry import RemoteLayout
from moriiod.core.ids import Epoch
from moriiod.engines.base import RegionHandle
from moriiod.engines.shm import MAX_OPS, ShmEngine
from moriiod.engines.shm_peer import ShmRegion, decode_region, encode_region
from moriiod.errors import (
    EngineMismatch,
    EngineQueueFull,
    MoriiodError,
    RegistrationFailed,
    SessionFailed,
    SharedMemoryUnavailable,
)
from moriiod.wire.fdsocket import (
    FdMessage,
    FdRefused,
    Regions,
    RegionTaken,
    receive_packet,
    send_packet,
)
from moriiod.wire.memfd import create_sealed_memfd
from tests.support.engines import (
    HOSTS,
    Pair,
    WorkerMemory,
    connected,
    layout_of,
    new_id,
    simple_plan,
)

Answer = Callable[[socket.socket], None]


class FakeExporter:
    """An exporter that a test looks into; it hands nothing to anyone."""

    address = "/nowhere.sock"

    def __init__(self, room: int = 1000) -> None:
        self.tokens: set[str] = set()
        self._room = room

    def export(self, token: str, fd: int, n_bytes: int) -> None:
        if len(self.tokens) >= self._room:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.tokens.add(token)

    def withdraw(self, token: str) -> None:
        self.tokens.discard(token)

    def refuse(self, peer: Epoch) -> int | None:
        return None

    def readmit(self, peer: Epoch) -> None:
        """Nothing is remembered."""

    def forget(self, peer: Epoch) -> None:
        """Nothing is remembered."""


# --- Seals: no signal, whatever the worker does ---------------------------------------------------


def open_tmpfs_file() -> int:
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(fd, 8192)
    return fd


def memfd_with(seals: int) -> int:
    fd = os.memfd_create("t", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, 8192)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def read_only_memfd() -> int:
    fd = create_sealed_memfd("t", 8192)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


BAD_FILES: dict[str, tuple[Callable[[], int], int]] = {
    "unsealed": (lambda: memfd_with(0), errno.EPERM),
    "may_shrink": (lambda: memfd_with(fcntl.F_SEAL_GROW), errno.EPERM),
    "sealed_against_writing": (
        lambda: memfd_with(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE),
        errno.EPERM,
    ),
    "tmpfs_file": (open_tmpfs_file, errno.EPERM),
    "read_only": (read_only_memfd, errno.EACCES),
    "eventfd": (lambda: os.eventfd(0), errno.EINVAL),
    "directory": (lambda: os.open("/", os.O_RDONLY | os.O_CLOEXEC), errno.EINVAL),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_memory_that_could_vanish_is_refused_with_size_and_errno(name: str) -> None:
    make, number = BAD_FILES[name]
    exporter = FakeExporter()
    engine = ShmEngine(exporter, new_id())
    fd, good = make(), WorkerMemory(4096)
    handles = [good.handle, RegionHandle("memfd", fd, 8192)]
    with pytest.raises(RegistrationFailed) as caught:
        engine.register(new_id(), handles)
    assert caught.value.fields["n_bytes"] == 8192
    assert caught.value.fields["errno"] == number
    assert not exporter.tokens
    good.close()
    os.close(fd)


def test_truncation_by_the_worker_is_refused_by_the_kernel(tmp_path: Path) -> None:
    with connected(HOSTS["shm"], tmp_path, [8192], [8192]) as pair:
        for memory in (*pair.local, *pair.remote):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fd, 0)
            with pytest.raises(PermissionError):
                fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert (
            pair.initiator.transfer(pair.session, "read", simple_plan([0], [0], 8192)).error is None
        )


def test_hole_punched_by_the_worker_reads_as_zeros(tmp_path: Path) -> None:
    """fallocate(PUNCH_HOLE) is allowed by the seals: bytes are lost, nobody crashes."""
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size, punch_hole = 1, 2
    with connected(HOSTS["shm"], tmp_path, [1 << 20], [1 << 20]) as pair:
        done = libc.fallocate(
            pair.remote[0].fd,
            keep_size | punch_hole,
            ctypes.c_long(0),
            ctypes.c_long(1 << 20),
        )
        assert done == 0
        plan = simple_plan([0], [0], 1 << 20)
        assert pair.initiator.transfer(pair.session, "read", plan).error is None
        assert not pair.local[0].bytes.any()


def test_memory_of_huge_pages_is_refused_because_a_hole_in_it_is_a_signal() -> None:
    """After PUNCH_HOLE the next access needs a free huge page; without one it is a SIGBUS."""
    engine = ShmEngine(FakeExporter(), new_id())
    fd = os.memfd_create("t", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC | os.MFD_HUGETLB)
    os.ftruncate(fd, 2 << 20)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(RegistrationFailed, match="huge pages"):
        engine.register(new_id(), [RegionHandle("memfd", fd, 4096)])
    os.close(fd)


def test_memory_outlives_the_fd_and_the_mapping_of_the_worker(tmp_path: Path) -> None:
    gone = WorkerMemory(8192).fill(9)
    kept = gone.bytes.copy()
    with connected(HOSTS["shm"], tmp_path, [8192], [8192]) as pair:
        far = pair.target.register(gone)
        gone.close()
        near = pair.local_layout.layout.generation
        session = pair.engine.open_session(pair.target.epoch, near, far)
        assert pair.initiator.transfer(session, "read", simple_plan([0], [0], 8192)).error is None
        assert (pair.local[0].bytes == kept).all()
        pair.engine.close_session(session)


def test_registration_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    exporter = FakeExporter(room=2)
    engine = ShmEngine(exporter, new_id())
    memories = [WorkerMemory(4096) for _ in range(3)]
    with pytest.raises(RegistrationFailed) as caught:
        engine.register(new_id(), [memory.handle for memory in memories])
    assert caught.value.fields["errno"] == errno.EMFILE
    assert not exporter.tokens
    for memory in memories:
        memory.close()


def test_generation_registered_twice_is_refused_and_the_first_stays() -> None:
    engine, memory, generation = ShmEngine(FakeExporter(), new_id()), WorkerMemory(4096), new_id()
    engine.register(generation, [memory.handle])
    with pytest.raises(RegistrationFailed):
        engine.register(generation, [memory.handle])
    engine.close()
    memory.close()


def test_mappings_are_kept_out_of_core_dumps() -> None:
    engine, memory = ShmEngine(FakeExporter(), new_id()), WorkerMemory(4096)
    engine.register(new_id(), [memory.handle])
    blocks = Path("/proc/self/smaps").read_text().split("VmFlags:")
    flags = [
        after.split("\n", 1)[0].split()
        for before, after in pairwise(blocks)
        if "/memfd:test-kv" in before
    ]
    assert sum("dd" in entry for entry in flags) == 1
    engine.close()
    memory.close()


# --- Hosts and users ------------------------------------------------------------------------------


def reopened(pair: Pair, **changes: object) -> None:
    """Open a session with descriptors that say something else."""
    good = pair.remote_layout
    regions = [replace(decode_region(d), **changes) for d in good.descriptors]  # type: ignore[arg-type]
    layout = layout_of(good.layout.generation, [region.n_bytes for region in regions])
    bad = RemoteLayout(layout, good.engine, tuple(encode_region(r) for r in regions))
    pair.engine.open_session(pair.target.epoch, pair.local_layout.layout.generation, bad)


def test_peer_on_another_host_is_a_typed_error_that_names_both(tmp_path: Path) -> None:
    with connected(HOSTS["shm"], tmp_path, [4096], [4096]) as pair:
        ours = decode_region(pair.remote_layout.descriptors[0]).boot_id
        with pytest.raises(SharedMemoryUnavailable) as caught:
            reopened(pair, boot_id="another-boot")
        assert caught.value.fields == {"theirs": "another-boot", "ours": ours}


def test_peer_of_another_user_is_a_typed_error_that_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(HOSTS["shm"], tmp_path, [4096], [4096]) as pair:
        monkeypatch.setattr(pair.engine, "_uid", 1234)
        with pytest.raises(SharedMemoryUnavailable) as caught:
            reopened(pair, uid=4321)
        assert caught.value.fields == {"theirs": 4321, "ours": 1234}


def test_socket_of_another_user_than_described_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the kernel's word counts: a descriptor can claim to be of our user."""
    with connected(HOSTS["shm"], tmp_path, [4096], [4096]) as pair:
        monkeypatch.setattr(pair.engine, "_uid", 4321)
        with pytest.raises(SharedMemoryUnavailable) as caught:
            reopened(pair, uid=4321)
        found = os.geteuid()
        assert caught.value.fields == {"theirs": found, "described": 4321, "ours": 4321}


def test_peer_whose_socket_is_out_of_reach_is_a_typed_error(tmp_path: Path) -> None:
    with connected(HOSTS["shm"], tmp_path, [4096], [4096]) as pair:
        with pytest.raises(SharedMemoryUnavailable) as caught:
            reopened(pair, address=str(tmp_path / "gone.sock"))
        assert caught.value.fields["errno"] == errno.ENOENT
        with pytest.raises(SharedMemoryUnavailable):
            reopened(pair, address="x" * 200)


def test_token_that_was_never_given_is_refused(tmp_path: Path) -> None:
    with connected(HOSTS["shm"], tmp_path, [4096], [4096]) as pair:
        with pytest.raises(SharedMemoryUnavailable):
            reopened(pair, token="0" * 32)
        assert [kind for kind, _ in pair.target.problems] == ["fd_packet_refused"]


def test_memory_of_another_inode_or_size_than_described_is_refused(tmp_path: Path) -> None:
    with connected(HOSTS["shm"], tmp_path, [4096], [4096]) as pair:
        inode = decode_region(pair.remote_layout.descriptors[0]).inode
        with pytest.raises(SessionFailed):
            reopened(pair, inode=inode + 1)
        with pytest.raises(RegistrationFailed):
            reopened(pair, n_bytes=8192)


def test_peer_with_another_engine_is_refused(tmp_path: Path) -> None:
    with connected(HOSTS["shm"], tmp_path, [4096], [4096]) as pair:
        good = pair.remote_layout
        near = pair.local_layout.layout.generation
        other = RemoteLayout(good.layout, "nixl", good.descriptors)
        with pytest.raises(EngineMismatch):
            pair.engine.open_session(pair.target.epoch, near, other)


# --- Rogue peers ------------------------------------------------------------------------------


@contextmanager
def rogue_peer(path: Path, answer: Answer) -> Iterator[None]:
    """Serve one connection: take one packet, then do as ``answer`` says."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(1)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            receive_packet(connection, 1)
            answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        listener.close()


def say(message: FdMessage, make_fds: Callable[[], list[int]] = list) -> Answer:
    def answer(connection: socket.socket) -> None:
        fds = make_fds()
        send_packet(connection, message, fds)
        for fd in fds:
            os.close(fd)

    return answer


ROGUE_ANSWERS: dict[str, Answer] = {
    "closes": lambda connection: None,
    "garbage": lambda connection: connection.sendall(b"\xff\xfe"),
    "wrong_type": say(RegionTaken(0)),
    "no_fd": say(Regions((4096,))),
    "two_fds": say(Regions((4096,)), lambda: [create_sealed_memfd("t", 4096) for _ in "ab"]),
    "unsealed": say(Regions((4096,)), lambda: [memfd_with(0)]),
    "too_small": say(Regions((4096,)), lambda: [create_sealed_memfd("t", 4095)]),
    "other_memory": say(Regions((4096,)), lambda: [create_sealed_memfd("t", 4096)]),
    "unknown_refusal": say(FdRefused("FROM_THE_FUTURE", "no")),
}


@pytest.mark.parametrize("name", ROGUE_ANSWERS)
def test_rogue_answer_is_a_typed_error_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    engine, memory, generation = ShmEngine(FakeExporter(), new_id()), WorkerMemory(4096), new_id()
    (descriptor,) = engine.register(generation, [memory.handle])
    path = tmp_path / "rogue.sock"
    region = replace(decode_region(descriptor), address=str(path), inode=1)
    remote = RemoteLayout(layout_of(new_id(), [4096]), "shm", (encode_region(region),))
    with rogue_peer(path, ROGUE_ANSWERS[name]), pytest.raises(MoriiodError) as caught:
        engine.open_session(new_id(), generation, remote)
    assert isinstance(caught.value, SessionFailed | RegistrationFailed)
    engine.close()
    memory.close()


def test_silent_peer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moriiod.engines.shm_peer.FETCH_TIMEOUT_S", 0.05)
    engine, memory, generation = ShmEngine(FakeExporter(), new_id()), WorkerMemory(4096), new_id()
    (descriptor,) = engine.register(generation, [memory.handle])
    path = tmp_path / "silent.sock"
    region = replace(decode_region(descriptor), address=str(path))
    remote = RemoteLayout(layout_of(new_id(), [4096]), "shm", (encode_region(region),))
    given_up = threading.Event()
    with rogue_peer(path, lambda connection: given_up.wait() and None):
        with pytest.raises(SessionFailed, match="does not answer"):
            engine.open_session(new_id(), generation, remote)
        given_up.set()
    engine.close()
    memory.close()


@pytest.mark.parametrize(
    "change",
    [
        {"n_bytes": 0},
        {"n_bytes": 1 << 63},
        {"token": "short"},
        {"uid": -1},
        {"uid": True},
        {"address": ""},
        {"inode": -1},
        {"boot_id": ""},
    ],
)
def test_descriptor_out_of_range_is_refused(change: dict[str, object]) -> None:
    good = ShmRegion("boot", 0, "/a", "0" * 32, 4096, 1)
    assert decode_region(encode_region(good)) == good
    with pytest.raises(MoriiodError):
        decode_region(encode_region(replace(good, **change)))  # type: ignore[arg-type]


# --- Limits ---------------------------------------------------------------------------------------


def test_T1_queue_that_is_full_refuses_and_takes_again_after_progress(tmp_path: Path) -> None:
    with connected(HOSTS["shm"], tmp_path, [4096], [4096]) as pair:
        plan = simple_plan([0], [0], 8)
        for op in range(MAX_OPS):
            pair.engine.post(op, pair.session, "read", plan)
        with pytest.raises(EngineQueueFull):
            pair.engine.post(MAX_OPS, pair.session, "read", plan)
        assert len(pair.initiator.run(MAX_OPS)) == MAX_OPS
        pair.engine.post(MAX_OPS, pair.session, "read", plan)
        assert pair.initiator.run()[0].error is None


def test_many_transfers_leave_no_mapping_and_no_fd(tmp_path: Path) -> None:
    with connected(HOSTS["shm"], tmp_path, [mmap.PAGESIZE] * 3, [mmap.PAGESIZE] * 3) as pair:
        near = pair.local_layout.layout.generation
        counts = []
        for _ in range(5):
            session = pair.engine.open_session(pair.target.epoch, near, pair.remote_layout)
            plan = simple_plan(np.asarray([0]), [0], 64)
            assert pair.initiator.transfer(session, "write", plan).error is None
            pair.engine.close_session(session)
            while pair.target.loop.call(lambda: pair.target.server.n_connections):
                pass  # the server notices the end of our connection in one of its next turns
            maps = Path("/proc/self/maps").read_text().count("/memfd:test-kv")
            counts.append((maps, len(os.listdir("/proc/self/fd"))))
        assert len(set(counts[1:])) == 1
