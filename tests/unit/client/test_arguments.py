"""What callers pass: packed when right, refused with the value named when wrong."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moriiod.client import arguments
from moriiod.core.requests import PeerAddress
from moriiod.errors import InvalidArgument, TooLarge


def unpacked(packed: bytes) -> list[int]:
    return [value for (value,) in struct.iter_unpack("<I", packed)]


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=50), max_size=4))
def test_block_ids_are_packed_as_little_endian_u32(groups: list[list[int]]) -> None:
    packed = arguments.pack_groups("blocks", groups)
    assert [unpacked(group) for group in packed] == groups
    arrays = [np.array(group, dtype=np.int64) for group in groups]
    assert arguments.pack_groups("blocks", arrays) == packed


@pytest.mark.parametrize("dtype", ["i4", "i8", "u4", "u8", ">i8", "u2"])
def test_arrays_of_any_whole_type_and_order_are_packed(dtype: str) -> None:
    ids = np.array([0, 7, 65535], dtype=dtype) if "2" in dtype else np.array([0, 7, 70000], dtype)
    (packed,) = arguments.pack_groups("blocks", [ids])
    assert unpacked(packed) == ids.tolist()


def test_strided_array_is_packed_by_value() -> None:
    (packed,) = arguments.pack_groups("blocks", [np.arange(10)[::3]])
    assert unpacked(packed) == [0, 3, 6, 9]


def test_numpy_scalars_in_a_list_are_whole_numbers() -> None:
    (packed,) = arguments.pack_groups("blocks", [[np.int64(5), 6]])
    assert unpacked(packed) == [5, 6]


def test_G4_ids_that_are_no_block_ids_are_refused_by_value() -> None:
    for bad, shown in [
        (-1, "-1"),
        (2**32, "4294967296"),
        (2**80, str(2**80)),
        (True, "True"),
        (1.0, "1.0"),
        (np.bool_(True), "True"),
        ("7", "'7'"),
        (None, "None"),
    ]:
        with pytest.raises(InvalidArgument) as raised:
            arguments.pack_groups("blocks", [[1], [5, bad, 6]])  # type: ignore[list-item]
        assert shown in str(raised.value.fields["got"])
        assert raised.value.fields["field"] == "blocks[1]"


@pytest.mark.parametrize("bad", [np.array([0, -1]), np.array([2**32]), np.array([2**63], "u8")])
def test_G4_arrays_with_ids_out_of_range_are_refused_by_value(bad: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        arguments.pack_groups("blocks", [bad])
    assert str(bad[-1]) in str(raised.value)


@pytest.mark.parametrize(
    "bad", [np.array([1.0]), np.array([True]), np.array([[1, 2]]), np.array(["1"]), np.array(3)]
)
def test_arrays_of_other_kinds_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument):
        arguments.pack_groups("blocks", [bad])


@pytest.mark.parametrize("bad", ["12", b"12", 12, None, {1, 2}, [7], ["12"], [None]])
def test_G1_what_is_no_list_of_lists_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument):
        arguments.pack_groups("blocks", bad)


def test_too_many_groups_or_ids_are_refused() -> None:
    with pytest.raises(TooLarge):
        arguments.pack_groups("blocks", [[]] * 65)
    with pytest.raises(TooLarge):
        arguments.pack_groups("blocks", [np.zeros((1 << 20) + 1, dtype=np.int32)])


def test_empty_lists_are_lists() -> None:
    assert arguments.pack_groups("blocks", []) == ()
    assert arguments.pack_groups("blocks", [[], np.array([], dtype=int)]) == (b"", b"")


@pytest.mark.parametrize("good", ["t", "tx-7", "ü" * 128, "a" * 256])
def test_usable_transfer_ids_pass(good: str) -> None:
    assert arguments.check_transfer_id(good) == good


@pytest.mark.parametrize("bad", ["", "a\n", "a" * 257, "ü" * 129, b"t", 7, None])
def test_other_transfer_ids_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        arguments.check_transfer_id(bad)
    assert raised.value.fields["field"] == "transfer_id"


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), True, "3", 604801])
def test_durations_that_are_none_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument):
        arguments.check_seconds("timeout_s", bad)


def test_durations_pass_as_floats() -> None:
    assert arguments.check_seconds("timeout_s", None) is None
    assert arguments.check_seconds("timeout_s", 3) == 3.0


@pytest.mark.parametrize("bad", [-1, 1025, True, 4.0, "4", None])
def test_tp_sizes_that_are_none_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument):
        arguments.check_tp_size("remote_tp_size", bad)


def test_layers_are_one_index_or_several() -> None:
    assert arguments.check_layers(3) == (3,)
    assert arguments.check_layers(range(3)) == (0, 1, 2)
    for bad in ([], [-1], [True], [4096], [1.0], True, -1):
        with pytest.raises(InvalidArgument):
            arguments.check_layers(bad)  # type: ignore[arg-type]


def test_layer_counts_and_positions_are_checked() -> None:
    assert arguments.check_layer_count(0) == 0
    assert arguments.check_positions("first", [0, 1 << 20]) == (0, 1 << 20)
    for bad in (-1, 4097, True, 1.0):
        with pytest.raises(InvalidArgument):
            arguments.check_layer_count(bad)  # type: ignore[arg-type]
    for first in ([-1], [True], [1.0], [(1 << 20) + 1], [0] * 65):
        with pytest.raises(InvalidArgument):
            arguments.check_positions("first", first)  # type: ignore[arg-type]


def test_block_sizes_are_checked() -> None:
    assert arguments.check_block_tokens("sizes", [16, 1 << 20]) == (16, 1 << 20)
    for sizes in ([0], [-1], [True], [16.0], [(1 << 20) + 1], [1] * 65):
        with pytest.raises(InvalidArgument, match="sizes"):
            arguments.check_block_tokens("sizes", sizes)  # type: ignore[arg-type]


def test_roles_and_peers_are_checked() -> None:
    assert arguments.check_role("pull") == "pull"
    peer = PeerAddress("h", 1)
    assert arguments.check_peer(peer) is peer
    with pytest.raises(InvalidArgument):
        arguments.check_role("read")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        arguments.check_peer("h:1")  # type: ignore[arg-type]
