"""A worker's KV cache without torch: two memfds, a pattern for every block, canaries elsewhere.

Every byte that is not part of a block in use is a canary: free blocks, the gaps between blocks,
and guards around every layer. So whatever is written to a wrong place, or to a block that was
given back, shows. Patterns are computed from who wrote them (rank, transfer, layer, piece,
position), so bytes of a wrong source, layer or block show as well.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from moriiod.client import MemoryRegion
from moriiod.core.geometry import KvGroup, KvLayer
from moriiod.wire.memfd import create_sealed_memfd

Bytes8 = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

CANARY: Final = 0xC5
#: Bytes between two blocks, and around each layer.
GAP: Final = 64
GUARD: Final = 4096
N_REGIONS: Final = 2
_TOKENS: Final = 16
_ITEM_BYTES: Final = 2
_WORD_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the cache of one rank looks like.

    Attributes:
        layers: Half of them in each region.
        blocks: In each layer.
        head_size: Elements of one KV head of K or V.
        heads: KV heads of the model; ranks beyond that number hold replicas.
        tp_size: Of the rank's instance.
    """

    layers: int = 4
    blocks: int = 64
    head_size: int = 64
    heads: int = 2
    tp_size: int = 1

    @property
    def piece_bytes(self) -> int:
        """Bytes of K (or V) of one block in one layer."""
        return _TOKENS * max(1, self.heads // self.tp_size) * self.head_size * _ITEM_BYTES

    @property
    def block_stride(self) -> int:
        """Bytes from one block to the next."""
        return self.piece_bytes + GAP

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer with its guard."""
        return 2 * self.blocks * self.block_stride + GUARD

    @property
    def region_bytes(self) -> int:
        """Bytes of each memfd."""
        return GUARD + -(-self.layers // N_REGIONS) * self.layer_bytes

    def n_bytes(self, n_blocks: int) -> int:
        """Return the payload of so many blocks in all layers."""
        return n_blocks * self.layers * 2 * self.piece_bytes

    def offset(self, layer: int) -> int:
        """Return where a layer starts in its region."""
        return GUARD + layer // N_REGIONS * self.layer_bytes

    def group(self) -> KvGroup:
        """Return the description for the daemon."""
        layers = tuple(
            KvLayer(
                name=f"layer.{index}",
                region=index % N_REGIONS,
                offset=self.offset(index),
                block_stride=self.block_stride,
                kv_stride=self.blocks * self.block_stride,
                piece_bytes=self.piece_bytes,
            )
            for index in range(self.layers)
        )
        return KvGroup(
            name="attention",
            layout="kv_first",
            head_order="NHD",
            dtype="bfloat16",
            block_tokens=_TOKENS,
            num_blocks=self.blocks,
            total_kv_heads=self.heads,
            head_size=self.head_size,
            layers=layers,
        )


@dataclass(frozen=True, slots=True)
class Origin:
    """Who wrote some blocks: the rank of the producer, and the transfer they belong to."""

    tp_rank: int
    transfer_id: str

    def words(self, layer: int, piece: int, n_blocks: int, n_words: int) -> Words:
        """Return what lies in one piece of each block: uint64 [n_blocks, n_words]."""
        key = zlib.crc32(f"{self.tp_rank} {self.transfer_id} {layer} {piece}".encode())
        starts = (np.uint64(key) << np.uint64(32)) + np.arange(1, n_blocks + 1, dtype=np.uint64)
        starts = (starts ^ (starts >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        steps = np.arange(n_words, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return np.asarray(starts[:, None] + steps[None, :], dtype=np.uint64)


def make_memory(name: str, shape: CacheShape) -> tuple[int, ...]:
    """Return the fds of the memfds of a new cache; the caller owns them."""
    return tuple(create_sealed_memfd(f"{name}-{i}", shape.region_bytes) for i in range(N_REGIONS))


class KvCache:
    """The mapped memory of one rank.

    Args:
        shape: Of the cache.
        fds: From ``make_memory``; stay the caller's.
        is_new: Fill it with canaries.
    """

    def __init__(self, shape: CacheShape, fds: Sequence[int], *, is_new: bool = False) -> None:
        self.shape = shape
        self.regions = tuple(MemoryRegion(fd, shape.region_bytes) for fd in fds)
        self._mappings = [mmap.mmap(fd, shape.region_bytes) for fd in fds]
        self._bytes: list[Bytes8] = [np.frombuffer(m, dtype=np.uint8) for m in self._mappings]
        if is_new:
            for region in self._bytes:
                region[:] = CANARY

    def close(self) -> None:
        """Unmap. What a failed test still looks at is unmapped when it is forgotten."""
        self._bytes.clear()
        for mapping in self._mappings:
            with contextlib.suppress(BufferError):
                mapping.close()

    def fill(self, blocks: Sequence[int], origin: Origin, layer: int) -> None:
        """Write one layer of a transfer, as its prefill would."""
        for piece, cells in self._pieces(layer):
            cells[list(blocks), : self.shape.piece_bytes] = self._pattern(
                origin, layer, piece, len(blocks)
            )

    def blank(self, blocks: Sequence[int]) -> None:
        """Give blocks back: canaries again."""
        for layer in range(self.shape.layers):
            for _, cells in self._pieces(layer):
                cells[list(blocks)] = CANARY

    def find_wrong(
        self, blocks: Sequence[int], origin: Origin, layers: Iterable[int] | None = None
    ) -> str:
        """Compare every byte of some blocks; return where the first wrong one is, "" if none."""
        for layer in range(self.shape.layers) if layers is None else layers:
            for piece, cells in self._pieces(layer):
                found = cells[list(blocks), : self.shape.piece_bytes]
                differs = found != self._pattern(origin, layer, piece, len(blocks))
                if differs.any():
                    row, at = np.argwhere(differs)[0].tolist()
                    return (
                        f"layer {layer} piece {piece} block {blocks[row]} byte {at}: "
                        f"{found[row, at]:#04x} is not of {origin} ({differs.sum()} bytes differ)"
                    )
        return ""

    def find_touched(self, used: Iterable[int] = ()) -> str:
        """Look at every byte outside of used blocks; return where one is no canary, "" if none."""
        used_blocks = list(used)
        for index, region in enumerate(self._bytes):
            copy = region.copy()
            for layer in range(index, self.shape.layers, N_REGIONS):
                for _, cells in self._pieces(layer, copy):
                    cells[used_blocks, : self.shape.piece_bytes] = CANARY
            touched = np.flatnonzero(copy != CANARY)
            if touched.size:
                at = int(touched[0])
                return f"region {index} byte {at} is {copy[at]:#04x} ({self._name(index, at)})"
        return ""

    def _pieces(self, layer: int, region: Bytes8 | None = None) -> Iterator[tuple[int, Bytes8]]:
        """Yield K and V of a layer: uint8 [blocks, block_stride]."""
        shape = self.shape
        whole = self._bytes[layer % N_REGIONS] if region is None else region
        for piece in range(2):
            start = shape.offset(layer) + piece * shape.blocks * shape.block_stride
            cells = whole[start : start + shape.blocks * shape.block_stride]
            yield piece, cells.reshape(shape.blocks, shape.block_stride)

    def _pattern(self, origin: Origin, layer: int, piece: int, n_blocks: int) -> Bytes8:
        words = origin.words(layer, piece, n_blocks, self.shape.piece_bytes // _WORD_BYTES)
        return words.view(np.uint8)

    def _name(self, region: int, at: int) -> str:
        shape = self.shape
        row, inside = divmod(at - GUARD, shape.layer_bytes)
        piece, inside = divmod(inside, shape.blocks * shape.block_stride)
        block, inside = divmod(inside, shape.block_stride)
        layer = row * N_REGIONS + region
        return f"layer {layer} piece {piece} block {block} byte {inside}; 2 = behind the layer"


@contextlib.contextmanager
def new_cache(name: str, shape: CacheShape) -> Iterator[KvCache]:
    """Give a cache of this very process, full of canaries."""
    fds = make_memory(name, shape)
    cache = KvCache(shape, fds, is_new=True)
    try:
        yield cache
    finally:
        cache.close()
        for fd in fds:
            os.close(fd)
