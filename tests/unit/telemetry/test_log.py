"""Log lines: fields, bounds, and nothing that breaks out of them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from moriiod.core.effects import CountProblem, Transition
from moriiod.telemetry.log import (
    MAX_FIELD,
    MAX_MESSAGE,
    ProblemLog,
    configure,
    escape,
    log_transition,
)

LOG = logging.getLogger("moriiod.test")
NASTY = "a\nlevel=ERROR b\r\x1b[31m\u2028\u202e\x00\x85"


@pytest.fixture(autouse=True)
def plain_logging() -> Iterator[None]:
    """Leave the logging of the process as it was."""
    root = logging.getLogger("moriiod")
    before = (root.level, root.propagate, list(root.handlers))
    yield
    root.setLevel(before[0])
    root.propagate = before[1]
    root.handlers[:] = before[2]


def to_stream(log_format: Any, level: str = "debug", **bound: object) -> io.StringIO:
    stream = io.StringIO()
    configure(level, log_format, bound, stream)
    return stream


def test_a_human_line_has_time_level_logger_message_and_fields() -> None:
    stream = to_stream("human", rank="3/8", epoch="ab12")
    LOG.info("client %s attached", "w3", extra={"pid": 17, "path": "/a b", "empty": ""})
    line = stream.getvalue()
    assert line[:20].count(":") == 2
    assert line[25:].rstrip("\n") == (
        'INFO    moriiod.test: client w3 attached rank=3/8 epoch=ab12 pid=17 path="/a b" empty=""'
    )


def test_a_json_line_keeps_types_and_bound_fields() -> None:
    stream = to_stream("json", tp_rank=3, epoch="ab12")
    LOG.warning("slow", extra={"n": 5, "ratio": 0.5, "ok": True, "none": None, "inf": float("inf")})
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "moriiod.test",
        "message": "slow",
        "tp_rank": 3,
        "epoch": "ab12",
        "n": 5,
        "ratio": 0.5,
        "ok": True,
        "none": None,
        "inf": "inf",
    }


@pytest.mark.parametrize("log_format", ["human", "json"])
def test_what_comes_from_outside_cannot_forge_a_line_or_steer_a_terminal(log_format: str) -> None:
    stream = to_stream(log_format)
    LOG.error("got %s", NASTY, extra={"transfer": NASTY, NASTY: "x", "quoted": 'a="b" c\\'})
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.rstrip("\n").isprintable()


def test_json_gives_the_nasty_text_back_unharmed() -> None:
    stream = to_stream("json")
    LOG.error("x", extra={"transfer": NASTY})
    assert json.loads(stream.getvalue())["transfer"] == NASTY


def test_fields_and_messages_are_bounded() -> None:
    stream = to_stream("json")
    LOG.info("m" * 100_000, extra={"field": "f" * 100_000})
    line = json.loads(stream.getvalue())
    assert len(line["message"]) < MAX_MESSAGE + 40
    assert len(line["field"]) < MAX_FIELD + 40
    assert "100000 characters" in line["field"]


def test_fields_cannot_take_the_place_of_the_lines_own() -> None:
    configure("info", "json", {"level": "nobody"}, stream := io.StringIO())
    LOG.info("real", extra={"time": "never", "logger": "x"})
    line = json.loads(stream.getvalue())
    assert (line["level"], line["message"], line["logger"]) == ("info", "real", "moriiod.test")
    assert (line["field_level"], line["field_time"]) == ("nobody", "never")


@pytest.mark.parametrize("log_format", ["human", "json"])
def test_an_exception_is_fields_of_the_same_line(log_format: str) -> None:
    stream = to_stream(log_format)
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        LOG.exception("it failed")
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert "ValueError: broken" in text
    assert "test_log.py" in text


def test_levels_are_obeyed_and_a_second_configuration_replaces_the_first() -> None:
    first = to_stream("human", level="info")
    configure("warning", "human", {}, second := io.StringIO())
    LOG.info("not shown")
    LOG.warning("shown")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1


def test_a_log_that_nobody_reads_is_not_the_callers_problem(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    configure("info", "human", {}, Broken())
    LOG.info("lost")
    assert capsys.readouterr().err == ""


def test_a_transition_is_one_line_at_debug_and_none_above() -> None:
    transition = Transition("tx-1", "pull", "reading", "draining", "aborted")
    stream = to_stream("json")
    log_transition(transition)
    line = json.loads(stream.getvalue())
    assert (line["logger"], line["level"]) == ("moriiod.transfer", "debug")
    assert line["message"] == "reading -> draining"
    assert (line["transfer"], line["role"], line["detail"]) == ("tx-1", "pull", "aborted")
    quiet = to_stream("json", level="info")
    log_transition(transition)
    assert quiet.getvalue() == ""


def test_a_flood_of_problems_is_a_few_lines_of_each_kind_that_say_so() -> None:
    stream = to_stream("json")
    log = ProblemLog(burst=2, interval_s=10.0)
    written = [log.log(CountProblem("malformed", str(n)), now=100.0 + n / 1000) for n in range(500)]
    assert sum(written) == 2
    assert log.log(CountProblem("other", ""), now=101.0)
    assert log.log(CountProblem("malformed", "again"), now=111.0)
    last = json.loads(stream.getvalue().splitlines()[-1])
    assert (last["detail"], last["left_out"]) == ("again", 498)


def test_escape_leaves_printable_text_alone() -> None:
    assert escape("prefill-0 é 漢") == "prefill-0 é 漢"
    assert escape("a\tb\x00") == "a\\tb\\x00"
