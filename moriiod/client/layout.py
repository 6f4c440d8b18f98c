"""From tensors and a few words about them to KV groups, checked, never guessed.

A tensor's shape does not say what its dimensions mean: ``[2, 2, 16, 8, 64]`` may have K and V
outside or blocks outside. The worker says which it is, and every number it says is checked
against shape and strides. Where the tensor contradicts it, or would fit two readings that lay
the bytes out differently, both readings are named and nothing is registered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from moriiod.client.spec import GroupSpec, TensorFacts
from moriiod.client.state import StateReading
from moriiod.core.geometry import CacheLayout, HeadOrder, KvGroup, KvLayer
from moriiod.core.layout import check_layout
from moriiod.errors import InvalidGeometry

_NO_GENERATION: Final = "0" * 32


def describe_groups(
    tensors: Mapping[str, TensorFacts], specs: Sequence[GroupSpec], tp_size: int | None
) -> tuple[KvGroup, ...]:
    """Return the KV groups that the daemon is told of.

    Args:
        tensors: Every tensor of the cache by name.
        specs: What the worker says; every tensor belongs to exactly one group.
        tp_size: TP size of this instance, to check the number of heads with; None = not known.

    Raises:
        InvalidGeometry: Description and tensors disagree, or a tensor could be read in two ways;
            names the layer and both readings.
    """
    _check_names(tensors, specs)
    groups = tuple(_describe_group(tensors, spec, tp_size) for spec in specs)
    sizes = {facts.region: facts.region_bytes for facts in tensors.values()}
    check_layout(CacheLayout(_NO_GENERATION, groups, tuple(sizes[i] for i in range(len(sizes)))))
    return groups


def _check_names(tensors: Mapping[str, TensorFacts], specs: Sequence[GroupSpec]) -> None:
    named: set[str] = set()
    for layer in (layer for spec in specs for layer in spec.layers):
        if layer not in tensors:
            raise InvalidGeometry(f"there is no tensor for layer {layer!r}", layer=layer)
        if layer in named:
            raise InvalidGeometry(f"layer {layer!r} is named twice", layer=layer)
        named.add(layer)
    for layer in tensors:
        if layer not in named:
            raise InvalidGeometry(f"layer {layer!r} belongs to no group", layer=layer)
    for spec in specs:
        if not spec.layers:
            raise InvalidGeometry(f"group {spec.name!r} has no layers", group=spec.name)


def _describe_group(
    tensors: Mapping[str, TensorFacts], spec: GroupSpec, tp_size: int | None
) -> KvGroup:
    _check_spec(spec)
    reading_of = StateReading if spec.layout == "state" else _Reading
    readings = [reading_of(layer, tensors[layer], spec, tp_size) for layer in spec.layers]
    layers = tuple(reading.layer() for reading in readings)
    first = readings[0]
    for reading in readings[1:]:
        for what, mine, theirs in (
            ("blocks", reading.num_blocks, first.num_blocks),
            ("elements of type", _dtype_in_group(reading), _dtype_in_group(first)),
            ("KV heads", reading.heads, first.heads),
        ):
            if mine != theirs:
                raise InvalidGeometry(
                    f"layer {reading.name!r} has {mine} {what}, layer {first.name!r} of the same "
                    f"group has {theirs}",
                    group=spec.name,
                    layer=reading.name,
                )
    return KvGroup(
        name=spec.name,
        layout=spec.layout,
        head_order=spec.head_order,
        # A convolution and the state behind it often have different types.
        dtype="/".join(dict.fromkeys(reading.facts.dtype for reading in readings)),
        block_tokens=spec.block_tokens,
        num_blocks=first.num_blocks,
        total_kv_heads=spec.total_kv_heads,
        head_size=spec.head_size,
        layers=layers,
        content=spec.content,
        kernel_tokens=spec.kernel_tokens,
    )


def _dtype_in_group(reading: _Reading | StateReading) -> str:
    """Return what must be equal in a group: only recurrent state may mix types."""
    return "any" if isinstance(reading, StateReading) else reading.facts.dtype


def _check_spec(spec: GroupSpec) -> None:
    tile = spec.tile_tokens
    if min(spec.block_tokens, tile) < 1 or spec.block_tokens % tile:
        raise InvalidGeometry(
            f"group {spec.name!r}: kernel blocks of {tile} tokens do not fill blocks of "
            f"{spec.block_tokens}",
            group=spec.name,
            kernel_tokens=tile,
            block_tokens=spec.block_tokens,
        )
    for what, names in (("head size", spec.head_sizes), ("parts", spec.parts)):
        unknown = sorted(set(names) - set(spec.layers))
        if unknown or (what == "parts" and names and spec.layout != "state"):
            raise InvalidGeometry(
                f"group {spec.name!r}: {what} of {unknown or spec.layout!r} mean nothing here",
                group=spec.name,
            )


class _Reading:
    """One tensor, read as its group's description says."""

    def __init__(self, name: str, facts: TensorFacts, spec: GroupSpec, tp_size: int | None) -> None:
        self.name = name
        self.facts = facts
        self.spec = spec
        self._tp_size = tp_size
        self.block_axis, self.kv_axis = self._outer_axes()
        outer = (self.block_axis,) if self.kv_axis is None else (self.block_axis, self.kv_axis)
        #: The dimensions inside one piece of one block.
        self.inner = tuple(axis for axis in range(len(facts.shape)) if axis not in outer)
        self._size = spec.head_size_of(name)
        tiles = spec.block_tokens // spec.tile_tokens
        self._tiles = facts.shape[self.block_axis]
        if self._tiles % tiles:
            raise self._wrong(f"its {self._tiles} blocks are no multiple of {tiles} kernel blocks")
        self.num_blocks = self._tiles // tiles
        self.heads = self._check_inner()
        self._check_packed()

    def layer(self) -> KvLayer:
        """Return where the layer's bytes are."""
        facts = self.facts
        piece_bytes = _product(facts.shape[axis] for axis in self.inner) * facts.item_bytes
        # The stride of a dimension with one entry means nothing.
        is_one = self._tiles == 1
        block_stride = piece_bytes if is_one else facts.stride[self.block_axis] * facts.item_bytes
        kv_stride = 0 if self.kv_axis is None else facts.stride[self.kv_axis] * facts.item_bytes
        if block_stride <= 0 or (self.kv_axis is not None and kv_stride <= 0):
            raise self._wrong("its blocks, or K and V, are the same bytes (an expanded tensor)")
        return KvLayer(
            self.name,
            facts.region,
            facts.offset * facts.item_bytes,
            block_stride,
            kv_stride,
            piece_bytes,
        )

    # --- Outside a block ----------------------------------------------------------------------

    def _outer_axes(self) -> tuple[int, int | None]:
        match self.spec.layout:
            case "kv_first":
                self._check_dimensions(3, 5)
                self._check_pair(axis=0, other=1)
                return 1, 0
            case "block_first":
                self._check_dimensions(3, 5)
                self._check_pair(axis=1, other=0)
                return 0, 1
            case "fused":
                self._check_dimensions(4)
                return 0, None
            case "mla":
                self._check_dimensions(3)
                return 0, None
            case unknown:
                raise self._wrong(f"there is no layout {unknown!r}")

    def _check_dimensions(self, *allowed: int) -> None:
        if len(self.facts.shape) not in allowed:
            wanted = " or ".join(str(n) for n in allowed)
            raise self._wrong(f"{self.spec.layout} needs {wanted} dimensions")
        if 0 in self.facts.shape:
            raise self._wrong("it is empty")

    def _check_pair(self, axis: int, other: int) -> None:
        shape = self.facts.shape
        readings = (
            f"kv_first has {shape[0]} where K and V are and {shape[1]} blocks; "
            f"block_first has {shape[1]} where K and V are and {shape[0]} blocks"
        )
        if shape[axis] != 2:
            raise self._wrong(f"it is not {self.spec.layout}: {readings}")
        if shape[other] == 2:
            raise self._wrong(f"it could be either: {readings}; use another number of blocks")

    # --- Inside a block -----------------------------------------------------------------------

    def _check_inner(self) -> int:
        """Check the numbers that were said; return the KV heads of this rank."""
        sizes = [self.facts.shape[axis] for axis in self.inner]
        if self.spec.layout == "mla":
            return self._check_mla(*sizes)
        if self.spec.layout == "fused":
            return self._check_fused(*sizes)
        if len(sizes) == 1:
            return self._check_flat(*sizes)
        return self._check_split(*sizes)

    def _check_mla(self, tokens: int, latent: int) -> int:
        said = (self.spec.tile_tokens, self._size)
        if (tokens, latent) != said:
            raise self._wrong(f"a block is [{tokens}, {latent}], [tokens, latent] was said {said}")
        if self.spec.total_kv_heads != 1:
            raise self._wrong(f"mla has 1 KV head, {self.spec.total_kv_heads} were said")
        return 1

    def _check_fused(self, heads: int, tokens: int, content: int) -> int:
        spec = self.spec
        if tokens != spec.tile_tokens:
            raise self._wrong(
                f"read as [blocks, heads, tokens, content] it has {tokens} tokens and {heads} "
                f"heads, read as [blocks, tokens, heads, content] {heads} tokens and {tokens} "
                f"heads; {spec.tile_tokens} tokens were said, and fused has heads first"
            )
        if content != 2 * self._size and not (spec.content and content >= self._size):
            raise self._wrong(
                f"its content dimension is {content}, K and V together are 2 * {self._size}; "
                "say in `content` how it is packed if that is right"
            )
        self._check_heads(heads)
        heads_axis, tokens_axis, _ = self.inner
        if heads > 1 and tokens > 1:
            strides = self.facts.stride
            order = "HND" if strides[heads_axis] > strides[tokens_axis] else "NHD"
            self._check_order({order})
        return heads

    def _check_flat(self, elements: int) -> int:
        per_head = self.spec.tile_tokens * self._size
        if per_head < 1 or elements % per_head:
            raise self._wrong(
                f"a piece of {elements} elements is no multiple of {self.spec.tile_tokens} "
                f"tokens * {self._size}"
            )
        self._check_heads(elements // per_head)
        return elements // per_head

    def _check_split(self, a: int, b: int, size: int) -> int:
        spec = self.spec
        if size != self._size:
            raise self._wrong(f"its head size is {size}, {self._size} was said")
        if spec.tile_tokens not in (a, b):
            raise self._wrong(
                f"a block is [{a}, {b}, {size}]: neither {a} nor {b} are the "
                f"{spec.tile_tokens} tokens that were said (kernel_tokens says where tensors have "
                "smaller blocks than the block table)"
            )
        strides = self.facts.stride
        a_is_outer = a == 1 or b == 1 or strides[self.inner[0]] > strides[self.inner[1]]
        orders: dict[HeadOrder, int] = {}
        if a == spec.tile_tokens:
            orders["NHD" if a_is_outer else "HND"] = b
        if b == spec.tile_tokens:
            orders["HND" if a_is_outer else "NHD"] = a
        heads = next(iter(orders.values()))
        if heads > 1 and spec.tile_tokens > 1:
            self._check_order(orders)
        self._check_heads(heads)
        return heads

    def _check_order(self, found: Iterable[str]) -> None:
        if self.spec.head_order not in found:
            raise self._wrong(
                f"{self.spec.head_order} was said, but its strides read {' or '.join(found)}"
            )

    def _check_heads(self, heads: int) -> None:
        total, tp = self.spec.total_kv_heads, self._tp_size
        if tp is None:
            is_right, wanted = total >= heads and total % heads == 0, f"a divisor of {total}"
        else:
            is_right = heads == max(1, total // tp) and (total % tp == 0 or tp % total == 0)
            wanted = f"{total} / TP size {tp}, at least 1"
        if not is_right:
            raise self._wrong(f"it has {heads} KV heads, {wanted} should be there")

    def _check_packed(self) -> None:
        """Inside a piece every byte is payload, and the last dimension is the innermost."""
        expected = 1
        dimensions = [(self.facts.stride[axis], self.facts.shape[axis]) for axis in self.inner]
        outer = sorted(d for d in dimensions[:-1] if d[1] > 1)
        for stride, size in [d for d in dimensions[-1:] if d[1] > 1] + outer:
            if stride != expected:
                raise self._wrong("the pieces of its blocks are not contiguous")
            expected *= size

    def _wrong(self, why: str) -> InvalidGeometry:
        return self.facts.wrong(self.name, self.spec, why)


def _product(sizes: Iterable[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result
