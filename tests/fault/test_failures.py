"""Operations that fail or never end: one outcome each, and the next one is none the worse."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.support.children import until
from tests.support.cluster import running_cluster
from tests.support.e2e_daemon import FENCES_AT_ONCE
from tests.support.kv_cache import CacheShape, Origin
from tests.support.nursery import Nursery
from tests.support.pair import open_gate, wait_in_flight
from tests.support.process_fixtures import PairMaker

N_TRANSFERS = 256


def test_T2_256_transfers_of_which_many_fail_all_end_once_on_both_sides(
    folder: Path, nursery: Nursery, seed: int
) -> None:
    # Every seventh at the post and every eleventh at the end, on whichever side posts.
    faults = f"seed={seed},fail_post=0.14,fail=0.09,reorder=1"
    settings = {"engine.shm_chunk_bytes": "4194304"}
    shape = CacheShape(heads=1, blocks=192)
    dice = random.Random(seed)
    with running_cluster(
        folder, tp_sizes=(1, 1), shape=shape, settings=settings, faults=faults, nursery=nursery
    ) as cluster:
        for number in range(N_TRANSFERS):
            while cluster.submit("write" if number % 4 == 0 else "read", 2, dice) is None:
                cluster.pump(1.0)
        cluster.settle()
        cluster.check_all_right()
        cluster.check_empty()
        failed = [sent for sent in cluster.done if sent.outcomes("D") == ["failed"]]
        assert N_TRANSFERS / 10 < len(failed) < N_TRANSFERS / 2
        for sent in failed:
            # The producer is told, not left to wait for the end of a lease.
            wanted = "released" if sent.mode == "read" else "failed"
            assert sent.outcomes("P") == [wanted], sent
        assert len(cluster.done) == N_TRANSFERS


def test_T3_transfers_that_never_end_time_out_and_hold_nobody_up(make_pair: PairMaker) -> None:
    pair = make_pair(decode_faults=f";{'stall ' * 4}")
    started_at = time.monotonic()
    for number in range(4):
        blocks = [2 * number, 2 * number + 1]
        pair.publish(f"bad{number}", blocks)
        pair.pull(f"bad{number}", remote=blocks, blocks=blocks, timeout_s=2.0)
    wait_in_flight(pair.decode, 4)
    for number in range(8):
        blocks = [20 + 2 * number, 21 + 2 * number]
        pair.publish(f"good{number}", blocks)
        pair.pull(f"good{number}", remote=blocks, blocks=blocks)
    for number in range(8):
        pair.check_good(pair.read_ends(f"good{number}"))
    assert time.monotonic() - started_at < 2.0, "the good ones waited for the bad ones"
    for number in range(4):
        published, pulled = pair.read_ends(f"bad{number}")
        assert (pulled.outcome, pulled.reason) == ("failed", "TIMED_OUT")
        assert (published.outcome, published.reason) == ("released", "aborted")
    assert 1.9 < time.monotonic() - started_at < 4.0
    until(lambda: pair.decode.status()["transfers"]["live"] == 0, "an empty table")
    pair.check_untouched()


def test_T7_one_failure_does_not_stick_to_a_healthy_pair(make_pair: PairMaker) -> None:
    pair = make_pair(prefill_faults=";fail", decode_faults=";fail")
    pair.read("t1")
    assert [end.outcome for end in pair.read_ends("t1")] == ["released", "failed"]
    pair.write("t2")
    assert [end.outcome for end in pair.write_ends("t2")] == ["failed", "failed"]
    pair.check_works()
    for daemon in (pair.prefill, pair.decode):
        rows = daemon.status()["counters"]["engine_ops"]
        results = {row["result"]: row["count"] for row in rows}
        assert results["failed"] == 1
        assert results["ok"] >= 1
    pair.check_untouched()


def test_planted_daemon_that_takes_silence_for_death_is_found(make_pair: PairMaker) -> None:
    fast = {"control.heartbeat_interval_s": "0.1", "control.link_timeout_s": "0.5"}
    pair = make_pair(fast, prefill_faults="late=1", decode_faults=FENCES_AT_ONCE)
    pair.write("t1")
    wait_in_flight(pair.prefill)
    pair.prefill.process.pause()
    assert pair.consumer.wait_end("reserve", "t1").outcome == "failed"
    assert pair.consumer.ask("sweep")["touched"] == ""
    open_gate(pair.prefill)
    pair.prefill.process.resume()
    assert pair.producer.wait_end("push", "t1").outcome == "failed"
    assert "block 5" in pair.consumer.ask("sweep")["touched"], "the late write was not seen"


def test_planted_wrong_byte_and_planted_late_write_are_found(make_pair: PairMaker) -> None:
    pair = make_pair(decode_faults=";corrupt")
    pair.read("t1")
    published, pulled = pair.read_ends("t1")
    assert (published.wrong, pulled.outcome) == ("", "received")
    assert "1 bytes differ" in pulled.wrong
    pair.check_untouched()
    with pair.consumer.cache() as cache:
        cache.fill([5], Origin(0, "t1"), layer=2)
    assert "layer 2 piece 0 block 5" in pair.consumer.ask("sweep")["touched"]
