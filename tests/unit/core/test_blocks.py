"""Block lists of several groups: one list and one first position for each."""

from __future__ import annotations

import numpy as np
import pytest

from moriiod.core.blocks import (
    check_groups,
    count_blocks,
    full_positions,
    pair_for_read,
    pair_for_write,
    tables_of,
    unpack_groups,
)
from moriiod.core.geometry import CacheLayout, KvGroup, KvLayer
from moriiod.errors import InvalidArgument, LengthMismatch, OutOfRange
from tests.support.lone import new_id
from tests.support.sim import pack


def make_layout(*blocks: int) -> CacheLayout:
    groups = tuple(
        KvGroup(f"g{i}", "mla", "NHD", "uint8", 1, n, 1, 8, (KvLayer(f"l{i}", 0, 0, 8, 0, 8),))
        for i, n in enumerate(blocks)
    )
    return CacheLayout(new_id(), groups, (max(blocks) * 8,))


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_blocks_of_all_groups_are_counted_and_unpacked():
    blocks = (pack(1, 2, 3), pack(), pack(7))
    assert count_blocks(blocks) == 4
    found = unpack_groups(blocks, make_layout(4, 4, 8), distinct=True)
    assert [list(x) for x in found] == [[1, 2, 3], [], [7]]


@pytest.mark.parametrize("blocks", [(), (pack(1),), (pack(1), pack(1), pack(1))])
def test_G1_number_of_lists_that_is_not_that_of_the_groups_is_refused_with_both(blocks):
    with pytest.raises(LengthMismatch) as caught:
        unpack_groups(blocks, make_layout(4, 4), distinct=False)
    assert caught.value.fields == {"lists": len(blocks), "groups": 2}


def test_G4_each_group_has_its_own_limit():
    with pytest.raises(OutOfRange) as caught:
        unpack_groups((pack(3), pack(4)), make_layout(4, 4), distinct=False)
    assert caught.value.fields == {"what": "g1", "id": 4, "limit": 4}


def test_G4_a_source_may_be_named_twice_and_a_destination_may_not():
    layout = make_layout(8)
    unpack_groups((pack(5, 5),), layout, distinct=False)
    with pytest.raises(InvalidArgument, match="block 5 is named twice"):
        unpack_groups((pack(5, 5),), layout, distinct=True)


def test_no_first_positions_mean_0_for_every_group():
    assert list(full_positions((), 3)) == [0, 0, 0]
    assert list(full_positions((1, 2), 2)) == [1, 2]
    with pytest.raises(LengthMismatch):
        full_positions((1, 2), 3)


def test_reading_skips_in_the_source_what_the_destination_has_already():
    layout = make_layout(8, 8)
    local = tables_of([ids(10, 11), ids(20)], (2, 0))
    remote = tables_of([ids(1, 2, 3, 4), ids(5)], ())
    (one, other) = pair_for_read(layout, local, layout, remote)
    assert (list(one.local), list(one.remote)) == ([10, 11], [3, 4])
    assert (list(other.local), list(other.remote)) == ([20], [5])


def test_writing_skips_in_ours_what_the_peer_has_already():
    layout = make_layout(8)
    local, remote = tables_of([ids(1, 2, 3, 4)], (0,)), tables_of([ids(10, 11)], (2,))
    (pair,) = pair_for_write(layout, local, layout, remote)
    assert (list(pair.local), list(pair.remote)) == ([3, 4], [10, 11])


def test_G1_sides_with_different_numbers_of_groups_are_refused_with_both():
    layout = make_layout(8, 8)
    local, remote = tables_of([ids(1), ids(2)], ()), tables_of([ids(1)], ())
    for call in (
        lambda: pair_for_read(layout, local, layout, remote),
        lambda: check_groups(local, remote, layout),
    ):
        with pytest.raises(LengthMismatch) as caught:
            call()
        assert caught.value.fields == {"ours": 2, "theirs": 1}


def test_G1_lists_that_end_at_different_positions_are_refused_with_both_lengths():
    layout = make_layout(8)
    local, remote = tables_of([ids(1, 2, 3)], ()), tables_of([ids(7, 8)], ())
    with pytest.raises(LengthMismatch) as caught:
        pair_for_read(layout, local, layout, remote)
    assert caught.value.fields["destination_blocks"] == 3
    assert caught.value.fields["source_blocks"] == 2


def test_G1_lists_are_refused_before_the_handshake_with_the_block_sizes_that_were_said():
    layout = make_layout(8)
    local, remote = tables_of([ids(1, 2, 3)], ()), tables_of([ids(7, 8)], ())
    check_groups(local, remote, layout, (2,))
    for sizes in ((), (1,), (4,)):
        with pytest.raises(LengthMismatch, match=r"3 destination .* 2 source"):
            check_groups(local, remote, layout, sizes)
    with pytest.raises(LengthMismatch) as caught:
        check_groups(local, remote, layout, (2, 2))
    assert caught.value.fields == {"sizes": 2, "groups": 1}
