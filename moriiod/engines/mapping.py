"""A sealed memfd mapped into this process."""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
import numpy.typing as npt

from moriiod.errors import RegistrationFailed
from moriiod.wire.memfd import check_sealed_memfd


class MappedRegion:
    """The first ``n_bytes`` of a sealed memfd, shared, readable and writable.

    Args:
        fd: Stays the caller's; the mapping outlives it.
        n_bytes: Bytes to map.

    Raises:
        InvalidArgument: The size is not positive.
        RegistrationFailed: The fd is no sealed memfd of that size, or the kernel refuses to map.

    Attributes:
        n_bytes: Bytes that may be touched.
        inode: Which memfd it is.
        address: Where byte 0 lies in this process.
    """

    __slots__ = ("_array", "_mapping", "address", "inode", "n_bytes")

    def __init__(self, fd: int, n_bytes: int) -> None:
        facts = check_sealed_memfd(fd, n_bytes)
        pages = -(-n_bytes // facts.page_bytes) * facts.page_bytes
        try:
            self._mapping = mmap.mmap(fd, min(pages, facts.file_bytes))
        except OSError as error:
            raise RegistrationFailed(
                f"the kernel refused to map {n_bytes} bytes: {error.strerror}",
                n_bytes=n_bytes,
                errno=error.errno or 0,
            ) from error
        # A core dump of the daemon must not contain every KV cache of the node.
        self._mapping.madvise(mmap.MADV_DONTDUMP)
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(
            self._mapping, dtype=np.uint8, count=n_bytes
        )
        self.n_bytes: Final = n_bytes
        self.inode: Final = facts.inode
        self.address: Final = int(self._array.ctypes.data)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes, uint8 [n_bytes]. Views of it must be gone before ``close``."""
        if self._array is None:
            raise ValueError("the region is not mapped any more")
        return self._array

    @property
    def is_open(self) -> bool:
        """Whether the region is still mapped."""
        return self._array is not None

    def close(self) -> None:
        """Unmap; doing it again is allowed.

        Raises:
            BufferError: Someone still holds a view: a bug, and the region stays mapped.
        """
        self._array = None
        self._mapping.close()
