"""Torch tensors in sealed memfds: moved in place, allocated there, or through the hook."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moriiod.client import Client, GroupSpec, KvMemPool, allocate_kv_cache, share_kv_caches
from moriiod.client import tensors as tensors_module
from moriiod.core.requests import RegisterCaches
from moriiod.errors import InvalidArgument, InvalidGeometry, RegistrationFailed
from moriiod.wire.memfd import SEALS, check_sealed_memfd
from tests.support.fake_daemon import FakeDaemon

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def tensors_are_gone(no_leaks: None) -> Iterator[None]:
    """Free the tensors of a test before its descriptors are counted."""
    yield
    gc.collect()


def bytes_of(fd: int, n_bytes: int, offset: int = 0) -> bytes:
    return os.pread(fd, n_bytes, offset)


def maps() -> list[str]:
    # Not just "moriiod": that is in the path of every library where the checkout is called so.
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/memfd:moriiod" in line]


# --- moving ---------------------------------------------------------------------------------------


def test_moved_tensor_keeps_its_values_shape_and_views() -> None:
    tensor = torch.arange(10_000, dtype=torch.int32).reshape(100, 100)
    view, row = tensor[50:, ::2], tensor.t()[3]
    before = tensor.clone()
    shared = share_kv_caches({"a": tensor})
    assert torch.equal(tensor, before)
    assert torch.equal(view, before[50:, ::2])
    (region,) = shared.regions
    assert region.n_bytes == 40_000
    assert fcntl.fcntl(region.fd, fcntl.F_GET_SEALS) == SEALS
    check_sealed_memfd(region.fd, region.n_bytes)
    view[0, 0] = -7
    row[9] = -8
    assert int.from_bytes(bytes_of(region.fd, 4, 50 * 400), "little", signed=True) == -7
    assert int.from_bytes(bytes_of(region.fd, 4, 9 * 400 + 12), "little", signed=True) == -8


def test_what_another_process_writes_is_seen_through_the_tensor_and_its_views() -> None:
    tensor = torch.zeros(1000, dtype=torch.float64)
    view = tensor[500:]
    (region,) = share_kv_caches({"a": tensor}).regions
    with mmap.mmap(region.fd, region.n_bytes) as other:
        np.frombuffer(other, dtype=np.float64)[500] = 3.5
    assert view[0].item() == 3.5


def test_sharing_again_moves_nothing() -> None:
    tensor = torch.ones(5000)
    first = share_kv_caches({"a": tensor})
    address = tensor.data_ptr()
    second = share_kv_caches({"a": tensor, "b": tensor[100:]})
    assert tensor.data_ptr() == address
    assert first.regions == second.regions


def test_M2_tensors_of_one_storage_share_one_region() -> None:
    backing = torch.zeros(1 << 16, dtype=torch.uint8)
    named = {"a": backing[: 1 << 15], "b": backing[1 << 15 :], "c": backing[100:5000]}
    shared = share_kv_caches(named)
    assert len(shared.regions) == 1
    assert [shared.tensors[name].offset for name in named] == [0, 1 << 15, 100]
    assert {facts.region for facts in shared.tensors.values()} == {0}


def test_M8_tensors_at_two_offsets_keep_their_bytes() -> None:
    backing = torch.zeros(1 << 20, dtype=torch.uint8)
    low, high = backing[:4096], backing[524_288 : 524_288 + 4096]
    low.fill_(1)
    high.fill_(2)
    shared = share_kv_caches({"low": low, "high": high})
    (region,) = shared.regions
    assert bytes_of(region.fd, 4096, shared.tensors["low"].offset) == b"\1" * 4096
    assert bytes_of(region.fd, 4096, shared.tensors["high"].offset) == b"\2" * 4096


def test_M8_memory_that_took_the_place_of_freed_memory_is_another_file() -> None:
    inodes = set()
    for n_bytes in (1 << 20, 2 << 20, 1 << 20):
        tensor = allocate_kv_cache((n_bytes,), torch.uint8)
        (region,) = share_kv_caches({"a": tensor}).regions
        assert region.n_bytes == n_bytes
        inodes.add(os.fstat(region.fd).st_ino)
        del tensor
    assert len(inodes) == 3
    assert maps() == []


def test_memory_goes_with_the_last_tensor() -> None:
    tensor = torch.zeros(100_000)
    view = tensor[10:]
    (region,) = share_kv_caches({"a": tensor}).regions
    name = os.readlink(f"/proc/self/fd/{region.fd}")
    assert "moriiod-kv" in name
    del tensor
    gc.collect()
    assert len(maps()) == 1
    del view
    gc.collect()
    assert maps() == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(region.fd)


def test_odd_sizes_are_rounded_up_to_pages_in_the_file_only() -> None:
    tensor = torch.arange(4097, dtype=torch.uint8)
    (region,) = share_kv_caches({"a": tensor}).regions
    assert region.n_bytes == 4097
    assert os.fstat(region.fd).st_size == 8192
    assert tensor[4096].item() == 4096 % 256


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "uint8", "float16"])
def test_element_types_go_by_their_torch_names(dtype: str) -> None:
    tensor = torch.zeros(64, dtype=getattr(torch, dtype))
    assert share_kv_caches({"a": tensor}).tensors["a"].dtype == dtype


def test_tensor_that_torch_shares_with_others_is_refused() -> None:
    tensor = torch.zeros(1000).share_memory_()
    with pytest.raises(InvalidArgument, match=r"torch\.multiprocessing"):
        share_kv_caches({"a": tensor})
    tensor[0] = 1


def test_tensors_that_cannot_be_shared_are_refused_before_any_is_moved() -> None:
    good = torch.zeros(1000)
    for bad in (
        torch.empty(0),
        torch.zeros(3, device="meta"),
        torch.zeros(3, 3).to_sparse(),
        np.zeros(3),
    ):
        with pytest.raises(InvalidArgument):
            share_kv_caches({"good": good, "bad": bad})
    assert not good.is_shared()


def test_no_room_to_move_is_refused_before_torch_is_killed_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.statvfs

    def full(path: str) -> os.statvfs_result:
        values = list(real(path))
        values[4] = 0  # f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(tensors_module.os, "statvfs", full)
    tensor = torch.zeros(10_000)
    with pytest.raises(RegistrationFailed, match="allocate_kv_cache or KvMemPool") as raised:
        share_kv_caches({"a": tensor})
    assert raised.value.fields["n_bytes"] == 40_000
    assert not tensor.is_shared()


def test_shared_tensor_can_still_go_to_another_process_through_torch() -> None:
    tensor = torch.full((1000,), 7.0)
    (region,) = share_kv_caches({"a": tensor}).regions
    fd, n_bytes = tensor.untyped_storage()._share_fd_cpu_()
    assert (fd, n_bytes) == (region.fd, region.n_bytes)
    again = torch.UntypedStorage._new_shared_fd_cpu(fd, n_bytes)
    other = torch.empty(0).set_(again, 0, (1000,), (1,))
    other[3] = 9.0
    assert tensor[3].item() == 9.0


# --- allocating -----------------------------------------------------------------------------------


def test_allocated_cache_is_zero_shared_and_page_aligned() -> None:
    cache = allocate_kv_cache((2, 10, 16, 2, 8), torch.bfloat16)
    assert cache.shape == (2, 10, 16, 2, 8)
    assert cache.is_contiguous()
    assert not cache.any()
    assert cache.data_ptr() % mmap.PAGESIZE == 0
    address = cache.data_ptr()
    (region,) = share_kv_caches({"a": cache}).regions
    assert cache.data_ptr() == address
    cache[1, 9, 15, 1, 7] = 1.0
    assert bytes_of(region.fd, 2, region.n_bytes - 2) == b"\x80\x3f"


def test_allocated_pages_are_taken_when_touched() -> None:
    cache = allocate_kv_cache((1 << 28,), torch.uint8)
    (region,) = share_kv_caches({"a": cache}).regions
    assert os.fstat(region.fd).st_blocks == 0
    cache[1 << 27] = 1
    assert os.fstat(region.fd).st_blocks * 512 <= 1 << 22


@pytest.mark.parametrize("shape", [(), (0,), (4, 0)])
def test_empty_cache_is_refused(shape: tuple[int, ...]) -> None:
    if shape == ():
        assert allocate_kv_cache(shape, torch.int8).numel() == 1
        return
    with pytest.raises(InvalidArgument):
        allocate_kv_cache(shape, torch.int8)


def test_pool_serves_large_plain_cpu_allocations_only() -> None:
    with KvMemPool(min_bytes=4096) as pool:
        served = [
            torch.zeros(4096, dtype=torch.int8),
            torch.zeros(2048, 2),
            torch.zeros((64, 64), dtype=torch.float16, device="cpu"),
            torch.empty(size=(5000,), dtype=torch.uint8),
            torch.zeros([4096], dtype=torch.int8, pin_memory=False, requires_grad=False),
        ]
        assert pool.allocations == 5
        left_alone = [
            torch.zeros(4095, dtype=torch.int8),
            torch.zeros(0),
            torch.zeros(4096, device="meta"),
            torch.zeros(4096, requires_grad=True),
            torch.ones(4096),
            torch.zeros(4096, out=torch.empty(0)),
        ]
        assert pool.allocations == 5
    assert [t.is_shared() for t in served] == [True] * 5
    assert [t.shape for t in served] == [(4096,), (2048, 2), (64, 64), (5000,), (4096,)]
    assert served[1].dtype == torch.float32
    assert not any(t.is_shared() for t in left_alone if t.device.type == "cpu" and t.numel())
    assert not torch.zeros(1 << 20).is_shared()


def test_backing_buffer_of_a_cpu_engine_needs_no_move() -> None:
    # As vLLM's CPU backend allocates: one buffer of bytes, layers interleaved block by block.
    layers, blocks, heads, tokens, content = 4, 16, 4, 32, 64
    page = heads * tokens * content * 4
    with KvMemPool():
        raw = torch.zeros(layers * blocks * page, dtype=torch.int8, device="cpu")
    typed = raw.view(torch.float32)
    strides = (layers * page // 4, tokens * content, content, 1)
    caches = {
        f"layer.{i}": typed.as_strided((blocks, heads, tokens, content), strides, i * page // 4)
        for i in range(layers)
    }
    address = raw.data_ptr()
    shared = share_kv_caches(caches)
    assert raw.data_ptr() == address
    assert len(shared.regions) == 1
    assert [facts.offset for facts in shared.tensors.values()] == [
        i * page // 4 for i in range(layers)
    ]


# --- registering ----------------------------------------------------------------------------------


def test_register_kv_caches_describes_what_the_tensors_are(tmp_path: Path) -> None:
    caches = {f"layer.{i}": torch.zeros(2, 10, 16, 1, 64, dtype=torch.bfloat16) for i in range(3)}
    spec = GroupSpec("full", "kv_first", "NHD", 16, 8, 64, tuple(caches))
    with FakeDaemon(tmp_path / "d.sock") as daemon, Client(daemon.path) as client:
        client.register_kv_caches(caches, [spec])
        client.register_kv_caches(caches, [spec])
        described = daemon.wait_for(RegisterCaches, 2)
        assert described[0] == described[1]
        (group,) = described[0].groups
        assert (group.num_blocks, group.dtype, group.total_kv_heads) == (10, "bfloat16", 8)
        assert [layer.region for layer in group.layers] == [0, 1, 2]
        piece = 16 * 1 * 64 * 2
        assert {layer.piece_bytes for layer in group.layers} == {piece}
        assert daemon.workers[0].regions == dict.fromkeys(range(3), 20 * piece)


def test_number_of_heads_is_checked_against_the_daemons_tp_size(tmp_path: Path) -> None:
    # The fake daemon is one of 8 ranks: 16 heads are 2 for each.
    caches = {"a": torch.zeros(2, 10, 16, 1, 64)}
    spec = GroupSpec("full", "kv_first", "NHD", 16, 16, 64, ("a",))
    with FakeDaemon(tmp_path / "d.sock") as daemon, Client(daemon.path) as client:
        with pytest.raises(InvalidGeometry, match="it has 1 KV heads"):
            client.register_kv_caches(caches, [spec])
        assert client.ping() == daemon.epoch


def test_importing_the_client_does_not_import_torch() -> None:
    code = (
        "import sys, moriiod.client as c; assert 'torch' not in sys.modules; "
        "c.allocate_kv_cache; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
