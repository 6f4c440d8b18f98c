"""What the coordinator and its workers say survives the way."""

from __future__ import annotations

import pytest

from moriiod.cli.demo import messages as msg

MESSAGES = [
    msg.Setup(
        *("decode", 1, 2, 8, "/tmp/x/rank2.sock", 20001, 2, 16, 0),
        *("kv_first", "HND", "", False, 1, 60.0, "none"),
    ),
    msg.Prefill(3, "read", "cmpl-x", {"do_remote_decode": True, "remote_tp_size": 8}, [3, 1]),
    msg.Decode(3, "write", "cmpl-x", {"remote_block_ids": None}, [5], 1, 4),
    msg.Verify(3),
    msg.Sweep(),
    msg.CountOpen(),
    msg.Leave(),
    msg.Registered("shm"),
    msg.Prefilled(3, None),
    msg.Ended(3, "pull", "received", "acked", "", 4096, 1.25, 2.5),
    msg.Checked(None, 12, "wrong\nhere"),
    msg.Open(4),
    msg.Left(True, ["x"]),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_is_one_line_and_comes_back_equal(message: msg.Message) -> None:
    line = msg.encode(message)
    assert line.count(b"\n") == 1
    assert msg.decode(line) == message


@pytest.mark.parametrize(
    "line", [b"", b"x", b"[]", b"{}", b'["Nope", {}]', b'["Verify", {}]', b'["Sweep", {"a": 1}]']
)
def test_line_that_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="not a message"):
        msg.decode(line)
