"""What a worker imports: its connection to the daemon, and its KV cache in shared memory.

Everything that needs torch is loaded when it is first used, so importing this package does not
import torch. See ``docs/client.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from moriiod.client.aio import AsyncClient
from moriiod.client.params import TransferParams, parse_transfer_params, producer_params
from moriiod.client.spec import GroupSpec
from moriiod.client.sync import Client
from moriiod.client.types import ClientProblem, ClientSettings, ClientState, MemoryRegion
from moriiod.core.requests import PeerAddress, TransferEnded

if TYPE_CHECKING:
    from moriiod.client.tensors import KvMemPool, allocate_kv_cache, share_kv_caches

__all__ = [
    "AsyncClient",
    "Client",
    "ClientProblem",
    "ClientSettings",
    "ClientState",
    "GroupSpec",
    "KvMemPool",
    "MemoryRegion",
    "PeerAddress",
    "TransferEnded",
    "TransferParams",
    "allocate_kv_cache",
    "parse_transfer_params",
    "producer_params",
    "share_kv_caches",
]

_NEEDS_TORCH: Final = frozenset({"KvMemPool", "allocate_kv_cache", "share_kv_caches"})


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moriiod.client import tensors

    return getattr(tensors, name)
