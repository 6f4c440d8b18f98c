"""WRITE, producer side: grants, layers, ends. Cases A10 G4 G9 L3 R1 R2 R5 T1 T2."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.core.geometry import KvGroup
from moriiod.core.push import Push
from moriiod.errors import EngineOpFailed, PeerLost, SessionFailed, TransferAborted
from tests.support.lone import SETTINGS, FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import make_groups, pack

RELEASED = ("push", "t", "released", "acked")


class Producer:
    """A prefill rank with a worker, and the decode ranks that it writes to."""

    def __init__(
        self,
        size: int = 1,
        consumers: int = 1,
        *,
        rank: int = 0,
        groups: tuple[KvGroup, ...] | None = None,
        **settings: float,
    ) -> None:
        self.lone = Lone(rank, size, settings=replace(SETTINGS, **settings))
        self.worker = LoneWorker(self.lone, groups)
        self.peers = [
            FarPeer(self.lone, r, consumers, groups=groups).dial() for r in range(consumers)
        ]

    @property
    def peer(self) -> FarPeer:
        return self.peers[0]

    def push(self, *blocks: int, **more: object) -> Push:
        request = req.Push("t", (pack(*blocks),), **more)  # type: ignore[arg-type]
        assert self.worker.ask(request) == req.Done()
        return next(iter(self.lone.machine.pushes))

    def ready(self, *layers: int) -> list[ef.PostOp]:
        assert self.worker.ask(req.LayerReady("t", layers)) == req.Done()
        return self.lone.of(ef.PostOp)

    def seal(self, n_layers: int = 2) -> None:
        assert self.worker.ask(req.Seal("t", n_layers)) == req.Done()

    def writing(self) -> list[ef.PostOp]:
        """Push, grant, both layers ready and sealed."""
        self.push(1, 2)
        self.peer.reserve("t", 5, 6)
        self.peer.describe()
        ops = [*self.ready(0), *self.ready(1)]
        self.seal()
        return ops

    def is_clean(self) -> bool:
        machine = self.lone.machine
        return (
            len(machine.pushes) == 0
            and machine.admission.active == 0
            and machine.peers.outbox.count() == 0
            and len(machine.ops) == 0
            and not any(peer.users for peer in machine.peers)
        )


@pytest.fixture
def one() -> Producer:
    return Producer()


def confirm(peer: FarPeer, told: msg.WriteDone | msg.WriteFailed) -> None:
    peer.say(msg.WriteConfirmed(told.transfer_id, told.grant_id))


# --- The good way ---------------------------------------------------------------------------------


def test_layers_are_written_when_both_grant_and_data_are_there(one):
    one.push(1, 2)
    grant = one.peer.reserve("t", 5, 6)
    assert one.peer.got(msg.GrantAccepted).grant_id == grant.grant_id
    assert one.peer.got(msg.LayoutRequest).generation == one.peer.generation
    assert one.ready(0) == []
    one.peer.describe()
    first = one.lone.one(ef.PostOp)
    assert (first.direction, first.plan.n_bytes, len(first.plan.layers)) == ("write", 16, 1)
    (second,) = one.ready(0, 1)
    assert len(second.plan.layers) == 1
    one.seal()
    one.lone.op_ended(first)
    assert one.lone.sent == []
    one.lone.op_ended(second)
    done = one.peer.got(msg.WriteDone)
    assert done == msg.WriteDone("t", grant.grant_id, 2, 32)
    (told,) = one.lone.of(ef.SendEvent)
    assert told.body == req.TransferEnded("t", "push", "released", "acked", n_bytes=32, n_layers=2)
    one.lone.wait(0.25)
    assert one.peer.got(msg.WriteDone) == done
    confirm(one.peer, done)
    assert one.is_clean()


def test_grant_before_the_push_waits_for_it(one):
    grant = one.peer.reserve("t", 5)
    assert one.peer.got(msg.GrantAccepted).grant_id == grant.grant_id
    assert one.lone.machine.pushes.early_grants == 1
    one.push(1)
    assert one.peer.heard(msg.LayoutRequest)
    assert one.lone.machine.pushes.early_grants == 0


def test_L2_grant_for_which_no_push_comes_is_failed_in_time(one):
    grant = one.peer.reserve("t", 5)
    one.lone.wait(8.0)
    failed = one.peer.heard(msg.WriteFailed)[0]
    assert (failed.grant_id, failed.error.code) == (grant.grant_id, "UNKNOWN_TRANSFER")
    assert one.lone.machine.pushes.early_dropped == 1


def test_rule_S6_more_early_grants_than_the_limit_are_failed_at_once():
    producer = Producer(max_early=1)
    producer.peer.reserve("a", 5)
    producer.peer.reserve("b", 5)
    assert producer.peer.got(msg.WriteFailed).error.code == "UNKNOWN_TRANSFER"
    assert producer.lone.problems == ["early_buffer_full"]


def test_R7_push_to_two_ranks_is_released_when_both_are_written():
    producer = Producer(consumers=2)
    producer.push(1, remote_tp_size=2)
    grants, ops = [], []
    for peer in producer.peers:
        grants.append(peer.reserve("t", 5))
        peer.describe()
    ops = producer.ready(0, 1)
    assert len(ops) == 2
    producer.seal()
    producer.lone.op_ended(ops[0])
    assert producer.peers[0].got(msg.WriteDone).grant_id == grants[0].grant_id
    assert producer.lone.ended == []
    producer.lone.op_ended(ops[1])
    assert producer.peers[1].got(msg.WriteDone).grant_id == grants[1].grant_id
    assert producer.lone.ended == [RELEASED]


def test_rule_S6_peer_that_confirms_nothing_is_told_of_a_grant_once_and_no_more_is_kept():
    producer = Producer(max_early=1)
    producer.peer.reserve("a", 5)
    producer.lone.wait(7.0)
    producer.peer.beat()
    producer.lone.wait(1.0)
    assert len(producer.peer.heard(msg.WriteFailed)) == 1
    grant = producer.peer.reserve("b", 5)
    for _ in range(8):
        producer.lone.wait(1.0)
        producer.peer.beat()
    assert producer.lone.machine.peers.outbox.count() == 1
    told = [body.grant_id for body in producer.lone.ever_sent(msg.WriteFailed)]
    assert told.count(grant.grant_id) == 1


@pytest.mark.parametrize("stated", [0, 1, 2])
def test_R1_size_of_the_handshake_decides_who_must_be_written(stated):
    producer = Producer(consumers=2)
    producer.push(1, remote_tp_size=stated)
    producer.peers[0].reserve("t", writes=False)
    producer.seal(0)
    assert producer.peers[0].heard(msg.WriteDone)
    assert producer.lone.ended == []
    producer.peers[1].reserve("t", writes=False)
    assert producer.lone.ended == [RELEASED]


def test_rank_that_takes_nothing_is_done_when_the_push_is_sealed(one):
    one.push(1)
    grant = one.peer.reserve("t", writes=False)
    assert one.peer.heard(msg.LayoutRequest) == []
    assert one.ready(0, 1) == []
    assert one.lone.ended == []
    one.seal()
    assert one.peer.got(msg.WriteDone) == msg.WriteDone("t", grant.grant_id, 2, 0)
    assert one.lone.ended == [RELEASED]


def test_G3_layers_of_a_group_without_blocks_are_not_posted(one):
    one.push()
    one.peer.reserve("t")
    one.peer.describe()
    assert one.ready(0, 1) == []
    one.seal()
    assert one.peer.got(msg.WriteDone).n_bytes == 0
    assert one.lone.ended == [RELEASED]


def test_partial_prefix_hit_at_the_consumer_is_written_by_position(one):
    one.push(1, 2, 3)
    grant = msg.Grant("t", new_id(), one.peer.generation, True, (pack(9),), (2,))
    one.peer.say(grant)
    one.peer.describe()
    (op,) = one.ready(0)
    (layer,) = op.plan.layers
    assert (list(layer.spans.local), list(layer.spans.remote)) == ([3 * 8], [9 * 8])


# --- From the worker ------------------------------------------------------------------------------


def test_A10_live_push_belongs_to_its_first_owner(one):
    one.push(1)
    other = LoneWorker(one.lone)
    assert one.worker.ask(req.Push("t", (pack(1),))) == req.Done()
    assert one.worker.refusal(req.Push("t", (pack(2),))).code == "ALREADY_EXISTS"
    assert other.refusal(req.Push("t", (pack(1),))).code == "ALREADY_EXISTS"
    for body in (req.LayerReady("t", (0,)), req.Seal("t", 2), req.Abort("t", "push")):
        assert other.refusal(body).code == "UNKNOWN_TRANSFER"


def test_layers_that_do_not_exist_are_refused(one):
    one.push(1)
    refusal = one.worker.refusal(req.LayerReady("t", (0, 2)))
    assert (refusal.code, refusal.fields) == ("INVALID_ARGUMENT", {"layer": 2, "limit": 2})


def test_G9_more_layers_than_were_sealed_are_refused(one):
    push = one.push(1)
    one.seal(1)
    refusal = one.worker.refusal(req.LayerReady("t", (0, 1)))
    assert (refusal.code, refusal.fields) == ("INVALID_ARGUMENT", {"sealed": 1, "ready": 2})
    assert push.ready == set()


def test_G9_seal_that_contradicts_what_was_said_is_refused(one):
    one.push(1)
    one.ready(0, 1)
    assert one.worker.refusal(req.Seal("t", 1)).code == "INVALID_ARGUMENT"
    one.seal(2)
    one.seal(2)
    refusal = one.worker.refusal(req.Seal("t", 3))
    assert refusal.fields == {"n_layers": 3, "sealed": 2, "ready": 2}


def test_layers_and_seal_of_what_is_not_there_are_unknown(one):
    assert one.worker.refusal(req.LayerReady("t", (0,))).code == "UNKNOWN_TRANSFER"
    assert one.worker.refusal(req.Seal("t", 1)).code == "UNKNOWN_TRANSFER"
    ops = one.writing()
    one.worker.send(req.Abort("t", "push"))
    assert one.worker.refusal(req.LayerReady("t", (0,))).code == "UNKNOWN_TRANSFER"
    assert one.lone.ever(ef.CancelOp) == [ef.CancelOp(op.op) for op in ops]


# --- Grants that are refused ----------------------------------------------------------------------


def refused(peer: FarPeer, grant: msg.Grant) -> str:
    failed = peer.got(msg.WriteFailed)
    assert failed.grant_id == grant.grant_id
    assert peer.heard(msg.GrantAccepted) == []
    return failed.error.code


def test_repeated_grant_is_accepted_again_and_taken_once(one):
    push = one.push(1)
    grant = one.peer.reserve("t", 5)
    one.peer.say(grant)
    assert one.peer.got(msg.GrantAccepted).grant_id == grant.grant_id
    assert len(push.targets) == 1


def test_second_grant_of_a_rank_is_a_conflict(one):
    one.push(1)
    one.peer.reserve("t", 5)
    assert refused(one.peer, one.peer.reserve("t", 7)) == "ALREADY_EXISTS"


def test_second_instance_cannot_take_what_another_one_takes():
    producer = Producer(consumers=2)
    producer.push(1)
    producer.peers[0].reserve("t", 5)
    stranger = FarPeer(producer.lone, 1, 2, instance="other").dial()
    assert refused(stranger, stranger.reserve("t", 5)) == "ALREADY_EXISTS"


def test_R2_rank_that_takes_nothing_from_us_is_refused():
    producer = Producer(size=2, consumers=4)
    producer.push(1)
    assert refused(producer.peers[2], producer.peers[2].reserve("t", 5)) == "INVALID_TOPOLOGY"


def test_R5_sizes_that_do_not_divide_the_heads_are_refused_before_any_plan():
    (group,) = make_groups()
    groups = (replace(group, layout="fused", total_kv_heads=3),)
    producer = Producer(consumers=4, groups=groups)
    producer.push(1)
    grant = producer.peer.reserve("t", 5)
    assert refused(producer.peer, grant) == "INVALID_TOPOLOGY"
    assert producer.lone.ever(ef.OpenSession) == []


@pytest.mark.parametrize(
    ("blocks", "first", "code"),
    [
        ((12, 1), (), "OUT_OF_RANGE"),
        ((5, 5), (), "INVALID_ARGUMENT"),
        ((5,), (), "LENGTH_MISMATCH"),
        ((5, 6, 7), (), "LENGTH_MISMATCH"),
        ((5, 6, 7), (0, 0), "LENGTH_MISMATCH"),
    ],
)
def test_G4_granted_blocks_that_cannot_be_written_fail_the_push(one, blocks, first, code):
    one.push(1, 2)
    grant = msg.Grant("t", new_id(), one.peer.generation, True, (pack(*blocks),), first)
    one.peer.say(grant)
    one.peer.describe()
    assert one.lone.ended == [("push", "t", "failed", code)]
    assert one.peer.got(msg.WriteFailed).error.code == code
    assert one.lone.ever(ef.PostOp) == []


def test_L3_grant_after_the_end_is_told_why_at_once(one):
    one.push(1, timeout_s=2.0)
    one.lone.wait(2.0)
    assert one.lone.ended == [("push", "t", "failed", "TIMED_OUT")]
    assert refused(one.peer, one.peer.reserve("t", 5)) == "TIMED_OUT"
    one.push(1)
    one.peer.reserve("t", writes=False)
    one.seal(0)
    assert refused(one.peer, one.peer.reserve("t", 5)) == "ABORTED"


def test_grant_while_the_push_drains_is_refused():
    producer = Producer(consumers=2)
    ops = producer.writing()
    producer.worker.send(req.Abort("t", "push"))
    assert refused(producer.peers[1], producer.peers[1].reserve("t", 5)) == "ABORTED"
    producer.lone.op_ended(ops[0], TransferAborted("cancelled"))
    assert producer.lone.ended == []
    producer.lone.op_ended(ops[1], TransferAborted("cancelled"))
    assert producer.lone.ended == [("push", "t", "failed", "ABORTED")]


# --- Grants that are taken back -------------------------------------------------------------------


def test_L2_revoked_grant_is_answered_when_nothing_is_written_any_more(one):
    ops = one.writing()
    grant_id = next(iter(one.lone.machine.pushes)).targets[0].grant.grant_id
    one.peer.say(msg.RevokeGrant("t", grant_id))
    assert one.lone.of(ef.CancelOp) == [ef.CancelOp(op.op) for op in ops]
    one.peer.say(msg.RevokeGrant("t", grant_id))
    one.lone.op_ended(ops[0], TransferAborted("cancelled"))
    assert one.peer.heard(msg.WriteFailed) == []
    one.lone.op_ended(ops[1])
    failed = one.peer.got(msg.WriteFailed)
    assert (failed.grant_id, failed.error.code) == (grant_id, "ABORTED")
    assert one.lone.ended == [("push", "t", "released", "aborted")]
    one.peer.say(msg.RevokeGrant("t", grant_id))
    assert one.peer.got(msg.WriteFailed) == failed
    confirm(one.peer, failed)
    assert one.is_clean()


def test_L2_revocation_before_any_layer_is_ready_releases_the_push_at_once(one):
    one.push(1)
    grant = one.peer.reserve("t", 5)
    one.peer.say(msg.RevokeGrant("t", grant.grant_id))
    assert one.lone.ended == [("push", "t", "released", "aborted")]
    one.peer.describe()
    assert one.lone.ever(ef.PostOp) == []


def test_early_grant_that_is_taken_back_is_not_taken_by_the_push(one):
    grant = one.peer.reserve("t", 5)
    one.peer.say(msg.RevokeGrant("t", grant.grant_id))
    assert one.peer.got(msg.WriteFailed).grant_id == grant.grant_id
    push = one.push(1)
    assert push.targets == {}


def test_revocation_by_one_rank_leaves_the_other_to_be_written():
    producer = Producer(consumers=2)
    producer.push(1, remote_tp_size=2)
    first = producer.peers[0].reserve("t", 5)
    producer.peers[1].reserve("t", 5)
    producer.peers[1].describe()
    producer.peers[0].say(msg.RevokeGrant("t", new_id()))  # of another attempt
    producer.peers[0].say(msg.RevokeGrant("t", first.grant_id))
    (op,) = producer.ready(0, 1)
    producer.seal()
    producer.lone.op_ended(op)
    assert producer.peers[1].got(msg.WriteDone).n_bytes == 16
    assert producer.lone.ended == [("push", "t", "released", "aborted")]


def test_rule_S3_late_copies_of_a_grant_that_is_over_are_told_its_end(one):
    ops = one.writing()
    grant = next(iter(one.lone.machine.pushes)).targets[0].grant
    for op in ops:
        one.lone.op_ended(op)
    done = one.peer.last(msg.WriteDone)
    confirm(one.peer, done)
    one.peer.say(grant)
    assert one.peer.got(msg.WriteDone) == done
    assert one.lone.ended == []
    assert len(one.lone.machine.pushes) == 0


def test_T4_consumer_that_takes_back_what_was_written_hears_that_nothing_writes_there(one):
    """Its WriteDone does not get through, so it no longer hopes for the data."""
    ops = one.writing()
    grant = next(iter(one.lone.machine.pushes)).targets[0].grant
    for op in ops:
        one.lone.op_ended(op)
    for _ in range(2):
        one.peer.say(msg.RevokeGrant("t", grant.grant_id))
        assert one.peer.got(msg.WriteFailed).error.code == "ABORTED"
        assert one.lone.ended == []
    confirm(one.peer, one.peer.last(msg.WriteFailed))
    assert one.is_clean()


# --- What fails -----------------------------------------------------------------------------------


def test_T2_write_that_fails_is_reported_and_the_consumer_is_told_when_all_have_ended(one):
    first, second = one.writing()
    one.lone.op_ended(first, EngineOpFailed("errno 5"))
    assert one.lone.of(ef.CancelOp) == [ef.CancelOp(second.op)]
    assert one.lone.ended == []
    one.lone.op_ended(second, TransferAborted("cancelled"))
    assert one.peer.got(msg.WriteFailed).error.code == "ENGINE_OP_FAILED"
    assert one.lone.ended == [("push", "t", "failed", "ENGINE_OP_FAILED")]


def test_T2_one_rank_that_fails_is_told_to_all():
    producer = Producer(consumers=2)
    producer.push(1, remote_tp_size=2)
    for peer in producer.peers:
        peer.reserve("t", 5)
        peer.describe()
    ops = producer.ready(0, 1)
    producer.lone.op_ended(ops[0], EngineOpFailed("no"))
    producer.lone.op_ended(ops[1], TransferAborted("cancelled"))
    for peer in producer.peers:
        assert peer.last(msg.WriteFailed).error.code == "ENGINE_OP_FAILED"
    assert producer.lone.ended == [("push", "t", "failed", "ENGINE_OP_FAILED")]


def test_T7_session_that_fails_fails_the_push(one):
    one.push(1)
    one.peer.reserve("t", 5)
    one.peer.say(msg.LayoutReply(one.peer.generation, one.peer.remote_layout))
    session = one.lone.one(ef.OpenSession).session
    one.lone.step(ev.SessionRefused(session, SessionFailed("no")))
    assert one.lone.ended == [("push", "t", "failed", "SESSION_FAILED")]
    assert one.peer.got(msg.WriteFailed).error.code == "SESSION_FAILED"


def test_push_without_grants_times_out(one):
    one.push(1)
    one.lone.wait(15.0)
    assert one.lone.ended == [("push", "t", "failed", "TIMED_OUT")]


def test_T1_engine_without_room_until_the_time_is_over_is_named(one):
    one.push(1, 2, timeout_s=1.0)
    one.peer.reserve("t", 5, 6)
    one.peer.describe()
    (op,) = one.ready(0)
    one.lone.step(ev.OpRefused(op.op))
    while not one.lone.ever(ef.SendEvent):
        one.lone.wait(0.001)
        for posted in one.lone.of(ef.PostOp):
            one.lone.step(ev.OpRefused(posted.op))
    assert one.lone.ended == [("push", "t", "failed", "ENGINE_QUEUE_FULL")]
    assert one.peer.last(msg.WriteFailed).error.code == "ENGINE_QUEUE_FULL"


@pytest.mark.parametrize("silent", [True, False])
def test_consumer_that_is_lost_fails_the_push_when_its_writes_have_ended(one, silent):
    ops = one.writing()
    if silent:
        one.lone.wait(4.0)
    else:
        one.peer.say(msg.Goodbye())
    assert one.lone.of(ef.CancelOp) == [ef.CancelOp(op.op) for op in ops]
    for op in ops:
        assert one.lone.ended == []
        one.lone.op_ended(op, TransferAborted("cancelled"))
    assert one.lone.ended == [("push", "t", "failed", "PEER_LOST")]


def test_worker_that_is_lost_fails_the_push_when_its_writes_have_ended(one):
    ops = one.writing()
    one.lone.step(ev.WorkerDied(one.worker.generation))
    assert one.lone.of(ef.ReleaseMemory) == []
    for op in ops:
        one.lone.op_ended(op, TransferAborted("cancelled"))
    assert one.lone.one(ef.ReleaseMemory).generation == one.worker.generation
    assert one.peer.got(msg.WriteFailed).error.code == "WORKER_LOST"


# --- What comes too late --------------------------------------------------------------------------


def test_signals_to_a_target_that_is_beyond_them_change_nothing(one):
    one.push(1)
    one.peer.reserve("t", 5)
    one.peer.describe()
    (push,) = one.lone.machine.pushes
    (target,) = push.targets.values()
    (op,) = one.ready(0, 1)
    one.seal()
    one.lone.op_ended(op)
    confirm(one.peer, one.peer.last(msg.WriteDone))
    (session,) = one.lone.machine.sessions._by_id.values()
    late = PeerLost("late")
    target.session_ready(session)
    target.session_failed(late)
    target.peer_lost(late)
    target.peer_fenced()
    target.peer_forgotten()
    target.close(late)
    push.fail(late)
    push.advance()
    one.lone.wait(0.0)
    assert one.lone.effects == ()
    assert one.is_clean()
