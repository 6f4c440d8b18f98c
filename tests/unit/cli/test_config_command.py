"""`moriiod config`: show, check, render."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from moriiod.cli.main import main
from moriiod.config.names import SETTINGS

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.env, raising=False)


def test_show_prints_values_with_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[control]\nbase_port = '7301'\n")
    monkeypatch.setenv("MORIIOD_TP_SIZE", "8")
    assert main(["config", "show", "--config", str(path), "--tp-rank", "3"]) == 0
    text = capsys.readouterr().out
    assert tomllib.loads(text)["control"]["base_port"] == 7301
    for part in ("# flag --tp-rank", "# env MORIIOD_TP_SIZE", f"# file {path}:2", "# default"):
        assert part in text


def test_show_as_json_is_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--json", "--tp-rank", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == set(SETTINGS)
    assert document["daemon.tp_rank"] == {"value": 3, "source": "flag", "where": "--tp-rank"}
    assert document["daemon.tp_size"] == {"value": None, "source": "unset", "where": ""}
    assert document["transfer.lease_s"]["source"] == "default"


def test_check_accepts_what_serve_would_and_says_what_is_still_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[daemon]\ntp_size = 8\n")
    assert main(["config", "check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: ok (to be given at start: daemon.tp_rank)\n"
    assert main(["config", "check", str(path), "--tp-rank", "7"]) == 0
    assert capsys.readouterr().out == f"{path}: ok\n"
    assert main(["config", "check", str(path), "--tp-rank", "8"]) == 78


def test_M5_check_prints_warnings_and_still_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[control]\nbase_port = 49657\n[engine]\nname = 'mori'\n")
    assert main(["config", "check", str(path)]) == 0
    captured = capsys.readouterr()
    assert "moriiod: warning: control.base_port = 49657" in captured.err
    assert "moriiod: warning: engine mori is not in this build" in captured.err
    assert captured.out.count("\n") == 1


def test_render_prints_each_text(capsys: pytest.CaptureFixture[str]) -> None:
    for text, part in (
        ("toml", "[daemon]"),
        ("env", "#MORIIOD_TP_SIZE="),
        ("table", "| `tp_size` |"),
        ("metrics", "| `moriiod_transfers_total` |"),
    ):
        assert main(["config", "render", text]) == 0
        assert part in capsys.readouterr().out


def test_render_can_bring_a_tree_up_to_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("configs", "docs"):
        (tmp_path / name).mkdir()
    pages = [Path("docs") / "configuration.md", Path("docs") / "metrics.md"]
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        (tmp_path / page).write_text(text.replace("| counter |", "").replace("`dp_rank`", "x"))
    assert main(["config", "render", "--update", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\n") == 4
    for path in (*pages, Path("configs") / "moriiod.toml", Path("configs") / "moriiod.env"):
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), path
