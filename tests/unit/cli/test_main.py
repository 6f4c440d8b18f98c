"""Exit codes and the one line that goes with them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import moriiod
from moriiod.cli import main as cli
from moriiod.config.names import SETTINGS
from tests.support.commands import FAIL_WITH

RANK_3_OF_8 = ["--tp-rank", "3", "--tp-size", "8"]


@pytest.fixture(autouse=True)
def probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a command that only loads the settings in the place of serve."""
    monkeypatch.setitem(cli._LAZY, "serve", "tests.support.commands")
    for name in list(SETTINGS):
        monkeypatch.delenv(SETTINGS[name].env, raising=False)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("moriiod: ")
    assert "Traceback" not in captured.err
    return captured.err


def test_serve_takes_every_setting_as_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    given = [*RANK_3_OF_8, "--control-base-port", "7301", "--engine", "nixl", "--log-level=debug"]
    assert cli.main(["serve", *given]) == 0
    line = capsys.readouterr().out
    for part in ("daemon.tp_rank=3[flag]", "base_port=7301[flag]", 'engine.name="nixl"[flag]'):
        assert part in line


def test_help_of_serve_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help"]) == 0
    words = capsys.readouterr().out.split()
    assert {setting.flag for setting in SETTINGS.values()} <= set(words)


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["serve", "--tp-rank", "8", "--tp-size", "8"], 78, "tp_rank 8 not in [0,8)"),
        (["serve", "--tp-rank", "-1", "--tp-size", "8"], 78, "tp_rank -1 not in [0,8)"),
        (["serve", "--tp-rank", "3", "--tp-size", "2"], 78, "tp_rank 3 not in [0,2)"),
        (["serve", "--tp-rank", "0", "--tp-size", "0"], 78, "daemon.tp_size"),
        (["serve", "--tp-rank", "3"], 2, "--tp-size"),
        (["serve", "--tp-size", "8"], 2, "--tp-rank"),
        (["serve"], 2, "--tp-rank"),
    ],
)
def test_C5_bad_ranks_are_78_and_missing_ones_are_2(
    arguments: list[str], code: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == code
    assert part in one_line(capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--no-such-flag"],
        ["serve", "extra"],
        ["nothing"],
        ["config"],
        ["config", "x"],
        ["serve", "--tp-rank"],
        ["config", "render", "x"],
        ["version", "x"],
    ],
)
def test_bad_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    one_line(capsys)


def test_no_command_is_2_and_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    text = capsys.readouterr().out
    for command in ("serve", "status", "config", "version"):
        assert command in text


@pytest.mark.parametrize(
    ("failure", "code", "part"),
    [
        ("outside", 1, "ADDRESS_IN_USE: port 6301 is held"),
        ("invariant", 70, "two owners"),
        ("bug", 70, "KeyError"),
    ],
)
def test_failures_have_their_exit_codes_and_one_line(
    failure: str,
    code: int,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(FAIL_WITH, failure)
    assert cli.main(["serve"]) == code
    assert part in one_line(capsys)


def test_an_interrupt_is_the_status_of_its_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FAIL_WITH, "interrupt")
    assert cli.main(["serve"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_developers_can_ask_for_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FAIL_WITH, "bug")
    monkeypatch.setenv("MORIIOD_TRACEBACK", "1")
    assert cli.main(["serve"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_C3_a_bad_variable_is_78(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MORIIOD_TP_SIZE", "abc")
    assert cli.main(["serve", "--tp-rank", "3"]) == 78
    assert "MORIIOD_TP_SIZE" in one_line(capsys)


def test_C1_a_typo_in_a_file_is_78_with_file_line_key_and_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "moriiod.toml"
    path.write_text("[daemon]\ntp_size = 8\n[control]\nnotifiy_port = 1\n")
    for command in (["serve", "--config", str(path)], ["config", "check", str(path)]):
        assert cli.main(command) == 78
        line = one_line(capsys)
        assert f"{path}:4: control.notifiy_port: unknown key" in line
        assert "control.base_port" in line


def test_version_names_the_build_and_the_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["version"], ["--version"]):
        assert cli.main(arguments) == 0
        assert capsys.readouterr().out.startswith(f"moriiod {moriiod.__version__} (peer protocol 1")


def test_a_lazy_command_that_is_not_in_this_build_is_unknown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli._LAZY, "serve", "tests.support.no_such_module")
    assert cli.main(["serve"]) == 2
    assert "serve" in one_line(capsys)


def test_the_command_line_does_not_load_what_it_does_not_need() -> None:
    code = "import sys, moriiod.cli.main; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"torch", "zmq", "uvloop", "moriiod.client"}.isdisjoint(loaded)


def test_commands_named_lazily_exist() -> None:
    module = "moriiod.cli.admin"
    assert cli._LAZY["status"] == module
    assert importlib.util.find_spec(module)
