"""Caches that differ, lists that do not fit, layers of several shapes. Cases G1 G3 G4 G7 G8 G9."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.core.geometry import KvGroup, KvLayer
from tests.support.lone import FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import make_groups, pack
from tests.support.world_helpers import Story

# --- G1 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remote", "local"), [((7, 8), (1, 2, 3)), ((7,), ()), ((), (1,)), ((7, 8, 9), (1, 2))]
)
def test_G1_lists_of_different_lengths_are_refused_with_both_and_the_next_transfer_works(
    remote, local
):
    story = Story()
    story.p.publish("t", (1, 2, 3))
    answer = story.d.pull("t", story.p_address, remote, local)
    assert isinstance(answer, req.Refused)
    assert answer.code == "LENGTH_MISMATCH"
    assert answer.fields["destination_blocks"] == len(local)
    assert answer.fields["source_blocks"] == len(remote)
    story.run()
    assert story.said == []
    assert story.ends(story.d) == []
    story.d.pull("t", story.p_address, (1, 2, 3), (4, 5, 6))
    story.run()
    assert story.outcomes_of(story.p, story.d) == [("released", "acked"), ("received", "acked")]


def test_G1_push_and_reservation_of_different_lengths_fail_on_both_sides_and_nothing_is_written():
    story = Story()
    before = story.d.memory.copy()
    story.d.reserve("t", story.p_address, (5, 6, 7))
    story.p.push("t", (1, 2))
    story.run()
    assert story.outcomes_of(story.p, story.d) == [("failed", "LENGTH_MISMATCH")] * 2
    assert (story.d.memory[:, :5] == before[:, :5]).all()
    story.assert_empty()


def test_G1_number_of_groups_that_differs_is_refused():
    worker = LoneWorker(Lone())
    peer = req.PeerAddress("127.0.0.1", 6301)
    two, one = (pack(1), pack(1)), (pack(1),)
    for body in (
        req.Publish("t", two),
        req.Push("t", two),
        req.Reserve("t", peer, two),
        req.Pull("t", peer, one, two),
        req.Pull("t", peer, two, one),
        req.Pull("t", peer, one, one, (0, 0)),
    ):
        assert worker.refusal(body).code == "LENGTH_MISMATCH"


# --- G3 -----------------------------------------------------------------------------------------


def test_G3_empty_read_is_done_at_once_and_the_producer_gets_one_ack():
    story = Story()
    story.p.publish("t1", (1, 2))
    story.d.pull("t1", story.p_address, (), ())
    assert story.ends(story.d) == [("pull", "t1", "received", "acked")]
    assert story.d.ended[0].n_bytes == 0
    story.run()
    assert story.times_said(msg.Ack) == 1
    assert story.ends(story.p) == [("publish", "t1", "released", "acked")]
    story.assert_empty()


def test_G3_empty_write_is_done_at_once_and_the_producer_is_let_go():
    story = Story()
    story.d.reserve("t1", story.p_address, ())
    assert story.ends(story.d) == [("reserve", "t1", "received", "acked")]
    story.p.push("t1", (1, 2))
    story.p.ask(req.LayerReady("t1", (0, 1)))
    story.p.ask(req.Seal("t1", 2))
    story.run()
    assert story.times_said(msg.WriteDone) == 1
    assert story.ends(story.p) == [("push", "t1", "released", "acked")]
    story.assert_empty()


# --- G4 -----------------------------------------------------------------------------------------

#: Blocks of the caches of rank 0 and rank 1, as in the report.
BLOCKS = (111_680, 111_488)


def groups_of(n_blocks: int) -> tuple[KvGroup, ...]:
    return make_groups(n_blocks, 1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("block", [111_487, 111_488, 111_500, 111_679, 111_680, 2**31])
def test_G4_ids_are_checked_against_the_very_rank_that_has_the_blocks(rank, block):
    limit = BLOCKS[rank]
    lone = Lone(rank, 2)
    worker = LoneWorker(lone, groups_of(limit))
    peer = req.PeerAddress("127.0.0.1", 6301)
    for body in (
        req.Publish("a", (pack(block),)),
        req.Push("b", (pack(block),)),
        req.Reserve("c", peer, (pack(block),)),
        req.Pull("d", peer, (pack(1),), (pack(block),)),
    ):
        answer = worker.ask(body)
        if block < limit:
            assert answer == req.Done()
        else:
            assert isinstance(answer, req.Refused)
            assert (answer.code, answer.retryable) == ("OUT_OF_RANGE", False)
            assert (answer.fields["id"], answer.fields["limit"]) == (block, limit)


def test_G4_consumer_with_more_blocks_than_the_producer_cannot_read_beyond_them():
    lone = Lone(1, 2)
    worker = LoneWorker(lone, groups_of(BLOCKS[1]))
    worker.send(req.Publish("t", (pack(111_487),)))
    peer = FarPeer(lone, 1, 2, groups=groups_of(BLOCKS[0])).dial()
    for block in (111_488, 111_679):
        peer.say(msg.Claim("t", new_id(), True, (pack(block),)))
        error = peer.got(msg.ClaimRefused).error
        assert error.code == "OUT_OF_RANGE"
        assert (error.fields["id"], error.fields["limit"]) == (block, 111_488)
    assert peer.claim("t", 111_487).transfer_id == "t"


@pytest.mark.parametrize(("block", "fails"), [(111_487, False), (111_488, True)])
def test_G4_producer_writes_to_no_block_that_the_consumers_rank_does_not_have(block, fails):
    lone = Lone(1, 2)
    worker = LoneWorker(lone, groups_of(BLOCKS[0]))
    worker.send(req.Push("t", (pack(5),)))
    peer = FarPeer(lone, 1, 2, groups=groups_of(BLOCKS[1])).dial()
    peer.reserve("t", block)
    peer.describe()
    assert lone.ended == ([("push", "t", "failed", "OUT_OF_RANGE")] if fails else [])
    worker.ask(req.LayerReady("t", (0,)))
    assert bool(lone.ever(ef.PostOp)) is not fails


def test_G4_destination_named_twice_is_refused_and_a_source_may_be():
    worker = LoneWorker(Lone())
    peer = req.PeerAddress("127.0.0.1", 6301)
    twice = (pack(5, 5),)
    for body in (req.Pull("t", peer, (pack(1, 2),), twice), req.Reserve("t", peer, twice)):
        assert worker.refusal(body).code == "INVALID_ARGUMENT"
    for body in (
        req.Publish("a", twice),
        req.Push("b", twice),
        req.Pull("c", peer, twice, (pack(1, 2),)),
    ):
        assert worker.ask(body) == req.Done()


# --- G7 G8 ----------------------------------------------------------------------------------------


def cache(**changes: object) -> tuple[KvGroup, ...]:
    """One fused layer of bf16, 32,768 bytes a block, with some things changed."""
    piece = int(changes.pop("piece_bytes", 32_768))  # type: ignore[call-overload]
    layers = int(changes.pop("layers", 1))  # type: ignore[call-overload]
    n_blocks = int(changes.pop("num_blocks", 113))  # type: ignore[call-overload]
    made = tuple(
        KvLayer(f"layer.{i}", 0, i * n_blocks * piece, piece, 0, piece) for i in range(layers)
    )
    group = KvGroup("kv", "fused", "NHD", "bfloat16", 16, n_blocks, 8, 128, made)
    return (replace(group, **changes),)  # type: ignore[arg-type]


CHANGES = [
    ({"piece_bytes": 16_384}, "piece_bytes", 32_768, 16_384),
    ({"dtype": "float8_e4m3fn"}, "dtype", "bfloat16", "float8_e4m3fn"),
    ({"dtype": "float8_e4m3fnuz"}, "dtype", "bfloat16", "float8_e4m3fnuz"),
    ({"head_size": 64}, "head_size", 128, 64),
    ({"head_order": "HND"}, "head_order", "NHD", "HND"),
    ({"block_tokens": 24}, "block_tokens", 16, 24),
    ({"layers": 2}, "layers", 1, 2),
    ({"layout": "mla"}, "layout", "fused", "mla"),
    ({"content": "2 physical blocks each"}, "content", "", "2 physical blocks each"),
]


@pytest.mark.parametrize(("changes", "field", "ours", "theirs"), CHANGES)
def test_G7_read_from_a_cache_that_differs_names_both_values_and_other_peers_are_served(
    changes, field, ours, theirs
):
    lone = Lone(instance="D")
    worker = LoneWorker(lone, cache())
    other = FarPeer(lone, instance="P", groups=cache(**changes))
    worker.send(req.Pull("t", other.address, (pack(1),), (pack(1),)))
    other.welcome()
    other.grant()
    other.describe()
    (told,) = lone.of(ef.SendEvent)
    assert (told.body.outcome, told.body.reason) == ("failed", "GEOMETRY_MISMATCH")
    for word in (field, repr(ours), repr(theirs)):
        assert word in told.body.message
    assert lone.ever(ef.PostOp) == lone.ever(ef.OpenSession) == []
    assert other.got(msg.Ack).ok is False

    good = FarPeer(lone, 0, 1, instance="P2", groups=cache())
    address = replace(good.address, base_port=7301)
    worker.send(req.Pull("u", address, (pack(1),), (pack(1),)))
    route = lone.one(ef.OpenRoute).route
    good.route = route
    hello = lone.ever_sent(msg.Hello)[-1]
    good.say(msg.Welcome(hello.nonce, 1, good.identity, ("shm",)))
    good.grant()
    good.describe()
    lone.op_ended(lone.one(ef.PostOp))
    good.confirm()
    assert lone.ended == [("pull", "u", "received", "acked")]


@pytest.mark.parametrize(("changes", "field", "ours", "theirs"), CHANGES)
def test_G7_write_to_a_cache_that_differs_fails_on_both_sides_before_anything_is_written(
    changes, field, ours, theirs
):
    lone = Lone()
    worker = LoneWorker(lone, cache())
    peer = FarPeer(lone, groups=cache(**changes)).dial()
    worker.send(req.Push("t", (pack(1),)))
    worker.send(req.LayerReady("t", (0,)))
    peer.reserve("t", 5)
    peer.describe()
    assert lone.ended == [("push", "t", "failed", "GEOMETRY_MISMATCH")]
    failed = peer.got(msg.WriteFailed).error
    assert failed.fields["field"] == field
    assert (failed.fields["local"], failed.fields["remote"]) == (ours, theirs)
    assert lone.ever(ef.PostOp) == []


def test_G8_number_of_blocks_may_differ():
    lone = Lone(instance="D")
    worker = LoneWorker(lone, cache(num_blocks=113))
    peer = FarPeer(lone, instance="P", groups=cache(num_blocks=211))
    worker.send(req.Pull("t", peer.address, (pack(210),), (pack(112),)))
    peer.welcome()
    peer.grant()
    peer.describe()
    op = lone.one(ef.PostOp)
    (layer,) = op.plan.layers
    assert (int(layer.spans.local[0]), int(layer.spans.remote[0])) == (112 * 32_768, 210 * 32_768)


# --- G9 -----------------------------------------------------------------------------------------

KEY_BYTES = 132 * 64


def hybrid(n_blocks: int) -> tuple[KvGroup, ...]:
    """A with K and V, B with keys only, C that nobody writes; each with its own block table."""
    at_b = 2 * n_blocks * 4096
    at_c = at_b + n_blocks * KEY_BYTES
    a = KvLayer("a", 0, 0, 4096, n_blocks * 4096, 4096)
    b = KvLayer("b", 0, at_b, KEY_BYTES, 0, KEY_BYTES)
    c = KvLayer("c", 0, at_c, 64, 0, 64)
    return (
        KvGroup("attention", "kv_first", "NHD", "bfloat16", 16, n_blocks, 1, 128, (a,)),
        KvGroup("indexer", "mla", "NHD", "uint8", 64, n_blocks, 1, 132, (b,)),
        KvGroup("state", "mla", "NHD", "uint8", 1, n_blocks, 1, 64, (c,)),
    )


def test_G9_each_layer_is_planned_by_its_own_shape_and_only_sealed_layers_are_waited_for():
    lone = Lone()
    worker = LoneWorker(lone, hybrid(32))
    peer = FarPeer(lone, groups=hybrid(20)).dial()
    blocks = (pack(3, 5), pack(4), pack())
    assert worker.ask(req.Push("t", blocks)) == req.Done()
    theirs = (pack(7, 2), pack(9), pack())
    grant = msg.Grant("t", new_id(), peer.generation, True, theirs, ())
    peer.say(grant)
    peer.describe()

    worker.ask(req.LayerReady("t", (0,)))
    first = lone.one(ef.PostOp)
    (layer,) = first.plan.layers
    assert (layer.local_offset, layer.remote_offset) == (0, 0)
    assert list(layer.spans.local) == [3 * 4096, 5 * 4096, (32 + 3) * 4096, (32 + 5) * 4096]
    assert list(layer.spans.remote) == [7 * 4096, 2 * 4096, (20 + 7) * 4096, (20 + 2) * 4096]
    assert set(layer.spans.sizes) == {4096}

    worker.ask(req.LayerReady("t", (1,)))
    second = lone.one(ef.PostOp)
    (layer,) = second.plan.layers
    assert (layer.local_offset, layer.remote_offset) == (2 * 32 * 4096, 2 * 20 * 4096)
    assert (list(layer.spans.local), list(layer.spans.remote)) == ([4 * KEY_BYTES], [9 * KEY_BYTES])
    assert list(layer.spans.sizes) == [KEY_BYTES]

    lone.op_ended(first)
    lone.op_ended(second)
    assert lone.ever_sent(msg.WriteDone) == []  # both are written, and nobody has sealed
    assert lone.ended == []
    worker.ask(req.Seal("t", 2))
    done = peer.got(msg.WriteDone)
    assert done == msg.WriteDone("t", grant.grant_id, 2, 4 * 4096 + KEY_BYTES)
    assert lone.ended == [("push", "t", "released", "acked")]
    lone.wait(0.0)
    assert lone.effects == ()


def test_G9_read_of_layers_of_several_shapes_is_one_plan_with_an_offset_for_each():
    lone = Lone(instance="D")
    worker = LoneWorker(lone, hybrid(20))
    peer = FarPeer(lone, instance="P", groups=hybrid(32))
    remote, local = (pack(3), pack(4), pack(6)), (pack(7), pack(9), pack(1))
    worker.send(req.Pull("t", peer.address, remote, local))
    peer.welcome()
    peer.grant()
    peer.describe()
    plan = lone.one(ef.PostOp).plan
    assert [(x.local_offset, x.remote_offset) for x in plan.layers] == [
        (0, 0),
        (2 * 20 * 4096, 2 * 32 * 4096),
        (2 * 20 * 4096 + 20 * KEY_BYTES, 2 * 32 * 4096 + 32 * KEY_BYTES),
    ]
    assert [list(x.spans.local) for x in plan.layers] == [
        [7 * 4096, 27 * 4096],
        [9 * KEY_BYTES],
        [64],
    ]
    assert plan.n_bytes == 2 * 4096 + KEY_BYTES + 64


def test_G3_group_that_is_a_full_hit_is_left_out_while_another_is_read():
    lone = Lone(instance="D")
    worker = LoneWorker(lone, hybrid(20))
    peer = FarPeer(lone, instance="P", groups=hybrid(20))
    request = req.Pull(
        "t",
        peer.address,
        (pack(1, 2), pack(4), pack()),
        (pack(), pack(9), pack()),
        local_first=(2, 0, 0),
    )
    worker.send(request)
    peer.welcome()
    assert peer.got(msg.Claim).blocks == (b"", pack(4), b"")
    peer.grant()
    peer.describe()
    plan = lone.one(ef.PostOp).plan
    assert len(plan.layers) == 1
    assert plan.n_bytes == KEY_BYTES
