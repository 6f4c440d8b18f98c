"""Control messages that are lost, repeated or late on a real wire (case T4)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import pytest

from moriiod.core.requests import PeerAddress
from tests.support.children import HOST, until
from tests.support.pair import Pair
from tests.support.process_fixtures import PairMaker
from tests.support.proxy import ALWAYS, Proxy, Rule

SETTINGS = {
    "control.heartbeat_interval_s": "0.2",
    "control.link_timeout_s": "2",
    "transfer.resend_first_s": "0.05",
    "transfer.resend_max_s": "0.1",
}
IMPATIENT = {
    "transfer.lease_s": "0.8",
    "transfer.pull_timeout_s": "1.5",
    "transfer.write_timeout_s": "1.5",
}
#: Every message of a READ and of a WRITE that ends well.
MESSAGES = (
    *("Hello", "Welcome", "LayoutRequest", "LayoutReply"),
    *("Claim", "ClaimGranted", "Ack", "AckConfirmed"),
    *("Grant", "GrantAccepted", "WriteDone", "WriteConfirmed"),
)


@pytest.fixture
def stack() -> ExitStack:
    with ExitStack() as made:
        yield made


def through_proxy(pair: Pair, rules: Mapping[str, Rule], stack: ExitStack) -> Proxy:
    """Put a proxy between the two daemons."""
    address = pair.prefill.address
    proxy = stack.enter_context(Proxy(f"tcp://{address.host}:{address.base_port}", rules))
    pair.address = replace(address, host=HOST, base_port=proxy.port)
    assert isinstance(pair.address, PeerAddress)
    return proxy


def check_quiet(pair: Pair) -> None:
    """Nothing is left, and nobody was told a second end."""
    for daemon in (pair.prefill, pair.decode):
        until(lambda d=daemon: d.status()["counters"]["messages_unanswered"] == 0, "all answered")
        assert daemon.status()["transfers"]["live"] == 0
    for worker in (pair.producer, pair.consumer):
        worker.ask("look")
        assert worker.ends == []
    pair.check_untouched()


@pytest.mark.parametrize(
    "rule",
    [Rule(lose=2), Rule(copies=2, delay_s=0.06)],
    ids=["lost-twice", "late-and-twice"],
)
def test_T4_messages_that_are_lost_repeated_or_late_cost_time_and_nothing_else(
    make_pair: PairMaker, stack: ExitStack, rule: Rule
) -> None:
    pair = make_pair(SETTINGS)
    proxy = through_proxy(pair, dict.fromkeys(MESSAGES, rule), stack)
    pair.read("r1")
    pair.check_good(pair.read_ends("r1"))
    pair.write("w1")
    pair.check_good(pair.write_ends("w1"))
    check_quiet(pair)
    assert [name for name in MESSAGES if not proxy.seen[name]] == []


def test_T4_write_done_that_never_arrives_ends_both_sides(
    make_pair: PairMaker, stack: ExitStack
) -> None:
    pair = make_pair({**SETTINGS, **IMPATIENT})
    through_proxy(pair, {"WriteDone": Rule(lose=ALWAYS)}, stack)
    pair.write("w1")
    pushed, reserved = pair.write_ends("w1")
    # The bytes are there and the producer needs its blocks no more; the consumer was never told.
    assert (pushed.outcome, pushed.wrong) == ("released", "")
    assert (reserved.outcome, reserved.reason) == ("failed", "TIMED_OUT")
    pair.read("r1")
    pair.check_good(pair.read_ends("r1"))
    pair.check_untouched()


def test_T4_ack_that_never_arrives_ends_both_sides_and_frees_nothing_early(
    make_pair: PairMaker, stack: ExitStack
) -> None:
    pair = make_pair({**SETTINGS, **IMPATIENT})
    through_proxy(pair, {"Ack": Rule(lose=ALWAYS)}, stack)
    pair.read("r1")
    pulled = pair.consumer.wait_end("pull", "r1")
    # What no producer has confirmed is no success, although the bytes may be there.
    assert pulled.outcome == "failed"
    # It may still be reading, for all the producer knows: only its process's end settles that.
    until(lambda: pair.prefill.status()["quarantined"]["transfers"] == 1, "quarantined")
    assert pair.producer.take() == []
    pair.decode.restart()
    assert pair.producer.wait_end("publish", "r1").outcome == "failed"
    pair.check_untouched()


def test_wire_that_goes_silent_ends_both_sides_and_works_again(
    make_pair: PairMaker, stack: ExitStack
) -> None:
    pair = make_pair({**SETTINGS, "control.link_timeout_s": "0.8"})
    silent = through_proxy(pair, {"Ack": Rule(lose=ALWAYS), "Heartbeat": Rule(lose=ALWAYS)}, stack)
    pair.publish("r1", [20, 21])
    pair.pull("r1", remote=[20, 21], blocks=[22, 23])
    assert pair.consumer.wait_end("pull", "r1").outcome == "failed"
    assert silent.seen["Heartbeat"] > 0
    # Answers go where a peer was last heard from, so the bad wire must be gone for good.
    stack.close()
    pair.address = None
    pair.check_works()
    # The Ack has found its way over the new link, in time or not.
    published = pair.producer.wait_end("publish", "r1")
    assert published.outcome in ("released", "failed")
    assert published.wrong == ""
    check_quiet(pair)
