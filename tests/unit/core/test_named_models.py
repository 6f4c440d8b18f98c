"""Real model shapes, byte for byte: small heads and blocks, but the TP sizes and groups of life."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core.compare import compare_layouts
from moriiod.errors import GeometryMismatch, UnsupportedTopology
from tests.support.kvmodel import Case, GroupModel, Side, SideGroup, make_rank, prompt

TOKENS = 45
BOTH_WAYS = pytest.mark.parametrize("reads", [True, False], ids=["READ", "WRITE"])


def even(model: tuple[GroupModel, ...], p: int, d: int, *, block: int = 16, skip: int = 0) -> Case:
    """Return a case whose sides differ in TP size and number of blocks only."""
    there = tuple(_held(group, block, 11, 0) for group in model)
    here = tuple(_held(group, block, 7, skip) for group in model)
    return Case(model, Side(p, there), Side(d, here, shares_region=False))


def _held(group: GroupModel, block: int, blocks: int, skip: int) -> SideGroup:
    if group.layout == "state":
        return SideGroup(1, blocks=blocks, table=(blocks // 2,))
    return prompt(TOKENS, block, blocks, skip=skip)


def llama(layout: str, order: str) -> tuple[GroupModel, ...]:
    return (GroupModel(layout, order, 8, (4,), layers=3),)


@BOTH_WAYS
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("layout", ["kv_first", "block_first", "fused"])
@pytest.mark.parametrize(("p", "d"), [(4, 8), (8, 4), (2, 8), (8, 16), (16, 2), (1, 1)])
def test_llama_70b_with_8_kv_heads(layout: str, order: str, p: int, d: int, reads: bool) -> None:
    case = even(llama(layout, order), p, d)
    per_rank = 3 * 2 * 3 * 16 * max(1, 8 // d) * 4 // (2 if layout == "fused" else 1)
    assert case.run(reads=reads) == d * per_rank


@BOTH_WAYS
@pytest.mark.parametrize(("p", "d"), [(4, 8), (8, 4), (8, 2), (2, 8), (1, 8), (16, 1)])
def test_qwen3_235b_with_4_kv_heads(p: int, d: int, reads: bool) -> None:
    assert even((GroupModel("kv_first", "HND", 4, (3,)),), p, d, skip=1).run(reads=reads)


@BOTH_WAYS
@pytest.mark.parametrize(("p", "d"), [(8, 16), (16, 8), (1, 4), (4, 1)])
def test_deepseek_v3_latent_beside_a_key_only_cache_with_another_block_length(
    p: int, d: int, reads: bool
) -> None:
    model = (GroupModel("mla", "NHD", 1, (18,), 3), GroupModel("mla", "NHD", 1, (5,), 3))
    side = (prompt(TOKENS, 16, 9), prompt(TOKENS, 64, 3))
    case = Case(model, Side(p, side), Side(d, (prompt(TOKENS, 16, 5), prompt(TOKENS, 64, 2))))
    assert case.run(reads=reads) == d * 3 * (3 * 16 * 18 + 64 * 5)
    for c in range(d):
        assert case.head_plan().sources(c) == (c * p // d,)


@BOTH_WAYS
@pytest.mark.parametrize(("p", "d"), [(4, 8), (8, 2)])
def test_gpt_oss_like_sliding_window_moves_only_the_last_window(
    p: int, d: int, reads: bool
) -> None:
    model = (GroupModel("kv_first", "HND", 8, (4,), 2), GroupModel("kv_first", "HND", 8, (4,), 2))
    full, window = prompt(TOKENS, 4, 20), prompt(TOKENS, 4, 20, skip=8)
    here = (prompt(TOKENS, 4, 14), prompt(TOKENS, 4, 16, skip=10))
    case = Case(model, Side(p, (full, window)), Side(d, here))
    per_block = 2 * 2 * 4 * max(1, 8 // d) * 4
    assert case.run(reads=reads) == d * (12 + 2) * per_block


@BOTH_WAYS
@pytest.mark.parametrize(("p", "d"), [(4, 4), (4, 8), (8, 4), (2, 1)])
def test_kda_hybrid_moves_latent_and_recurrent_state(p: int, d: int, reads: bool) -> None:
    conv_of_q_k_v, ssm = (6, 6, 9), (32,)
    model = (
        GroupModel("mla", "NHD", 1, (18,), 1),
        GroupModel("state", "HND", 32, conv_of_q_k_v, 3),
        GroupModel("state", "HND", 32, ssm, 3),
    )
    case = even(model, p, d)
    assert case.run(reads=reads) == d * (3 * 16 * 18 + 3 * 32 // d * (21 + 32))


@BOTH_WAYS
@pytest.mark.parametrize(("p", "d"), [(4, 6), (6, 4), (4, 3)])
def test_uneven_sizes_with_12_heads(p: int, d: int, reads: bool) -> None:
    assert even((GroupModel("block_first", "HND", 12, (2,)),), p, d).run(reads=reads)


@BOTH_WAYS
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize(("b", "kernel_b", "a", "kernel_a"), [
    (16, 0, 64, 0), (64, 0, 16, 0), (128, 16, 16, 0), (16, 0, 128, 16), (32, 8, 64, 4),
])  # fmt: skip
def test_G8_block_sizes_that_differ_by_a_factor(
    order: str, b: int, kernel_b: int, a: int, kernel_a: int, reads: bool
) -> None:
    model = (GroupModel("kv_first", order, 8, (2,)),)
    there = prompt(200, b, 14, kernel_tokens=kernel_b, pad=3)
    for skip in (0, 1):
        here = prompt(200, a, 15, skip=skip, kernel_tokens=kernel_a)
        for p, d in ((4, 4), (4, 8), (8, 2)):
            case = Case(model, Side(p, (there,)), Side(d, (here,)))
            assert case.run(reads=reads)


@BOTH_WAYS
def test_G9_layers_of_one_group_with_different_bytes_per_block(reads: bool) -> None:
    model = (GroupModel("kv_first", "HND", 4, (2,), layers=4, grow=3),)
    assert even(model, 2, 4).run(reads=reads)


@BOTH_WAYS
def test_G3_full_prefix_hit_moves_nothing(reads: bool) -> None:
    assert even(llama("kv_first", "HND"), 4, 8, skip=3).run(reads=reads) == 0


# --- Descriptors ------------------------------------------------------------------------------


def spans_of(case: Case, c: int = 0) -> tuple[int, int]:
    """Return descriptors of one layer and token descriptors of all, for one consumer rank."""
    heads = case.head_plan()
    n = by_token = 0
    for p in heads.sources(c):
        here, there = (
            make_rank(case.model, case.consumer, c, 1),
            make_rank(case.model, case.producer, p, 1),
        )
        plan = case.planner(there, here, (p, c), reads=True).plan()
        n += len(plan.layers[0].spans.sizes)
        by_token += plan.n_token_spans
    return n, by_token


def test_split_heads_are_one_descriptor_a_block_in_HND_and_one_a_token_in_NHD() -> None:
    n_blocks = 3
    assert spans_of(even(llama("kv_first", "HND"), 4, 8)) == (2 * n_blocks, 0)
    assert spans_of(even(llama("fused", "HND"), 4, 8)) == (n_blocks, 0)
    assert spans_of(even(llama("kv_first", "HND"), 8, 4)) == (2 * 2 * n_blocks, 0)
    tokens = 2 * n_blocks * 16
    assert spans_of(even(llama("kv_first", "NHD"), 4, 8)) == (tokens, 3 * tokens)


def test_token_descriptors_over_the_limit_are_refused_saying_what_to_change() -> None:
    case = replace(even(llama("kv_first", "NHD"), 4, 8), max_token_spans=3 * 2 * 3 * 16)
    assert spans_of(case)[1] == case.max_token_spans
    with pytest.raises(UnsupportedTopology, match=r"HND .* raise the limit") as caught:
        spans_of(replace(case, max_token_spans=case.max_token_spans - 1))
    assert caught.value.fields == {"needed": 288, "limit": 287}
    # Where nothing is split, NHD needs no token descriptors.
    assert spans_of(replace(even(llama("kv_first", "NHD"), 4, 4), max_token_spans=1))[1] == 0


def test_nothing_that_differs_in_meaning_is_bridged() -> None:

    case = even(llama("kv_first", "HND"), 4, 8)
    other = even(llama("kv_first", "NHD"), 4, 8)
    with pytest.raises(GeometryMismatch, match="head_order"):
        compare_layouts(
            make_rank(case.model, case.producer, 0, 1).layout,
            make_rank(other.model, other.consumer, 0, 1).layout,
            4,
            8,
        )
