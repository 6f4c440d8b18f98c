"""What is written for people says what the schema says."""

from __future__ import annotations

import tomllib

import pytest

from moriiod.config.load import load
from moriiod.config.names import SETTINGS
from moriiod.config.render import (
    render_effective,
    render_env,
    render_table,
    render_toml,
    replace_generated,
)


def test_the_full_file_is_the_defaults_and_nothing_else() -> None:
    tables = tomllib.loads(render_toml())
    given = {f"{section}.{key}": v for section, t in tables.items() for key, v in t.items()}
    expected = {
        s.name: list(s.default) if isinstance(s.default, tuple) else s.default
        for s in SETTINGS.values()
        if s.default is not None
    }
    assert given == expected


def test_the_full_file_becomes_valid_when_its_commented_settings_are_switched_on() -> None:
    lines = [
        line.removeprefix("#") if line.startswith("#") and not line.startswith("# ") else line
        for line in render_toml().splitlines()
    ]
    flags = {
        f"{section}.{key}": ",".join(v) if isinstance(v, list) else str(v)
        for section, table in tomllib.loads("\n".join(lines)).items()
        for key, v in table.items()
        if v != []
    }
    assert set(flags) == set(SETTINGS) - {"control.node_hosts"}
    assert load(flags, {}).config.daemon.instance == "prefill-0"


def test_every_variable_in_the_environment_file_is_taken() -> None:
    lines = [line[1:] for line in render_env().splitlines() if line.startswith("#MORIIOD_")]
    env = dict(line.split("=", 1) for line in lines)
    del env["MORIIOD_CONFIG"]
    env["MORIIOD_CONTROL_HOST"] = "10.0.0.1"
    assert set(env) == {s.env for s in SETTINGS.values()}
    assert load({}, env).config.control.node_hosts == ("10.0.0.1", "10.0.0.2")


def test_the_table_has_a_row_for_every_setting() -> None:
    rows = [line for line in render_table().splitlines() if line.startswith("| `")]
    assert len(rows) == len(SETTINGS)
    assert all(row.count(" | ") == 5 for row in rows)


def test_effective_values_can_be_used_as_a_file_again() -> None:
    loaded = load({"daemon.tp_rank": "1", "daemon.socket_mode": "0600"}, {}, partial=True)
    text = render_effective(loaded)
    assert "tp_rank = 1" in text
    assert "# flag --tp-rank" in text
    assert "#tp_size =" in text
    assert tomllib.loads(text)["daemon"]["socket_mode"] == "0600"


def test_generated_parts_are_replaced_between_their_markers_only() -> None:
    page = "a\n<!-- generated: x -->\nold\n<!-- end of generated: x -->\nb\n"
    new = replace_generated(page, "x", "new\n")
    assert new.startswith("a\n<!-- generated: x -->\n\nnew\n\n<!-- end of generated: x -->\nb")
    assert replace_generated(new, "x", "new") == new
    with pytest.raises(ValueError, match="no markers"):
        replace_generated(page, "y", "new")
