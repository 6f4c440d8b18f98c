"""The rule that names settings, and what is guessed from a wrong name."""

from __future__ import annotations

import pytest

from moriiod.config.names import (
    FOREIGN_NAMES,
    SETTINGS,
    SETTINGS_BY_ENV,
    is_from_kubernetes,
    legacy_env_advice,
    nearest_env,
    nearest_section,
    nearest_setting,
)


@pytest.mark.parametrize(
    ("name", "env", "flag"),
    [
        ("daemon.tp_rank", "MORIIOD_TP_RANK", "--tp-rank"),
        ("control.base_port", "MORIIOD_CONTROL_BASE_PORT", "--control-base-port"),
        ("engine.name", "MORIIOD_ENGINE", "--engine"),
        ("engine.shm_chunk_bytes", "MORIIOD_ENGINE_SHM_CHUNK_BYTES", "--engine-shm-chunk-bytes"),
        ("telemetry.log_level", "MORIIOD_LOG_LEVEL", "--log-level"),
        ("topology.allow_uneven", "MORIIOD_TOPOLOGY_ALLOW_UNEVEN", "--topology-allow-uneven"),
    ],
)
def test_one_rule_gives_a_setting_its_names(name: str, env: str, flag: str) -> None:
    assert (SETTINGS[name].env, SETTINGS[name].flag) == (env, flag)


def test_no_two_settings_share_a_name() -> None:
    settings = SETTINGS.values()
    assert len(SETTINGS_BY_ENV) == len({s.parameter for s in settings}) == len(SETTINGS)


def test_every_setting_says_what_it_is_for_and_what_it_takes() -> None:
    for setting in SETTINGS.values():
        assert setting.description.endswith("."), setting.name
        assert setting.kind.describe(), setting.name


def test_foreign_names_lead_to_settings_that_exist() -> None:
    assert set(FOREIGN_NAMES.values()) <= set(SETTINGS)


@pytest.mark.parametrize(
    ("unknown", "expected"),
    [
        ("control.base_prt", "control.base_port"),
        ("daemon.notifiy_port", "control.base_port"),
        ("host_ip", "control.advertise"),
        ("daemon.tpsize", "daemon.tp_size"),
        ("transfer.heartbeat_interval_s", "control.heartbeat_interval_s"),
        ("ENGINE", "engine.name"),
        ("", None),
        ("\x00" * 50, None),
    ],
)
def test_C1_the_nearest_setting_is_always_named(unknown: str, expected: str | None) -> None:
    found = nearest_setting(unknown)
    assert found in SETTINGS
    assert expected in (None, found)


def test_nearest_variables_and_sections_exist() -> None:
    assert nearest_env("MORIIOD_HANDSHAKE_PORT") == "MORIIOD_CONTROL_BASE_PORT"
    assert nearest_env("MORIIOD_TPRANK") == "MORIIOD_TP_RANK"
    assert nearest_section("limit") == "limits"


def test_C3_advice_about_retired_variables_names_variables_that_exist() -> None:
    for name in ("VLLM_MORIIO_BACKEND", "VLLM_MORIIO_DEFERRED_TIMEOUT_S"):
        assert legacy_env_advice(name).removeprefix("use ") in SETTINGS_BY_ENV
    assert legacy_env_advice("VLLM_MORIIO_QP_PER_TRANSFER") == "nothing replaces it"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("MORIIOD_SERVICE_HOST", "10.0.0.1", True),
        ("MORIIOD_CONTROL_SERVICE_PORT", "6301", True),
        ("MORIIOD_CONTROL_PORT", "tcp://10.0.0.1:6301", True),
        ("MORIIOD_PORT_6301_TCP", "tcp://10.0.0.1:6301", True),
        ("MORIIOD_CONTROL_PORT", "6301", False),
        ("MORIIOD_LOGLEVEL", "info", False),
    ],
)
def test_kubernetes_variables_are_told_from_typos(name: str, value: str, expected: bool) -> None:
    assert is_from_kubernetes(name, value) is expected
