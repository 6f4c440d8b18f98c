"""READ from the first message to the last: what is said, to whom, and what is left behind."""

from __future__ import annotations

import random

import pytest

from moriiod.core import messages as msg
from moriiod.core import requests as req
from tests.support.world_helpers import Story

RELEASED = ("publish", "t", "released", "acked")
RECEIVED = ("pull", "t", "received", "acked")

#: What a consumer rank and the producer rank that it reads say to each other.
READ = [
    "{c}>{p} Hello",
    "{p}>{c} Welcome",
    "{c}>{p} Claim",
    "{p}>{c} ClaimGranted",
    "{c}>{p} LayoutRequest",
    "{p}>{c} LayoutReply",
    "{c}>{p} Ack",
    "{p}>{c} AckConfirmed",
]
#: The same where nothing is read, and the producer rank is only released.
RELEASE = [line for line in READ if "Layout" not in line]


def spoken(lines: list[str], consumer: str, producer: str) -> list[str]:
    return [line.format(c=consumer, p=producer) for line in lines]


def publish_everywhere(story: Story, *blocks: int, name: str = "t") -> None:
    for worker in story.p_workers:
        assert worker.publish(name, blocks) == req.Done()


def pull_everywhere(
    story: Story, remote: tuple[int, ...], local: tuple[int, ...], **more: object
) -> None:
    for worker in story.d_workers:
        assert worker.pull("t", story.p_address, remote, local, **more) == req.Done()


def test_prefill_4_to_decode_8_says_exactly_this():
    story = Story(4, 8)
    publish_everywhere(story, 1, 2, 3)
    pull_everywhere(story, (1, 2, 3), (9, 8, 7))
    story.run()
    expected = []
    for c, p in enumerate([0, 0, 1, 1, 2, 2, 3, 3]):
        assert story.said_with(f"D{c}", f"P{p}") == spoken(READ, f"D{c}", f"P{p}")
        expected += spoken(READ, f"D{c}", f"P{p}")
        source = story.p_workers[p]
        (promise,) = story.promises["publish", "t", p]
        assert story.d_workers[c].ended[0].n_bytes == promise.nbytes
        assert source.ended[0].outcome == "released"
    assert sorted(story.said) == sorted(expected)
    assert story.ends() == [RELEASED] * 4 + [RECEIVED] * 8
    story.assert_empty()


def test_prefill_8_to_decode_4_releases_the_ranks_that_nobody_reads_by_a_word_and_no_timer():
    story = Story(8, 4)
    publish_everywhere(story, 1, 2)
    pull_everywhere(story, (1, 2), (5, 6))
    start = story.now
    story.run()
    assert story.now == start
    expected = []
    for p in range(8):
        lines = READ if p % 2 == 0 else RELEASE
        expected += spoken(lines, f"D{p // 2}", f"P{p}")
        assert story.said_with(f"D{p // 2}", f"P{p}") == spoken(lines, f"D{p // 2}", f"P{p}")
    assert sorted(story.said) == sorted(expected)
    assert story.ends() == [RELEASED] * 8 + [RECEIVED] * 4
    story.assert_empty()


def test_second_transfer_needs_neither_handshake_nor_layout():
    story = Story(2, 2)
    for name in ("a", "b"):
        publish_everywhere(story, 1, name=name)
        for worker in story.d_workers:
            worker.pull(name, story.p_address, (1,), (5,))
        story.run()
    again = [line for line in READ if not line.endswith(("Hello", "Welcome", "Request", "Reply"))]
    assert story.said_with("D1", "P1") == spoken([*READ, *again], "D1", "P1")


def test_partial_prefix_hit_reads_by_position_and_nothing_else():
    story = Story()
    story.p.publish("t", (1, 2, 3, 4))
    (promise,) = story.promises["publish", "t", 0]
    story.d.pull("t", story.p_address, (1, 2, 3, 4), (9, 7), local_first=(2,))
    story.run_but(msg.AckConfirmed)
    got = story.bytes_of(story.d, 9, 7)
    assert got == promise[:, 2:].tobytes()
    (claim,) = [line for line in story.said if "Claim" in line and "Granted" not in line]
    story.run()
    assert story.d.ended[0].n_bytes == len(got)
    assert story.ends() == [RELEASED, RECEIVED]
    assert claim == "D0>P0 Claim"


def test_both_sides_may_start_anywhere_as_long_as_they_end_together():
    story = Story()
    story.p.publish("t", (1, 2, 3))  # positions 4 to 6
    (promise,) = story.promises["publish", "t", 0]
    story.d.pull("t", story.p_address, (1, 2, 3), (9,), local_first=(6,), remote_first=(4,))
    story.run_but(msg.AckConfirmed)
    assert story.bytes_of(story.d, 9) == promise[:, 2:].tobytes()
    story.run()
    assert story.ends() == [RELEASED, RECEIVED]


def test_G3_full_prefix_hit_moves_nothing_ends_at_once_and_releases_the_producer():
    story = Story(2, 2)
    publish_everywhere(story, 1, 2)
    pull_everywhere(story, (), ())
    assert story.ends(*story.d_workers) == [RECEIVED] * 2
    assert [worker.ended[0].n_bytes for worker in story.d_workers] == [0, 0]
    story.run()
    for rank in range(2):
        lines = spoken(RELEASE, f"D{rank}", f"P{rank}")
        assert story.said_with(f"D{rank}", f"P{rank}") == lines
    assert story.ends(*story.p_workers) == [RELEASED] * 2
    story.assert_empty()


def test_full_prefix_hit_may_name_the_blocks_that_it_does_not_need():
    story = Story()
    story.p.publish("t", (1, 2))
    story.d.pull("t", story.p_address, (1, 2), (), local_first=(2,))
    story.run()
    assert story.times_said(msg.LayoutRequest) == 0
    assert story.ends() == [RELEASED, RECEIVED]


@pytest.mark.parametrize("seed", range(8))
def test_everything_twice_and_in_any_order_changes_nothing(seed):
    story, dice = Story(2, 4, seed=seed), random.Random(seed)
    publish_everywhere(story, 1, 2)
    pull_everywhere(story, (1, 2), (5, 6))
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


def test_every_message_lost_once_only_delays():
    story = Story(2, 2)
    publish_everywhere(story, 1)
    pull_everywhere(story, (1,), (5,))
    seen: set[str] = set()
    start = story.now
    while not len(story.ends()) == 4:
        for index in range(len(story.net) - 1, -1, -1):
            message = story.net[index]
            line = f"{message.source} {message.target} {type(message.body).__name__}"
            if line not in seen:
                seen.add(line)
                story.lose(index)
        story.run_where(lambda m: f"{m.source} {m.target} {type(m.body).__name__}" in seen)
        if not any(daemon.local_events for daemon in story.daemons):
            story.pass_time(0.05)
    assert story.now - start < 5.0
    assert story.ends() == [RELEASED] * 2 + [RECEIVED] * 2
