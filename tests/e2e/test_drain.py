"""Stopping with transfers in flight (case L9), on either side."""

from __future__ import annotations

import signal
import time

from tests.support.children import holds_for
from tests.support.pair import Pair, open_gate, wait_in_flight
from tests.support.process_fixtures import PairMaker
from tests.support.processes import Daemon

LIMIT_S = 0.6
SHORT_DRAIN = {"daemon.drain_timeout_s": str(LIMIT_S)}
#: How much longer than the limit a stop may take.
MORE_S = 2.0


def stop_and_time(daemon: Daemon) -> tuple[int, float]:
    """Stop a daemon; return its exit status and how long it took."""
    started_at = time.monotonic()
    return daemon.stop(), time.monotonic() - started_at


def ask_to_stop(daemon: Daemon) -> None:
    """Send a signal, and wait until it was noticed."""
    daemon.process.send_signal(signal.SIGTERM)
    while daemon.notify.take(5.0) != "STOPPING=1":
        assert daemon.process.is_running


def test_L9_daemon_with_idle_workers_stops_at_once(make_pair: PairMaker) -> None:
    pair = make_pair()
    pair.check_works()
    for daemon in (pair.decode, pair.prefill):
        status, took_s = stop_and_time(daemon)
        assert status == 0
        assert took_s < MORE_S


def test_L9_slow_read_is_waited_for_and_new_work_is_refused(make_pair: PairMaker) -> None:
    pair = make_pair(decode_faults=";late")
    pair.read("slow")
    wait_in_flight(pair.decode)
    ask_to_stop(pair.decode)
    pair.pull("refused", blocks=[9, 10])
    refused = pair.consumer.wait_end("pull", "refused")
    assert (refused.outcome, refused.reason, refused.retryable) == ("failed", "DRAINING", True)
    open_gate(pair.decode)
    pair.check_good(pair.read_ends("slow"))
    assert pair.decode.process.wait_ended() == 0
    pair.check_untouched()


def test_L9_endless_read_is_aborted_at_the_limit(make_pair: PairMaker) -> None:
    pair = make_pair(SHORT_DRAIN, decode_faults="stall=1")
    pair.read("endless")
    wait_in_flight(pair.decode)
    status, took_s = stop_and_time(pair.decode)
    released, failed = pair.read_ends("endless")
    assert (failed.outcome, failed.reason) == ("failed", "DRAINING")
    assert (released.outcome, released.reason) == ("released", "aborted")
    assert status == 0
    assert LIMIT_S <= took_s < LIMIT_S + MORE_S
    pair.check_untouched()


def test_L9_endless_write_is_aborted_at_the_limit(make_pair: PairMaker) -> None:
    pair = make_pair(SHORT_DRAIN, prefill_faults="stall=1")
    pair.write("endless")
    wait_in_flight(pair.prefill)
    status, took_s = stop_and_time(pair.prefill)
    pushed, reserved = pair.write_ends("endless")
    assert (pushed.outcome, pushed.reason) == ("failed", "DRAINING")
    assert reserved.outcome == "failed"
    assert status == 0
    assert LIMIT_S <= took_s < LIMIT_S + MORE_S
    pair.check_untouched()


def test_L9_consumer_that_stops_takes_its_grant_back(make_pair: PairMaker) -> None:
    pair = make_pair(SHORT_DRAIN, prefill_faults="stall=1")
    pair.write("endless")
    wait_in_flight(pair.prefill)
    status, took_s = stop_and_time(pair.decode)
    pushed, reserved = pair.write_ends("endless")
    assert (reserved.outcome, reserved.reason) == ("failed", "DRAINING")
    assert (pushed.outcome, pushed.reason) == ("released", "aborted")
    assert status == 0
    assert LIMIT_S <= took_s < LIMIT_S + MORE_S


def test_L9_handshake_that_nobody_answers_does_not_hold_the_stop_up(make_pair: PairMaker) -> None:
    pair = make_pair(SHORT_DRAIN)
    pair.prefill.process.pause()
    pair.pull("unanswered")
    pair.consumer.ask("sync")
    status, took_s = stop_and_time(pair.decode)
    failed = pair.consumer.wait_end("pull", "unanswered")
    assert (failed.outcome, failed.reason) == ("failed", "DRAINING")
    assert status == 0
    assert took_s < LIMIT_S + MORE_S


def test_L9_second_signal_ends_at_once_and_not_with_status_0(make_pair: PairMaker) -> None:
    pair = make_pair(decode_faults="stall=1")
    pair.read("endless")
    wait_in_flight(pair.decode)
    started_at = time.monotonic()
    ask_to_stop(pair.decode)
    assert pair.decode.stop() == 128 + signal.SIGTERM
    assert time.monotonic() - started_at < MORE_S
    end = pair.consumer.wait_end("pull", "endless")
    assert end.outcome == "failed"
    pair.check_untouched()


def test_S1_write_that_cannot_be_ended_keeps_the_blocks_until_the_process_is_gone(
    make_pair: PairMaker,
) -> None:
    pair = make_pair({**SHORT_DRAIN, "control.link_timeout_s": "2.5"}, prefill_faults="late=1")
    pair.write("stuck")
    wait_in_flight(pair.prefill)
    ask_to_stop(pair.prefill)
    pair.prefill.process.send_signal(signal.SIGTERM)
    # The engine never lets go of it: only the end of the process does.
    holds_for(1.0, lambda: not reserve_has_ended(pair), "the reservation is kept")
    assert pair.prefill.process.wait_ended() == 128 + signal.SIGTERM
    # Nothing of it can land any more, and only now the consumer is told.
    assert pair.consumer.wait_end("reserve", "stuck").outcome == "failed"
    pair.check_untouched()


def reserve_has_ended(pair: Pair) -> bool:
    pair.consumer.ask("look")
    return bool(pair.consumer.ends)
