"""ACK fan-in as a set of ranks. Cases A1 A4 A5 A7 A8 A9 A10 (what is in the fan-in's hands)."""

from __future__ import annotations

import pytest

from moriiod.core.fanin import AckVerdict, EarlyAcks, FanIn, TransferAck
from moriiod.errors import InvalidArgument, InvalidTopology

COUNTED, COMPLETE, DUPLICATE = AckVerdict.COUNTED, AckVerdict.COMPLETE, AckVerdict.DUPLICATE
UNEXPECTED, DISAGREES, INVALID = (
    AckVerdict.UNEXPECTED,
    AckVerdict.DISAGREES,
    AckVerdict.INVALID,
)


def ack(rank: int | None, size: int = 8, transfer_id: str = "t1", source: str = "") -> TransferAck:
    return TransferAck(transfer_id, size, rank, source)


def verdicts(fan_in: FanIn, *acks: TransferAck) -> list[AckVerdict]:
    return [fan_in.add(item) for item in acks]


# --- TransferAck ------------------------------------------------------------------------------


def test_plain_string_is_an_ack_with_nothing_but_its_id():
    assert TransferAck("t1") == TransferAck("t1", consumer_tp_size=1, consumer_tp_rank=None)
    assert TransferAck.plain("t1") == TransferAck("t1")
    assert TransferAck("t1").is_plain


@pytest.mark.parametrize(
    "structured",
    [TransferAck("t1", 8), TransferAck("t1", 1, 0), TransferAck.release("t1", 1)],
)
def test_an_ack_that_states_something_is_not_plain(structured):
    assert not structured.is_plain
    assert structured.is_well_formed


@pytest.mark.parametrize(
    "name", ["tx-6f1c", "cmpl-x-0-1a2b3c4d", "0123456789abcdef", "abc:tp3", "é" * 128]
)
def test_A9_any_printable_id_up_to_the_limit_is_an_id(name):
    assert TransferAck(name).is_well_formed


@pytest.mark.parametrize("name", ["", "x" * 257, "é" * 129, "a\x00b", "a\nb", "\ud800", b"t1", 7])
def test_A9_ids_that_cannot_be_are_not_well_formed(name):
    assert not TransferAck(name).is_well_formed
    assert FanIn(0, 4).add(TransferAck(name)) is INVALID


# --- Fan-in -----------------------------------------------------------------------------------


def test_A1_two_of_two_ranks_release_once():
    fan_in = FanIn(0, 4, 8)
    assert fan_in.add(ack(0)) is COUNTED
    assert not fan_in.is_complete
    assert (fan_in.n_missing, fan_in.pending()) == (1, {1})
    assert fan_in.add(ack(1)) is COMPLETE
    assert fan_in.is_complete
    assert (fan_in.n_missing, fan_in.pending()) == (0, frozenset())


@pytest.mark.parametrize(
    ("rank", "producer", "consumer", "needs"),
    [(0, 2, 8, 4), (0, 1, 8, 8), (3, 8, 8, 1), (2, 8, 4, 1), (3, 8, 4, 1)],
)
def test_A1_number_of_acks_needed(rank, producer, consumer, needs):
    fan_in = FanIn(rank, producer, consumer)
    assert fan_in.n_missing == needs
    got = verdicts(fan_in, *(ack(c, consumer) for c in sorted(fan_in.expected)))
    assert got == [COUNTED] * (needs - 1) + [COMPLETE]


def test_a_repeated_ack_is_never_a_second_rank():
    fan_in = FanIn(0, 4, 8)
    assert verdicts(fan_in, ack(0), ack(0), ack(0)) == [COUNTED, DUPLICATE, DUPLICATE]
    assert not fan_in.is_complete


def test_A8_acks_after_the_release_complete_nothing_again():
    fan_in = FanIn(0, 4, 8)
    verdicts(fan_in, ack(0), ack(1))
    late = verdicts(fan_in, ack(1), TransferAck("t1"), ack(5), ack(0, 4), ack(9))
    assert late == [DUPLICATE, DUPLICATE, UNEXPECTED, DISAGREES, INVALID]
    assert fan_in.is_complete


def test_A8_partial_count_does_not_leak_into_a_new_lease():
    FanIn(0, 4, 8).add(ack(0))
    again = FanIn(0, 4, 8)
    assert verdicts(again, ack(1)) == [COUNTED]
    assert again.pending() == {0}


@pytest.mark.parametrize("size", [6, 0, -8, "eight", True, 2**40, 8.0, None, 1025])
def test_A7_bad_size_is_ignored_and_the_next_good_pair_releases(size):
    for fan_in in (FanIn(0, 4, 8), FanIn(0, 4)):
        assert fan_in.add(TransferAck("t1", size, 0)) is INVALID
        assert fan_in.add(TransferAck("t1", size)) is INVALID
        assert verdicts(fan_in, ack(0), ack(1)) == [COUNTED, COMPLETE]


