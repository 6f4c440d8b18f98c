"""Layers, origins, and what is refused or warned about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moriiod.config.checks import HostFacts, warnings
from moriiod.config.flags import load_from_flags
from moriiod.config.load import LoadedConfig, load
from moriiod.config.schema import Config
from moriiod.core.settings import CoreSettings
from moriiod.errors import ConfigError

RANK_3_OF_8 = {"daemon.tp_rank": "3", "daemon.tp_size": "8"}
ROOMY = HostFacts(ephemeral_ports=(32768, 60999), memlock_bytes=None)
PUBLISHED = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "realistic_inputs.json").read_text(encoding="utf-8")
)


def loaded(**flags: Any) -> LoadedConfig:
    """Load from flags named ``section__key``, as rank 3 of 8 unless they say otherwise."""
    given = {key.replace("__", "."): str(value) for key, value in flags.items()}
    return load({**RANK_3_OF_8, **given}, {})


def refusal(flags: dict[str, str] | None = None, env: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load({**RANK_3_OF_8, **(flags or {})}, env or {})
    assert "\n" not in caught.value.message
    return caught.value


def warned(**flags: Any) -> list[str]:
    return warnings(loaded(**flags).config, ROOMY)


# --- Layers -----------------------------------------------------------------------------------


def test_C3_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[daemon]\ntp_rank = 1\ntp_size = 8\ndp_size = 2\n[control]\nbase_port = 5\n")
    env = {"MORIIOD_TP_RANK": "5", "MORIIOD_DP_SIZE": "4"}
    result = load({"daemon.tp_rank": "3"}, env, str(file))
    daemon = result.config.daemon
    assert (daemon.tp_rank, daemon.dp_size, result.config.control.base_port) == (3, 4, 5)
    origins = {k: (o.source, o.where) for k, o in result.origins.items()}
    assert origins["daemon.tp_rank"] == ("flag", "--tp-rank")
    assert origins["daemon.dp_size"] == ("env", "MORIIOD_DP_SIZE")
    assert origins["control.base_port"] == ("file", f"{file}:6")
    assert origins["transfer.lease_s"] == ("default", "")
    line = result.effective_line()
    for part in (
        "daemon.tp_rank=3[flag]",
        "daemon.dp_size=4[env]",
        "control.base_port=5[file]",
        "transfer.lease_s=60.0 ",
    ):
        assert part in line
    assert "\n" not in line


def test_the_file_may_be_named_by_the_environment_and_a_flag_beats_it(tmp_path: Path) -> None:
    one, two = tmp_path / "1.toml", tmp_path / "2.toml"
    one.write_text("[control]\nbase_port = 1001\n")
    two.write_text("[control]\nbase_port = 1002\n")
    env = {"MORIIOD_CONFIG": str(one)}
    assert load(RANK_3_OF_8, env).config.control.base_port == 1001
    assert load(RANK_3_OF_8, env, str(two)).config.control.base_port == 1002


def test_C3_an_unknown_variable_is_an_error_that_names_the_nearest() -> None:
    error = refusal(env={"MORIIOD_CONTROL_BASEPORT": "1"})
    assert "MORIIOD_CONTROL_BASEPORT" in error.message
    assert error.fields["nearest"] == "MORIIOD_CONTROL_BASE_PORT"


def test_C3_a_bad_value_in_the_environment_is_refused_even_if_a_flag_covers_it() -> None:
    error = refusal(env={"MORIIOD_TP_SIZE": "abc"})
    assert "MORIIOD_TP_SIZE" in error.message
    assert error.fields["key"] == "daemon.tp_size"
    assert error.fields["value"] == "'abc'"


def test_C3_retired_variables_are_warned_about_with_what_replaces_them() -> None:
    env = {"VLLM_MORIIO_TRANSFER_TIMEOUT_S": "600", "VLLM_MORIIO_NUM_WORKERS": "4"}
    found = load(RANK_3_OF_8, env).warnings
    assert any("MORIIOD_TRANSFER_PULL_TIMEOUT_S" in text for text in found)
    assert any("VLLM_MORIIO_NUM_WORKERS is ignored" in text for text in found)
    assert load(RANK_3_OF_8, env).config.transfer.pull_timeout_s == 120.0


def test_variables_of_a_kubernetes_service_are_no_typos() -> None:
    env = {
        "MORIIOD_SERVICE_HOST": "10.0.0.1",
        "MORIIOD_SERVICE_PORT_CONTROL": "6301",
        "MORIIOD_PORT": "tcp://10.0.0.1:6301",
        "MORIIOD_PORT_6301_TCP_PROTO": "tcp",
    }
    assert len(load(RANK_3_OF_8, env).warnings) >= 4


def test_a_variable_with_the_shape_of_a_service_but_a_port_as_value_is_a_typo() -> None:
    assert refusal(env={"MORIIOD_BASE_PORT": "6301"}).fields["nearest"]


def test_several_problems_are_one_line_that_says_how_many() -> None:
    error = refusal(env={"MORIIOD_A": "1", "MORIIOD_B": "1", "MORIIOD_TP_SIZE": "x"})
    assert "2 more problems" in error.message


# --- Ranks and sizes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "size", "text"),
    [
        (8, 8, "tp_rank 8 not in [0,8)"),
        (-1, 8, "tp_rank -1 not in [0,8)"),
        (3, 2, "tp_rank 3 not in [0,2)"),
        (0, 0, "not in [1, 1024]"),
        (0, 2048, "not in [1, 1024]"),
    ],
)
def test_C5_ranks_outside_their_group_are_refused(rank: int, size: int, text: str) -> None:
    error = refusal({"daemon.tp_rank": str(rank), "daemon.tp_size": str(size)})
    assert text in error.message


def test_C5_dp_ranks_outside_their_group_are_refused() -> None:
    assert (
        "dp_rank 2 not in [0,2)" in refusal({"daemon.dp_rank": "2", "daemon.dp_size": "2"}).message
    )


@pytest.mark.parametrize("missing", ["tp_rank", "tp_size"])
def test_C5_a_missing_rank_or_size_has_no_default(missing: str) -> None:
    flags = {k: v for k, v in RANK_3_OF_8.items() if not k.endswith(missing)}
    with pytest.raises(ConfigError) as caught:
        load(flags, {})
    assert caught.value.fields["missing"] is True
    assert f"--{missing.replace('_', '-')}" in caught.value.message


def test_a_partial_load_assumes_the_smallest_group_and_says_so() -> None:
    env = {"MORIIOD_CONTROL_NODE_HOSTS": "h0,h1", "MORIIOD_CONTROL_HOST": "0.0.0.0"}
    result = load({}, env, partial=True)
    assert result.config.daemon.tp_size == 2
    assert result.origins["daemon.tp_size"].source == "unset"
    assert load({"daemon.tp_rank": "5"}, {}, partial=True).config.daemon.tp_size == 6
    assert load({"daemon.tp_size": "4"}, {}, partial=True).config.daemon.tp_rank == 3


# --- Ports ------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [6105, 61005])
def test_P1_every_rank_of_an_instance_has_its_own_port(base: int) -> None:
    ports = [
        loaded(
            daemon__tp_rank=tp,
            daemon__tp_size=4,
            daemon__dp_rank=dp,
            daemon__dp_size=2,
            control__base_port=base,
        ).config.control_port
        for dp in range(2)
        for tp in range(4)
    ]
    assert ports == list(range(base, base + 8))


def test_P1_control_and_metrics_ports_that_overlap_are_refused() -> None:
    error = refusal(
        {
            "daemon.tp_size": "8",
            "daemon.dp_size": "16",
            "control.base_port": "61700",
            "telemetry.metrics_base_port": "61800",
        }
    )
    assert "61700" in error.message
    assert "61800" in error.message


def test_P1_ranges_that_only_touch_are_fine() -> None:
    config = loaded(control__base_port=6301, telemetry__metrics_base_port=6309).config
    assert (config.control_port, config.metrics_port) == (6304, 6312)


def test_P6_a_range_that_leaves_the_ports_is_refused_with_its_last_port() -> None:
    error = refusal({"control.base_port": "65530"})
    assert error.fields["key"] == "control.base_port"
    assert "65537" in error.message
    assert "65537" in refusal({"telemetry.metrics_base_port": "65530"}).message


@pytest.mark.parametrize("port", ["-1", "65536", "6301.0", "true", ""])
def test_P6_what_is_no_port_is_refused_naming_the_key(port: str) -> None:
    error = refusal({"control.base_port": port})
    assert error.fields["key"] == "control.base_port"
    assert "errno" not in error.message


def test_P6_a_range_in_the_ephemeral_ports_is_warned_about() -> None:
    found = warned(control__base_port=49657)
    assert any("49657 to 49664" in text and "ephemeral" in text for text in found)
    assert not any("ephemeral" in text for text in warned(control__base_port=6301))
    # The first port is below the range, the last is in it.
    assert any("ephemeral" in text for text in warned(control__base_port=32765))


def test_P2_port_0_leaves_the_choice_to_the_kernel() -> None:
    assert loaded(control__base_port=0).config.control_port == 0
    assert loaded().config.metrics_port == 0
    assert any("base_port = 0" in text for text in warned(control__base_port=0))


@pytest.mark.parametrize(
    "unit", [u for u in PUBLISHED if "P" in u or "D" in u], ids=lambda u: u["id"]
)
def test_C2_published_ports_and_sizes_are_taken_as_written(unit: dict[str, Any]) -> None:
    for side in (unit.get("P"), unit.get("D"), unit.get("variant")):
        if side is None or "handshake_port" not in side or side["handshake_port"] == "<port>":
            continue
        tp = side.get("tp", side.get("tp_size", 2))
        result = loaded(
            daemon__tp_rank=0, daemon__tp_size=tp, control__base_port=side["handshake_port"]
        )
        assert result.config.control_port == int(side["handshake_port"])


# --- Addresses --------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*", "::ffff:0.0.0.0"])
def test_P3_a_wildcard_that_peers_would_be_told_is_refused(host: str) -> None:
    assert refusal({"control.host": host}).fields["key"] == "control.advertise"
    error = refusal({"control.host": "10.0.0.1", "control.advertise": host})
    assert error.fields["key"] == "control.advertise"
    assert "wildcard" in error.message


def test_P3_an_empty_advertise_is_refused_and_a_real_one_is_told() -> None:
    assert refusal({"control.advertise": ""}).fields["key"] == "control.advertise"
    config = loaded(control__host="0.0.0.0", control__advertise="10.0.0.7").config
    assert (config.control.host, config.advertise) == ("0.0.0.0", "10.0.0.7")
    assert loaded(control__host="10.0.0.7").config.advertise == "10.0.0.7"


def test_P4_loopback_is_an_error_in_a_group_of_hosts_and_a_warning_with_a_network_engine() -> None:
    hosts = {"control.node_hosts": "h0,h1"}
    assert refusal(hosts).fields["key"] == "control.host"
    told = {**hosts, "control.host": "0.0.0.0", "control.advertise": "localhost"}
    assert refusal(told).fields["key"] == "control.advertise"
    assert any("loopback" in text for text in warned(engine__name="mori"))
    assert not any("loopback" in text for text in warned())


def test_one_machine_may_play_several_hosts() -> None:
    hosts = "127.0.0.1,127.0.0.2"
    assert loaded(control__node_hosts=hosts).config.advertise == "127.0.0.1"


@pytest.mark.parametrize(("rank", "host"), [(0, "h0"), (7, "h0"), (8, "h1"), (15, "h1")])
def test_R4_ranks_are_shared_out_over_the_hosts_in_order(rank: int, host: str) -> None:
    config = loaded(
        daemon__tp_rank=rank,
        daemon__tp_size=16,
        control__node_hosts="h0,h1",
        control__host="0.0.0.0",
    ).config
    assert config.node_host == config.advertise == host
    assert config.instance == "h0-6301"


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("h0,h1,h2", "3 hosts do not divide tp_size 16"),
        ("h0,H0", "listed twice"),
        ("h0,", "empty"),
        ("h0,0.0.0.0", "wildcard"),
        ("h0,127.0.0.1", "loopback"),
    ],
)
def test_R4_hosts_that_cannot_be_are_refused(hosts: str, text: str) -> None:
    error = refusal(
        {"daemon.tp_size": "16", "control.host": "10.0.0.1", "control.node_hosts": hosts}
    )
    assert error.fields["key"] == "control.node_hosts"
    assert text in error.message


def test_a_switch_that_nothing_acts_on_cannot_be_turned_on() -> None:
    assert refusal({"topology.allow_uneven": "true"}).fields["key"] == "topology.allow_uneven"
    assert loaded(topology__allow_uneven="false").config.topology.allow_uneven is False


def test_an_open_control_endpoint_is_warned_about() -> None:
    assert any("auth" in text for text in warned(control__host="10.0.0.1"))


def test_M5_a_low_memory_lock_limit_is_warned_about_where_it_matters() -> None:
    low = HostFacts(ephemeral_ports=(32768, 60999), memlock_bytes=65536)
    with_mori = loaded(engine__name="mori").config
    assert any("65536 bytes" in text for text in warnings(with_mori, low))
    assert not any("locked-memory" in text for text in warnings(loaded().config, low))
    assert not any("locked-memory" in text for text in warnings(with_mori, ROOMY))


# --- Paths ------------------------------------------------------------------------------------


def runtime_dir_for(fd_path_bytes: int, letter: str) -> str:
    room = fd_path_bytes - len("/" + "/rank3.fd.sock")
    width = len(letter.encode())
    return "/" + letter * (room // width) + "a" * (room % width)


@pytest.mark.parametrize("letter", ["a", "é", "漢"])
@pytest.mark.parametrize("n_bytes", [106, 107])
def test_Z1_socket_paths_up_to_the_limit_in_bytes_are_taken(n_bytes: int, letter: str) -> None:
    config = loaded(daemon__runtime_dir=runtime_dir_for(n_bytes, letter)).config
    assert len(config.fd_socket_path.encode()) == n_bytes


@pytest.mark.parametrize("letter", ["a", "é", "漢"])
@pytest.mark.parametrize("n_bytes", [108, 200])
def test_Z1_longer_ones_are_refused_with_length_and_limit(n_bytes: int, letter: str) -> None:
    error = refusal({"daemon.runtime_dir": runtime_dir_for(n_bytes, letter)})
    assert error.fields["key"] == "daemon.runtime_dir"
    assert f"{n_bytes} bytes" in error.message
    assert "107" in error.message


def test_Z1_an_explicit_socket_is_checked_with_the_one_beside_it() -> None:
    config = loaded(daemon__socket="/tmp/x.sock").config
    assert (config.socket_path, config.fd_socket_path) == ("/tmp/x.sock", "/tmp/x.fd.sock")
    long = "/" + "a" * 101 + ".sock"  # 107 bytes; the fd socket's path has 110
    assert "110 bytes" in refusal({"daemon.socket": long}).message


def test_sockets_are_named_by_the_index_of_the_rank_in_its_instance() -> None:
    config = loaded(daemon__dp_rank=1, daemon__dp_size=2).config
    assert config.socket_path == "/run/moriiod/rank11.sock"
    assert config.fd_socket_path == "/run/moriiod/rank11.fd.sock"


def test_a_relative_path_is_meant_from_where_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"tp_rank": "3", "tp_size": "8", "runtime_dir": "r"}
    assert load_from_flags(flags, {}).config.daemon.runtime_dir == f"{tmp_path}/r"
    with pytest.raises(ConfigError, match="not an absolute path"):
        load(RANK_3_OF_8, {"MORIIOD_RUNTIME_DIR": "r"})


# --- Times and limits -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [("transfer.lease_s", "1.5"), ("control.link_timeout_s", "1.5"), ("control.link_idle_s", "1")],
)
def test_C4_less_than_two_heartbeats_is_refused(key: str, value: str) -> None:
    error = refusal({key: value})
    assert error.fields["key"] == key
    assert "heartbeat" in error.message


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "1e-9", "1e400", "1e12"])
@pytest.mark.parametrize(
    "key",
    [
        "transfer.lease_s",
        "transfer.pull_timeout_s",
        "transfer.write_timeout_s",
        "transfer.early_ttl_s",
        "control.heartbeat_interval_s",
        "control.connect_timeout_s",
    ],
)
def test_C4_times_that_are_not_sane_are_refused_naming_the_key(key: str, value: str) -> None:
    assert refusal({key: value}).fields["key"] == key


def test_C4_zero_is_allowed_where_it_is_documented() -> None:
    assert loaded(daemon__drain_timeout_s=0).config.daemon.drain_timeout_s == 0


def test_a_message_limit_below_the_largest_transfer_is_refused() -> None:
    error = refusal({"limits.max_message_bytes": "65536"})
    assert error.fields["key"] == "limits.max_message_bytes"


def test_repeats_cannot_start_slower_than_they_end() -> None:
    assert "resend" in refusal({"transfer.resend_first_s": "10"}).message


def test_defaults_are_those_of_the_core() -> None:
    """Two places say them; the daemon fills one from the other."""
    config = loaded().config
    known = {
        key: value
        for section in (config.control, config.transfer, config.limits)
        for key, value in section.model_dump().items()
    }
    core = CoreSettings()
    shared = [name for name in CoreSettings.__dataclass_fields__ if name in known]
    assert len(shared) >= 18
    assert {n: known[n] for n in shared} == {n: getattr(core, n) for n in shared}


# --- The rest ---------------------------------------------------------------------------------


def test_the_configuration_is_frozen_and_closed() -> None:
    config = loaded().config
    with pytest.raises(ValueError, match="frozen"):
        config.daemon.tp_rank = 4  # type: ignore[misc]
    with pytest.raises(ValueError, match="extra"):
        Config.model_validate({"daemon": {"tp_rank": 0, "tp_size": 1, "x": 1}})


def test_a_derived_instance_name_tells_two_instances_of_one_host_apart() -> None:
    one, two = loaded().config, loaded(control__base_port=7301).config
    assert one.instance != two.instance
    assert loaded(daemon__instance="decode-0").config.instance == "decode-0"


def test_socket_settings_that_let_everybody_in_are_warned_about() -> None:
    assert any("every user" in text for text in warned(daemon__socket_mode="0666"))
    assert any("no such group" in text for text in warned(daemon__socket_group="no-such-group"))
    assert loaded().config.socket_permissions == 0o660


@pytest.mark.parametrize("value", ["x\ny", "x\x1b[31m", "\u202e", "é" * 5000])
def test_a_value_cannot_break_out_of_the_line(value: str) -> None:
    error = refusal(env={"MORIIOD_CONTROL_BASE_PORT": value, "MORIIOD_X": "1"})
    assert error.message.isprintable()
    assert len(error.message) < 400
