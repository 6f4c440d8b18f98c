"""Death and departure at every point of a transfer, each with the end that both sides see.

A transfer is brought to where a message of one kind (or a copy) is under way and goes no further;
then a daemon restarts, a worker is killed and replaced, or a daemon is told to stop at once. What
was under way still arrives. Each line: direction, what is under way, whose daemon or worker, how it
ends at the producer, and at the consumer; "-" where nobody is left to be told.

The world checks meanwhile that no free block is touched and that what is received is right.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from tests.support.sim import N_LAYERS, Worker
from tests.support.world_helpers import Story

#: Peer restart: rule S7, cases M9 and A8.
RESTART = """\
read  Hello          P  failed DAEMON_LOST     failed UNKNOWN_TRANSFER
read  Hello          D  failed LEASE_EXPIRED   failed DAEMON_LOST
read  Welcome        P  failed DAEMON_LOST     failed UNKNOWN_TRANSFER
read  Welcome        D  failed LEASE_EXPIRED   failed DAEMON_LOST
read  Claim          P  failed DAEMON_LOST     failed UNKNOWN_TRANSFER
read  Claim          D  failed ABORTED         failed DAEMON_LOST
read  ClaimGranted   P  failed DAEMON_LOST     failed PEER_RESTARTED
read  ClaimGranted   D  failed ABORTED         failed DAEMON_LOST
read  LayoutRequest  P  failed DAEMON_LOST     failed PEER_RESTARTED
read  LayoutRequest  D  failed ABORTED         failed DAEMON_LOST
read  LayoutReply    P  failed DAEMON_LOST     failed ENGINE_OP_FAILED
read  LayoutReply    D  failed ABORTED         failed DAEMON_LOST
read  copy           P  failed DAEMON_LOST     failed PEER_RESTARTED
read  copy           D  failed ABORTED         failed DAEMON_LOST
read  Ack            P  failed DAEMON_LOST     failed PEER_RESTARTED
read  Ack            D  released acked         failed DAEMON_LOST
read  AckConfirmed   P  released acked         received acked
read  AckConfirmed   D  released acked         failed DAEMON_LOST
write Hello          P  failed DAEMON_LOST     failed UNKNOWN_TRANSFER
write Hello          D  failed TIMED_OUT       failed DAEMON_LOST
write Welcome        P  failed DAEMON_LOST     failed UNKNOWN_TRANSFER
write Welcome        D  failed TIMED_OUT       failed DAEMON_LOST
write Grant          P  failed DAEMON_LOST     failed UNKNOWN_TRANSFER
write Grant          D  failed PEER_RESTARTED  failed DAEMON_LOST
write LayoutRequest  P  failed DAEMON_LOST     failed PEER_RESTARTED
write LayoutRequest  D  failed PEER_RESTARTED  failed DAEMON_LOST
write GrantAccepted  P  released acked         received acked
write GrantAccepted  D  released acked         received acked
write LayoutReply    P  failed DAEMON_LOST     failed PEER_RESTARTED
write LayoutReply    D  failed ENGINE_OP_FAILED failed DAEMON_LOST
write copy           P  failed DAEMON_LOST     failed PEER_RESTARTED
write copy           D  failed PEER_RESTARTED  failed DAEMON_LOST
write WriteDone      P  released acked         received acked
write WriteDone      D  released acked         failed DAEMON_LOST
write WriteConfirmed P  released acked         received acked
write WriteConfirmed D  released acked         received acked
"""

#: Worker death: case M6.
WORKER = """\
read  Hello          P  -                      failed WORKER_LOST
read  Hello          D  failed LEASE_EXPIRED   -
read  Welcome        P  -                      failed WORKER_LOST
read  Welcome        D  failed LEASE_EXPIRED   -
read  Claim          P  -                      failed WORKER_LOST
read  Claim          D  released aborted       -
read  ClaimGranted   P  -                      failed WORKER_LOST
read  ClaimGranted   D  released aborted       -
read  LayoutRequest  P  -                      failed WORKER_LOST
read  LayoutRequest  D  released aborted       -
read  LayoutReply    P  -                      failed WORKER_LOST
read  LayoutReply    D  released aborted       -
read  copy           P  -                      failed WORKER_LOST
read  copy           D  released aborted       -
read  Ack            P  -                      failed LEASE_EXPIRED
read  Ack            D  released acked         -
read  AckConfirmed   P  released acked         received acked
read  AckConfirmed   D  released acked         -
write Hello          P  -                      failed WORKER_LOST
write Hello          D  failed TIMED_OUT       -
write Welcome        P  -                      failed WORKER_LOST
write Welcome        D  failed TIMED_OUT       -
write Grant          P  -                      failed WORKER_LOST
write Grant          D  released aborted       -
write LayoutRequest  P  -                      failed WORKER_LOST
write LayoutRequest  D  released aborted       -
write GrantAccepted  P  released acked         received acked
write GrantAccepted  D  released acked         received acked
write LayoutReply    P  -                      failed WORKER_LOST
write LayoutReply    D  released aborted       -
write copy           P  -                      failed WORKER_LOST
write copy           D  released aborted       -
write WriteDone      P  released acked         received acked
write WriteDone      D  released acked         -
write WriteConfirmed P  released acked         received acked
write WriteConfirmed D  released acked         received acked
"""

#: Stop at once: case L9.
DRAIN = """\
read  Hello          P  failed DRAINING        failed DRAINING
read  Hello          D  failed LEASE_EXPIRED   failed DRAINING
read  Welcome        P  failed DRAINING        failed DRAINING
read  Welcome        D  failed LEASE_EXPIRED   failed DRAINING
read  Claim          P  failed DRAINING        failed PEER_LOST
read  Claim          D  released aborted       failed DRAINING
read  ClaimGranted   P  failed DRAINING        failed DRAINING
read  ClaimGranted   D  released aborted       failed DRAINING
read  LayoutRequest  P  failed DRAINING        failed DRAINING
read  LayoutRequest  D  released aborted       failed DRAINING
read  LayoutReply    P  failed DRAINING        failed DRAINING
read  LayoutReply    D  released aborted       failed DRAINING
read  copy           P  failed DRAINING        failed DRAINING
read  copy           D  released aborted       failed DRAINING
read  Ack            P  failed DRAINING        failed LEASE_EXPIRED
read  Ack            D  released acked         failed DRAINING
read  AckConfirmed   P  released acked         received acked
read  AckConfirmed   D  released acked         failed DRAINING
write Hello          P  failed DRAINING        failed DRAINING
write Hello          D  failed TIMED_OUT       failed DRAINING
write Welcome        P  failed DRAINING        failed DRAINING
write Welcome        D  failed TIMED_OUT       failed DRAINING
write Grant          P  failed DRAINING        failed PEER_LOST
write Grant          D  released aborted       failed DRAINING
write LayoutRequest  P  failed DRAINING        failed DRAINING
write LayoutRequest  D  released aborted       failed DRAINING
write GrantAccepted  P  released acked         received acked
write GrantAccepted  D  released acked         received acked
write LayoutReply    P  failed DRAINING        failed DRAINING
write LayoutReply    D  released aborted       failed DRAINING
write copy           P  failed DRAINING        failed DRAINING
write copy           D  released aborted       failed DRAINING
write WriteDone      P  released acked         received acked
write WriteDone      D  released acked         failed DRAINING
write WriteConfirmed P  released acked         received acked
write WriteConfirmed D  released acked         received acked
"""


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    direction: str
    point: str
    side: str
    producer: str
    consumer: str

    def __str__(self) -> str:
        return f"{self.direction}-{self.point}-{self.side}"


def rows(table: str) -> list[Row]:
    """Parse a table; an end is one word or two."""
    found = []
    for line in table.splitlines():
        direction, point, side, *ends = line.split()
        first = 1 if ends[0] == "-" else 2
        producer, consumer = " ".join(ends[:first]), " ".join(ends[first:])
        found.append(Row(direction, point, side, producer, consumer))
    return found


def begin(row: Row) -> Story:
    """Bring a transfer to where the row's message is under way."""
    story = Story()
    if row.direction == "read":
        story.p.publish("t", (1, 2))
        story.d.pull("t", story.p_address, (1, 2), (5, 6))
    else:
        story.d.reserve("t", story.p_address, (5, 6))
        story.p.push("t", (1, 2))
        story.p.ask(req.LayerReady("t", tuple(range(N_LAYERS))))
        story.p.ask(req.Seal("t", N_LAYERS))
    if row.point == "copy":
        story.run(copies=False)
        assert story.ops
    else:
        kind = getattr(msg, row.point)
        story.run_but(kind)
        assert story.find(kind)
    return story


