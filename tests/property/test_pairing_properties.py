"""Block lists of two block sizes, against lists of single tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moriiod.core.pairing import BlockTable, pair_tables, unit_tokens
from moriiod.errors import InvalidArgument, LengthMismatch
from tests.support.caches import group

BLOCKS = (1, 2, 4, 8)
sizes = st.sampled_from(BLOCKS)


def table(ids: list[int], first: int) -> BlockTable:
    return BlockTable(np.array(ids, np.int64), first)


def tokens(held: BlockTable, block: int) -> dict[int, int]:
    """Token position -> token slot of the cache."""
    return {
        (held.first + i) * block + t: int(one) * block + t
        for i, one in enumerate(held.ids)
        for t in range(block)
    }


@given(
    st.tuples(sizes, sizes),
    st.tuples(sizes, sizes),
    st.lists(st.integers(0, 30), max_size=6, unique=True),
    st.lists(st.integers(0, 30), max_size=6),
    st.integers(0, 5),
    st.integers(0, 5),
)
@settings(max_examples=2000)
def test_pairs_hold_the_same_tokens(to_size, of_size, to, of, to_first, of_first):
    into = group(block_tokens=to_size[0], kernel_tokens=min(to_size))
    out_of = group(block_tokens=of_size[0], kernel_tokens=min(of_size))
    destination, source = table(to, to_first), table(of, of_first)
    lengths = [
        n
        for n in range(100)
        if -(-n // to_size[0]) == destination.end and -(-n // of_size[0]) == source.end
    ]
    starts_late = bool(to) and to_first * to_size[0] < of_first * of_size[0]
    if to_size[0] == of_size[0]:
        starts_late = to_first < of_first
    try:
        got_to, got_of = pair_tables(destination, into, source, out_of)
    except LengthMismatch:
        assert not lengths
        return
    except InvalidArgument:
        assert lengths
        assert starts_late
        return
    assert lengths
    assert not starts_late
    unit = unit_tokens(into, out_of)
    got = {
        int(a) * unit + t: int(b) * unit + t
        for a, b in zip(got_to, got_of, strict=True)
        for t in range(unit)
    }
    here, there = tokens(destination, to_size[0]), tokens(source, of_size[0])
    end = min(destination.end * to_size[0], source.end * of_size[0])
    assert got == {slot: there[at] for at, slot in here.items() if at < end}
