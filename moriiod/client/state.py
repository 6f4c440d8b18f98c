"""One tensor of recurrent state, read as its group's description says."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from moriiod.client.spec import GroupSpec, TensorFacts
from moriiod.core.geometry import MAX_PARTS, KvLayer
from moriiod.errors import InvalidGeometry


class StateReading:
    """A tensor ``[slots, ...]`` whose slots are split by heads.

    Without parts the dimension behind the slots is the one that is split. With parts it is the
    dimension whose size is their sum; where that is an inner one, every row in front of it is
    split alike (a convolution that keeps its positions outermost).

    Raises:
        InvalidGeometry: The tensor contradicts the description, or fits two readings.
    """

    def __init__(self, name: str, facts: TensorFacts, spec: GroupSpec, tp_size: int | None) -> None:
        self.name = name
        self.facts = facts
        self._spec = spec
        if len(facts.shape) < 2 or 0 in facts.shape:
            raise self._wrong("state needs slots and at least one dimension more")
        if spec.block_tokens != 1 or spec.kernel_tokens > 1 or spec.head_order != "HND":
            raise self._wrong("a slot has no tokens: block_tokens is 1, and head_order HND")
        self.num_blocks = facts.shape[0]
        self.heads = self._local_heads(tp_size)
        self._parts = self._find_parts()
        self._check_packed()

    def layer(self) -> KvLayer:
        """Return where the layer's bytes are."""
        facts = self.facts
        piece_bytes = prod(facts.shape[1:]) * facts.item_bytes
        stride = piece_bytes if self.num_blocks == 1 else facts.stride[0] * facts.item_bytes
        if stride <= 0:
            raise self._wrong("its slots are the same bytes (an expanded tensor)")
        return KvLayer(
            self.name,
            facts.region,
            facts.offset * facts.item_bytes,
            stride,
            0,
            piece_bytes,
            tuple(n * facts.item_bytes for n in self._parts) if len(self._parts) > 1 else (),
        )

    def _local_heads(self, tp_size: int | None) -> int:
        total = self._spec.total_kv_heads
        if tp_size is None:
            return 1  # not known: the daemon's peers compare bytes
        if total % tp_size and tp_size % total:
            raise self._wrong(f"{total} heads cannot be spread evenly over TP size {tp_size}")
        return max(1, total // tp_size)

    def _find_parts(self) -> tuple[int, ...]:
        """Return the elements of every part of a slot, in memory order."""
        shape, sizes = self.facts.shape, self._spec.parts.get(self.name, ())
        if not sizes:
            self._check_split(shape[1:2])
            return (prod(shape[1:]),)
        axes = [axis for axis in range(1, len(shape)) if shape[axis] == sum(sizes)]
        readings = " or ".join(f"dimension {axis}" for axis in axes) or "no dimension"
        if len(axes) != 1:
            raise self._wrong(f"parts {list(sizes)} add up to {sum(sizes)}, which is {readings}")
        self._check_split(sizes)
        rows, inner = prod(shape[1 : axes[0]]), prod(shape[axes[0] + 1 :])
        if rows * len(sizes) > MAX_PARTS:
            raise self._wrong(f"{rows} rows of {len(sizes)} parts are more than {MAX_PARTS}")
        return tuple(size * inner for size in sizes) * rows

    def _check_split(self, sizes: Iterable[int]) -> None:
        for size in sizes:
            if size < 1 or size % self.heads:
                raise self._wrong(f"{size} does not split into {self.heads} heads of this rank")

    def _check_packed(self) -> None:
        expected = 1
        for size, stride in zip(self.facts.shape[:0:-1], self.facts.stride[:0:-1], strict=True):
            if size > 1 and stride != expected:
                raise self._wrong("its slots are not contiguous")
            expected *= size

    def _wrong(self, why: str) -> InvalidGeometry:
        return self.facts.wrong(self.name, self._spec, why)
