"""Engines and wires that fail, lose and delay. Cases T1 T2 T3 T4 T6 T7."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.core.messages import PeerBody
from moriiod.core.snapshot import take_snapshot
from moriiod.errors import EngineOpFailed, SessionFailed
from tests.support.lone import FarPeer, Lone, LoneWorker
from tests.support.sim import N_LAYERS, PIECE, SETTINGS, pack
from tests.support.world_helpers import Story

GOOD = [("released", "acked"), ("received", "acked")]


def read(story: Story, name: str = "t", block: int = 1, **more: object) -> None:
    story.p.publish(name, (block,))
    story.d.pull(name, story.p_address, (block,), (block,), **more)


def write(story: Story, name: str = "t", block: int = 1) -> None:
    """A WRITE up to where its copies are posted."""
    story.d.reserve(name, story.p_address, (block,))
    story.p.push(name, (block,))
    story.run(copies=False)
    story.p.ask(req.LayerReady(name, tuple(range(N_LAYERS))))
    story.p.ask(req.Seal(name, N_LAYERS))


# --- T1 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 50])
@pytest.mark.parametrize("direction", ["read", "write"])
def test_T1_engine_that_is_full_k_times_delays_and_fails_nothing(k, direction):
    story = Story()
    story.engine_refusals = k
    if direction == "read":
        read(story)
        story.run_but(msg.Ack)
        posts = 0
        while story.engine_refusals or any(d.local_events for d in story.daemons):
            assert story.find(msg.Ack) == []  # no ack before success
            story.pass_time(0.001)
            story.run_but(msg.Ack)
            posts += 1
            assert posts < 10_000
    else:
        write(story)
    story.live_for(8.0)
    assert story.outcomes_of() == GOOD
    story.assert_empty()


def test_T1_operation_is_never_posted_while_it_is_with_the_engine():
    lone = Lone(instance="D")
    worker = LoneWorker(lone)
    peer = FarPeer(lone, instance="P")
    worker.send(req.Pull("t", peer.address, (pack(1),), (pack(1),)))
    peer.welcome()
    peer.grant()
    peer.describe()
    op = lone.one(ef.PostOp)
    for _ in range(50):
        lone.step(ev.OpRefused(op.op))
        posted: list[ef.PostOp] = []
        while not posted:
            lone.wait(0.001)
            posted = lone.of(ef.PostOp)
        assert posted == [op]
        lone.wait(0.001)
        assert lone.of(ef.PostOp) == []
    lone.op_ended(op)
    assert peer.got(msg.Ack).ok is True


def test_T1_engine_that_stays_full_fails_the_transfer_at_its_time_and_says_why():
    story = Story()
    story.engine_refusals = 1 << 60
    read(story, timeout_s=1.0)
    start = story.now
    story.live_for(0.9)
    assert story.ends() == []
    story.live_for(0.2)
    assert story.outcomes_of(story.d) == [("failed", "ENGINE_QUEUE_FULL")]
    assert story.now - start == pytest.approx(1.1)
    assert story.outcomes_of(story.p) == [("released", "aborted")]
    story.engine_refusals = 0
    read(story, "u")
    story.run()
    assert story.outcomes_of(story.d)[-1] == ("received", "acked")


def test_T1_true_error_fails_at_once_also_while_others_wait_for_room():
    story = Story()
    read(story, "error", 1)
    story.run(copies=False)
    (op,) = story.ops.values()
    story.engine_refusals = 1
    read(story, "waits", 2)
    story.run(copies=False)
    start = story.now
    story.copy(op, error=EngineOpFailed("errno 5"))
    story.run()
    assert story.now == start
    assert story.ends(story.d) == [("pull", "error", "failed", "ENGINE_OP_FAILED")]
    story.live_for(0.5)
    assert story.ends(story.d)[-1] == ("pull", "waits", "received", "acked")


def test_T1_many_operations_that_find_no_room_do_not_keep_the_loop_busy():
    """256 operations, an engine that is full for a second: the timers fire some thousand times."""
    story = Story(n_blocks=256)
    story.engine_refusals = 1 << 60
    for i in range(256):
        read(story, f"t{i}", i)
    story.run()
    steps = 0
    end = story.now + 1.0
    daemon = story.decode[0]
    while (when := daemon.machine.next_deadline()) is not None and when <= end:
        story.now = when
        daemon.step(ev.TimerFired())
        while daemon.local_events:
            daemon.step(daemon.local_events.popleft())
        steps += 1
    assert steps < 200


# --- T2 -----------------------------------------------------------------------------------------


N = 256
NAMES = [f"t{i:03}" for i in range(N)]
#: Every 7th fails when it is posted, every 11th when it completes.
BAD = {NAMES[i] for i in range(N) if i % 7 == 0 or i % 11 == 0}


def end_some_badly(story: Story) -> None:
    """Let every copy in flight come to its end, as ``BAD`` says."""
    while story.ops:
        op = next(iter(story.ops.values()))
        block = op.spans()[0][0] // PIECE % N
        if block % 7 == 0:
            story.copy(op, error=EngineOpFailed("the post failed"))
        elif block % 11 == 0:
            story.copy(op, spans=1)
            story.copy(op, error=EngineOpFailed("completed with an error"))
        else:
            story.copy(op, spans=9)
        while story.local_step():
            pass


@pytest.mark.timeout(120)  # traced for coverage it takes ten times as long
@pytest.mark.parametrize("direction", ["read", "write"])
def test_T2_of_256_transfers_every_one_ends_and_both_sides_agree(direction):
    story = Story(n_blocks=N, settings=replace(SETTINGS, max_transfers=1024))
    for i, name in enumerate(NAMES):
        (read if direction == "read" else write)(story, name, i)
    story.run(copies=False)
    assert len(story.ops) == N
    start = story.now
    end_some_badly(story)
    story.run()
    assert story.now == start
    told = ("released", "aborted") if direction == "read" else ("failed", "ENGINE_OP_FAILED")
    good = {NAMES[i] for i in range(N)} - BAD
    assert sorted((e.transfer_id, e.outcome, e.reason) for e in story.d.ended) == sorted(
        [(name, "received", "acked") for name in good]
        + [(name, "failed", "ENGINE_OP_FAILED") for name in BAD]
    )
    assert sorted((e.transfer_id, e.outcome, e.reason) for e in story.p.ended) == sorted(
        [(name, "released", "acked") for name in good] + [(name, *told) for name in BAD]
    )
    story.assert_empty()


# --- T3 -----------------------------------------------------------------------------------------


def test_T3_transfers_that_never_complete_time_out_and_eight_good_ones_follow():
    """Four workers' worth of room, all of it taken by reads that stay in progress."""
    story = Story(settings=replace(SETTINGS, max_ops_in_flight=4))
    for i in range(4):
        read(story, f"stuck{i}", i, timeout_s=2.0)
    story.run(copies=False)
    stuck = list(story.ops.values())
    assert len(stuck) == 4
    start = story.now
    for i in range(8):
        read(story, f"good{i}", 4 + i)
    story.live_for(1.9, copies=False)
    assert story.ends(story.d) == []
    assert not any(op.is_cancelled for op in stuck)
    story.live_for(0.15, copies=False)
    assert all(op.is_cancelled for op in stuck)
    # Until the engine says that they are over, nobody gets their blocks back.
    assert story.ends(story.d) == []
    assert sorted(story.d.busy) == list(range(12))
    for op in stuck:
        story.copy(op)
    story.run()
    ended = {e.transfer_id: (e.outcome, e.reason) for e in story.d.ended}
    assert {ended[f"stuck{i}"] for i in range(4)} == {("failed", "TIMED_OUT")}
    assert {ended[f"good{i}"] for i in range(8)} == {("received", "acked")}
    assert story.now - start == pytest.approx(2.05)
    story.assert_empty()


