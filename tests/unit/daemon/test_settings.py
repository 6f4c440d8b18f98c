"""What the configuration means for the parts of the daemon."""

from __future__ import annotations

from dataclasses import fields

from moriiod.config.load import load
from moriiod.config.names import SETTINGS
from moriiod.config.schema import Config
from moriiod.core.settings import CoreSettings
from moriiod.daemon import settings

#: Times of the core that nobody needs to set.
_NOT_CONFIGURABLE = {"op_retry_s", "drain_grace_s", "event_window"}
#: Values other than 17.
_OTHER_TEXTS = {"max_bytes_in_flight": "1234567", "allow_uneven": "true"}
#: What must be raised along with a time.
_MUST_BE_MORE = {
    "resend_first_s": ("transfer.resend_max_s",),
    "heartbeat_interval_s": ("control.link_timeout_s",),
}


def make(**values: str) -> Config:
    given = {"daemon.tp_rank": "3", "daemon.tp_size": "8", **values}
    return load(given, {}).config


def test_every_time_and_limit_of_the_core_comes_from_the_configuration() -> None:
    for field in fields(CoreSettings):
        if field.name in _NOT_CONFIGURABLE:
            continue
        (name,) = [n for n in SETTINGS if n.partition(".")[2] == field.name]
        text = _OTHER_TEXTS.get(field.name, "17")
        more = {other: "50" for other in _MUST_BE_MORE.get(field.name, ())}
        core = settings.core_settings(make(**{name: text, **more}))
        expected = text == "true" if field.type == "bool" else float(text)
        assert getattr(core, field.name) == expected, field.name


def test_defaults_of_the_configuration_are_those_of_the_core() -> None:
    assert settings.core_settings(make()) == CoreSettings()


def test_P1_control_port_is_that_of_the_rank() -> None:
    config = make(**{"daemon.dp_rank": "1", "daemon.dp_size": "2", "control.base_port": "6105"})
    control = settings.control_settings(config)
    assert (control.host, control.port, control.advertise) == ("127.0.0.1", 6116, "127.0.0.1")


def test_sockets_lie_side_by_side_with_the_same_permissions() -> None:
    config = make(**{"daemon.runtime_dir": "/run/x", "daemon.socket_mode": "0600"})
    ipc, fds = settings.ipc_settings(config), settings.fd_settings(config)
    assert (ipc.path, fds.path) == ("/run/x/rank3.sock", "/run/x/rank3.fd.sock")
    assert ipc.mode == fds.mode == 0o600


def test_identity_has_the_epoch_of_this_start() -> None:
    identity = settings.identity_of(make(**{"daemon.instance": "decode-0"}), "a" * 32)
    assert (identity.instance, identity.tp_rank, identity.tp_size) == ("decode-0", 3, 8)
    assert (identity.dp_rank, identity.dp_size, identity.epoch) == (0, 1, "a" * 32)