def test_A7_missing_size_is_the_plain_string_rule():
    fan_in = FanIn(0, 4, 8)
    assert verdicts(fan_in, TransferAck("t1"), ack(1)) == [COUNTED, COMPLETE]


@pytest.mark.parametrize("rank", [-1, 8, True, 0.0, "0"])
def test_bad_rank_is_ignored(rank):
    fan_in = FanIn(0, 4, 8)
    assert fan_in.add(ack(rank)) is INVALID
    assert fan_in.pending() == {0, 1}


def test_a_rank_that_does_not_read_us_is_reported_and_ignored():
    fan_in = FanIn(0, 4, 8)
    assert verdicts(fan_in, ack(2), ack(3)) == [UNEXPECTED, UNEXPECTED]
    assert fan_in.n_missing == 2


def test_a_rank_nobody_reads_waits_for_its_designated_consumer_only():
    fan_in = FanIn(3, 8, 4)
    assert fan_in.pending() == {1}
    assert verdicts(fan_in, ack(0, 4), ack(3, 4), ack(1, 4)) == [UNEXPECTED, UNEXPECTED, COMPLETE]


def test_plain_string_is_enough_alone_if_nothing_was_announced():
    fan_in = FanIn(0, 4)
    assert fan_in.consumer_tp_size == 4
    assert fan_in.add(TransferAck("t1")) is COMPLETE


def test_plain_string_is_one_of_many_once_a_size_is_announced():
    fan_in = FanIn(0, 4, 8)
    assert fan_in.add(TransferAck("t1")) is COUNTED
    assert (fan_in.n_missing, fan_in.pending()) == (1, {0, 1})
    assert fan_in.add(TransferAck("t1")) is DUPLICATE
    assert fan_in.add(ack(0)) is COMPLETE


def test_plain_string_is_one_of_many_once_an_ack_stated_a_size():
    fan_in = FanIn(0, 4)
    assert verdicts(fan_in, ack(0), TransferAck("t1")) == [COUNTED, COMPLETE]


def test_rankless_releases_are_told_apart_by_their_connection():
    fan_in = FanIn(0, 4)
    first, other = TransferAck.release("t1", 8, "conn-a"), TransferAck.release("t1", 8, "conn-b")
    assert verdicts(fan_in, first, first, other) == [COUNTED, DUPLICATE, COMPLETE]
    assert fan_in.consumer_tp_size == 8


def test_ack_from_a_rank_that_does_not_read_us_still_tells_the_size():
    fan_in = FanIn(0, 4)
    assert fan_in.add(ack(5)) is UNEXPECTED
    assert fan_in.add(TransferAck("t1")) is COUNTED


def test_R1_wrong_stated_size_is_no_ack_once_the_right_one_is_announced():
    fan_in = FanIn(0, 4, 8)
    wrong = (TransferAck.release("t1", 1), TransferAck("t1", 4), ack(0, 4), ack(0, 16))
    assert verdicts(fan_in, *wrong) == [DISAGREES] * 4
    assert fan_in.n_missing == 2


def test_disagreeing_acks_let_the_larger_need_hold_whichever_comes_first():
    fan_in = FanIn(0, 4)
    assert verdicts(fan_in, ack(0, 8), ack(0, 4)) == [COUNTED, DISAGREES]
    assert verdicts(fan_in, ack(1, 8)) == [COMPLETE]

    fan_in = FanIn(0, 4)
    assert verdicts(fan_in, ack(0, 8), ack(1, 16)) == [COUNTED, DISAGREES]
    assert fan_in.pending() == {0, 2, 3}
    assert verdicts(fan_in, ack(1, 8)) == [DISAGREES]
    got = verdicts(fan_in, ack(0, 16), ack(1, 16), ack(2, 16), ack(3, 16))
    assert got == [COUNTED, DUPLICATE, COUNTED, COMPLETE]


def test_a_larger_size_keeps_plain_strings_and_drops_releases_of_the_old_size():
    fan_in = FanIn(0, 2)
    releases = [TransferAck.release("t1", 8, name) for name in "ab"]
    assert verdicts(fan_in, *releases, TransferAck.plain("t1", "c")) == [COUNTED] * 3
    assert fan_in.add(ack(0, 16)) is DISAGREES
    assert fan_in.n_missing == 8 - 2


def test_announced_size_is_the_truth_for_acks_that_follow():
    fan_in = FanIn(0, 4)
    assert fan_in.announce(8) is COUNTED
    assert fan_in.announce(8) is DUPLICATE
    assert fan_in.add(ack(0, 4)) is DISAGREES
    assert verdicts(fan_in, ack(0), ack(1)) == [COUNTED, COMPLETE]
    assert fan_in.announce(16) is DUPLICATE


def test_a_second_announcement_never_shrinks_the_set_silently():
    fan_in = FanIn(0, 4, 8)
    assert fan_in.announce(4) is DISAGREES
    assert fan_in.consumer_tp_size == 8
    assert fan_in.announce(16) is DISAGREES
    assert fan_in.consumer_tp_size == 16