def test_T3_reads_that_cannot_even_be_cancelled_hold_up_nobody_else():
    story = Story()
    for i in range(4):
        read(story, f"stuck{i}", i, timeout_s=2.0)
    story.run(copies=False)
    stuck = list(story.ops.values())
    story.live_for(60.0, copies=False)
    assert story.ends(story.d) == []  # nothing proves that their blocks are free
    assert [pull.state for pull in story.decode[0].machine.pulls] == ["draining"] * 4
    start = story.now
    for i in range(8):
        read(story, f"good{i}", 4 + i)
        story.run(copies=False)
        for op in [op for op in story.ops.values() if op not in stuck]:
            story.copy(op, spans=9)
        story.run(copies=False)
    assert story.now == start
    assert story.outcomes_of(story.d) == [("received", "acked")] * 8
    for op in stuck:
        story.copy(op)
    story.run()
    assert story.outcomes_of(story.d)[8:] == [("failed", "TIMED_OUT")] * 4
    story.assert_empty()


# --- T4 -----------------------------------------------------------------------------------------

#: What ends a transfer on the other side, by direction: the word, and its answer.
LAST_WORDS: dict[str, tuple[type[PeerBody], type[PeerBody]]] = {
    "read": (msg.Ack, msg.AckConfirmed),
    "write": (msg.WriteDone, msg.WriteConfirmed),
}


