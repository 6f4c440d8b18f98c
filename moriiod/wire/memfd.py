"""Sealed memfds: the only kind of memory that crosses a process boundary as a file descriptor.

A mapping of a file that its owner can shrink dies with SIGBUS at the next access, and takes the
daemon with it. So a region is accepted only if the kernel itself says that it can never shrink
(``F_SEAL_SHRINK``); everything else is refused before it is mapped. So is memory of huge pages: no
seal forbids to punch a hole, and a huge page that cannot be had again is a SIGBUS as well.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Final

from moriiod.core.ids import MAX_OFFSET
from moriiod.errors import InvalidArgument, RegistrationFailed

#: Seals of every memfd moriiod makes: it keeps its size for ever, and so do its seals.
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: Linux 5.1; the fcntl module of Python 3.11 does not name it.
_F_SEAL_FUTURE_WRITE: Final = 0x0010


@dataclass(frozen=True, slots=True)
class MemfdFacts:
    """What the kernel says about a memfd.

    Attributes:
        inode: Unique among the memfds that exist on this host at one time.
        file_bytes: Size of the file; never shrinks.
        page_bytes: What the kernel likes to read at once; a multiple of the page size.
    """

    inode: int
    file_bytes: int
    page_bytes: int


def create_sealed_memfd(name: str, n_bytes: int) -> int:
    """Return the fd of a new, zero-filled memfd of exactly ``n_bytes`` that keeps its size.

    The caller owns the fd. Memory is taken when it is first touched.

    Args:
        name: For people reading ``/proc/PID/maps``; needs not be unique.
        n_bytes: Size in bytes, at least 1.

    Raises:
        InvalidArgument: The size is not positive or beyond 2^62.
        RegistrationFailed: The kernel refused; fields carry n_bytes and errno.
    """
    _check_n_bytes(n_bytes)
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _refused("the kernel made no memfd", n_bytes, error.errno or 0) from error
    try:
        os.ftruncate(fd, n_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        raise _refused("the memfd got neither size nor seals", n_bytes, error.errno or 0) from error
    return fd


def check_sealed_memfd(fd: int, n_bytes: int) -> MemfdFacts:
    """Make sure that ``n_bytes`` of this file can be mapped and touched without a signal, ever.

    Args:
        fd: Any file descriptor; it stays open and unchanged.
        n_bytes: Bytes that are going to be mapped from offset 0.

    Raises:
        InvalidArgument: The size is not positive or beyond 2^62.
        RegistrationFailed: Not a memfd, not sealed against shrinking, of huge pages, smaller than
            ``n_bytes``, or not writable; fields carry n_bytes and errno.
    """
    _check_n_bytes(n_bytes)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        facts = os.fstat(fd)
        page_bytes = os.fstatvfs(fd).f_bsize
    except OSError as error:
        raise _refused("the file is not a memfd", n_bytes, error.errno or 0) from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise _refused("the file is not sealed against shrinking", n_bytes, errno.EPERM)
    if page_bytes > mmap.PAGESIZE:
        raise _refused("the memfd is of huge pages (MFD_HUGETLB)", n_bytes, errno.EINVAL)
    if seals & (fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE):
        raise _refused("the memfd is sealed against writing", n_bytes, errno.EPERM)
    if flags & os.O_ACCMODE != os.O_RDWR:
        raise _refused("the memfd is not open for reading and writing", n_bytes, errno.EACCES)
    if facts.st_size < n_bytes:
        raise RegistrationFailed(
            f"the memfd has {facts.st_size} bytes, {n_bytes} were announced",
            n_bytes=n_bytes,
            errno=errno.EINVAL,
            limit=facts.st_size,
        )
    return MemfdFacts(facts.st_ino, facts.st_size, facts.st_blksize)


def _check_n_bytes(n_bytes: int) -> None:
    if not 1 <= n_bytes <= MAX_OFFSET:
        raise InvalidArgument(
            f"a region of {n_bytes} bytes cannot be", field="n_bytes", got=str(n_bytes)[:40]
        )


def _refused(reason: str, n_bytes: int, number: int) -> RegistrationFailed:
    return RegistrationFailed(
        f"{reason} ({n_bytes} bytes, {errno.errorcode.get(number, number)})",
        n_bytes=n_bytes,
        errno=number,
    )