def test_R1_wrong_published_size_gives_way_to_the_handshake():
    fan_in = FanIn(0, 4, 1)
    assert fan_in.pending() == {0}
    assert fan_in.announce(8) is DISAGREES
    assert verdicts(fan_in, ack(0), ack(1)) == [COUNTED, COMPLETE]


def test_announced_size_replaces_a_learned_one_that_needs_as_many():
    fan_in = FanIn(5, 8)
    assert fan_in.add(ack(0, 4)) is UNEXPECTED
    assert fan_in.announce(2) is DISAGREES
    assert fan_in.consumer_tp_size == 2
    assert fan_in.announce(4) is DISAGREES
    assert fan_in.consumer_tp_size == 2


def test_a_learned_size_becomes_an_announced_one_when_confirmed():
    fan_in = FanIn(0, 4)
    assert fan_in.add(ack(0)) is COUNTED
    assert fan_in.announce(8) is COUNTED
    assert fan_in.add(ack(1, 16)) is DISAGREES
    assert fan_in.add(ack(1)) is COMPLETE


@pytest.mark.parametrize("size", [6, 0, -1, True, "8", 1025])
def test_impossible_announcement_changes_nothing(size):
    fan_in = FanIn(0, 4, 8)
    assert fan_in.announce(size) is INVALID
    assert fan_in.consumer_tp_size == 8


@pytest.mark.parametrize("arguments", [(4, 4, 0), (0, 4, 6), (0, 4, -1), (0, 0, 0), (True, 4, 0)])
def test_impossible_fan_in_is_refused(arguments):
    with pytest.raises(InvalidTopology):
        FanIn(*arguments)


def test_only_three_verdicts_are_protocol_problems():
    assert {v for v in AckVerdict if v.is_problem} == {UNEXPECTED, DISAGREES, INVALID}


# --- Early ACKs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "early", [(0, 1), (0, 0, 1, 1), (1, 0, 1)], ids=["both", "each twice", "one twice"]
)
def test_A4_acks_before_the_publish_release_as_soon_as_it_comes(early):
    buffer = EarlyAcks(capacity=16, ttl_s=30.0)
    for rank in early:
        buffer.add(ack(rank, transfer_id="t9"), now=0.0)
    assert len(buffer) == 2
    fan_in = FanIn(0, 4, 8)
    got = verdicts(fan_in, *buffer.take("t9"))
    assert got == [COUNTED, COMPLETE]
    assert (len(buffer), buffer.next_deadline()) == (0, None)


def test_A4_one_before_and_one_after_release_after_the_second():
    buffer = EarlyAcks(16, 30.0)
    assert buffer.add(ack(0), 0.0) is COUNTED
    assert buffer.add(ack(0), 1.0) is DUPLICATE
    fan_in = FanIn(0, 4, 8)
    assert verdicts(fan_in, *buffer.take("t1")) == [COUNTED]
    assert fan_in.add(ack(1)) is COMPLETE


def test_A9_only_the_exact_id_takes_early_acks():
    buffer = EarlyAcks(16, 30.0)
    for name in ("abc-deadbeef", "abcdef", "abc:tp3"):
        buffer.add(TransferAck(name), 0.0)
    assert buffer.take("abc") == []
    assert buffer.take("abc:tp3") == [TransferAck("abc:tp3")]
    assert len(buffer) == 2


def test_early_acks_expire_in_order_of_arrival_and_repeats_do_not_wait_longer():
    buffer = EarlyAcks(16, ttl_s=30.0)
    buffer.add(ack(0), 0.0)
    buffer.add(ack(1), 10.0)
    buffer.add(ack(0), 20.0)
    assert buffer.next_deadline() == 30.0
    assert buffer.expire(29.9) == 0
    assert buffer.expire(30.0) == 1
    assert buffer.next_deadline() == 40.0
    assert buffer.expire(100.0) == 1
    assert (buffer.expire(100.0), buffer.next_deadline(), buffer.dropped) == (0, None, 0)
    assert buffer.take("t1") == []


def test_impossible_early_acks_are_not_kept():
    buffer = EarlyAcks(16, 30.0)
    assert buffer.add(TransferAck("t1", True), 0.0) is INVALID
    assert len(buffer) == 0


def test_A5_flood_of_unknown_ids_stays_bounded_and_real_acks_still_work():
    buffer = EarlyAcks(capacity=1024, ttl_s=30.0)
    for n in range(100_000):
        buffer.add(TransferAck(f"ghost-{n}"), now=n * 1e-4)
    assert (len(buffer), buffer.dropped) == (1024, 100_000 - 1024)
    buffer.add(ack(0, transfer_id="real"), now=10.0)
    assert buffer.take("real") == [ack(0, transfer_id="real")]
    assert len(buffer) == 1023
    assert buffer.take("ghost-0") == []
    assert buffer.expire(1000.0) == 1023


@pytest.mark.parametrize(("capacity", "ttl_s"), [(0, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))])
def test_early_acks_need_positive_limits(capacity, ttl_s):
    with pytest.raises(InvalidArgument, match="positive"):
        EarlyAcks(capacity, ttl_s)
