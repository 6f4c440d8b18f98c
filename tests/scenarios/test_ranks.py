"""Which rank talks to which, played out. Cases R1 R2 R3 R4 R5 R6 R7 P3."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.core.geometry import KvGroup, KvLayer
from tests.support.lone import FarPeer, Lone, LoneWorker
from tests.support.sim import BASE_PORT, N_LAYERS, pack
from tests.support.world_helpers import Story

RECEIVED = ("reserve", "t", "received", "acked")


def write(story: Story, address: req.PeerAddress, **of_push: object) -> None:
    """A WRITE of the whole group, up to its end."""
    for worker in story.d_workers:
        worker.reserve("t", address, (5, 6))
    for worker in story.p_workers:
        worker.push("t", (1, 2), **of_push)
    story.run()
    for worker in story.p_workers:
        worker.ask(req.LayerReady("t", tuple(range(N_LAYERS))))
        worker.ask(req.Seal("t", N_LAYERS))
    story.finish_ops()


@pytest.mark.parametrize("remote_tp_size", [0, 1, 8])
def test_R1_eight_ranks_write_to_eight_ranks_whatever_the_push_says_of_their_number(remote_tp_size):
    story = Story(8, 8)
    write(story, replace(story.p_address, tp_size=0), remote_tp_size=remote_tp_size)
    for rank, worker in enumerate(story.d_workers):
        (promise,) = story.promises["push", "t", rank]
        assert story.bytes_of(worker, 5, 6) == promise.tobytes()
    story.run()
    assert story.ends(*story.d_workers) == [RECEIVED] * 8
    grants = {line for line in story.said if line.endswith(" Grant")}
    assert grants == {f"D{rank}>P{rank} Grant" for rank in range(8)}
    story.assert_empty()


def test_R1_wrong_size_1_of_a_router_is_a_mismatch_and_never_rank_0_for_all():
    story = Story(8, 8)
    wrong = replace(story.p_address, tp_size=1)
    for worker in story.p_workers:
        worker.publish("t", (1, 2))
    for worker in story.d_workers:
        worker.reserve("w", wrong, (5, 6))
        worker.pull("t", wrong, (1, 2), (7, 8))
    story.run()
    for worker in story.d_workers:
        assert sorted(story.ends(worker)) == [
            ("pull", "t", "failed", "TOPOLOGY_MISMATCH"),
            ("reserve", "w", "failed", "TOPOLOGY_MISMATCH"),
        ]
    assert story.times_said(msg.Grant) == story.times_said(msg.Claim) == 0
    assert story.ends(*story.p_workers) == []


def test_R1_published_size_1_still_waits_for_every_rank_of_the_handshake():
    story = Story(1, 4)
    story.p.publish("t", (1,), remote_tp_size=1)
    for worker in story.d_workers[:3]:
        worker.pull("t", story.p_address, (1,), (5,))
    story.run()
    assert story.prefill[0].problems == ["tp_size_disagrees"]
    assert story.ends(story.p) == []
    story.d_workers[3].pull("t", story.p_address, (1,), (5,))
    story.run()
    assert story.outcomes_of(story.p) == [("released", "acked")]


@pytest.mark.parametrize(
    ("prefill", "decode", "sources"),
    [
        (4, 8, [0, 0, 1, 1, 2, 2, 3, 3]),
        (8, 4, [0, 2, 4, 6]),
        (2, 8, [0, 0, 0, 0, 1, 1, 1, 1]),
        (8, 1, [0]),
        (3, 6, [0, 0, 1, 1, 2, 2]),
        (6, 3, [0, 2, 4]),
        (4, 4, [0, 1, 2, 3]),
    ],
)
def test_R2_every_decode_rank_reads_the_listed_prefill_rank_and_no_message_goes_elsewhere(
    prefill, decode, sources
):
    story = Story(prefill, decode)
    for worker in story.p_workers:
        worker.publish("t", (1,))
    for worker in story.d_workers:
        worker.pull("t", story.p_address, (1,), (5,))
    dialled = [sorted(daemon.routes.values()) for daemon in story.decode]
    share = max(1, prefill // decode)
    assert dialled == [[BASE_PORT + p for p in range(source, source + share)] for source in sources]
    story.run(copies=False)
    read = {(op.daemon.rank, op.peer.rank) for op in story.ops.values()}
    assert read == set(enumerate(sources))
    story.run()
    assert story.outcomes_of(*story.p_workers) == [("released", "acked")] * prefill
    assert story.outcomes_of(*story.d_workers) == [("received", "acked")] * decode


@pytest.mark.parametrize(("ours", "theirs"), [(4, 6), (6, 4), (3, 8), (8, 3), (5, 2), (8, 6)])
def test_R2_sizes_that_are_no_multiples_are_refused_by_name_and_the_daemon_serves_on(ours, theirs):
    lone = Lone(ours - 1, ours, instance="D")
    worker = LoneWorker(lone)
    peer = req.PeerAddress("127.0.0.1", BASE_PORT, theirs)
    bodies = (
        req.Pull("t", peer, (pack(1),), (pack(1),)),
        req.Reserve("t", peer, (pack(1),)),
        req.Reject("t", peer),
        req.Publish("t", (pack(1),), remote_tp_size=theirs),
        req.Push("t", (pack(1),), remote_tp_size=theirs),
    )
    for body in bodies:
        refusal = worker.refusal(body)
        assert refusal.code == "INVALID_TOPOLOGY"
        assert set(refusal.fields.values()) == {str(ours), str(theirs)}
        assert "multiple" in refusal.message
    assert lone.ever(ef.OpenRoute) == []
    assert worker.ask(req.Publish("t", (pack(1),), remote_tp_size=ours)) == req.Done()


def gqa(heads: int, tp_size: int) -> tuple[KvGroup, ...]:
    """A cache of one layer whose rank holds its share of the heads, or one replicated head."""
    piece = 8 * max(1, heads // tp_size)
    layer = KvLayer("layer.0", 0, 0, 2 * piece, piece, piece)
    return (KvGroup("kv", "block_first", "HND", "uint8", 1, 8, heads, 8, (layer,)),)


@pytest.mark.parametrize(
    ("local", "remote", "heads", "ports"),
    [
        (4, 4, 8, [3]),
        (8, 4, 4, [3]),
        (4, 8, 4, [6, 7]),
        (4, 2, 4, [1]),
        (2, 4, 4, [2, 3]),
        (4, 1, 2, [0]),
    ],
)
def test_R5_pairs_whose_ranks_hold_other_heads_dial_the_ranks_that_hold_or_owe_them(
    local, remote, heads, ports
):
    peer = req.PeerAddress("127.0.0.1", BASE_PORT, remote)
    for body in (
        req.Pull("t", peer, (pack(1),), (pack(1),)),
        req.Reserve("t", peer, (pack(1),)),
    ):
        lone = Lone(local - 1, local, instance="D")
        assert LoneWorker(lone, gqa(heads, local)).ask(body) == req.Done()
        assert [one.port - BASE_PORT for one in lone.ever(ef.OpenRoute)] == ports


def test_R5_pairs_whose_heads_do_not_divide_are_refused_before_any_descriptor():
    lone = Lone(3, 4, instance="D")
    worker = LoneWorker(lone, gqa(6, 4))
    peer = req.PeerAddress("127.0.0.1", BASE_PORT, 2)
    refusal = worker.refusal(req.Pull("t", peer, (pack(1),), (pack(1),)))
    assert refusal.code == "INVALID_TOPOLOGY"
    assert (refusal.fields["tp_size"], refusal.fields["total_kv_heads"]) == (4, 6)
    assert lone.ever(ef.OpenRoute) == []


def test_R5_two_heads_on_one_prefill_rank_are_two_slices_for_four_decode_ranks():
    """Each decode rank gets the one head it holds, never an address behind the region."""
    lone = Lone()
    worker = LoneWorker(lone, gqa(2, 1))
    worker.send(req.Push("t", (pack(1),), remote_tp_size=4))
    worker.send(req.LayerReady("t", (0,)))
    found = []
    for rank in range(4):
        peer = FarPeer(lone, rank, 4, groups=gqa(2, 4)).dial()
        peer.reserve("t", 5)
        peer.describe()
        plan = lone.one(ef.PostOp).plan
        found.append([int(layer.spans.local[0]) for layer in plan.layers])
        assert plan.n_bytes * 2 == sum(
            layer.pieces * layer.piece_bytes for layer in gqa(2, 1)[0].layers
        )
    assert found[0] == found[1] != found[2] == found[3]


def test_R4_ranks_of_the_second_host_are_dialled_there():
    hosts = ("10.0.0.1", "10.0.0.2")
    peer = req.PeerAddress(hosts[0], BASE_PORT, 16, node_hosts=hosts)
    for rank, host in ((0, hosts[0]), (7, hosts[0]), (8, hosts[1]), (15, hosts[1])):
        lone = Lone(rank, 16, instance="D")
        worker = LoneWorker(lone)
        worker.send(req.Pull("t", peer, (pack(1),), (pack(1),)))
        route = lone.one(ef.OpenRoute)
        assert (route.host, route.port) == (host, BASE_PORT + rank)


def test_R4_hosts_that_do_not_divide_the_group_are_refused_and_never_the_head_host():
    worker = LoneWorker(Lone(15, 16, instance="D"))
    hosts = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    peer = req.PeerAddress(hosts[0], BASE_PORT, 16, node_hosts=hosts)
    refusal = worker.refusal(req.Pull("t", peer, (pack(1),), (pack(1),)))
    assert refusal.code == "INVALID_TOPOLOGY"
    assert refusal.fields == {"tp_size": 16, "hosts": 3}


def dp_pull(dp_rank: int) -> tuple[Lone, LoneWorker, FarPeer]:
    """A decode rank pulls from (dp rank, tp 0) of an instance of DP 8; its router says DP 1."""
    lone = Lone(instance="D")
    worker = LoneWorker(lone)
    peer = FarPeer(lone, 0, 1, instance="P", dp=(dp_rank, 8))
    address = req.PeerAddress("127.0.0.1", BASE_PORT, 1, dp_size=1, dp_rank=dp_rank)
    worker.send(req.Pull("t", address, (pack(1),), (pack(1),)))
    return lone, worker, peer


def test_R6_dp_rank_is_dialled_by_its_rank_whatever_the_router_says_of_the_size():
    lone, _, peer = dp_pull(5)
    assert lone.one(ef.OpenRoute).port == BASE_PORT + 5
    peer.welcome()
    assert peer.got(msg.Claim).reads is True


@pytest.mark.parametrize("answers", [7, 0])
def test_R6_dp_rank_that_the_instance_does_not_have_is_invalid_and_never_another_rank(answers):
    lone, worker, _ = dp_pull(8)
    route = lone.one(ef.OpenRoute)
    assert route.port == BASE_PORT + 8
    other = FarPeer(lone, 0, 1, instance="P", dp=(answers, 8))
    (hello,) = lone.ever_sent(msg.Hello)
    other.route = route.route
    other.say(msg.Welcome(hello.nonce, 1, other.identity, ("shm",)))
    (told,) = lone.of(ef.SendEvent)
    assert (told.body.outcome, told.body.reason) == ("failed", "INVALID_TOPOLOGY")
    assert "8" in told.body.message
    assert lone.ever_sent(msg.Claim) == []
    assert worker.ask(req.Publish("u", (pack(1),))) == req.Done()


def test_R6_another_dp_rank_of_the_instance_at_that_port_is_a_wrong_peer():
    lone, _, _ = dp_pull(5)
    other = FarPeer(lone, 0, 1, instance="P", dp=(4, 8))
    (hello,) = lone.ever_sent(msg.Hello)
    other.route = lone.one(ef.OpenRoute).route
    other.say(msg.Welcome(hello.nonce, 1, other.identity, ("shm",)))
    assert lone.ended == [("pull", "t", "failed", "WRONG_PEER")]


def test_P3_daemon_that_reaches_itself_fails_at_once_and_serves_on():
    story = Story()
    own = story.decode[0].port
    start = story.now
    story.d.pull("t", req.PeerAddress("127.0.0.1", own), (1,), (5,))
    story.d.reserve("u", req.PeerAddress("127.0.0.1", own), (6,))
    story.run()
    assert sorted(story.ends(story.d)) == [
        ("pull", "t", "failed", "SELF_CONNECT"),
        ("reserve", "u", "failed", "SELF_CONNECT"),
    ]
    assert story.now == start
    story.p.publish("t", (1,))
    story.d.pull("t", story.p_address, (1,), (5,))
    story.run()
    assert story.outcomes_of(story.p) == [("released", "acked")]


def test_P3_prefill_instance_that_answers_as_another_rank_is_a_wrong_peer():
    """An advertised address that leads to a neighbour is no silent wait either."""
    story = Story(2, 2)
    shifted = replace(story.p_address, base_port=BASE_PORT + 1)
    story.d_workers[0].pull("t", shifted, (1,), (5,))
    story.run()
    assert story.ends(story.d_workers[0]) == [("pull", "t", "failed", "WRONG_PEER")]
