"""READ, consumer side: claim, read, confirm, drain. Cases A4 G1 G3 G4 L2 L5 R2 T1 T3."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moriiod.core import effects as ef
from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.core.pull import Pull
from moriiod.errors import EngineOpFailed, PeerLost, SessionFailed, TransferAborted
from tests.support.lone import SETTINGS, FarPeer, Lone, LoneWorker, new_id
from tests.support.sim import make_groups, pack

RECEIVED = ("pull", "t", "received", "acked")


class Consumer:
    """A decode rank with a worker, and the prefill ranks it pulls from."""

    def __init__(
        self, size: int = 1, producers: int = 1, *, heads: int = 0, **settings: float
    ) -> None:
        self.lone = Lone(0, size, instance="D", settings=replace(SETTINGS, **settings))
        self.worker = LoneWorker(self.lone, make_groups(heads=heads, tp_size=size))
        groups = make_groups(heads=heads, tp_size=producers)
        self.peers = [
            FarPeer(self.lone, r, producers, instance="P", groups=groups) for r in range(producers)
        ]

    @property
    def peer(self) -> FarPeer:
        """The rank that is read."""
        return self.peers[0]

    def request(self, remote: bytes, local: bytes, **more: object) -> req.Pull:
        return req.Pull("t", self.peer.address, (remote,), (local,), **more)  # type: ignore[arg-type]

    def pull(self, *blocks: int, **more: object) -> Pull:
        request = self.request(pack(*blocks), pack(*blocks), **more)
        assert self.worker.ask(request) == req.Done()
        return next(iter(self.lone.machine.pulls))

    def claiming(self, **more: object) -> Pull:
        pull = self.pull(1, 2, **more)
        self.peer.welcome()
        return pull

    def holding(self, ttl_s: float = 20.0, **more: object) -> Pull:
        pull = self.claiming(**more)
        self.peer.grant(ttl_s)
        return pull

    def reading(self, ttl_s: float = 20.0, **more: object) -> ef.PostOp:
        self.holding(ttl_s, **more)
        self.peer.describe()
        return self.lone.one(ef.PostOp)

    def legs(self) -> list[str]:
        return [leg.state.value for pull in self.lone.machine.pulls for leg in pull.legs]

    def is_clean(self) -> bool:
        machine = self.lone.machine
        return (
            len(machine.pulls) == 0
            and machine.admission.active == 0
            and machine.peers.outbox.count() == 0
            and len(machine.ops) == 0
            and not any(peer.users for peer in machine.peers)
        )


@pytest.fixture
def one() -> Consumer:
    return Consumer()


# --- The good way ---------------------------------------------------------------------------------


def test_pull_claims_reads_acks_and_is_received_when_the_ack_is_confirmed(one):
    one.pull(1, 2)
    (opened,) = one.lone.of(ef.OpenRoute)
    assert (opened.host, opened.port) == ("127.0.0.1", 6301)
    one.peer.welcome()
    claim = one.peer.got(msg.Claim)
    assert (claim.transfer_id, claim.reads, claim.blocks) == ("t", True, (pack(1, 2),))
    one.peer.grant()
    assert one.peer.got(msg.LayoutRequest).generation == one.peer.generation
    one.peer.describe()
    op = one.lone.one(ef.PostOp)
    assert (op.direction, op.plan.n_bytes) == ("read", 32)
    one.lone.op_ended(op)
    ack = one.peer.got(msg.Ack)
    assert (ack.pull_id, ack.ok) == (claim.pull_id, True)
    assert (ack.consumer_tp_rank, ack.consumer_tp_size) == (0, 1)
    assert one.lone.ended == []
    one.peer.confirm()
    (told,) = one.lone.of(ef.SendEvent)
    assert told.body == req.TransferEnded("t", "pull", "received", "acked", n_bytes=32, n_layers=2)
    assert one.is_clean()


def test_G3_full_prefix_hit_is_received_at_once_and_the_producer_is_told(one):
    one.pull()
    assert one.lone.ended == [RECEIVED]
    one.peer.welcome()
    claim = one.peer.got(msg.Claim)
    assert (claim.reads, claim.blocks) == (False, ())
    one.peer.grant()
    assert one.peer.got(msg.Ack).ok is True
    assert one.peer.heard(msg.LayoutRequest) == []
    one.peer.confirm()
    assert one.lone.ended == []
    assert one.is_clean()


def test_ranks_that_nobody_reads_are_released_when_the_data_is_there():
    consumer = Consumer(producers=2)
    consumer.pull(1)
    read, unread = consumer.peers
    read.welcome()
    assert read.got(msg.Claim).reads is True
    unread.welcome()
    assert unread.got(msg.Claim).reads is False
    unread.grant()
    assert unread.heard(msg.Ack) == []
    read.grant()
    read.describe()
    consumer.lone.op_ended(consumer.lone.one(ef.PostOp))
    assert read.got(msg.Ack).ok is True
    assert unread.got(msg.Ack).ok is True
    read.confirm()
    assert consumer.lone.ended == [RECEIVED]
    unread.confirm()
    assert consumer.is_clean()


def test_rank_that_nobody_reads_and_that_grants_late_is_released_then():
    consumer = Consumer(producers=2)
    read, unread = consumer.peers
    consumer.reading()
    unread.welcome()
    op = consumer.lone.ever(ef.PostOp)[0]
    consumer.lone.op_ended(op)
    unread.grant()
    assert consumer.legs() == ["acking", "holding"]
    read.confirm()
    assert consumer.lone.ended == [RECEIVED]
    assert unread.got(msg.Ack).ok is True
    unread.confirm()
    assert consumer.is_clean()


@pytest.mark.parametrize("happens", ["refused", "unreachable", "revoked", "lost", "after"])
def test_failure_of_a_rank_that_nobody_reads_fails_nothing(happens):
    consumer = Consumer(producers=2)
    read, unread = consumer.peers
    op = consumer.reading()
    if happens != "unreachable":
        unread.welcome()
    claim = consumer.lone.ever_sent(msg.Claim)[-1]
    error = msg.WireError("LEASE_EXPIRED", "over", False, {})
    match happens:
        case "refused":
            unread.say(msg.ClaimRefused("t", claim.pull_id, error))
        case "unreachable":
            routes = {x.port: x.route for x in consumer.lone.ever(ef.OpenRoute)}
            consumer.lone.step(ev.RouteFailed(routes[unread.port], PeerLost("no way")))
        case "revoked":
            unread.say(msg.Revoke("t", claim.pull_id, new_id(), error))
            assert unread.got(msg.Ack).ok is False
            unread.confirm()
        case "lost":
            unread.say(msg.Goodbye())
        case "after":
            pass
    consumer.lone.op_ended(op)
    read.confirm()
    assert consumer.lone.ended == [RECEIVED]
    if happens == "after":
        unread.say(msg.ClaimRefused("t", claim.pull_id, error))
    assert consumer.is_clean()


# --- Requests that are refused --------------------------------------------------------------------


def test_identical_pull_is_a_no_op_and_another_under_the_id_a_conflict(one):
    one.pull(1, 2)
    assert one.worker.ask(one.request(pack(1, 2), pack(1, 2))) == req.Done()
    assert one.worker.refusal(one.request(pack(3), pack(3))).code == "ALREADY_EXISTS"
    assert len(one.lone.machine.pulls) == 1


@pytest.mark.parametrize(
    ("remote", "local", "code"),
    [
        (pack(7, 8), pack(1, 2, 3), "LENGTH_MISMATCH"),
        (pack(7), pack(), "LENGTH_MISMATCH"),
        (pack(1), pack(12), "OUT_OF_RANGE"),
        (pack(1, 2), pack(5, 5), "INVALID_ARGUMENT"),
    ],
)
def test_G1_G4_lists_that_do_not_fit_are_refused_and_nothing_is_started(one, remote, local, code):
    assert one.worker.refusal(one.request(remote, local)).code == code
    assert one.lone.of(ef.OpenRoute) == []
    assert one.is_clean()
    one.pull(1)


def test_G1_lists_are_checked_with_the_block_size_that_was_said_and_again_with_the_true_one(one):
    request = one.request(pack(7, 8), pack(1, 2, 3), remote_block_tokens=(2,))
    assert one.worker.ask(request) == req.Done()
    one.peer.welcome()
    one.peer.grant()
    one.peer.describe()  # blocks of one token
    assert one.lone.of(ef.PostOp) == []
    (told,) = one.lone.of(ef.SendEvent)
    assert (told.body.outcome, told.body.reason) == ("failed", "LENGTH_MISMATCH")
    assert one.peer.got(msg.Ack).ok is False
    one.peer.confirm()
    assert one.is_clean()


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_G1_lists_that_do_not_fit_the_block_size_that_was_said_are_refused(one, sizes):
    request = one.request(pack(7, 8), pack(1, 2, 3), remote_block_tokens=sizes)
    assert one.worker.refusal(request).code == "LENGTH_MISMATCH"


def test_source_block_may_be_read_twice(one):
    assert one.worker.ask(one.request(pack(3, 3), pack(5, 6))) == req.Done()


@pytest.mark.parametrize(
    ("size", "claimed", "code"), [(4, 6, "INVALID_TOPOLOGY"), (8, 3, "INVALID_TOPOLOGY")]
)
def test_R2_sizes_that_are_no_multiples_are_refused_naming_both(size, claimed, code):
    consumer = Consumer(size=size)
    peer = replace(consumer.peer.address, tp_size=claimed)
    for body in (req.Pull("t", peer, (pack(1),), (pack(1),)), req.Reject("t", peer)):
        refusal = consumer.worker.refusal(body)
        assert refusal.code == code
        assert refusal.fields == {
            "producer_tp_size": str(claimed),
            "consumer_tp_size": str(size),
        }
    assert consumer.lone.ever(ef.OpenRoute) == []


# --- What fails -----------------------------------------------------------------------------------


def test_refused_claim_fails_with_the_producers_reason(one):
    pull = one.claiming()
    error = msg.WireError("LEASE_EXPIRED", "over", False, {"lease_s": 1.0})
    for _ in range(2):
        one.peer.say(msg.ClaimRefused("t", pull.pull_id, error))
        ended = one.lone.ended or ended  # noqa: F821
    assert ended == [("pull", "t", "failed", "LEASE_EXPIRED")]
    assert one.is_clean()


def test_unreachable_producer_fails_the_pull(one):
    one.pull(1)
    one.lone.wait(5.0)
    assert one.lone.ended == [("pull", "t", "failed", "PEER_UNREACHABLE")]
    assert one.is_clean()


def test_M4_producer_without_memory_fails_the_pull_and_is_told(one):
    one.holding()
    one.peer.say(msg.LayoutReply(one.peer.generation, None))
    assert one.lone.ended == [("pull", "t", "failed", "NOT_REGISTERED")]
    assert one.peer.got(msg.Ack).ok is False


def test_rule_S5_granted_blocks_that_the_described_cache_does_not_have_are_not_read(one):
    one.holding()
    groups = make_groups(2)
    layout = replace(one.peer.layout, groups=groups, region_bytes=(32,))
    one.peer.say(
        msg.LayoutReply(one.peer.generation, replace(one.peer.remote_layout, layout=layout))
    )
    one.lone.open_sessions()
    assert one.lone.ended == [("pull", "t", "failed", "OUT_OF_RANGE")]
    assert one.lone.ever(ef.PostOp) == []
    assert one.peer.got(msg.Ack).ok is False


def test_T7_session_that_fails_fails_the_pull_and_is_tried_again(one):
    one.holding()
    one.peer.say(msg.LayoutReply(one.peer.generation, one.peer.remote_layout))
    session = one.lone.one(ef.OpenSession).session
    one.lone.step(ev.SessionRefused(session, SessionFailed("this once")))
    assert one.lone.ended == [("pull", "t", "failed", "SESSION_FAILED")]
    one.peer.confirm(valid=False)
    one.pull(1, 2)
    one.peer.grant()
    one.peer.describe()
    one.lone.op_ended(one.lone.one(ef.PostOp))
    one.peer.confirm()
    assert one.lone.ended == [RECEIVED]


def test_T2_failed_read_is_reported_and_the_producer_is_told(one):
    op = one.reading()
    one.lone.op_ended(op, EngineOpFailed("errno 5"))
    assert one.lone.ended == [("pull", "t", "failed", "ENGINE_OP_FAILED")]
    assert one.peer.got(msg.Ack).ok is False
    one.peer.confirm(valid=False)
    assert one.is_clean()


def test_rule_S3_read_that_the_producer_calls_invalid_is_a_failure(one):
    op = one.reading()
    one.lone.op_ended(op)
    one.peer.confirm(valid=False)
    assert one.lone.ended == [("pull", "t", "failed", "LEASE_EXPIRED")]
    assert one.is_clean()


def test_T3_read_that_never_ends_is_cancelled_at_its_time_and_reported_when_it_is_over(one):
    op = one.reading(timeout_s=2.0)
    one.lone.wait(1.9)
    assert one.lone.of(ef.CancelOp) == []
    one.lone.wait(0.1)
    assert one.lone.of(ef.CancelOp) == [ef.CancelOp(op.op)]
    one.lone.wait(2.0)
    assert one.lone.ever(ef.SendEvent) == []
    assert one.legs() == ["reading"]
    one.lone.op_ended(op, TransferAborted("cancelled"))
    assert one.lone.ended == [("pull", "t", "failed", "TIMED_OUT")]


def test_read_that_succeeds_after_the_pull_was_given_up_is_still_a_failure(one):
    op = one.reading()
    assert one.worker.ask(req.Abort("t", "pull")) == req.Done()
    one.lone.op_ended(op)
    assert one.lone.ended == [("pull", "t", "failed", "ABORTED")]
    assert one.peer.got(msg.Ack).ok is False


def test_T1_engine_without_room_until_the_time_is_over_is_named(one):
    op = one.reading(timeout_s=1.0)
    for _ in range(200):
        if one.lone.ever(ef.SendEvent):
            break
        one.lone.step(ev.OpRefused(op.op))
        while not one.lone.wait(0.001):
            pass
    assert [e.body.reason for e in one.lone.ever(ef.SendEvent)] == ["ENGINE_QUEUE_FULL"]
    assert one.lone.now == pytest.approx(101.0, abs=0.01)
    assert one.peer.last(msg.Ack).ok is False


@pytest.mark.parametrize("state", ["dialing", "claiming", "holding", "reading", "acking"])
def test_worker_that_is_lost_ends_the_pull_in_every_state(one, state):
    op = None
    match state:
        case "dialing":
            one.pull(1)
        case "claiming":
            one.claiming()
        case "holding":
            one.holding()
        case "reading" | "acking":
            op = one.reading()
    if state == "acking":
        assert op is not None
        one.lone.op_ended(op)
    assert one.legs() == [state]
    one.lone.step(ev.WorkerDied(one.worker.generation))
    released = one.lone.of(ef.ReleaseMemory)
    if state == "reading":
        assert released == []
        assert op is not None
        one.lone.op_ended(op, TransferAborted("cancelled"))
        released = one.lone.of(ef.ReleaseMemory)
    assert [effect.generation for effect in released] == [one.worker.generation]
    if state == "claiming":
        one.peer.grant()  # the claim is still on its way there: only an Ack ends it
    if state != "dialing":
        assert one.peer.last(msg.Ack).ok is (state == "acking")
        one.peer.confirm()
    assert one.lone.ever(ef.SendEvent) == []
    assert one.is_clean()


@pytest.mark.parametrize("state", ["dialing", "claiming", "holding", "reading", "acking"])
def test_L2_abort_ends_the_pull_once_in_every_state(one, state):
    match state:
        case "dialing":
            one.pull(1)
        case "claiming":
            one.claiming()
        case "holding":
            one.holding()
        case _:
            op = one.reading()
            if state == "acking":
                one.lone.op_ended(op)
    assert one.worker.ask(req.Abort("t", "pull")) == req.Done()
    if state == "reading":
        assert one.lone.ended == []
        one.lone.op_ended(op, TransferAborted("cancelled"))
    assert one.lone.ended == [("pull", "t", "failed", "ABORTED")]
    assert one.worker.refusal(req.Abort("t", "pull")).code == "UNKNOWN_TRANSFER"


# --- Claims and time ------------------------------------------------------------------------------


def test_repeats_and_late_copies_of_a_grant_change_nothing(one):
    pull = one.holding()
    one.peer.grant()
    assert one.lone.sent == []
    one.peer.say(msg.ClaimRefused("t", pull.pull_id, msg.WireError("BUSY", "late", True, {})))
    one.peer.say(msg.AckConfirmed("t", pull.pull_id, True))
    assert one.lone.effects == ()
    one.peer.describe()
    one.peer.grant()
    one.lone.op_ended(one.lone.ever(ef.PostOp)[0])
    one.peer.grant()
    assert one.lone.sent == []
    one.peer.confirm()
    assert one.lone.ended == [RECEIVED]
    one.peer.confirm()
    one.peer.grant()
    assert one.peer.got(msg.Ack).ok is False  # nobody here knows it any more
    assert one.lone.ended == []


def test_A4_grant_for_a_claim_that_waited_longer_than_the_lease_is_asked_for_again(one):
    one.claiming()
    claim = one.peer.last(msg.Claim)
    one.lone.wait(3.0)
    one.peer.beat()
    one.peer.grant(ttl_s=2.0)
    assert one.lone.sent == [claim]
    one.lone.wait(0.1)
    one.peer.grant(ttl_s=2.0)
    assert one.peer.heard(msg.LayoutRequest)
    (pull,) = one.lone.machine.pulls
    assert pull.legs[0].valid_until == pytest.approx(105.0)


def test_L5_time_counts_from_when_we_asked_and_not_from_the_answer(one):
    pull = one.claiming()
    one.lone.wait(1.5)
    one.peer.grant(ttl_s=2.0)
    (leg,) = pull.legs
    assert leg.valid_until == 102.0
    assert leg.renew_at < leg.valid_until


def test_L5_read_that_ends_after_the_lease_is_a_failure_whatever_the_engine_says(one):
    op = one.reading(ttl_s=1.0)
    one.lone.now = 101.5  # the timer is late
    one.lone.op_ended(op)
    assert one.lone.ended == [("pull", "t", "failed", "LEASE_EXPIRED")]
    assert one.peer.got(msg.Ack).ok is False


def test_L4_leases_are_renewed_when_a_quarter_has_passed_while_they_are_held(one):
    op = one.reading(ttl_s=3.0)
    (leg,) = next(iter(one.lone.machine.pulls)).legs
    lease = ("t", leg.lease_id)
    for _ in range(10):
        one.lone.wait(0.5)
        assert one.peer.heard(msg.Renew) == []
        one.lone.wait(0.25)
        assert one.peer.got(msg.Renew).leases == (lease,)
        one.peer.say(msg.Renewed(((*lease, 3.0),), ()))
        one.peer.say(msg.Renewed(((*lease, 99.0),), ()))  # nobody asked
    assert leg.valid_until == pytest.approx(one.lone.now + 3.0)
    one.lone.op_ended(op)
    assert one.lone.machine.pulls._holders == {}
    one.peer.confirm()
    assert one.lone.ended == [RECEIVED]


def test_L4_renewal_that_is_not_answered_is_repeated_until_the_lease_is_over(one):
    op = one.reading(ttl_s=3.0)
    one.lone.wait(2.9)
    assert len([body for body in one.lone.sent if isinstance(body, msg.Renew)]) > 3
    one.lone.wait(0.2)
    assert one.lone.of(ef.CancelOp) == [ef.CancelOp(op.op)]
    one.lone.op_ended(op, TransferAborted("cancelled"))
    assert one.lone.ended == [("pull", "t", "failed", "LEASE_EXPIRED")]


def test_L8_lease_that_the_producer_does_not_know_ends_the_pull(one):
    op = one.reading()
    (leg,) = next(iter(one.lone.machine.pulls)).legs
    unknown = msg.Renewed((("u", new_id(), 5.0),), (("t", leg.lease_id), ("u", new_id())))
    one.peer.say(unknown)
    assert one.lone.of(ef.CancelOp) == [ef.CancelOp(op.op)]
    one.peer.say(unknown)
    one.lone.op_ended(op, TransferAborted("cancelled"))
    assert one.lone.ended == [("pull", "t", "failed", "LEASE_EXPIRED")]


def test_one_renewal_speaks_for_all_leases_of_a_producer(one):
    other = req.Pull("u", one.peer.address, (pack(3),), (pack(3),))
    one.holding(ttl_s=6.0)
    one.worker.ask(other)
    one.peer.grant(9.0)
    one.lone.wait(2.0)
    assert [name for name, _ in one.peer.got(msg.Renew).leases] == ["t", "u"]
    one.worker.send(req.Abort("t", "pull"))
    one.lone.wait(2.0)
    assert [name for name, _ in one.peer.heard(msg.Renew)[-1].leases] == ["u"]


def test_next_attempt_is_renewed_also_when_the_end_of_the_one_before_is_confirmed(one):
    one.holding()
    (leg,) = next(iter(one.lone.machine.pulls)).legs
    lease_id = leg.lease_id
    one.worker.send(req.Abort("t", "pull"))
    first = one.peer.last(msg.Ack)
    one.pull(1, 2)
    claim = one.peer.last(msg.Claim)
    one.peer.say(msg.ClaimGranted("t", claim.pull_id, lease_id, one.peer.generation, 6.0))
    one.peer.say(msg.AckConfirmed("t", first.pull_id, True))
    one.lone.wait(2.0)
    assert one.peer.got(msg.Renew).leases == (("t", lease_id),)


# --- Revocation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["claiming", "holding", "reading", "acking"])
def test_L4_revoked_lease_is_acked_when_nothing_is_read_any_more(state):
    one = Consumer()
    pull = one.claiming()
    lease_id = new_id()
    if state != "claiming":
        granted = msg.ClaimGranted("t", pull.pull_id, lease_id, one.peer.generation, 20.0)
        one.peer.say(granted)
    if state in ("reading", "acking"):
        one.peer.describe()
        op = one.lone.one(ef.PostOp)
    if state == "acking":
        one.lone.op_ended(op)
    revoke = msg.Revoke("t", pull.pull_id, lease_id, msg.WireError("ABORTED", "no", False, {}))
    one.peer.say(revoke)
    if state == "reading":
        assert one.peer.heard(msg.Ack) == []
        one.lone.op_ended(op, TransferAborted("cancelled"))
    if state == "acking":  # our Ack is on its way already; the producer will say what it is worth
        assert one.lone.effects == ()
        one.peer.confirm(valid=False)
        assert one.lone.ended == [("pull", "t", "failed", "LEASE_EXPIRED")]
        return
    assert one.lone.ended == [("pull", "t", "failed", "ABORTED")]
    ack = one.peer.got(msg.Ack)
    assert (ack.lease_id, ack.ok) == (lease_id, False)
    if state == "holding":
        one.peer.describe()  # asked for before; nobody waits for it any more
        assert one.lone.of(ef.PostOp) == []
    one.peer.say(revoke)
    one.peer.confirm()
    assert one.is_clean()
    one.peer.say(revoke)
    assert one.peer.got(msg.Ack).ok is False


# --- Several sources ------------------------------------------------------------------------------


class TwoSources(Consumer):
    """A pull that gathers the two heads of a model from two prefill ranks."""

    def __init__(self) -> None:
        super().__init__(producers=2, heads=2)
        self.pull(1, 2)
        self.ops = []
        for peer in self.peers:
            peer.welcome()
            peer.grant()
            peer.describe()
            self.ops.append(self.lone.one(ef.PostOp))


def test_pull_is_received_when_every_source_was_read_and_has_confirmed():
    both = TwoSources()
    both.lone.op_ended(both.ops[0])
    assert both.lone.sent == []
    assert both.legs() == ["read", "reading"]
    both.lone.op_ended(both.ops[1])
    assert [type(body) for body in both.lone.sent] == [msg.Ack, msg.Ack]
    both.peers[0].confirm()
    assert both.lone.ended == []
    both.peers[1].confirm()
    (told,) = both.lone.of(ef.SendEvent)
    assert (told.body.outcome, told.body.n_bytes, told.body.n_layers) == ("received", 64, 2)
    assert both.is_clean()


@pytest.mark.parametrize("happens", ["revoked", "lost", "void", "expired", "unknown"])
def test_rule_S3_source_that_was_read_can_still_fail_the_pull_before_the_others_are(happens):
    both = TwoSources()
    read, reading = both.peers
    both.lone.op_ended(both.ops[0])
    (pull,) = both.lone.machine.pulls
    lease_id = pull.legs[0].lease_id
    error = msg.WireError("ABORTED", "no", False, {})
    match happens:
        case "revoked":
            read.say(msg.Revoke("t", pull.pull_id, lease_id, error))
        case "lost":
            both.lone.wait(3.0)
            reading.reply_beat()
            both.lone.wait(1.0)
        case "void":
            read.say(msg.Goodbye())
        case "expired":
            pull.legs[0].valid_until = both.lone.now + 1.0
            pull.legs[0].renew_at = both.lone.now
            both.lone.machine.pulls._arm_renewal(pull.legs[0].peer)
            both.lone.wait(1.5)
        case "unknown":
            read.say(msg.Renewed((), (("t", lease_id),)))
    assert both.lone.of(ef.CancelOp) == [ef.CancelOp(both.ops[1].op)]
    assert both.lone.ended == []
    both.lone.op_ended(both.ops[1], TransferAborted("cancelled"))
    reasons = {"revoked": "ABORTED", "lost": "PEER_LOST", "void": "PEER_LOST"}
    reason = reasons.get(happens, "LEASE_EXPIRED")
    assert both.lone.ended == [("pull", "t", "failed", reason)]
    if happens != "void":
        assert read.last(msg.Ack).ok is False
    assert reading.last(msg.Ack).ok is False


# --- Loss of the producer -------------------------------------------------------------------------


def test_silent_producer_fails_the_pull_and_is_told_when_it_is_back(one):
    op = one.reading()
    one.lone.wait(4.0)
    assert one.lone.of(ef.CancelOp) == [ef.CancelOp(op.op)]
    one.lone.op_ended(op, TransferAborted("cancelled"))
    assert one.lone.ended == [("pull", "t", "failed", "PEER_LOST")]
    one.lone.wait(200.0)
    one.peer.welcome()
    one.lone.wait(5.0)
    assert one.peer.heard(msg.Ack)
    one.peer.confirm(valid=False)
    assert one.is_clean()


def test_producer_that_is_silent_for_very_long_is_forgotten_with_its_acks(one):
    one.holding()
    one.lone.wait(310.0)
    assert len(one.lone.machine.pulls) == 0
    assert one.is_clean()


def test_silent_producer_that_never_answered_a_claim_is_forgotten_as_well(one):
    one.claiming()
    one.lone.wait(310.0)
    assert one.is_clean()


def restart(one: Consumer) -> FarPeer:
    fresh = one.peer.restarted()
    fresh.say(msg.UnknownEpoch(one.lone.identity.epoch))
    fresh.welcome()
    return fresh


def test_rule_S7_restart_of_the_producer_before_it_granted_is_claimed_of_the_next(one):
    one.claiming()
    old = one.peer.last(msg.Claim)
    fresh = restart(one)
    claim = fresh.got(msg.Claim)
    assert claim == old
    fresh.grant()
    fresh.describe()
    one.lone.op_ended(one.lone.one(ef.PostOp))
    fresh.confirm()
    assert one.lone.ended == [RECEIVED]


def test_rule_S7_pull_that_was_given_up_claims_nothing_of_the_next_epoch(one):
    one.claiming()
    one.worker.send(req.Abort("t", "pull"))
    fresh = restart(one)
    assert fresh.heard(msg.Claim) == []
    assert one.is_clean()


@pytest.mark.parametrize("state", ["holding", "reading", "acking"])
def test_rule_S7_restart_of_the_producer_after_it_granted_fails_the_pull(one, state):
    op = None
    if state == "holding":
        one.holding()
    else:
        op = one.reading()
    if state == "acking":
        assert op is not None
        one.lone.op_ended(op)
    restart(one)
    if state == "reading":
        assert one.lone.ended == []
        assert op is not None
        one.lone.op_ended(op)
    assert one.lone.ended == [("pull", "t", "failed", "PEER_RESTARTED")]
    assert one.is_clean()


def test_goodbye_of_the_producer_fails_the_pull(one):
    one.claiming()
    one.peer.say(msg.Goodbye())
    assert one.lone.ended == [("pull", "t", "failed", "PEER_LOST")]
    assert one.is_clean()


# --- Reject ---------------------------------------------------------------------------------------


def test_L2_reject_releases_the_producer_and_reports_nothing(one):
    assert one.worker.ask(req.Reject("t", one.peer.address)) == req.Done()
    one.peer.welcome()
    assert one.peer.got(msg.Claim).reads is False
    one.peer.grant()
    assert one.peer.got(msg.Ack).ok is False
    one.peer.confirm()
    assert one.is_clean()
    assert one.lone.ever(ef.SendEvent) == []


def test_L2_transfer_that_is_being_pulled_is_aborted_and_not_rejected(one):
    one.pull(1)
    assert one.worker.refusal(req.Reject("t", one.peer.address)).code == "ALREADY_EXISTS"


# --- What comes too late --------------------------------------------------------------------------


def test_signals_to_a_leg_that_is_beyond_them_change_nothing(one):
    op = one.reading()
    one.lone.op_ended(op)
    (pull,) = one.lone.machine.pulls
    (leg,) = pull.legs
    (known,) = one.lone.machine.peers
    one.peer.confirm()
    (session,) = one.lone.machine.sessions._by_id.values()
    late = PeerLost("late")
    leg.session_ready(session)
    leg.link_up(known)
    leg.link_failed(late)
    leg.peer_lost(late)
    leg.peer_fenced()
    leg.peer_forgotten()
    leg.session_failed(late)
    leg.lease_lost()
    leg.give_up()
    pull.fail(late)
    one.lone.wait(0.0)
    assert one.lone.effects == ()
    assert one.is_clean()


def test_link_to_a_daemon_that_is_over_when_it_is_told_is_no_link(one):
    pull = one.pull(1)
    other = FarPeer(one.lone, instance="X").dial()
    known = one.lone.machine.peers.get(other.epoch)
    assert known is not None
    other.restarted().dial()
    pull.legs[0].link_up(known)
    one.lone.wait(0.0)
    effects = one.lone.machine.ctx.take_effects()
    told = [effect.body for effect in effects if isinstance(effect, ef.SendEvent)]
    assert [event.reason for event in told] == ["LEASE_EXPIRED"]