def begin(story: Story, direction: str) -> None:
    (read if direction == "read" else write)(story)


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("which", [0, 1], ids=["word", "answer"])
@pytest.mark.parametrize("times", [1, 2])
def test_T4_last_word_that_is_lost_is_said_again_and_both_sides_succeed(direction, which, times):
    story = Story()
    kind = LAST_WORDS[direction][which]
    begin(story, direction)
    for _ in range(times):
        story.run_but(kind)
        assert story.lose_all(kind) == 1
        story.pass_time(0.5)
    story.live_for(3.0)
    assert story.outcomes_of() == GOOD
    story.assert_empty()


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("which", [0, 1], ids=["word", "answer"])
def test_T4_last_word_that_comes_twice_is_one_event(direction, which):
    story = Story()
    kind = LAST_WORDS[direction][which]
    begin(story, direction)
    story.run_but(kind)
    for _ in range(3):
        story.deliver_one(kind, keep=True)
        story.run_but(kind)
    story.run()
    assert story.outcomes_of() == GOOD
    story.assert_empty()


@pytest.mark.parametrize("direction", ["read", "write"])
@pytest.mark.parametrize("which", [0, 1], ids=["word", "answer"])
def test_T4_last_word_that_is_five_seconds_late_still_ends_it_well(direction, which):
    story = Story()
    kind = LAST_WORDS[direction][which]
    begin(story, direction)
    for _ in range(100):
        story.run_but(kind)
        story.pass_time(0.05)
    assert len(story.ends()) < 2 or (direction, which) == ("write", 1)
    story.run()
    assert story.outcomes_of() == GOOD
    story.assert_empty()


def test_T4_release_that_never_gets_through_fails_the_reader_and_frees_nothing_early():
    story = Story()
    story.p.publish("t", (1,), lease_s=3.0)
    story.d.pull("t", story.p_address, (1,), (5,))
    story.live_for(14.0, msg.Ack)
    # The reader has its bytes but no confirmation; the producer has a reader that is alive.
    assert story.ends() == []
    story.live_for(2.0, msg.Ack)
    assert story.outcomes_of(story.d) == [("failed", "TIMED_OUT")]
    assert story.ends(story.p) == []
    (row,) = take_snapshot(story.prefill[0].machine, story.now, 9).quarantined
    assert (row.role, row.state) == ("publish", "revoking")
    story.live_for(6.0)  # the wire is well again
    assert story.outcomes_of(story.p) == [("failed", "LEASE_EXPIRED")]
    story.assert_empty()


def test_T4_write_done_that_never_gets_through_ends_both_sides_and_the_reader_fails():
    story = Story()
    write(story)
    story.live_for(1.0, msg.WriteDone)
    # All that touches the producer's blocks has ended, so they are free.
    assert story.outcomes_of(story.p) == [("released", "acked")]
    assert story.ends(story.d) == []
    story.live_for(16.0, msg.WriteDone)
    # The consumer gave up and took its grant back; that nothing writes there is another message.
    assert story.outcomes_of(story.d) == [("failed", "TIMED_OUT")]
    story.live_for(2.0)
    story.assert_empty()


