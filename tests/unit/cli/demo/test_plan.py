"""What a demo will do, before it does it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from moriiod.cli.demo.plan import DemoOptions, DemoRequest, Mode, Rank, plan_waves
from moriiod.cli.demo.shapes import CacheShape, KvChoice
from moriiod.errors import InvalidArgument, InvalidTopology

SMALL = DemoOptions(blocks=32, requests=40, layers=2)


def all_requests(options: DemoOptions) -> list[DemoRequest]:
    return [r for mode in options.modes for wave in plan_waves(options, mode) for r in wave]


def test_every_request_of_every_mode_has_a_number_and_a_transfer_id_of_its_own() -> None:
    requests = all_requests(SMALL)
    assert [request.number for request in requests] == list(range(80))
    assert len({request.transfer_id for request in requests}) == 80
    assert all(request.transfer_id.startswith("tx-") for request in requests)
    assert [request.mode for request in requests] == ["read"] * 40 + ["write"] * 40


@pytest.mark.parametrize("mode", ["read", "write"])
def test_blocks_within_a_wave_overlap_nowhere_and_leave_some_unused(mode: Mode) -> None:
    options = replace(SMALL, prefill_instances=2, decode_instances=2)
    waves = list(plan_waves(options, mode))
    assert len(waves) > 1
    for wave, side in itertools.product(waves, ("prefill", "decode")):
        for instance in range(2):
            tables = [
                r.prefill_blocks if side == "prefill" else r.decode_blocks
                for r in wave
                if (r.producer if side == "prefill" else r.consumer) == instance
            ]
            used = [block for table in tables for block in table]
            assert len(used) == len(set(used)) <= options.blocks - options.blocks // 8
            assert all(0 <= block < options.blocks for block in used)


def test_block_tables_are_scattered() -> None:
    requests = all_requests(DemoOptions())
    assert any(list(r.prefill_blocks) != sorted(r.prefill_blocks) for r in requests)
    assert any(r.prefill_blocks != r.decode_blocks for r in requests)
    assert all(len(r.prefill_blocks) == len(r.decode_blocks) for r in requests)


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (2, 2), (3, 2), (2, 4)])
def test_every_decode_instance_gets_from_every_prefill_instance(
    prefills: int, decodes: int
) -> None:
    options = replace(
        SMALL, prefill_instances=prefills, decode_instances=decodes, requests=prefills * decodes
    )
    for mode in options.modes:
        pairs = {(r.producer, r.consumer) for wave in plan_waves(options, mode) for r in wave}
        assert pairs == set(itertools.product(range(prefills), range(decodes)))


def test_same_seed_plans_the_same_and_another_seed_something_else() -> None:
    assert all_requests(SMALL) == all_requests(SMALL)
    assert all_requests(SMALL) != all_requests(replace(SMALL, seed=2))


def test_smallest_cache_still_takes_requests() -> None:
    waves = list(plan_waves(replace(SMALL, blocks=8, requests=20), "read"))
    assert sum(len(wave) for wave in waves) == 20
    assert all(wave for wave in waves)


def test_ranks_have_the_names_that_the_tables_show() -> None:
    options = DemoOptions(prefill_tp=2, decode_tp=1, prefill_instances=2)
    assert [rank.name for rank in options.ranks] == ["P0/0", "P0/1", "P1/0", "P1/1", "D0/0"]
    assert options.ranks_of("prefill", 1) == [Rank("prefill", 1, 0), Rank("prefill", 1, 1)]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (DemoOptions(prefill_tp=4, decode_tp=6), InvalidTopology),
        (DemoOptions(prefill_tp=4, decode_tp=4, kv=KvChoice(6)), InvalidTopology),
        (DemoOptions(prefill_instances=2, decode_instances=2, requests=3), InvalidArgument),
        (DemoOptions(kv=KvChoice(model="no-such")), InvalidArgument),
        (DemoOptions(prefill_tp=64, decode_tp=64), InvalidArgument),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    options: DemoOptions, error: type[Exception]
) -> None:
    with pytest.raises(error):
        options.check()


@pytest.mark.parametrize(("p", "d", "heads"), [(4, 8, 0), (8, 4, 2), (4, 4, 8), (4, 8, 8)])
def test_pairs_that_work_pass(p: int, d: int, heads: int) -> None:
    DemoOptions(prefill_tp=p, decode_tp=d, kv=KvChoice(heads)).check()


def test_uneven_sizes_pass_where_they_are_allowed() -> None:
    DemoOptions(prefill_tp=2, decode_tp=3, kv=KvChoice(6), allow_uneven=True).check()


@pytest.mark.parametrize(
    ("choice", "tensor", "pieces", "block_bytes"),
    [
        (KvChoice(), (9, 16, 576), 1, 16 * 576 * 2),
        (KvChoice(2), (2, 9, 1, 16, 128), 2, 2 * 16 * 128 * 2),
        (KvChoice(8, head_order="NHD"), (2, 9, 16, 2, 128), 2, 2 * 16 * 2 * 128 * 2),
        (KvChoice(8, "fused"), (9, 2, 16, 256), 1, 2 * 16 * 2 * 128 * 2),
    ],
)
def test_cache_shapes_add_up(
    choice: KvChoice, tensor: tuple[int, ...], pieces: int, block_bytes: int
) -> None:
    shape = CacheShape(choice, 1, 9, 4)
    (group,) = shape.groups
    assert (group.tensor_shape, group.group.pieces) == (tensor, pieces)
    assert group.block_bytes == block_bytes
    assert shape.cache_bytes == 9 * block_bytes


def test_hybrid_model_has_a_table_for_each_group() -> None:
    shape = CacheShape(KvChoice(model="kimi-linear-48b"), 2, 9, 4)
    assert shape.tables([5, 3, 8]) == [[5, 3, 8], [5], [5]]
    assert shape.n_layers == 6
    sliding = CacheShape(KvChoice(model="gpt-oss-120b"), 2, 9, 4)
    assert sliding.tables([5, 3, 8, 1]) == [[5, 3, 8, 1], [3, 8, 1]]
