"""What is wrong with a file, in one line with the place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moriiod.config.load import load
from moriiod.config.tomlfile import MAX_FILE_BYTES, find_lines, read_toml
from moriiod.errors import ConfigError

RANK = {"daemon.tp_rank": "0", "daemon.tp_size": "1"}


def refusal(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        load(RANK, {}, str(path))
    message = caught.value.message
    assert message.startswith(f"{path}:")
    assert message.isprintable()
    return message.removeprefix(str(path))


@pytest.mark.parametrize(
    ("content", "start", "parts"),
    [
        ("[control]\nnotifiy_port = 1\n", ":2: control.notifiy_port", ["control.base_port"]),
        ("[control]\nlocal_ip = '10.0.0.1'\n", ":2: control.local_ip", ["control.advertise"]),
        ("pd_backends = ['a']\n", ":1: pd_backends", ["nearest known"]),
        ("[contrl]\nhost = 'a'\n", ":1: contrl", ["unknown section", "[control]"]),
        ("[transfer]\n\n# x\nlease = 5\n", ":4: transfer.lease", ["transfer.lease_s"]),
        ("[control]\nbase_port = 1\nbase_port = 2\n", ":3", ["base_port = 2", "overwrite"]),
        ("[control]\nhost='a'\n[control]\n", ":3", ["[control]"]),
        ("tp_size: 8\n", ":1", ["not valid TOML", "tp_size: 8"]),
        ("daemon:\n\t- tp_size\n", ":1", ["not valid TOML"]),
        ("[1, 2]\n", ":1", ["not valid TOML"]),
        ("[[daemon]]\ntp_size = 1\n", ":1: daemon", ["must be a table"]),
        ("daemon = 5\n", ":1: daemon", ["must be a table"]),
        ("", "", ["empty"]),
        (" \n\t\n", "", ["empty"]),
        (b"\x7fELF\x02\x01\x00\xff\xfe", ":1", ["not a text file"]),
        (b"[control]\nhost = '\xff'\n", ":2", ["not a text file"]),
        ("[control]\nbase_port = 010\n", ":2", ["base_port = 010"]),
        ("[control]\nbase_port = yes\n", ":2", ["base_port = yes"]),
        ("[control]\nbase_port = null\n", ":2", ["base_port = null"]),
        ("[control]\nbase_port = 1e9\n", ":2: control.base_port", ["not a whole number"]),
        ("[control]\nbase_port = 0x10000\n", ":2: control.base_port", ["65536"]),
        ("[control]\nbase_port = true\n", ":2: control.base_port", ["not a whole number"]),
        ("[control]\nbase_port = {a = 1}\n", ":2: control.base_port", ["not a whole number"]),
        ("control = {base_port = 65536}\n", ":1: control.base_port", ["not in [0, 65535]"]),
        ("control.base_port = 65536\n", ":1: control.base_port", ["not in [0, 65535]"]),
        ("x = " + "[" * 20000, "", ["nested too deeply"]),
        ("[limits]\nmax_peers = " + "9" * 5000 + "\n", "", ["not valid TOML"]),
        ('[control]\nhost = "a\x00"\n', ":2", ["not valid TOML"]),
    ],
)
def test_C1_a_bad_file_is_one_line_with_place_key_and_reason(
    tmp_path: Path, content: str | bytes, start: str, parts: list[str]
) -> None:
    message = refusal(tmp_path / "moriiod.toml", content)
    assert message.startswith((f"{start}:", f"{start} = ")), message
    for part in parts:
        assert part in message


def test_C1_a_file_that_is_not_there_or_no_file_is_named(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, reason in (
        (tmp_path / "none.toml", "No such file"),
        (tmp_path, "not a regular file"),
        (fifo, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "a\0b", "null byte"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read_toml(str(path))


def test_C1_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES * 1000)
    with pytest.raises(ConfigError, match="larger than"):
        read_toml(str(path))


@contextmanager
def other_user() -> Iterator[None]:
    """Be nobody for a while, where that is possible."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_C1_a_file_that_may_not_be_read_is_named() -> None:
    # Not tmp_path: pytest makes its folders for the owner only.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "moriiod.toml"
        path.write_text("[control]\n")
        path.chmod(0)
        with other_user(), pytest.raises(ConfigError, match="Permission denied"):
            read_toml(str(path))


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf[control]\r\nbase_port = '7301'\r\n")
    assert load(RANK, {}, str(path)).config.control.base_port == 7301


def test_a_file_with_only_comments_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "comments.toml"
    path.write_text("# nothing yet\n")
    assert load(RANK, {}, str(path)).config == load(RANK, {}).config


def test_lines_are_found_in_every_way_to_write_a_key() -> None:
    text = "\n".join(
        [
            "# control.x = 1",
            "control.host = 'a'",
            "[ 'limits' ]",
            'note = """',
            "[engine]",
            'max_peers = 2"""',
            "max_peers = 3  # [daemon]",
            "  [telemetry] # x",
            '"log_level" = "info"',
            "[[a.b]]",
        ]
    )
    found = find_lines(text)
    assert found == {
        "control.host": 2,
        "limits": 3,
        "limits.note": 4,
        "limits.max_peers": 7,
        "telemetry": 8,
        "telemetry.log_level": 9,
        "a.b": 10,
    }
