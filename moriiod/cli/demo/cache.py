"""A worker's KV cache: torch tensors in shared memory, written and checked with the pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from moriiod.cli.demo import pattern
from moriiod.cli.demo.pattern import Origin
from moriiod.cli.demo.shapes import CacheShape, GroupShape
from moriiod.client import GroupSpec
from moriiod.client.tensors import allocate_kv_cache
from moriiod.core.headplan import HeadPlan, HeadSlice


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the bytes of a request come from.

    Attributes:
        origin_of: Returns who wrote a block, by producer rank.
        shape: The producers' caches.
        slices: For each group, which heads are whose.
    """

    origin_of: Callable[[int], Origin]
    shape: CacheShape
    slices: tuple[tuple[HeadSlice, ...], ...]

    @classmethod
    def of_rank(
        cls, heads: HeadPlan, rank: int, shape: CacheShape, origin_of: Callable[[int], Origin]
    ) -> Sources:
        """Return where a consumer rank's bytes come from."""
        groups = range(len(heads.shapes))
        return cls(origin_of, shape, tuple(heads.slices(group, rank) for group in groups))

    @classmethod
    def own(cls, origin: Origin, shape: CacheShape) -> Sources:
        """Return the sources of bytes that a rank wrote itself."""
        slices = tuple((HeadSlice(origin.tp_rank, 0, 0, one.heads),) for one in shape.groups)
        return cls(lambda _: origin, shape, slices)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One tensor as whole words: for each part [pieces, blocks, heads, tokens or 1, words]."""

    index: int
    group: int
    shape: GroupShape
    parts: tuple[torch.Tensor, ...]


class RankCache:
    """The KV cache of one rank. Blocks that belong to no request hold the canary.

    Args:
        shape: Groups, layers, blocks and what a block holds.
        canary: The word of unused blocks.

    Raises:
        RegistrationFailed: The kernel has no memory for it.
    """

    def __init__(self, shape: CacheShape, canary: int) -> None:
        self.shape = shape
        self._canary = canary
        self._tensors: dict[str, torch.Tensor] = {}
        self._layers: list[_Layer] = []
        for number, group in enumerate(shape.groups):
            for name in group.layer_names:
                tensor = allocate_kv_cache(group.tensor_shape, torch.bfloat16)
                words = tensor.flatten().view(torch.int64)
                words.fill_(canary)
                self._layers.append(
                    _Layer(len(self._layers), number, group, tuple(_views(words, group)))
                )
                is_nhd = group.group.layout == "fused" and group.group.head_order == "NHD"
                self._tensors[name] = tensor.transpose(1, 2) if is_nhd else tensor

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors by layer name, for ``register_kv_caches``."""
        return self._tensors

    @property
    def specs(self) -> list[GroupSpec]:
        """What the tensors are, in the words of the client library."""
        return [_spec(group) for group in self.shape.groups]

    def fill(self, blocks: Sequence[int], origin: Origin, layer: int) -> None:
        """Write one layer of a request, as its prefill would."""
        one = self._layers[layer]
        own = Sources.own(origin, self.shape)
        rows = torch.tensor(one.shape.rows(blocks))
        for piece, part, view in _pieces(one):
            view[rows] = _wanted(one, own, (piece, part), len(rows))

    def blank(self, blocks: Sequence[int]) -> None:
        """Put the canary into blocks that are not used any more."""
        rows = torch.tensor(blocks)
        for layer in self._layers:
            for view in layer.parts:
                view[:, rows] = self._canary

    def find_wrong(self, blocks: Sequence[int], sources: Sources) -> str:
        """Compare every byte of a request's blocks with what its producers wrote.

        Returns:
            Where the first wrong byte is; "" if there is none.
        """
        for layer in self._layers:
            used = layer.shape.rows(blocks)
            rows = torch.tensor(used)
            for piece, part, view in _pieces(layer):
                found = view[rows]
                wanted = _wanted(layer, sources, (piece, part), len(used))
                if not torch.equal(found, wanted):
                    return _describe(found, wanted, used, f"layer {layer.index} piece {piece}")
        return ""

    def find_touched(self, tables: Sequence[Sequence[int]]) -> tuple[int, str]:
        """Look for a byte that is not the canary's in the blocks that are not used.

        Args:
            tables: Blocks of the requests.

        Returns:
            Bytes that were looked at, and where the first wrong one is; "" if there is none.
        """
        n_bytes, where = 0, ""
        for layer in self._layers:
            taken = {block for blocks in tables for block in layer.shape.rows(blocks)}
            free = [block for block in range(self.shape.blocks) if block not in taken]
            n_bytes += len(free) * layer.shape.block_bytes
            rows = torch.tensor(free, dtype=torch.int64)
            for piece, _, view in _pieces(layer) if not where else ():
                found = view[rows]
                wanted = torch.full_like(found, self._canary)
                if not torch.equal(found, wanted):
                    place = f"unused blocks of layer {layer.index} piece {piece}"
                    where = where or _describe(found, wanted, free, place)
        return n_bytes, where

    def flip_byte(self, blocks: Sequence[int]) -> None:
        """Spoil one byte in the middle of one of these blocks, of the last layer."""
        last = self._layers[-1]
        block = last.shape.rows(blocks)[0]
        data = last.parts[-1][-1, block, -1, -1].view(torch.uint8)
        data[len(data) // 2] ^= 1


def _views(words: torch.Tensor, shape: GroupShape) -> Iterator[torch.Tensor]:
    group = shape.group
    if group.layout == "block_first":
        pieces = words.view(shape.blocks, 2, shape.piece_words).transpose(0, 1)
    else:
        pieces = words.view(group.pieces, shape.blocks, shape.piece_words)
    start = 0
    for n in shape.part_words:
        part = pieces[..., start : start + shape.heads * n]
        if group.head_order == "NHD" and group.layout != "mla":
            per_token = n // group.block_tokens
            inner = (group.block_tokens, shape.heads, per_token)
            yield part.view(*part.shape[:2], *inner).transpose(2, 3)
        else:
            yield part.view(*part.shape[:2], shape.heads, 1, n)
        start += shape.heads * n


def _pieces(layer: _Layer) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield piece, part, and the view [blocks, heads, tokens or 1, words]."""
    for part, view in enumerate(layer.parts):
        for piece in range(layer.shape.group.pieces):
            yield piece, part, view[piece]


def _wanted(layer: _Layer, sources: Sources, place: tuple[int, int], n_blocks: int) -> torch.Tensor:
    """Return what a part of a piece of every block must hold: what each head's producer wrote."""
    piece, part = place
    shape, theirs = layer.shape, sources.shape.groups[layer.group]
    n = shape.part_words[part]
    start = theirs.heads * sum(theirs.part_words[:part])
    wanted = torch.empty((n_blocks, shape.heads, n), dtype=torch.int64)
    for one in sources.slices[layer.group]:
        origin = sources.origin_of(one.producer_rank)
        words = pattern.pieces(origin, layer.index, piece, n_blocks, theirs.piece_words)
        written = torch.from_numpy(words.view("int64"))[:, start : start + theirs.heads * n]
        there = written.view(n_blocks, theirs.heads, n)
        wanted[:, one.consumer_head : one.consumer_head + one.count] = there[
            :, one.producer_head : one.producer_head + one.count
        ]
    view = layer.parts[part]
    return wanted.view(n_blocks, shape.heads, *view.shape[3:])


def _spec(shape: GroupShape) -> GroupSpec:
    group = shape.group
    n_parts = len(group.token_bytes)
    parts = dict.fromkeys(shape.layer_names, (shape.heads,) * n_parts) if n_parts > 1 else {}
    return GroupSpec(
        name=group.name,
        layout=group.layout,
        head_order=group.head_order,
        block_tokens=group.block_tokens,
        total_kv_heads=group.heads,
        head_size=shape.head_size,
        layers=shape.layer_names,
        parts=parts,
    )


def _describe(found: torch.Tensor, wanted: torch.Tensor, blocks: Sequence[int], where: str) -> str:
    n = len(blocks)
    found = found.reshape(n, -1).view(torch.uint8)
    wanted = wanted.reshape(n, -1).view(torch.uint8)
    differing = (found != wanted).nonzero()
    row, byte = differing[0].tolist()
    return (
        f"{where}: byte {byte} of block {blocks[row]} is {int(found[row, byte]):#04x}, not "
        f"{int(wanted[row, byte]):#04x}; {len(differing)} bytes differ there"
    )
