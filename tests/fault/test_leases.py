"""Promises and their end, with a consumer that is slow, stopped, dead, or does not want to."""

from __future__ import annotations

import time

from tests.support.children import holds_for, until
from tests.support.pair import Pair, open_gate, wait_in_flight
from tests.support.process_fixtures import PairMaker
from tests.support.processes import WorkerProcess

LEASE_S = 0.6
FAST = {
    "control.heartbeat_interval_s": "0.1",
    "control.link_timeout_s": "0.5",
    "transfer.lease_s": str(LEASE_S),
}


def has_ended(worker: WorkerProcess) -> bool:
    worker.ask("look")
    return bool(worker.ends)


def slow_read(make_pair: PairMaker) -> Pair:
    """Return a pair with a read in flight that lasts until the gate opens."""
    pair = make_pair(FAST, decode_faults=";late")
    pair.read("t1")
    wait_in_flight(pair.decode)
    return pair


def test_L4_slow_reader_keeps_the_blocks_beyond_the_lease_until_its_process_is_gone(
    make_pair: PairMaker,
) -> None:
    pair = slow_read(make_pair)
    # Alive: its heartbeats renew the lease.
    holds_for(3 * LEASE_S, lambda: not has_ended(pair.producer), "the lease is kept")
    assert pair.prefill.status()["leases"]["open"] == 1
    # Silent: the lease ends, the promise does not.
    pair.decode.process.pause()
    until(lambda: pair.prefill.status()["quarantined"]["transfers"], "quarantined")
    assert not has_ended(pair.producer)
    # Dead: nothing can read any more.
    started_at = time.monotonic()
    pair.decode.kill()
    published = pair.producer.wait_end("publish", "t1")
    assert (published.outcome, published.wrong) == ("failed", "")
    assert time.monotonic() - started_at < 2.0
    pulled = pair.consumer.wait_end("pull", "t1")
    assert (pulled.outcome, pulled.reason) == ("failed", "DAEMON_LOST")


def test_L4_stopped_reader_keeps_the_blocks_and_is_told_that_it_was_late(
    make_pair: PairMaker,
) -> None:
    pair = slow_read(make_pair)
    pair.decode.process.pause()
    held = until(lambda: pair.prefill.status()["quarantined"]["rows"], "quarantined")
    assert [row["transfer_id"] for row in held] == ["t1"]
    holds_for(2 * LEASE_S, lambda: not has_ended(pair.producer), "the blocks are kept")
    pair.decode.process.resume()
    open_gate(pair.decode)
    published, pulled = pair.read_ends("t1")
    assert (published.outcome, published.wrong) == ("failed", "")
    assert pulled.outcome == "failed", "a read that ended after its lease is no success"
    until(lambda: pair.prefill.status()["quarantined"]["transfers"] == 0, "nothing is held")
    pair.check_works()
    pair.check_untouched()


def test_L2_reject_releases_the_producer_long_before_the_lease_ends(make_pair: PairMaker) -> None:
    pair = make_pair()
    pair.publish("t1")
    pair.producer.ask("sync")
    started_at = time.monotonic()
    pair.consumer.ask("reject", transfer_id="t1", peer=pair.peer)
    released = pair.producer.wait_end("publish", "t1")
    assert (released.outcome, released.reason) == ("released", "aborted")
    assert time.monotonic() - started_at < 1.0
    until(lambda: pair.decode.status()["counters"]["messages_unanswered"] == 0, "all is said")
    assert not has_ended(pair.producer)
    assert not has_ended(pair.consumer)


def test_L2_both_sides_abort_before_the_other_has_spoken(make_pair: PairMaker) -> None:
    pair = make_pair()
    # READ: the producer never publishes. WRITE: the consumer never reserves.
    pair.pull("r1")
    pair.push("w1")
    assert not has_ended(pair.consumer)
    pair.consumer.ask("abort", transfer_id="r1", role="pull")
    pair.producer.ask("abort", transfer_id="w1", role="push")
    assert pair.consumer.wait_end("pull", "r1").reason == "ABORTED"
    assert pair.producer.wait_end("push", "w1").reason == "ABORTED"
    # What comes late for them finds an end, and no transfer.
    pair.reserve("w1")
    late = pair.consumer.wait_end("reserve", "w1")
    assert (late.outcome, late.reason) == ("failed", "ABORTED")
    pair.check_works()
    pair.check_untouched()


def test_L2_both_sides_abort_a_write_in_flight_and_both_are_told_once(make_pair: PairMaker) -> None:
    pair = make_pair(prefill_faults=";stall")
    pair.write("t1")
    wait_in_flight(pair.prefill)
    pair.producer.ask("abort", transfer_id="t1", role="push")
    pair.consumer.ask("abort", transfer_id="t1", role="reserve")
    pushed, reserved = pair.write_ends("t1")
    assert reserved.outcome == "failed"
    # The consumer may have been heard before the worker.
    assert (pushed.outcome, pushed.reason) in (("failed", "ABORTED"), ("released", "aborted"))
    pair.check_works()
    assert not has_ended(pair.producer)
    assert not has_ended(pair.consumer)
    pair.check_untouched()
