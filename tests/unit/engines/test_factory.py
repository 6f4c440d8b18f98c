"""Engines by name."""

from __future__ import annotations

import pytest

from moriiod.core.ids import Epoch
from moriiod.engines.factory import make_engine
from moriiod.engines.faulty import Faults, parse_faults
from moriiod.errors import ConfigError

EPOCH = "0" * 32


class NoExporter:
    """Hands out nothing."""

    address = "/nowhere"

    def export(self, token: str, fd: int, n_bytes: int) -> None:
        raise AssertionError

    def withdraw(self, token: str) -> None:
        raise AssertionError

    def refuse(self, peer: Epoch) -> int | None:
        raise AssertionError

    def readmit(self, peer: Epoch) -> None:
        raise AssertionError

    def forget(self, peer: Epoch) -> None:
        raise AssertionError


def test_shm_and_its_faulty_twin_are_made() -> None:
    assert make_engine("shm", NoExporter(), EPOCH).capabilities.name == "shm"
    faulty = make_engine("faulty:shm,seed=3,fail=0.5", NoExporter(), EPOCH)
    assert faulty.capabilities.name == "shm"
    assert faulty.capabilities.poll_interval_s > 0


@pytest.mark.parametrize(("name", "extra"), [("mori", "moriiod[mori]"), ("nixl", "moriiod[nixl]")])
def test_engine_of_a_later_build_names_the_extra(name: str, extra: str) -> None:
    with pytest.raises(ConfigError, match="not in this build yet") as caught:
        make_engine(name, NoExporter(), EPOCH)
    assert caught.value.fields["extra"] == extra


@pytest.mark.parametrize("name", ["", "SHM", "tcp", "faulty:", "faulty:tcp", "faulty:shm,x=1"])
def test_unknown_engine_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError):
        make_engine(name, NoExporter(), EPOCH)


def test_faults_are_parsed() -> None:
    assert parse_faults("") == Faults()
    assert parse_faults("seed=7,fail=0.25,rounds=9") == Faults(seed=7, fail=0.25, rounds=9)


@pytest.mark.parametrize("text", ["fail", "fail=x", "fail=2", "lose=-1", "fail=0.6,lose=0.6", "=1"])
def test_bad_faults_are_config_errors(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_faults(text)