@pytest.mark.parametrize("direction", ["read", "write"])
def test_T4_link_that_is_cut_before_the_last_word_ends_both_sides_by_proof(direction):
    story = Story()
    begin(story, direction)
    story.run_but(LAST_WORDS[direction][0])
    p, d = story.prefill[0], story.decode[0]
    story.cut.add(frozenset((p.port, d.port)))
    story.lose_all(*LAST_WORDS[direction])
    story.live_for(6.0)
    if direction == "read":
        assert story.outcomes_of(story.d) == [("failed", "PEER_LOST")]
        waits, other = story.p, d  # whose reader may live on, behind the cut
    else:
        assert story.outcomes_of(story.p) == [("released", "acked")]
        waits, other = story.d, p  # whose writer may live on
    story.live_for(30.0)
    assert story.ends(waits) == []
    story.kill_daemon(other)
    story.run()
    (end,) = story.outcomes_of(waits)
    assert end in (("failed", "LEASE_EXPIRED"), ("failed", "PEER_LOST"))


# --- T6 -----------------------------------------------------------------------------------------


def test_T6_late_answer_to_the_first_handshake_does_not_become_the_second():
    """#1 times out after 1 s; its answer comes between the request and the answer of #2."""
    settings = replace(SETTINGS, connect_timeout_s=1.0)
    lone = Lone(instance="D", settings=settings)
    worker = LoneWorker(lone)
    peer = FarPeer(lone, instance="P")
    pull = req.Pull("t", peer.address, (pack(1),), (pack(1),))
    worker.send(pull)
    (first,) = lone.ever_sent(msg.Hello)
    lone.wait(1.0)
    assert lone.ended == [("pull", "t", "failed", "PEER_UNREACHABLE")]
    lone.wait(1.5)
    worker.send(pull)
    second = lone.ever_sent(msg.Hello)[-1]
    assert second.nonce != first.nonce
    lone.wait(0.5)
    for route in {effect.route for effect in lone.ever(ef.OpenRoute)}:
        peer.route = route
        peer.say(msg.Welcome(first.nonce, 1, peer.identity, ("shm",)))
        assert lone.problems == ["stale_handshake"]
        assert lone.sent == []
    peer.welcome()
    peer.grant()
    peer.describe()
    lone.op_ended(lone.one(ef.PostOp))
    peer.confirm()
    assert lone.ended == [("pull", "t", "received", "acked")]


def test_T6_late_answer_of_a_daemon_that_was_replaced_meanwhile_is_ignored():
    """The link stays, because somebody needs it; another start of the peer has answered already."""
    lone = Lone(instance="D")
    worker = LoneWorker(lone)
    old = FarPeer(lone, instance="P")
    worker.send(req.Reserve("t", old.address, (pack(1),)))
    old.welcome()
    old.accept()
    lone.wait(5.0)
    fresh = old.restarted()
    late = msg.Welcome(lone.ever_sent(msg.Hello)[-1].nonce, 1, old.identity, ("shm",))
    fresh.welcome()
    old.say(late)
    assert lone.problems == ["stale_epoch"]
    assert [peer.epoch for peer in lone.machine.peers] == [fresh.epoch]


# --- T7 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["read", "write"])
def test_T7_one_failed_copy_does_not_stick_to_the_pair(direction):
    story = Story()
    begin(story, direction)
    story.run(copies=False)
    (op,) = story.ops.values()
    story.copy(op, error=EngineOpFailed("this once"))
    story.run()
    assert [outcome for outcome, _ in story.outcomes_of(story.d)] == ["failed"]
    start = story.now
    (read if direction == "read" else write)(story, "again", 2)
    story.run()
    assert story.now == start
    assert story.outcomes_of(story.d)[-1] == ("received", "acked")
    failed = [e for e in (*story.p.ended, *story.d.ended) if e.reason == "ENGINE_OP_FAILED"]
    assert len(failed) == (1 if direction == "read" else 2)


def test_T7_one_failed_session_does_not_stick_to_the_pair():
    story = Story()
    read(story)
    story.run_but(msg.LayoutReply)
    daemon = story.decode[0]
    story.deliver_one(msg.LayoutReply)
    (opened,) = daemon.local_events
    assert isinstance(opened, ev.SessionOpened)
    daemon.local_events.clear()
    daemon.local_events.append(ev.SessionRefused(opened.session, SessionFailed("this once")))
    story.run()
    assert story.outcomes_of(story.d) == [("failed", "SESSION_FAILED")]
    read(story, "again", 2)
    story.run()
    assert story.outcomes_of(story.d)[-1] == ("received", "acked")
