"""Sealed memfds: what is made, what is accepted."""

from __future__ import annotations

import errno
import fcntl
import os
import resource

import pytest

from moriiod.errors import InvalidArgument, RegistrationFailed
from moriiod.wire.memfd import SEALS, check_sealed_memfd, create_sealed_memfd


def test_new_memfd_has_its_size_its_seals_and_is_not_inherited() -> None:
    fd = create_sealed_memfd("t", 10_000)
    facts = check_sealed_memfd(fd, 10_000)
    assert (facts.file_bytes, facts.inode) == (10_000, os.fstat(fd).st_ino)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS
    assert not os.get_inheritable(fd)
    for n_bytes in (0, 9_999, 10_001):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, n_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


@pytest.mark.parametrize("n_bytes", [0, -1, (1 << 62) + 1, 1 << 63, 1 << 64])
def test_impossible_size_is_refused_by_both(n_bytes: int) -> None:
    with pytest.raises(InvalidArgument):
        create_sealed_memfd("t", n_bytes)
    fd = create_sealed_memfd("t", 1)
    with pytest.raises(InvalidArgument):
        check_sealed_memfd(fd, n_bytes)
    os.close(fd)


def test_refusal_of_the_kernel_is_a_typed_error_with_size_and_errno() -> None:
    with pytest.raises(RegistrationFailed) as caught:
        create_sealed_memfd("x" * 300, 4096)
    assert caught.value.fields == {"n_bytes": 4096, "errno": errno.EINVAL}


def test_size_over_the_limit_of_the_process_leaves_no_fd() -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old[1]))
    try:
        with pytest.raises(RegistrationFailed) as caught:
            create_sealed_memfd("t", 8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert caught.value.fields == {"n_bytes": 8192, "errno": errno.EFBIG}


@pytest.mark.parametrize(
    ("seals", "flags", "number"),
    [
        (0, os.O_RDWR, errno.EPERM),
        (fcntl.F_SEAL_GROW, os.O_RDWR, errno.EPERM),
        (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE, os.O_RDWR, errno.EPERM),
        (fcntl.F_SEAL_SHRINK, os.O_RDONLY, errno.EACCES),
    ],
)
def test_memfd_that_could_vanish_or_cannot_be_written_is_refused(
    seals: int, flags: int, number: int
) -> None:
    made = os.memfd_create("t", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(made, 4096)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    fd = os.open(f"/proc/self/fd/{made}", flags | os.O_CLOEXEC)
    with pytest.raises(RegistrationFailed) as caught:
        check_sealed_memfd(fd, 4096)
    assert caught.value.fields["errno"] == number
    os.close(fd)
    os.close(made)


def test_memfd_smaller_than_announced_names_both_sizes() -> None:
    fd = create_sealed_memfd("t", 4096)
    with pytest.raises(RegistrationFailed, match=r"4096 bytes, 4097") as caught:
        check_sealed_memfd(fd, 4097)
    assert caught.value.fields["limit"] == 4096
    os.close(fd)


def test_closed_fd_is_a_typed_error() -> None:
    with pytest.raises(RegistrationFailed):
        check_sealed_memfd(100_000, 1)


def test_seal_against_shrinking_alone_is_enough() -> None:
    fd = os.memfd_create("t", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert check_sealed_memfd(fd, 4096).file_bytes == 4096
    os.close(fd)
