"""Errors across a process boundary: typed on both sides, bounded in between."""

from __future__ import annotations

import math

import pytest

from moriiod.core.faults import (
    MAX_FIELD_CHARS,
    MAX_FIELDS,
    MAX_MESSAGE_CHARS,
    to_error,
    to_refused,
    to_wire_error,
)
from moriiod.core.messages import HelloRefused, WireError
from moriiod.core.requests import Refused
from moriiod.errors import Busy, InvalidArgument, MoriiodError, error_classes
from moriiod.wire.ipc import ReplyFrame, decode_reply, encode_reply
from moriiod.wire.peer import PeerFrame, decode_peer, encode_peer
from tests.support.samples import ATTEMPT, EPOCH


def over_ipc(error: MoriiodError) -> MoriiodError:
    frames = encode_reply(ReplyFrame(1, EPOCH, to_refused(error)))
    body = decode_reply(frames).body
    assert isinstance(body, Refused)
    return to_error(body)


def over_peer(error: MoriiodError) -> MoriiodError:
    frames = encode_peer(PeerFrame(EPOCH, HelloRefused(ATTEMPT, to_wire_error(error))))
    body = decode_peer(frames).body
    assert isinstance(body, HelloRefused)
    return to_error(body.error)


@pytest.mark.parametrize("cls", error_classes().values(), ids=lambda cls: cls.code)
def test_error_arrives_as_its_own_type(cls: type[MoriiodError]) -> None:
    error = cls("no", limit="n", value=3, share=0.5, flag=True, none=None)
    for received in (over_ipc(error), over_peer(error)):
        assert type(received) is cls
        assert received.message == "no"
        assert received.fields == error.fields
        assert received.fields["flag"] is True


def test_code_of_a_newer_build_keeps_its_name_and_retryability_also_when_passed_on() -> None:
    received = to_error(WireError("NO_SUCH_CODE", "new", True, {"a": 1}))
    assert type(received) is MoriiodError
    assert received.fields == {"a": 1, "foreign_code": "NO_SUCH_CODE", "foreign_retryable": True}
    passed_on = to_refused(received)
    assert (passed_on.code, passed_on.retryable) == ("NO_SUCH_CODE", True)


def test_text_over_the_limit_is_cut() -> None:
    received = over_ipc(Busy("x" * 10_000, detail="y" * 10_000))
    assert received.message == "x" * (MAX_MESSAGE_CHARS - 3) + "..."
    assert len(str(received.fields["detail"])) == MAX_FIELD_CHARS


def test_fields_over_the_limit_are_left_out() -> None:
    fields = {f"f{i}": i for i in range(100)}
    assert len(over_ipc(Busy("x", **fields)).fields) == MAX_FIELDS
    assert len(to_error(Refused("BUSY", "x", True, fields)).fields) == MAX_FIELDS


def test_values_the_wire_cannot_carry_become_text() -> None:
    error = InvalidArgument(
        "file \udcff", name="\udcff", ratio=math.nan, limit=math.inf, huge=2**64, tiny=-(2**64)
    )
    received = over_peer(error)
    assert received.message == "file ?"
    assert received.fields == {
        "name": "?",
        "ratio": "nan",
        "limit": "inf",
        "huge": "0x10000000000000000",
        "tiny": "-0x10000000000000000",
    }


def test_largest_numbers_pass_as_numbers() -> None:
    fields = over_ipc(Busy("x", high=2**64 - 1, low=-(2**63))).fields
    assert fields == {"high": 2**64 - 1, "low": -(2**63)}


def test_retryable_crosses_the_wire() -> None:
    assert to_wire_error(Busy("later")).retryable
    assert not to_wire_error(InvalidArgument("bad")).retryable


def test_foreign_code_that_is_no_code_is_not_passed_on() -> None:
    assert to_refused(MoriiodError("x", foreign_code="\n")).code == "MORIIOD_ERROR"
    assert to_refused(MoriiodError("x", foreign_code="")).code == "MORIIOD_ERROR"
