"""The envelope: what every message has in front of its body."""

from __future__ import annotations

import pytest

from moriiod.errors import MalformedFrame, TooLarge, VersionMismatch
from moriiod.wire.frames import (
    MAX_FRAMES,
    MAX_SEQUENCE,
    MAX_TYPE_BYTES,
    Kind,
    check_body,
    check_count,
    check_type,
    check_version,
    header,
    pack_sequence,
    parse_epoch,
    parse_header,
    parse_sequence,
)


@pytest.mark.parametrize("kind", Kind)
def test_header_of_any_version_can_be_read(kind: Kind) -> None:
    for version in (0, 1, 255):
        assert parse_header(header(version, kind)) == (version, kind)


@pytest.mark.parametrize("frame", [b"", b"1", b"\x01", b"\x01QQ", b"\x01q", b"\x01\x00"])
def test_frame_that_is_no_header_is_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        parse_header(frame)


@pytest.mark.parametrize("version", [0, 2, ord("1")])
def test_Z8_other_version_is_a_mismatch_that_names_both(version: int) -> None:
    with pytest.raises(VersionMismatch) as caught:
        check_version(version, (1,))
    assert caught.value.fields == {"got": version, "ours": "1"}
    assert f"version {version}," in caught.value.message


def test_one_of_several_versions_is_accepted() -> None:
    check_version(2, (3, 2))


@pytest.mark.parametrize("n_frames", [0, 1, 3, 5, MAX_FRAMES + 1])
def test_Z6_other_number_of_frames_is_malformed(n_frames: int) -> None:
    with pytest.raises(MalformedFrame):
        check_count([b""] * n_frames, 4)


@pytest.mark.parametrize("sequence", [0, 1, 255, 2**32, MAX_SEQUENCE])
def test_sequence_survives_the_wire(sequence: int) -> None:
    assert parse_sequence(pack_sequence(sequence)) == sequence


def test_sequence_is_little_endian() -> None:
    assert pack_sequence(0x0102) == b"\x02\x01\0\0\0\0\0\0"


@pytest.mark.parametrize("frame", [b"", b"\0" * 7, b"\0" * 9, pack_sequence(MAX_SEQUENCE + 1)])
def test_sequence_of_another_size_is_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        parse_sequence(frame)


def test_epoch_survives_the_wire() -> None:
    assert parse_epoch(b"0123456789abcdef" * 2) == "0123456789abcdef" * 2


@pytest.mark.parametrize(
    "frame", [b"", b"0" * 31, b"0" * 33, b"0" * 31 + b"A", b"0" * 31 + b"\xff"]
)
def test_epoch_that_is_none_is_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        parse_epoch(frame)


@pytest.mark.parametrize("frame", [b"", b"P\xefng", b"P" * (MAX_TYPE_BYTES + 1)])
def test_type_that_is_no_short_name_is_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        check_type(frame)


def test_type_is_returned_as_text() -> None:
    assert check_type(b"Ping") == "Ping"


def test_body_at_the_limit_passes_and_over_it_is_too_large() -> None:
    assert check_body(b"12", 2) == b"12"
    with pytest.raises(TooLarge):
        check_body(b"123", 2)
