"""Torch tensors in memory that the daemon can map: sealed memfds, one for each storage.

Torch itself keeps track of which file a storage lies in, so nothing is remembered here: a tensor
that was freed and another one that got its address can never be mistaken for each other.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from moriiod.client.spec import TensorFacts
from moriiod.client.types import MemoryRegion
from moriiod.errors import InvalidArgument, MoriiodError, RegistrationFailed
from moriiod.wire.memfd import check_sealed_memfd, create_sealed_memfd

#: Where torch puts storages that it shares; ours pass through on their way into a memfd.
_TORCH_SHM: Final = "/dev/shm"
_NAME: Final = "moriiod-kv"
_MAP_FIXED: Final = 0x10
#: Smaller allocations than this are none of a KV cache.
_MIN_POOL_BYTES: Final = 1 << 20
_PLAIN_KEYWORDS: Final = frozenset(
    {"size", "dtype", "device", "layout", "requires_grad", "pin_memory"}
)

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
]


@dataclass(frozen=True, slots=True)
class SharedCaches:
    """Where the tensors of a KV cache lie.

    Attributes:
        tensors: By layer name; ``region`` counts in ``regions``.
        regions: One for each distinct storage. The descriptors are torch's own: they are valid
            for as long as a tensor of that storage lives.
    """

    tensors: Mapping[str, TensorFacts]
    regions: tuple[MemoryRegion, ...]


def share_kv_caches(tensors: Mapping[str, torch.Tensor]) -> SharedCaches:
    """Make sure that every tensor lies in a sealed memfd, moving storages where they do not.

    A moved storage keeps its tensors, views, shapes and values; only its address changes. Views
    that this function was not told of follow as well. What does not follow are raw pointers taken
    before (``data_ptr()``, ``numpy()``, a captured graph): take them afterwards. Nothing may use
    the tensors meanwhile. Moving needs the cache's size once more for a moment, and room in
    ``/dev/shm``; ``allocate_kv_cache`` and ``KvMemPool`` need neither.

    Args:
        tensors: By layer name; several may share one storage.

    Raises:
        InvalidArgument: A tensor is not on the CPU, not strided, empty, or shared with other
            processes by torch.
        RegistrationFailed: The kernel has no memory for it.
    """
    regions: dict[int, MemoryRegion] = {}
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage._cdata not in regions:
            regions[storage._cdata] = MemoryRegion(_fd_of(name, storage), storage.nbytes())
    order = list(regions)
    facts = {
        name: _facts_of(tensor, order.index(tensor.untyped_storage()._cdata))
        for name, tensor in tensors.items()
    }
    return SharedCaches(facts, tuple(regions.values()))


def allocate_kv_cache(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a new zero-filled CPU tensor in a memfd of its own.

    Pages are taken when they are first touched. The memory lives as long as a tensor or view of
    it, a registration, or a daemon that still copies from or to it.

    Args:
        shape: Sizes of the dimensions.
        dtype: Element type.

    Raises:
        InvalidArgument: The tensor would be empty.
        RegistrationFailed: The kernel has no memory for it.
    """
    n_elements = 1
    strides: list[int] = []
    for size in reversed(shape):
        strides.insert(0, n_elements)
        n_elements *= size
    n_bytes = n_elements * dtype.itemsize
    if n_bytes < 1:
        raise InvalidArgument("a KV cache is not empty", field="shape", got=str(tuple(shape)))
    fd = create_sealed_memfd(_NAME, _whole_pages(n_bytes))
    try:
        storage = torch.UntypedStorage._new_shared_fd_cpu(fd, n_bytes)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise _failed("cannot map a KV cache", n_bytes, error) from error
    finally:
        os.close(fd)
    return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(strides))


class KvMemPool(TorchFunctionMode):
    """While active, large ``torch.zeros`` and ``torch.empty`` on the CPU come from memfds.

    This is what vLLM's ``get_mem_pool_context`` hook expects; with it, KV caches lie in shareable
    memory from the start and nothing has to be moved::

        with KvMemPool():
            cache = torch.zeros(num_blocks * page_bytes, dtype=torch.int8)

    Args:
        min_bytes: Smaller allocations are left alone.
    """

    def __init__(self, min_bytes: int = _MIN_POOL_BYTES) -> None:
        super().__init__()
        self._min_bytes = min_bytes
        #: How many allocations were served.
        self.allocations = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer an allocation, or pass the call on."""
        keywords = dict(kwargs or {})
        if func in (torch.zeros, torch.empty):
            request = _plain_request(args, keywords)
            if request is not None and _n_bytes(*request) >= self._min_bytes:
                self.allocations += 1
                return allocate_kv_cache(*request)
        return func(*args, **keywords)


def _plain_request(
    args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Return shape and dtype of a plain CPU allocation, None if it is another one."""
    size = keywords.get("size", args[0] if len(args) == 1 else args)
    shape = (size,) if isinstance(size, int) else tuple(size)
    device = keywords.get("device")
    is_plain = (
        not set(keywords) - _PLAIN_KEYWORDS
        and all(isinstance(n, int) and n > 0 for n in shape)
        and keywords.get("layout") in (None, torch.strided)
        and not keywords.get("requires_grad")
        and not keywords.get("pin_memory")
        and torch.device(torch.get_default_device() if device is None else device).type == "cpu"
    )
    return (shape, keywords.get("dtype") or torch.get_default_dtype()) if is_plain else None


