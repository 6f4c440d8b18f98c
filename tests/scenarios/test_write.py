"""WRITE from the first message to the last: what is said, to whom, and what is left behind."""

from __future__ import annotations

import random

import pytest

from moriiod.core import messages as msg
from moriiod.core import requests as req
from tests.support.sim import N_LAYERS, Worker
from tests.support.world_helpers import Story

RELEASED = ("push", "t", "released", "acked")
RECEIVED = ("reserve", "t", "received", "acked")

#: What a consumer rank and the producer rank that writes to it say to each other.
WRITE = [
    "{c}>{p} Hello",
    "{p}>{c} Welcome",
    "{c}>{p} Grant",
    "{p}>{c} LayoutRequest",
    "{p}>{c} GrantAccepted",
    "{c}>{p} LayoutReply",
    "{p}>{c} WriteDone",
    "{c}>{p} WriteConfirmed",
]
#: The same where nothing is written, and the producer rank is only let go.
RELEASE = [line for line in WRITE if "Layout" not in line]


def spoken(lines: list[str], consumer: str, producer: str) -> list[str]:
    return [line.format(c=consumer, p=producer) for line in lines]


def reserve_everywhere(story: Story, *blocks: int, **more: object) -> None:
    for worker in story.d_workers:
        assert worker.reserve("t", story.p_address, blocks, **more) == req.Done()


def push_everywhere(story: Story, *blocks: int, **more: object) -> None:
    for worker in story.p_workers:
        assert worker.push("t", blocks, **more) == req.Done()


def fill(*workers: Worker) -> None:
    """Say that every layer is ready, one by one, and seal."""
    for worker in workers:
        for layer in range(N_LAYERS):
            assert worker.ask(req.LayerReady("t", (layer,))) == req.Done()
        assert worker.ask(req.Seal("t", N_LAYERS)) == req.Done()


def write_everything(story: Story) -> None:
    reserve_everywhere(story, 9, 8)
    push_everywhere(story, 1, 2)
    story.run()
    fill(*story.p_workers)


def check_bytes(story: Story, sources: list[int], *blocks: int) -> None:
    """Every decode rank holds what its own prefill rank promised."""
    for worker, p in zip(story.d_workers, sources, strict=True):
        (promise,) = story.promises["push", "t", p]
        assert story.bytes_of(worker, *blocks) == promise.tobytes()


def test_R7_prefill_4_to_decode_8_fills_every_rank_and_says_exactly_this():
    story = Story(4, 8)
    write_everything(story)
    story.finish_ops()
    sources = [0, 0, 1, 1, 2, 2, 3, 3]
    check_bytes(story, sources, 9, 8)
    story.run()
    expected = []
    for c, p in enumerate(sources):
        assert story.said_with(f"D{c}", f"P{p}") == spoken(WRITE, f"D{c}", f"P{p}")
        expected += spoken(WRITE, f"D{c}", f"P{p}")
    assert sorted(story.said) == sorted(expected)  # exactly one write_done each, and no stranger
    assert story.ends() == [RELEASED] * 4 + [RECEIVED] * 8
    assert {worker.ended[0].n_layers for worker in story.workers} == {N_LAYERS}
    story.assert_empty()


def test_R7_four_transfers_at_once_reach_every_rank_whole():
    story = Story(4, 8)
    names = ("a", "b", "c", "d")
    for i, name in enumerate(names):
        for worker in story.d_workers:
            worker.reserve(name, story.p_address, (3 * i, 3 * i + 1))
        for worker in story.p_workers:
            worker.push(name, (3 * i, 3 * i + 1))
    story.run()
    for name in names:
        for worker in story.p_workers:
            worker.ask(req.LayerReady(name, tuple(range(N_LAYERS))))
            worker.ask(req.Seal(name, N_LAYERS))
    story.run()  # the world compares the bytes of each reservation when it is received
    for worker in story.d_workers:
        assert sorted(e.transfer_id for e in worker.ended) == list(names)
        assert {e.outcome for e in worker.ended} == {"received"}
    story.assert_empty()


def test_prefill_8_to_decode_4_lets_the_ranks_go_that_write_nothing():
    story = Story(8, 4)
    write_everything(story)
    story.finish_ops()
    check_bytes(story, [0, 2, 4, 6], 9, 8)
    story.run()
    expected = []
    for p in range(8):
        lines = WRITE if p % 2 == 0 else RELEASE
        assert story.said_with(f"D{p // 2}", f"P{p}") == spoken(lines, f"D{p // 2}", f"P{p}")
        expected += spoken(lines, f"D{p // 2}", f"P{p}")
    assert sorted(story.said) == sorted(expected)
    assert story.ends() == [RELEASED] * 8 + [RECEIVED] * 4
    story.assert_empty()


