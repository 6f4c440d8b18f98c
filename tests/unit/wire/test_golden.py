"""Released bytes never change: every version's frames decode to what they meant, for ever."""

from __future__ import annotations

import pytest

from moriiod.core.messages import PROTOCOL_VERSIONS
from moriiod.wire.frames import IPC_VERSIONS
from moriiod.wire.ipc import RequestFrame, decode_reply, decode_request
from moriiod.wire.peer import PeerFrame, decode_peer
from tests.support import golden

FRAMES = golden.load(1)
TYPED = golden.typed_frames()


def test_there_are_golden_frames_of_every_version_and_message() -> None:
    assert set(FRAMES) == golden.all_type_names()
    for version in {*PROTOCOL_VERSIONS, *IPC_VERSIONS}:
        assert golden.path_of(version).exists()


@pytest.mark.parametrize("name", FRAMES)
def test_golden_frames_decode_to_their_message(name: str) -> None:
    wanted = TYPED[name]
    decode = {RequestFrame: decode_request, PeerFrame: decode_peer}.get(type(wanted), decode_reply)
    assert decode(FRAMES[name]) == wanted


@pytest.mark.parametrize("name", FRAMES)
def test_message_encodes_to_its_golden_frames(name: str) -> None:
    assert golden.encode(TYPED[name]) == FRAMES[name]
