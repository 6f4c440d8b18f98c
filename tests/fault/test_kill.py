"""SIGKILL and SIGSTOP at random points of many transfers: what is told, and what is left.

Every scenario draws from one seed, which its name and its first line show:
``make test ARGS="tests/fault/test_kill.py -k 'D-daemon-1'"`` runs one of them again, and
``--randomly-seed=N`` draws others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.support.children import until
from tests.support.cluster import Cluster, Rank

pytestmark = pytest.mark.allow_leaks(reason="the processes of the cluster outlive a test")

#: So many transfers at once, of so many blocks, take about this long.
N_TRANSFERS = 10
N_BLOCKS = 10
BUSY_S = 0.5
#: Longer than a silent peer counts as alive, and than a lease lasts.
LONG_PAUSE_S = 2.5

#: What is killed, one side or both: the daemon, the worker, or both of a rank at once; and the
#: number of the scenario.
KILLED = (
    *("P-daemon-0", "P-daemon-1", "D-daemon-0", "D-daemon-1", "PD-daemon-0", "PD-daemon-1"),
    *("P-worker-0", "P-worker-1", "D-worker-0", "D-worker-1"),
    *("P-rank-0", "D-rank-0", "PD-rank-0", "PD-worker-0"),
)

Resources = dict[str, tuple[int, list[str]]]


def nothing_is_added(before: Resources, after: Resources) -> bool:
    """Whether every process holds the same memory, and no more descriptors (a passing one, of a
    status request that was still being closed, may have been counted before)."""
    return before.keys() == after.keys() and all(
        after[name][0] <= n_fds and after[name][1] == memfds
        for name, (n_fds, memfds) in before.items()
    )


def say(text: str) -> None:
    print(text)  # noqa: T201 - pytest shows it with a failure


def start_transfers(cluster: Cluster, dice: random.Random) -> None:
    for _ in range(N_TRANSFERS):
        assert cluster.submit(dice.choice(("read", "write")), N_BLOCKS, dice) is not None


def kill(cluster: Cluster, rank: Rank, what: str) -> None:
    if what in ("daemon", "rank"):
        rank.daemon.kill()
    if what in ("worker", "rank"):
        cluster.kill_worker(rank)


def bring_back(cluster: Cluster, ranks: Sequence[Rank]) -> None:
    """Start again what was killed, and wait until each rank is whole."""
    for rank in ranks:
        if not rank.daemon.process.is_running:
            rank.daemon.launch()
    for rank in ranks:
        rank.daemon.wait_ready()
        if not rank.is_worker_alive:
            cluster.launch_worker(rank)
    for rank in ranks:
        cluster.worker_of(rank).wait_ready()
        cluster.worker_of(rank).wait_attached()


def check_recovered(cluster: Cluster, dice: random.Random, before: Resources) -> None:
    """Every end told once, no wrong byte, tables empty, all ranks work, no descriptor more."""
    cluster.settle()
    for sent in cluster.done:
        say(f"{sent.transfer_id} {sent.mode} {sent.outcomes('P')} {sent.outcomes('D')}")
    cluster.check_all_right()
    # What a dead daemon has not confirmed is kept until its successor is met.
    cluster.check_empty(ignore="messages unanswered")
    cluster.transfer_all(dice)
    cluster.check_empty()
    until(lambda: nothing_is_added(before, cluster.resources()), f"no more than {before}")


@pytest.mark.parametrize("killed", KILLED)
def test_killed_process_costs_no_wrong_byte_and_leaves_nothing(
    cluster: Cluster, killed: str, seed: int
) -> None:
    dice = random.Random(f"kill {seed} {killed}")
    sides, what, _ = killed.split("-")
    victims = [dice.choice(cluster.ranks_of(side)) for side in sides]
    point_s, away_s = dice.uniform(0, BUSY_S), dice.choice((0.0, dice.uniform(0, 2)))
    names = [rank.name for rank in victims]
    say(f"seed {seed}: kill {what} of {names} after {point_s:.3f} s, back after {away_s:.3f} s")
    before = cluster.resources()
    start_transfers(cluster, dice)
    cluster.pump_for(point_s)
    for rank in victims:
        kill(cluster, rank, what)
    cluster.pump_for(away_s)
    bring_back(cluster, victims)
    check_recovered(cluster, dice, before)


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("side", ["P", "D"])
def test_stopped_daemon_that_goes_on_touches_nothing_that_was_given_back(
    cluster: Cluster, side: str, number: int, seed: int
) -> None:
    dice = random.Random(f"stop {seed} {side} {number}")
    victim = dice.choice(cluster.ranks_of(side))
    point_s = dice.uniform(0, BUSY_S)
    pause_s = LONG_PAUSE_S if number % 2 else dice.uniform(0, LONG_PAUSE_S)
    say(f"seed {seed}: stop {victim.name} after {point_s:.3f} s for {pause_s:.3f} s")
    before = cluster.resources()
    start_transfers(cluster, dice)
    cluster.pump_for(point_s)
    victim.daemon.process.pause()
    cluster.pump_for(pause_s)
    victim.daemon.process.resume()
    check_recovered(cluster, dice, before)


def test_stopped_worker_is_told_every_end_when_it_goes_on(cluster: Cluster, seed: int) -> None:
    dice = random.Random(f"stop worker {seed}")
    victim = dice.choice(cluster.ranks)
    before = cluster.resources()
    start_transfers(cluster, dice)
    cluster.pump_for(dice.uniform(0, BUSY_S / 2))
    cluster.worker_of(victim).process.pause()
    cluster.pump_for(dice.uniform(0.5, 1.5))
    cluster.worker_of(victim).process.resume()
    check_recovered(cluster, dice, before)
