"""S1-S4 over hostile worlds, and proof that this test would notice if they broke.

Each planted bug is one that a peer system has shipped; the machine must find it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from moriiod.core.fanin import AckVerdict, FanIn, TransferAck
from moriiod.core.lease import Lease, LeaseClaim
from moriiod.core.pull import Pull, PullLeg
from moriiod.core.push import PushTarget
from moriiod.core.reserve import GrantLeg, GrantState, Reserve
from moriiod.core.transfers import Ending
from moriiod.errors import InvariantViolation, MoriiodError
from tests.property.world_machine import WorldMachine


def _run(examples: int, steps: int = 50) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        WorldMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(240)
def test_hostile_worlds_keep_the_safety_rules() -> None:
    _run(1200)


def _free_at_deadline(patch: pytest.MonkeyPatch) -> None:
    def check_expiry(self: Lease) -> None:
        if self._ctx.now >= self.expires_at:
            for claim in self.open_claims():
                self._close_claim(claim)
            self.error = None
            self._end(Ending("failed", "LEASE_EXPIRED"))

    patch.setattr(Lease, "check_expiry", check_expiry)


def _count_acks(patch: pytest.MonkeyPatch) -> None:
    def add(self: FanIn, ack: TransferAck) -> AckVerdict:
        seen = getattr(Counter, "seen", {})
        seen[id(self)] = seen.get(id(self), 0) + 1
        Counter.seen = seen  # type: ignore[attr-defined]
        self._is_complete = seen[id(self)] >= self._needed()
        return AckVerdict.COUNTED

    class Counter:
        pass

    def acked(self: Lease, claim: LeaseClaim, message: object) -> None:
        claim.is_valid = self.is_open
        identity = claim.peer.identity
        self._count(TransferAck(self.transfer_id, identity.tp_size, identity.tp_rank))
        if self.fan_in.is_complete and self.is_open:
            for other in self.open_claims():
                self._close_claim(other)
            self._end(Ending("released", "acked"))

    patch.setattr(FanIn, "add", add)
    patch.setattr(Lease, "acked", acked)


def _believe_the_clock(patch: pytest.MonkeyPatch) -> None:
    """Report received when the read has ended, without asking whether the lease held."""

    def leg_read(self: Pull) -> None:
        self.receive()

    patch.setattr(Pull, "leg_read", leg_read)


def _report_before_drain(patch: pytest.MonkeyPatch) -> None:
    def fail(self: Pull, error: MoriiodError) -> None:
        if self.is_active:
            self.error = error
            self._end(Ending.failure(error))
            for leg in self.legs:
                leg.give_up()

    patch.setattr(Pull, "fail", fail)


def _trust_the_revoke(patch: pytest.MonkeyPatch) -> None:
    """Give reserved blocks back when the producer was asked, not when it has answered."""
    original = GrantLeg.revoke

    def revoke(self: GrantLeg) -> None:
        original(self)
        if self.state is GrantState.REVOKING:
            self._close(GrantState.CLOSED)

    patch.setattr(GrantLeg, "revoke", revoke)


def _silence_is_death(patch: pytest.MonkeyPatch) -> None:
    """Take a silent producer for a dead one."""

    def peer_lost(self: GrantLeg, error: MoriiodError) -> None:
        if not self.is_over:
            self._close(GrantState.CLOSED)
            self.reserve.fail(error)
            self.reserve.settle()

    patch.setattr(GrantLeg, "peer_lost", peer_lost)


def _done_before_the_end(patch: pytest.MonkeyPatch) -> None:
    """Say WriteDone when everything is posted, not when it has ended."""
    original = PushTarget.write

    def write(self: PushTarget, ready: set[int]) -> None:
        original(self, ready)
        self.ops.clear()

    patch.setattr(PushTarget, "write", write)


def _end_twice(patch: pytest.MonkeyPatch) -> None:
    """Report a reservation for each producer that has written."""

    def leg_done(self: Reserve) -> None:
        event_error = Ending("received", "acked")
        self.is_ended = False
        self.report(event_error)

    patch.setattr(Reserve, "leg_done", leg_done)


def _release_while_held(patch: pytest.MonkeyPatch) -> None:
    """Ack the lease while the read is still in flight."""

    def give_up(self: PullLeg) -> None:
        if self.peer is not None and self.lease_id:
            self._ack(self.peer, ok=False)

    patch.setattr(PullLeg, "give_up", give_up)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "plant",
    [
        _free_at_deadline,
        _count_acks,
        _believe_the_clock,
        _report_before_drain,
        _trust_the_revoke,
        _silence_is_death,
        _done_before_the_end,
        _end_twice,
        _release_while_held,
    ],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, InvariantViolation)):
        _run(1500)
