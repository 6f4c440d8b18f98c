"""``moriiod plan``: rank map, slices, ACK sets, bytes and descriptors, without a daemon."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moriiod.cli import main as cli
from moriiod.cli.models import MODELS, find_model
from moriiod.core.headplan import HeadRule
from moriiod.core.layout import check_layout
from moriiod.errors import InvalidArgument

SMALL = ("--layers", "2", "--tokens", "33", "--head-size", "4")


def document(capsys: pytest.CaptureFixture[str], p: int, d: int, *more: str) -> dict[str, Any]:
    arguments = ["plan", "--prefill-tp", str(p), "--decode-tp", str(d), "--json", *more]
    assert cli.main(arguments) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], p: int, d: int, *more: str) -> tuple[int, str]:
    code = cli.main(["plan", "--prefill-tp", str(p), "--decode-tp", str(d), *more])
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return code, text


@pytest.mark.parametrize(
    ("p", "d", "expected"),
    [
        (4, 8, [[0], [0], [1], [1], [2], [2], [3], [3]]),
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 8, [[0], [0], [0], [0], [1], [1], [1], [1]]),
    ],
)
def test_rank_map_of_8_heads(
    p: int, d: int, expected: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, p, d, "--kv-heads", "8", *SMALL)
    assert found["rank_map"] == expected
    acks = [row["ack_set"] for row in found["prefill_ranks"]]
    assert acks == [[c for c in range(d) if r in expected[c]] for r in range(p)]


def test_slices_bytes_and_descriptors_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, 8, 4, "--kv-heads", "8", *SMALL)
    assert found["decode_ranks"][1] == {
        "rank": 1,
        "sources": [
            {
                "prefill_rank": 2 + i,
                "slices": [{"group": "attention", "prefill_head": 0, "decode_head": i, "count": 1}],
                # 2 layers, K and V, 3 blocks of 16 tokens, 4 elements of 2 bytes.
                "bytes": 2 * 2 * 3 * 16 * 4 * 2,
                "descriptors": 2 * 2 * 3,
                "token_descriptors": 0,
            }
            for i in range(2)
        ],
    }
    assert found["bytes"] == 8 * 2 * 2 * 3 * 16 * 8


@pytest.mark.parametrize(
    ("more", "descriptors", "by_token"),
    [
        ((), 4 * 3, 0),
        (("--layout", "fused"), 2 * 3, 0),
        (("--layout", "block_first"), 4 * 3, 0),
        (("--head-order", "NHD"), 4 * 48, 4 * 48),
        (("--block-tokens", "32"), 4 * 2, 0),
        (("--decode-block-tokens", "32"), 4 * 3, 0),
        (("--block-tokens", "32", "--kernel-tokens", "8"), 4 * 8, 0),
    ],
)
def test_descriptors_of_one_pair(
    more: tuple[str, ...], descriptors: int, by_token: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, 1, 2, "--kv-heads", "2", *SMALL, *more)
    (source,) = found["decode_ranks"][0]["sources"]
    assert (source["descriptors"], source["token_descriptors"]) == (descriptors, by_token)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("p", "d"), [(4, 8), (8, 4), (1, 16)])
def test_known_models_are_laid_out_and_planned(
    name: str, p: int, d: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for tp in (p, d):
        check_layout(find_model(name).layout(tp, 9))
    found = document(capsys, p, d, "--model", name, "--tokens", "64")
    shapes = tuple(group.shape for group in find_model(name).groups)
    plan = HeadRule(shapes).plan(p, d)
    assert found["rank_map"] == [list(plan.sources(c)) for c in range(d)]
    assert found["bytes"] > 0


def test_sliding_window_counts_only_the_blocks_of_the_window(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = document(capsys, 1, 1, "--model", "gpt-oss-120b", "--tokens", "128")
    long = document(capsys, 1, 1, "--model", "gpt-oss-120b", "--tokens", "256")
    block = 18 * 2 * 16 * 8 * 64 * 2
    assert short["bytes"] == 2 * 8 * block
    assert long["bytes"] == (16 + 8) * block


def test_tables_are_printed_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--prefill-tp", "4", "--decode-tp", "2", "--kv-heads", "2"]) == 0
    text = capsys.readouterr().out
    assert "prefill TP 4 -> decode TP 2" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["1", "nobody", "0"] in lines
    assert ["0", "attention", "0", "P0", "(its", "0)"] == lines[3][:6]


@pytest.mark.parametrize(
    ("p", "d", "more", "code"),
    [
        (4, 6, ("--kv-heads", "12"), "INVALID_TOPOLOGY"),
        (4, 8, ("--kv-heads", "6"), "INVALID_TOPOLOGY"),
        (4, 8, ("--decode-block-tokens", "24"), "GEOMETRY_MISMATCH"),
        (4, 8, ("--kernel-tokens", "5"), "INVALID_GEOMETRY"),
        (4, 8, ("--head-order", "NHD", "--max-token-spans", "9"), "UNSUPPORTED_TOPOLOGY"),
        (4, 8, ("--model", "no-such"), "INVALID_ARGUMENT"),
    ],
)
def test_what_the_pair_cannot_do_is_refused_with_its_code(
    p: int, d: int, more: tuple[str, ...], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = refusal(capsys, p, d, *more)
    assert (status, code in text) == (1, True)


def test_uneven_sizes_are_planned_where_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, 4, 6, "--kv-heads", "12", "--allow-uneven", *SMALL)
    assert found["rank_map"] == [[0], [0, 1], [1], [2], [2, 3], [3]]


def test_unknown_model_is_refused_naming_those_there_are() -> None:
    with pytest.raises(InvalidArgument, match=r"llama-3-70b"):
        find_model("x")
