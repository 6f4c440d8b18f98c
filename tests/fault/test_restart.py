"""Daemons that are killed and come back at the same address within half a second (case M9)."""

from __future__ import annotations

import time

from tests.support.children import holds_for, until
from tests.support.pair import Pair, open_gate, wait_in_flight
from tests.support.process_fixtures import PairMaker
from tests.support.processes import Daemon, WorkerProcess

FAST = {"control.heartbeat_interval_s": "0.2", "control.link_timeout_s": "1"}


def epoch_of(daemon: Daemon) -> str:
    epoch: str = daemon.status()["identity"]["epoch"]
    return epoch


def test_M9_worker_of_a_restarted_daemon_is_told_attaches_again_and_works(
    make_pair: PairMaker,
) -> None:
    pair = make_pair(FAST)
    pair.check_works("before")
    old = epoch_of(pair.prefill)
    pair.publish("lost", [1, 2])
    pair.producer.ask("sync")
    started_at = time.monotonic()
    pair.prefill.kill()
    pair.prefill.launch()
    pair.publish("too-early", [3, 4])
    lost = pair.producer.wait_end("publish", "lost")
    assert (lost.outcome, lost.reason, lost.wrong) == ("failed", "DAEMON_LOST", "")
    refused = pair.producer.wait_end("publish", "too-early")
    assert refused.reason == "DAEMON_LOST", refused
    pair.prefill.wait_ready()
    pair.producer.wait_attached()
    assert time.monotonic() - started_at < 10
    assert pair.producer.ask("look")["epoch"] == epoch_of(pair.prefill) != old
    read_until_received(pair)
    pair.check_works("after")


def read_until_received(pair: Pair) -> None:
    """Read; the first attempts may meet the link to the old start, and say that it restarted."""
    for attempt in range(5):
        pair.read(f"again{attempt}")
        end = pair.consumer.wait_end("pull", f"again{attempt}")
        if end.outcome == "received":
            pair.check_good((pair.producer.wait_end("publish", f"again{attempt}"), end))
            return
        assert end.reason in ("PEER_RESTARTED", "PEER_LOST"), end
        assert end.retryable
        pair.producer.ask("abort", transfer_id=f"again{attempt}", role="publish")
    raise AssertionError("never received")


def test_M9_pull_in_flight_ends_once_when_the_consumers_daemon_is_killed(
    make_pair: PairMaker,
) -> None:
    pair = make_pair(FAST, decode_faults=";late")
    pair.read("t1")
    wait_in_flight(pair.decode)
    pair.decode.faults = ""
    pair.decode.restart()
    published, pulled = pair.read_ends("t1")
    assert (pulled.outcome, pulled.reason) == ("failed", "DAEMON_LOST")
    # The producer saw the process end, so nothing reads its blocks any more.
    assert (published.outcome, published.wrong) == ("failed", "")
    pair.consumer.wait_attached()
    pair.check_works()
    pair.check_untouched()


def has_ended(worker: WorkerProcess) -> bool:
    worker.ask("look")
    return bool(worker.ends)


def test_S1_reservation_outlives_its_daemon_until_the_producer_writes_no_more(
    make_pair: PairMaker,
) -> None:
    pair = make_pair(FAST, prefill_faults="late=1")
    pair.write("t1")
    wait_in_flight(pair.prefill)
    pair.decode.restart()
    pair.consumer.wait_attached()
    # The write will land: the new daemon says nothing before that.
    status = until(lambda: fencing(pair), "the reservation waits for a fence")
    assert [row["transfer_id"] for row in status["transfers"]["rows"]] == ["t1"]
    holds_for(0.5, lambda: not has_ended(pair.consumer), "the reservation has not ended")
    with pair.consumer.cache() as cache:
        assert cache.find_touched() == ""
    open_gate(pair.prefill)
    end = pair.consumer.wait_end("reserve", "t1")
    assert (end.outcome, end.reason) == ("failed", "DAEMON_LOST")
    assert pair.producer.wait_end("push", "t1").outcome == "failed"
    pair.check_untouched()
    pair.check_works()
    pair.check_untouched()


def fencing(pair: Pair) -> dict[str, object] | None:
    status = pair.decode.status()
    return status if status["quarantined"]["transfers"] == 1 else None
