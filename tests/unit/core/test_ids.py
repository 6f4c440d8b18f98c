"""What the plain values of every boundary must keep, as the predicates say it. Case A9."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from moriiod.core import ids
from moriiod.core.messages import Goodbye, LayoutRequest
from moriiod.core.requests import Seal


def is_valid(kind: object, value: object) -> bool:
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    "text", ["t", "7", "tx-6f1c", "cmpl-x-0-1a2b3c4d", "0123456789abcdef", "a:tp3", "\u00e9" * 128]
)
def test_A9_printable_text_up_to_256_bytes_is_a_transfer_id(text):
    assert is_valid(ids.TransferId, text)


@pytest.mark.parametrize(
    "text", ["", "x" * 257, "\u00e9" * 129, "x" * 4096, "a\x00b", "a\nb", "\x7f", "\ud800", b"t", 7]
)
def test_A9_anything_else_is_none(text):
    assert not is_valid(ids.TransferId, text)


@pytest.mark.parametrize("text", ["0" * 32, "0123456789abcdef" * 2])
def test_epoch_is_32_hex_digits(text):
    assert is_valid(ids.Epoch, text)


@pytest.mark.parametrize("text", ["0" * 31, "0" * 33, "A" * 32, "g" * 32, "\u0660" * 32])
def test_anything_else_is_no_epoch(text):
    assert not is_valid(ids.Epoch, text)


def test_packed_blocks_are_whole_ids():
    assert is_valid(ids.PackedBlocks, b"")
    assert is_valid(ids.PackedBlocks, bytes(8))
    assert not is_valid(ids.PackedBlocks, bytes(7))


@pytest.mark.parametrize("value", [True, "1", 1.0, -1, 1 << 33])
def test_G4_number_that_is_no_count_is_refused(value):
    assert not is_valid(ids.Count, value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, 7 * 86400.0 + 1])
def test_T3_time_that_is_none_is_refused(value):
    assert not is_valid(ids.Duration, value)


def test_wire_types_are_closed_and_strict_and_built_from_maps():
    seal = TypeAdapter(Seal)
    assert seal.validate_python({"transfer_id": "t", "n_layers": 2}) == Seal("t", 2)
    for bad in (
        {"transfer_id": "t", "n_layers": "2"},
        {"transfer_id": "t", "n_layers": True},
        {"transfer_id": "t", "n_layers": 2, "more": 1},
        {"transfer_id": "t"},
    ):
        with pytest.raises(ValidationError):
            seal.validate_python(bad)
    assert TypeAdapter(Goodbye).validate_python({}) == Goodbye()
    with pytest.raises(ValidationError):
        TypeAdapter(LayoutRequest).validate_python({"generation": "x"})