def ends(story: Story, before: list[Worker]) -> tuple[str, str]:
    """What both sides were told, the workers of the beginning included."""
    told = []
    for worker in before:
        assert len(worker.ended) <= 1, "S2"
        told.append(" ".join(story.outcomes_of(worker)[0]) if worker.ended else "-")
    return told[0], told[1]


def assert_next_transfer_works(story: Story) -> None:
    """Nothing of the old one is in the way."""
    story.assert_empty()
    story.p.publish("next", (3,))
    story.d.pull("next", story.p_address, (3,), (7,))
    story.live_for(2.0)
    assert story.outcomes_of(story.p)[-1] == ("released", "acked")
    assert story.outcomes_of(story.d)[-1] == ("received", "acked")
    story.assert_empty()


@pytest.mark.parametrize("row", rows(RESTART), ids=str)
def test_M9_daemon_that_restarts_at_any_point_ends_the_transfer_like_this(row):
    story = begin(row)
    workers = [story.p, story.d]
    daemon = (story.prefill if row.side == "P" else story.decode)[0]
    story.kill_daemon(daemon)
    story.restart_daemon(daemon)
    story.live_for(40.0)
    assert ends(story, workers) == (row.producer, row.consumer)
    assert_next_transfer_works(story)


@pytest.mark.parametrize("row", rows(WORKER), ids=str)
def test_M6_worker_that_is_killed_at_any_point_ends_the_transfer_like_this(row):
    story = begin(row)
    workers = [story.p, story.d]
    worker = story.p if row.side == "P" else story.d
    generation = worker.generation
    story.kill_worker(worker)
    story.replace_worker(worker)
    story.live_for(40.0)
    assert ends(story, workers) == (row.producer, row.consumer)
    assert generation not in worker.daemon.registered
    assert_next_transfer_works(story)


@pytest.mark.parametrize("row", rows(DRAIN), ids=str)
def test_L9_daemon_that_stops_at_any_point_ends_the_transfer_like_this(row):
    story = begin(row)
    workers = [story.p, story.d]
    daemon = (story.prefill if row.side == "P" else story.decode)[0]
    daemon.step(ev.DrainRequested(0.0))
    story.pass_time(0.0)
    story.live_for(40.0)
    assert ends(story, workers) == (row.producer, row.consumer)
    assert daemon.drained is True
    story.assert_empty()