def _n_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    n = dtype.itemsize
    for size in shape:
        n *= size
    return n


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"layer {name!r} is no torch tensor", layer=name)
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise InvalidArgument(
            f"layer {name!r} is a {tensor.layout} tensor on {tensor.device}; only strided CPU "
            "tensors can be shared",
            layer=name,
            device=str(tensor.device),
        )
    if tensor.numel() == 0:
        raise InvalidArgument(f"layer {name!r} is empty", layer=name)


def _facts_of(tensor: torch.Tensor, region: int) -> TensorFacts:
    return TensorFacts(
        region=region,
        region_bytes=tensor.untyped_storage().nbytes(),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
        item_bytes=tensor.element_size(),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def _fd_of(name: str, storage: torch.UntypedStorage) -> int:
    """Return the sealed memfd of a storage, moving it there if need be."""
    if not storage.is_shared():
        return _move_to_memfd(storage)
    try:
        fd, n_bytes = storage._share_fd_cpu_()
        check_sealed_memfd(fd, n_bytes)
    except (RuntimeError, MoriiodError) as error:
        raise InvalidArgument(
            f"layer {name!r} is shared with other processes by torch.multiprocessing; moving it "
            "would cut them off",
            layer=name,
        ) from error
    return int(fd)


def _move_to_memfd(storage: torch.UntypedStorage) -> int:
    """Move a storage into a memfd under the feet of its tensors; return torch's descriptor.

    Torch can move a storage in place, but only into a file of its own that cannot be sealed. So
    that is done first, and then the memfd is put in the place of that file: in the mapping and in
    the descriptor, both of which are torch's and end with the storage.
    """
    n_bytes = storage.nbytes()
    _check_room(n_bytes)
    memfd = create_sealed_memfd(_NAME, _whole_pages(n_bytes))
    try:
        try:
            fd, _ = storage._share_fd_cpu_()
        except RuntimeError as error:
            raise _failed("torch cannot share a storage", n_bytes, error) from error
        _copy(storage, memfd, n_bytes)
        _map_over(storage.data_ptr(), memfd, n_bytes)
        os.dup2(memfd, fd, inheritable=False)
    finally:
        os.close(memfd)
    return int(fd)


def _copy(storage: torch.UntypedStorage, memfd: int, n_bytes: int) -> None:
    source = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (n_bytes,), (1,))
    with mmap.mmap(memfd, n_bytes) as mapping:
        target = torch.frombuffer(mapping, dtype=torch.uint8, count=n_bytes)
        target.copy_(source)
        # The mapping cannot be closed while a tensor looks at it.
        del target


def _map_over(address: int, fd: int, n_bytes: int) -> None:
    flags = mmap.MAP_SHARED | _MAP_FIXED
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = _libc.mmap(address, _whole_pages(n_bytes), rights, flags, fd, 0)
    if mapped != address:
        number = ctypes.get_errno()
        raise RegistrationFailed(
            f"cannot map a KV cache of {n_bytes} bytes: {os.strerror(number)}",
            n_bytes=n_bytes,
            errno=number,
        )


def _check_room(n_bytes: int) -> None:
    try:
        room = os.statvfs(_TORCH_SHM)
    except OSError as error:
        raise _failed(f"there is no {_TORCH_SHM}", n_bytes, error) from error
    free = room.f_bavail * room.f_frsize
    if free < n_bytes:
        # Torch would be killed by SIGBUS half-way.
        raise RegistrationFailed(
            f"moving a KV cache of {n_bytes} bytes needs that much in {_TORCH_SHM}, which has "
            f"{free}; allocate it with allocate_kv_cache or KvMemPool instead",
            n_bytes=n_bytes,
            errno=0,
            limit=free,
        )


def _whole_pages(n_bytes: int) -> int:
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _failed(what: str, n_bytes: int, error: Exception) -> RegistrationFailed:
    return RegistrationFailed(
        f"{what} ({n_bytes} bytes): {error}"[:500],
        n_bytes=n_bytes,
        errno=getattr(error, "errno", None) or 0,
    )
