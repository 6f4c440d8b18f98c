"""The shipped configurations and pages are what the schema says, and they load."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from moriiod.cli.config import generated_files
from moriiod.config.load import load
from moriiod.config.names import SETTINGS, SETTINGS_BY_ENV

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
TOML_FILES = sorted(CONFIGS.rglob("*.toml"))


@pytest.mark.parametrize(
    ("path", "content"),
    generated_files(ROOT).items(),
    ids=[str(path.relative_to(ROOT)) for path in generated_files(ROOT)],
)
def test_generated_files_are_up_to_date(path: Path, content: str) -> None:
    assert path.read_text(encoding="utf-8") == content, "run: moriiod config render --update ."


@pytest.mark.parametrize("path", TOML_FILES, ids=lambda path: path.name)
def test_shipped_files_load_for_every_rank(path: Path) -> None:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    tp_size = tables.get("daemon", {}).get("tp_size", 8)
    ports = set()
    for rank in range(tp_size):
        flags = {"daemon.tp_rank": str(rank), "daemon.tp_size": str(tp_size)}
        config = load(flags, {}, str(path)).config
        ports |= {config.control_port, config.metrics_port or -rank - 1}
    assert len(ports) == 2 * tp_size


def test_the_examples_are_a_prefill_and_a_decode_side_that_can_meet() -> None:
    prefill = load({"daemon.tp_rank": "0"}, {}, str(CONFIGS / "examples" / "prefill-tp4.toml"))
    decode = load({"daemon.tp_rank": "0"}, {}, str(CONFIGS / "examples" / "decode-tp8.toml"))
    one, two = prefill.config, decode.config
    assert (one.daemon.tp_size, two.daemon.tp_size) == (4, 8)
    assert one.instance != two.instance
    assert one.advertise != two.advertise
    assert one.engine.name == two.engine.name == "mori"


def test_the_minimal_file_says_nothing_that_is_not_needed() -> None:
    text = (CONFIGS / "moriiod-minimal.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text) == {"daemon": {"tp_size": 8}}


@pytest.mark.parametrize("path", ["systemd/moriiod.env", "configs/moriiod.env"])
def test_environment_files_name_only_variables_that_exist(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    names = set(re.findall(r"^#?(MORIIOD_\w+)=", text, flags=re.MULTILINE))
    assert names
    assert names <= {*SETTINGS_BY_ENV, "MORIIOD_CONFIG"}


@pytest.mark.parametrize("page", ["configuration", "operations", "metrics"])
def test_pages_name_only_settings_flags_and_variables_that_exist(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    text = text.replace("control.notifiy_port", "")  # the page's example of an error
    sections = {setting.section for setting in SETTINGS.values()}
    dotted = set(re.findall(rf"`((?:{'|'.join(sections)})\.\w+)`", text))
    assert dotted <= set(SETTINGS), dotted - set(SETTINGS)
    variables = set(re.findall(r"\bMORIIOD_[A-Z_]*[A-Z]\b", text))
    assert variables <= {*SETTINGS_BY_ENV, "MORIIOD_CONFIG", "MORIIOD_TRACEBACK"}