def test_push_that_comes_first_waits_for_the_grant_and_writes_what_is_ready_then():
    story = Story()
    push_everywhere(story, 1, 2)
    assert story.p.ask(req.LayerReady("t", (0,))) == req.Done()
    story.run()
    assert story.said == []
    reserve_everywhere(story, 9, 8)
    story.run(copies=False)
    (op,) = story.ops.values()
    assert len(op.plan.layers) == 1
    assert story.p.ask(req.LayerReady("t", (1,))) == req.Done()
    assert story.p.ask(req.Seal("t", 2)) == req.Done()
    story.run()
    assert story.ends() == [RELEASED, RECEIVED]
    story.assert_empty()


def test_layers_are_written_one_by_one_while_prefill_still_runs():
    story = Story()
    reserve_everywhere(story, 9)
    push_everywhere(story, 1)
    story.run()
    (promise,) = story.promises["push", "t", 0]
    for layer in (1, 0):
        assert story.p.ask(req.LayerReady("t", (layer,))) == req.Done()
        assert story.p.ask(req.LayerReady("t", (layer,))) == req.Done()  # said twice
        story.run()
        assert story.d.memory[layer, 9].tobytes() == promise[layer, 0].tobytes()
        assert story.ends() == []
    story.p.ask(req.Seal("t", 2))
    story.run()
    assert story.ends() == [RELEASED, RECEIVED]


def test_partial_prefix_hit_writes_by_position_and_nothing_else():
    story = Story()
    reserve_everywhere(story, 9, first=(2,))
    push_everywhere(story, 1, 2, 3)
    story.run()
    fill(story.p)
    story.finish_ops()
    (promise,) = story.promises["push", "t", 0]
    assert story.bytes_of(story.d, 9) == promise[:, 2:].tobytes()
    story.run()
    assert story.ends() == [RELEASED, RECEIVED]
    assert story.p.ended[0].n_bytes == story.d.ended[0].n_bytes == promise[:, 2:].nbytes


def test_G3_full_prefix_hit_writes_nothing_and_lets_the_producer_go():
    story = Story(2, 2)
    reserve_everywhere(story)
    assert story.ends(*story.d_workers) == [RECEIVED] * 2
    push_everywhere(story, 1, 2)
    story.run()
    fill(*story.p_workers)
    story.run()
    for rank in range(2):
        lines = spoken(RELEASE, f"D{rank}", f"P{rank}")
        assert story.said_with(f"D{rank}", f"P{rank}") == lines
    assert story.ends(*story.p_workers) == [RELEASED] * 2
    assert [worker.ended[0].n_bytes for worker in story.workers] == [0] * 4
    story.assert_empty()


@pytest.mark.parametrize("seed", range(8))
def test_everything_twice_and_in_any_order_changes_nothing(seed):
    story, dice = Story(2, 4, seed=seed), random.Random(seed)
    reserve_everywhere(story, 5, 6)
    push_everywhere(story, 1, 2)
    fill(*story.p_workers)
    twice: set[int] = set()
    for _ in range(5000):
        if story.local_step():
            continue
        if story.net:
            index = dice.randrange(len(story.net))
            message = story.net[index]
            keep = id(message) not in twice
            twice.add(id(message))
            story.deliver(index, keep=keep)
        elif story.ops:
            story.copy(dice.choice(list(story.ops.values())), spans=1)
        else:
            break
    assert story.ends() == [RELEASED] * 2 + [RECEIVED] * 4
    story.live_for(10.0)
    story.assert_empty()


@pytest.mark.parametrize(("prefill", "decode"), [(8, 4), (4, 8)])
def test_R2_abort_by_the_producers_reaches_every_consumer_rank_and_ends_it_once(prefill, decode):
    story = Story(prefill, decode)
    reserve_everywhere(story, 9)
    push_everywhere(story, 1)
    story.run()
    for worker in story.p_workers:
        assert worker.ask(req.Abort("t", "push")) == req.Done()
    story.run()
    assert story.outcomes_of(*story.d_workers) == [("failed", "ABORTED")] * decode
    assert story.outcomes_of(*story.p_workers) == [("failed", "ABORTED")] * prefill
    told = {line for line in story.said if line.endswith(" WriteFailed")}
    share = max(1, prefill // decode)
    assert told == {
        f"P{p}>D{c} WriteFailed"
        for p in range(prefill)
        for c in range(decode)
        if (p // share == c if prefill > decode else c * prefill // decode == p)
    }
    story.assert_empty()


@pytest.mark.parametrize(("prefill", "decode"), [(8, 4), (4, 8)])
def test_R2_abort_by_the_consumers_reaches_every_producer_rank_once(prefill, decode):
    story = Story(prefill, decode)
    reserve_everywhere(story, 9)
    push_everywhere(story, 1)
    story.run()
    for worker in story.d_workers:
        assert worker.ask(req.Abort("t", "reserve")) == req.Done()
    story.run()
    assert story.times_said(msg.RevokeGrant) == max(prefill, decode)
    assert story.outcomes_of(*story.p_workers) == [("released", "aborted")] * prefill
    assert story.outcomes_of(*story.d_workers) == [("failed", "ABORTED")] * decode
    story.assert_empty()
