"""A worker's KV cache: torch tensors in shared memory, written and checked with the pattern."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from moriiod.cli.demo import pattern
from moriiod.cli.demo.pattern import Origin
from moriiod.cli.demo.plan import CacheShape
from moriiod.client import GroupSpec
from moriiod.client.tensors import allocate_kv_cache


class RankCache:
    """The KV cache of one rank. Blocks that belong to no request hold the canary.

    Args:
        shape: Layers, blocks and what a block holds.
        canary: The word of unused blocks.

    Raises:
        RegistrationFailed: The kernel has no memory for it.
    """

    def __init__(self, shape: CacheShape, canary: int) -> None:
        self.shape = shape
        self._canary = canary
        self._tensors = {
            name: allocate_kv_cache(shape.tensor_shape, torch.bfloat16)
            for name in shape.layer_names
        }
        #: The same memory as whole words: for each layer [pieces, blocks, words].
        self._words = [
            tensor.flatten().view(torch.int64).view(shape.pieces, shape.blocks, shape.piece_words)
            for tensor in self._tensors.values()
        ]
        for words in self._words:
            words.fill_(canary)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors by layer name, for ``register_kv_caches``."""
        return self._tensors

    @property
    def spec(self) -> GroupSpec:
        """What the tensors are, in the words of the client library."""
        shape = self.shape
        return GroupSpec(
            name="attention",
            layout="mla" if shape.is_mla else "kv_first",
            head_order="NHD",
            block_tokens=shape.block_tokens,
            total_kv_heads=max(1, shape.kv_heads),
            head_size=shape.head_size,
            layers=shape.layer_names,
        )

    def n_bytes(self, n_blocks: int) -> int:
        """Return the size of so many blocks in all layers."""
        return n_blocks * self.shape.layers * self.shape.block_bytes

    def fill(self, blocks: Sequence[int], origin: Origin, layer: int) -> None:
        """Write one layer of a request, as its prefill would."""
        rows = torch.tensor(blocks)
        for piece in range(self.shape.pieces):
            self._words[layer][piece][rows] = self._pattern(origin, layer, piece, len(blocks))

    def blank(self, blocks: Sequence[int]) -> None:
        """Put the canary into blocks that are not used any more."""
        rows = torch.tensor(blocks)
        for words in self._words:
            words[:, rows] = self._canary

    def find_wrong(self, blocks: Sequence[int], origin: Origin) -> str:
        """Compare every byte of a request's blocks with what its producer wrote.

        Returns:
            Where the first wrong byte is; "" if there is none.
        """
        rows = torch.tensor(blocks)
        for layer, words in enumerate(self._words):
            for piece in range(self.shape.pieces):
                found = words[piece][rows]
                wanted = self._pattern(origin, layer, piece, len(blocks))
                if not torch.equal(found, wanted):
                    return self._describe(found, wanted, blocks, f"layer {layer} piece {piece}")
        return ""

    def find_touched(self, used: Collection[int]) -> tuple[int, str]:
        """Look for a byte that is not the canary's in the blocks that are not used.

        Returns:
            Bytes that were looked at, and where the first wrong one is; "" if there is none.
        """
        taken = frozenset(used)
        blocks = [block for block in range(self.shape.blocks) if block not in taken]
        rows = torch.tensor(blocks, dtype=torch.int64)
        for layer, words in enumerate(self._words):
            for piece in range(self.shape.pieces):
                found = words[piece][rows]
                wanted = torch.full_like(found, self._canary)
                if not torch.equal(found, wanted):
                    where = f"unused blocks of layer {layer} piece {piece}"
                    return self.n_bytes(len(blocks)), self._describe(found, wanted, blocks, where)
        return self.n_bytes(len(blocks)), ""

    def flip_byte(self, block: int) -> None:
        """Spoil one byte in the middle of a block of the last layer."""
        tensor = self._words[-1][-1][block].view(torch.uint8)
        tensor[len(tensor) // 2] ^= 1

    def _pattern(self, origin: Origin, layer: int, piece: int, n_blocks: int) -> torch.Tensor:
        words = pattern.pieces(origin, layer, piece, n_blocks, self.shape.piece_words)
        return torch.from_numpy(words.view("int64"))

    @staticmethod
    def _describe(
        found: torch.Tensor, wanted: torch.Tensor, blocks: Sequence[int], where: str
    ) -> str:
        found, wanted = found.view(torch.uint8), wanted.view(torch.uint8)
        differing = (found != wanted).nonzero()
        row, byte = differing[0].tolist()
        return (
            f"{where}: byte {byte} of block {blocks[row]} is {int(found[row, byte]):#04x}, not "
            f"{int(wanted[row, byte]):#04x}; {len(differing)} bytes differ there"
        )
