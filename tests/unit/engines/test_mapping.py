"""Mapped regions: what is mapped, and that a view in use is never unmapped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moriiod.engines.mapping import MappedRegion
from moriiod.errors import RegistrationFailed
from moriiod.wire.memfd import create_sealed_memfd


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:mapping-test")


def test_region_is_mapped_until_it_is_closed_and_outlives_its_fd() -> None:
    fd = create_sealed_memfd("mapping-test", 10_000)
    region = MappedRegion(fd, 5_000)
    os.pwrite(fd, b"hello", 4_000)
    assert (region.n_bytes, region.inode) == (5_000, os.fstat(fd).st_ino)
    os.close(fd)
    assert len(region.array) == 5_000
    assert region.array[4_000:4_005].tobytes() == b"hello"
    assert (mappings(), region.is_open) == (1, True)
    region.close()
    region.close()
    assert (mappings(), region.is_open) == (0, False)
    with pytest.raises(ValueError, match="not mapped"):
        _ = region.array


def test_region_with_a_view_in_use_stays_mapped_and_says_so() -> None:
    fd = create_sealed_memfd("mapping-test", 4096)
    region = MappedRegion(fd, 4096)
    os.close(fd)
    view = region.array[:10]
    with pytest.raises(BufferError):
        region.close()
    view[0] = 1
    del view
    region.close()
    assert mappings() == 0


def test_size_that_does_not_fit_the_address_space_is_a_typed_error() -> None:
    fd = create_sealed_memfd("mapping-test", 1 << 50)
    with pytest.raises(RegistrationFailed) as caught:
        MappedRegion(fd, 1 << 50)
    assert caught.value.fields["n_bytes"] == 1 << 50
    os.close(fd)
