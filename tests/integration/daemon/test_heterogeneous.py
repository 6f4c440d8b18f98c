"""Different TP sizes, layouts and block sizes through real daemons, every byte compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moriiod.core.geometry import KvGroup
from tests.support.kvdaemons import kv_world
from tests.support.kvmodel import (
    Case,
    GroupModel,
    Side,
    SideGroup,
    logical,
    make_rank,
    prompt,
    write,
)

UNEVEN = {"topology.allow_uneven": "true"}
BOTH_WAYS = pytest.mark.parametrize("reads", [True, False], ids=["READ", "WRITE"])
ATTENTION = GroupModel("kv_first", "HND", 4, (8,), 3)


def case(p: int, d: int, *model: GroupModel, block: int = 16) -> Case:
    there = tuple(prompt(45, block, 7) for _ in model)
    here = tuple(prompt(45, block, 9, skip=1) for _ in model)
    return Case(model, Side(p, there), Side(d, here, shares_region=False))


@BOTH_WAYS
@pytest.mark.parametrize(
    ("p", "d", "model"),
    [
        (2, 4, ATTENTION),
        (4, 2, ATTENTION),
        (4, 1, replace(ATTENTION, layout="fused")),
        (1, 4, replace(ATTENTION, heads=2, layout="block_first")),
        (4, 1, replace(ATTENTION, heads=2)),
        (2, 4, replace(ATTENTION, order="NHD")),
    ],
    ids=str,
)
async def test_split_heads_arrive_and_every_producer_is_released(
    tmp_path: Path, p: int, d: int, model: GroupModel, reads: bool
) -> None:
    async with kv_world(tmp_path, case(p, d, model)) as world:
        world.start("t1", reads=reads)
        ends = await world.ends("t1", reads=reads)
        assert ends == [("received", "acked")] * d + [("released", "acked")] * p
        world.check_bytes()


@BOTH_WAYS
async def test_hybrid_groups_and_block_sizes_in_one_transfer(tmp_path: Path, reads: bool) -> None:
    model = (
        GroupModel("mla", "NHD", 1, (18,), 1),
        GroupModel("kv_first", "HND", 4, (4,), 2, grow=1),
        GroupModel("state", "HND", 8, (6, 6, 9), 2),
    )
    slot = SideGroup(1, blocks=5, table=(3,))
    there = (prompt(45, 16, 7), prompt(45, 32, 7, kernel_tokens=8), slot)
    here = (prompt(45, 64, 2), prompt(45, 8, 9, skip=2, pad=5), replace(slot, table=(0,)))
    async with kv_world(tmp_path, Case(model, Side(2, there), Side(1, here))) as world:
        world.start("t1", reads=reads)
        ends = await world.ends("t1", reads=reads)
        assert ends == [("received", "acked"), ("released", "acked"), ("released", "acked")]
        world.check_bytes()


@BOTH_WAYS
async def test_uneven_sizes_are_served_where_both_sides_allow_it(
    tmp_path: Path, reads: bool
) -> None:
    uneven = case(2, 3, replace(ATTENTION, heads=6))
    async with kv_world(tmp_path, uneven, UNEVEN, UNEVEN) as world:
        world.start("t1", reads=reads)
        ends = await world.ends("t1", reads=reads)
        assert ends == [("received", "acked")] * 3 + [("released", "acked")] * 2
        world.check_bytes()


@pytest.mark.parametrize("allowing", ["prefill", "decode"])
async def test_uneven_sizes_are_refused_where_one_side_does_not_allow_them(
    tmp_path: Path, allowing: str
) -> None:
    uneven = case(2, 3, replace(ATTENTION, heads=6))
    async with kv_world(tmp_path, uneven, **{allowing: UNEVEN}) as world:
        for worker in world.producers:
            worker.client.publish("t1", worker.blocks)
        for worker in world.consumers:
            worker.client.pull(
                "t1", world.address, world.producers[0].blocks, worker.blocks, local_first=[1]
            )
            end = await worker.end_of("t1", "pull")
            assert (end.outcome, end.reason) == ("failed", "INVALID_TOPOLOGY")
            assert "2 (producer) and 3 (consumer)" in end.message


async def test_token_descriptors_over_the_limit_fail_naming_it(tmp_path: Path) -> None:
    nhd = case(2, 4, replace(ATTENTION, order="NHD"))
    limit = {"limits.max_token_spans": "100"}
    async with kv_world(tmp_path, nhd, decode=limit) as world:
        world.start("t1", reads=True)
        for worker in world.consumers:
            end = await worker.end_of("t1", "pull")
            assert (end.outcome, end.reason) == ("failed", "UNSUPPORTED_TOPOLOGY")
            assert "limits.max_token_spans is 100" in end.message


async def test_G7_one_group_that_differs_leaves_the_others_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = case(2, 2, ATTENTION, replace(ATTENTION, heads=2))
    names = iter(["uint8", "uint8"] * 2 + ["uint8", "float8_e4m3fn"] * 2 + ["uint8"] * 99)

    def described(**fields: object) -> KvGroup:
        return KvGroup(**{**fields, "dtype": next(names)})  # type: ignore[arg-type]

    monkeypatch.setattr("tests.support.kvmodel.KvGroup", described)
    async with kv_world(tmp_path, two) as world:
        world.start("t1", reads=True)
        for worker in world.consumers:
            end = await worker.end_of("t1", "pull")
            assert (end.outcome, end.reason) == ("failed", "GEOMETRY_MISMATCH")
            assert "dtype of group 1 (group1) is 'float8_e4m3fn' here and 'uint8'" in end.message
        for number, worker in enumerate(world.consumers):
            blocks = world.producers[number].blocks
            world.producers[number].client.publish("t2", [blocks[0], []])
            worker.client.pull(
                "t2", world.address, [blocks[0], []], [worker.blocks[0], []], local_first=[1, 0]
            )
            assert (await worker.end_of("t2", "pull")).outcome == "received"
            assert (await world.producers[number].end_of("t2", "publish")).outcome == "released"


async def test_G9_layer_that_is_never_written_is_not_waited_for(tmp_path: Path) -> None:
    three = case(2, 1, replace(ATTENTION, grow=5))
    async with kv_world(tmp_path, three) as world:
        (consumer,) = world.consumers
        untouched = consumer.memory[2].bytes.copy()
        consumer.client.reserve("t1", world.address, consumer.blocks, first=consumer.first)
        for worker in world.producers:
            worker.client.push("t1", worker.blocks, first=worker.first, remote_tp_size=1)
            worker.client.layer_ready("t1", [0])
            worker.client.layer_ready("t1", [1])
            worker.client.seal("t1", 2)
        end = await consumer.end_of("t1", "reserve")
        assert (end.outcome, end.n_layers) == ("received", 2)
        for worker in world.producers:
            assert (await worker.end_of("t1", "push")).outcome == "released"
        assert len(consumer.ended) == 1
        wanted = make_rank(three.model, three.consumer, 0, 2)
        write(wanted, 0, three.model, three.consumer, logical(three.model, 48, seed=7), [48])
        for layer in (0, 1):
            np.testing.assert_array_equal(consumer.memory[layer].bytes, wanted.regions[layer])
        np.testing.assert_array_equal(consumer.memory[2].bytes, untouched)


@BOTH_WAYS
async def test_offsets_above_4_gib_are_exact_on_sparse_memory(tmp_path: Path, reads: bool) -> None:
    gib = 1 << 30
    there, here = (prompt(45, 16, 7),), (prompt(45, 16, 9),)
    far = Case((ATTENTION,), Side(1, there, base=5 * gib), Side(2, here, base=6 * gib + 3))
    async with kv_world(tmp_path, far) as world:
        world.start("t1", reads=reads)
        ends = await world.ends("t1", reads=reads)
        assert ends == [("received", "acked")] * 2 + [("released", "acked")]
        world.check_bytes()
