"""A transfer plan: what an engine is asked to copy, as arrays (not Python lists).

The block part of a plan depends on block ids and strides only, so it is computed once and
shared by every layer whose blocks are spaced alike. A layer only adds its region and offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BlockSpans:
    """Byte ranges relative to a layer's base, sorted by local offset and merged.

    Attributes:
        local: int64 [n], byte offsets from the local layer base.
        remote: int64 [n], byte offsets from the remote layer base.
        sizes: int64 [n], bytes of each range, all positive.
        n_bytes: Sum of ``sizes``.
    """

    local: Int64Array
    remote: Int64Array
    sizes: Int64Array
    n_bytes: int


@dataclass(frozen=True, slots=True)
class LayerSpans:
    """One layer of a plan: where its spans start on both sides, in which regions."""

    spans: BlockSpans
    local_region: int
    local_offset: int
    remote_region: int
    remote_offset: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Everything one engine operation copies between one local and one remote cache.

    Attributes:
        layers: One entry for each layer that is copied.
        n_bytes: Bytes of all layers.
        n_token_spans: Spans that hold one token each, before merging (heads split in NHD blocks).
    """

    layers: tuple[LayerSpans, ...]
    n_bytes: int
    n_token_spans: int = 0
