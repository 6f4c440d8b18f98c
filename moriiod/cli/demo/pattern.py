"""The bytes that the demo writes: computed from where they come from, never stored.

In a real model, replicas of a head hold equal bytes, so a rank that was served by the wrong
replica would look right. Here every rank of every instance writes bytes of its own, and so does
every request, layer, piece and block: wherever the wrong bytes are taken from, or put, it shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

#: Bits of each coordinate in the 64 that name a piece of a block, lowest first.
POSITION_BITS: Final = 16
_PIECE_BITS: Final = 1
LAYER_BITS: Final = 12
REQUEST_BITS: Final = 16
RANK_BITS: Final = 10
INSTANCE_BITS: Final = 8

#: Step between the words of a piece; odd, so that no word comes twice.
_STEP: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Origin:
    """Who wrote a block: the request it belongs to, and the rank that computed it."""

    seed: int
    instance: int
    tp_rank: int
    request: int


def pieces(origin: Origin, layer: int, piece: int, n_blocks: int, n_words: int) -> Words:
    """Return one piece (K, V, or a latent) of each block of a request in one layer.

    Args:
        origin: Who wrote it.
        layer: Index of the layer.
        piece: 0 or 1.
        n_blocks: Blocks of the request.
        n_words: Words of 8 bytes in a piece.

    Returns:
        Shape [n_blocks, n_words]; row i belongs to position i of the prompt.
    """
    key = origin.instance
    for value, bits in (
        (origin.tp_rank, RANK_BITS),
        (origin.request, REQUEST_BITS),
        (layer, LAYER_BITS),
        (piece, _PIECE_BITS),
        (0, POSITION_BITS),
    ):
        key = key << bits | value
    keys = np.arange(key, key + n_blocks, dtype=np.uint64)
    starts = _mix(keys ^ np.uint64(mix(origin.seed)))
    steps = np.arange(n_words, dtype=np.uint64) * np.uint64(_STEP)
    return starts[:, None] + steps[None, :]


def canary(seed: int, side: str, instance: int, tp_rank: int) -> int:
    """Return the word that fills the unused blocks of a rank, as a signed 64-bit number."""
    side_bit = int(side == "decode")
    word = mix(mix(seed) ^ (1 << 63 | side_bit << 62 | instance << RANK_BITS | tp_rank))
    return word - (1 << 64) if word >> 63 else word


def mix(value: int) -> int:
    """Scramble 64 bits; different values give different results (splitmix64)."""
    return int(_mix(np.array([value & _MASK], dtype=np.uint64))[0])


def _mix(values: Words) -> Words:
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
