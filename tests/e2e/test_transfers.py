"""Instances of several ranks, every process a real one, every byte compared."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.children import holds_for
from tests.support.cluster import Cluster, running_cluster
from tests.support.nursery import Nursery
from tests.support.pair import Pair
from tests.support.process_fixtures import PairMaker

#: As users run it, except for the log.
AS_SHIPPED = {
    "control.heartbeat_interval_s": "1",
    "control.link_timeout_s": "5",
    "transfer.lease_s": "60",
    "transfer.pull_timeout_s": "120",
    "transfer.write_timeout_s": "120",
    "engine.shm_chunk_bytes": "4194304",
}


def check_many(cluster: Cluster, seed: int, n: int) -> None:
    """Run many transfers at once, most of them over and over on the same blocks."""
    dice = random.Random(seed)
    for _ in range(n):
        mode = dice.choice(("read", "write"))
        while cluster.submit(mode, dice.randint(1, 12), dice) is None:
            cluster.pump(1.0)
    cluster.settle()
    for sent in cluster.done:
        assert set(sent.outcomes("P")) == {"released"}, sent
        assert set(sent.outcomes("D")) == {"received"}, sent
    cluster.check_all_right()
    cluster.check_empty()


def test_R7_ranks_of_different_tp_sizes_get_the_bytes_of_their_heads(
    folder: Path, nursery: Nursery, seed: int
) -> None:
    # The other way round, P2/D4, is what the tests with faults run on.
    with running_cluster(
        folder, tp_sizes=(4, 2), settings=AS_SHIPPED, faults=None, nursery=nursery
    ) as cluster:
        cluster.transfer_all(random.Random(seed))
        check_many(cluster, seed, 30)


def test_S1_worker_that_stands_still_for_two_seconds_is_not_taken_for_dead(
    make_pair: PairMaker,
) -> None:
    pair = make_pair()
    pair.publish("t1")
    pair.producer.ask("sync")
    pair.producer.process.pause()
    pair.pull("t1")
    received = pair.consumer.wait_end("pull", "t1")
    assert (received.outcome, received.wrong) == ("received", "")
    holds_for(2.0, lambda: is_attached(pair), "the worker is attached")
    pair.producer.process.resume()
    assert pair.producer.wait_end("publish", "t1").outcome == "released"
    pair.check_works()


def is_attached(pair: Pair) -> bool:
    (row,) = pair.prefill.status()["clients"]
    return (row["name"], row["state"], row["memory"]) == (
        pair.producer.name,
        "attached",
        "registered",
    )
