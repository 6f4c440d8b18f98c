"""Each kind of value: the forms that are taken, and the ones that must never be guessed at."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from moriiod.config.values import (
    AbsolutePath,
    Choice,
    Host,
    Hosts,
    Name,
    OctalMode,
    Seconds,
    Switch,
    Whole,
)

PORT = Whole(0, 65535)
DURATION = Seconds(0.5, 604800)


@pytest.mark.parametrize(
    ("raw", "value"), [(6301, 6301), ("6301", 6301), (" 6301 ", 6301), ("0", 0)]
)
def test_C2_numbers_and_numeric_texts_are_one(raw: Any, value: int) -> None:
    assert PORT(raw) == value


@pytest.mark.parametrize(
    "raw",
    [
        True,
        False,
        None,
        6301.0,
        "6301.0",
        "1e3",
        "0x10",
        "010",
        "",
        " ",
        "+1",
        "1_000",
        "6 301",
        "٦٣٠١",
        "6301\n6302",
        [6301],
        {"a": 1},
        b"6301",
        "null",
        "yes",
        datetime.date(2026, 1, 1),
    ],
)
def test_C2_what_is_no_whole_number_is_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        PORT(raw)


@pytest.mark.parametrize("raw", [-1, "-1", 65536, "65536", 2**63, 2**64, "9" * 20])
def test_P6_ports_outside_the_range_are_refused_with_the_range(raw: Any) -> None:
    with pytest.raises(ValueError, match=r"not in \[0, 65535\]"):
        PORT(raw)


def test_digits_beyond_any_number_are_refused_without_being_converted() -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        PORT("9" * 100_000)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (True, True),
        ("true", True),
        ("1", True),
        (1, True),
        ("TRUE ", True),
        (False, False),
        ("false", False),
        ("0", False),
        (0, False),
        ("False", False),
    ],
)
def test_C2_bools_in_their_published_forms_are_taken(raw: Any, value: bool) -> None:
    assert Switch()(raw) is value


@pytest.mark.parametrize("raw", ["yes", "no", "on", 2, -1, "2", "", " ", None, 1.0, [True], "t"])
def test_C2_what_only_looks_like_a_bool_is_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="not true, false, 1 or 0"):
        Switch()(raw)


@pytest.mark.parametrize(("raw", "value"), [(60, 60.0), ("60", 60.0), ("0.5", 0.5), ("6e1", 60.0)])
def test_durations_are_taken_as_numbers_and_as_texts(raw: Any, value: float) -> None:
    taken = DURATION(raw)
    assert (taken, type(taken)) == (value, float)


@pytest.mark.parametrize(
    "raw",
    [
        float("nan"),
        float("inf"),
        -float("inf"),
        "nan",
        "inf",
        "1e400",
        "-1e400",
        -1,
        "-1",
        0,
        1e-09,
        "1e-9",
        1000000000000.0,
        "1e12",
        10**400,
        True,
        None,
        "",
        "60s",
        "1,5",
        "0x10",
        "010",
        [60],
    ],
)
def test_C4_times_that_are_not_sane_are_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="not "):
        DURATION(raw)


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("Node-7.example", "node-7.example"),
        ("*", "0.0.0.0"),
        ("h\n", "h"),
    ],
)
def test_P5_hosts_come_out_in_one_spelling(raw: str, value: str) -> None:
    assert Host()(raw) == value


@pytest.mark.parametrize(
    "raw",
    [
        "",
        " ",
        "[::1]:6301",
        "10.0.0.1:6301",
        "tcp://10.0.0.1",
        "a b",
        "-a",
        "256.1.1.1",
        "1.2.3",
        "a" * 300,
        "h\nh",
        "h\x00",
        5,
        None,
        "[10.0.0.1]",
        "a..b",
        "a/b",
    ],
)
def test_P5_what_is_no_host_is_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match=r"empty|not a|longer|printed"):
        Host()(raw)


def test_a_list_of_hosts_may_be_a_list_or_a_text() -> None:
    assert Hosts(4)(["h0", "[::1]"]) == ("h0", "::1")
    assert Hosts(4)("h0, h1") == ("h0", "h1")
    assert Hosts(4)([]) == ()


@pytest.mark.parametrize("raw", ["", "h0,", ["h0", ""], [None], 5, ["h0"] * 5, {"h0": 1}])
def test_R4_a_list_with_something_else_in_it_is_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match=r"host \d|not a list|more than"):
        Hosts(4)(raw)


@pytest.mark.parametrize(("raw", "value"), [("0660", "0660"), ("660", "0660"), ("0600", "0600")])
def test_socket_modes_are_octal_texts(raw: str, value: str) -> None:
    assert OctalMode()(raw) == value


@pytest.mark.parametrize("raw", [660, 0o660, True, "0o660", "0770", "0060", "0888", "", "66", None])
def test_socket_modes_that_could_be_misread_are_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match=r"octal|owner"):
        OctalMode()(raw)


@pytest.mark.parametrize("raw", ["run/moriiod", "./x", "", "/a\0b", "/a\nb", 5, None, "~/x"])
def test_Z1_paths_that_depend_on_where_one_stands_are_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="path"):
        AbsolutePath()(raw)


def test_paths_lose_their_trailing_slashes() -> None:
    assert AbsolutePath()("/run/moriiod//") == "/run/moriiod"
    assert AbsolutePath()("/") == "/"


def test_choices_and_names_are_read_and_refused() -> None:
    assert Choice(("shm", "mori"))(" SHM ") == "shm"
    assert Name(4)(" ab ") == "ab"
    for kind, raw in ((Choice(("shm",)), "nixl"), (Choice(("shm",)), 1), (Name(4), "abcde")):
        with pytest.raises(ValueError, match=r"not one of|longer"):
            kind(raw)


@pytest.mark.parametrize(
    "kind",
    [
        PORT,
        DURATION,
        Switch(),
        Choice(("a",)),
        Name(3),
        AbsolutePath(),
        OctalMode(),
        Host(),
        Hosts(2),
    ],
)
def test_every_kind_says_what_it_takes(kind: Any) -> None:
    assert kind.describe()
    assert kind.metavar
