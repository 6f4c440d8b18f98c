"""`moriiod status` against sockets that answer, that do not, and that are not there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from moriiod.core.requests import GetStatus, StatusDocument
from moriiod.wire.ipc import ReplyFrame, decode_request, encode_reply

DOCUMENT = {"version": "0.1.0", "identity": {"instance": "decode-0", "tp_rank": 3}, "clients": []}
#: Far longer than anything takes; only what would hang for ever meets it.
PATIENCE_S = 60


class Daemon:
    """A socket that answers like a daemon's; only what ``status`` needs."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(f"ipc://{path}")

    def answer(self, text: str) -> None:
        """Answer the next request, which must be for the status."""
        assert self._router.poll(PATIENCE_S * 1000)
        route, *frames = self._router.recv_multipart()
        request = decode_request(frames)
        assert isinstance(request.body, GetStatus)
        reply = ReplyFrame(request.sequence, "e" * 32, StatusDocument(text))
        self._router.send_multipart([route, *encode_reply(reply)])

    def close(self) -> None:
        self._router.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def daemon(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(context, tmp_path / "rank3.sock")
    yield daemon
    daemon.close()


def status(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "moriiod", "status", "--runtime-dir", str(directory)]
    return subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


@pytest.mark.parametrize("named", [[], ["--tp-rank", "3"]])
def test_status_shows_the_daemons_own_document(
    daemon: Daemon, tmp_path: Path, named: list[str]
) -> None:
    process = status(tmp_path, *named)
    daemon.answer(json.dumps(DOCUMENT))
    code, out, err = ended(process)
    assert (code, err) == (0, "")
    assert "decode-0" in out
    process = status(tmp_path, "--json", *named)
    daemon.answer(json.dumps(DOCUMENT))
    code, out, _ = ended(process)
    assert (code, json.loads(out)) == (0, DOCUMENT)


def test_status_of_all_daemons_is_one_document_on_each_line_by_rank(
    context: zmq.Context[zmq.Socket[bytes]], daemon: Daemon, tmp_path: Path
) -> None:
    other = Daemon(context, tmp_path / "rank11.sock")
    (tmp_path / "rank3.fd.sock").touch()
    process = status(tmp_path, "--all", "--json")
    daemon.answer(json.dumps({"rank": 3}))
    other.answer(json.dumps({"rank": 11}))
    code, out, _ = ended(process)
    assert code == 0
    assert [json.loads(line)["rank"] for line in out.splitlines()] == [3, 11]
    other.close()


def test_several_daemons_and_none_named_is_bad_usage(
    context: zmq.Context[zmq.Socket[bytes]], daemon: Daemon, tmp_path: Path
) -> None:
    other = Daemon(context, tmp_path / "rank4.sock")
    code, _, err = ended(status(tmp_path))
    assert code == 2
    assert "--tp-rank" in err
    other.close()


def test_what_is_not_there_or_silent_is_one_line_and_status_1(
    daemon: Daemon, tmp_path: Path
) -> None:
    (tmp_path / "rank5.sock").touch()
    (tmp_path / "empty").mkdir()
    running = {
        "not there": status(tmp_path, "--tp-rank", "4"),
        "no socket": status(tmp_path, "--tp-rank", "5"),
        "no daemon has": status(tmp_path / "empty"),
        "no daemon answers": status(tmp_path, "--tp-rank", "3", "--timeout", "0.2"),
    }
    for what, process in running.items():
        code, out, err = ended(process)
        assert (code, out, err.count("\n")) == (1, "", 1), what
        assert "Traceback" not in err


@pytest.mark.parametrize("text", ["", "[1]", "{", '"x"'])
def test_an_answer_that_is_no_document_is_status_1(
    daemon: Daemon, tmp_path: Path, text: str
) -> None:
    process = status(tmp_path)
    daemon.answer(text)
    code, _, err = ended(process)
    assert code == 1
    assert "does not answer like a moriiod" in err


def test_all_goes_on_past_a_daemon_that_does_not_answer(
    daemon: Daemon, tmp_path: Path, context: Any
) -> None:
    (tmp_path / "rank1.sock").touch()
    process = status(tmp_path, "--all", "--json")
    daemon.answer(json.dumps(DOCUMENT))
    code, out, err = ended(process)
    assert code == 1
    assert json.loads(out) == DOCUMENT
    assert "rank1.sock" in err
