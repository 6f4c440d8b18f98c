"""Bad messages in a row, in bounded memory."""

from __future__ import annotations

from moriiod.control.offences import MAX_IN_A_ROW, MAX_REMEMBERED, Offences


def test_route_is_muted_by_the_last_chance_and_that_is_told_once() -> None:
    offences = Offences()
    told = [offences.add("a:1") for _ in range(MAX_IN_A_ROW + 2)]
    assert told.index(True) == MAX_IN_A_ROW - 1
    assert told.count(True) == 1
    assert offences.is_muted("a:1")
    assert not offences.is_muted("a:2")


def test_good_message_gives_all_chances_back() -> None:
    offences = Offences()
    for _ in range(MAX_IN_A_ROW - 1):
        offences.add("a:1")
    offences.forgive("a:1")
    assert not offences.add("a:1")
    assert not offences.is_muted("a:1")
    offences.forgive("a:unknown")


def test_oldest_offender_is_forgotten_when_there_are_too_many() -> None:
    offences = Offences()
    for _ in range(MAX_IN_A_ROW):
        offences.add("a:first")
    for n in range(MAX_REMEMBERED):
        offences.add(f"a:{n}")
    assert not offences.is_muted("a:first")
