"""Golden frames: the exact bytes of every message of every protocol version.

Regenerate after adding a message with

    python -m tests.support.golden

It refuses to change frames that are there: released bytes never change within a version. While a
version has not been released yet, ``--rewrite`` makes them anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final, get_args

from moriiod.core.messages import PeerBody
from moriiod.core.requests import ClientEvent, Reply, Request
from moriiod.wire.ipc import EventFrame, ReplyFrame, RequestFrame, encode_reply, encode_request
from moriiod.wire.peer import PeerFrame, encode_peer
from tests.support.samples import EPOCH, EVENTS, PEER_BODIES, REPLIES, REQUESTS, SEQUENCE

FOLDER: Final = Path(__file__).resolve().parents[1] / "fixtures" / "golden"
VERSION: Final = 1

TypedFrame = RequestFrame | ReplyFrame | EventFrame | PeerFrame
Golden = dict[str, list[str]]


def path_of(version: int) -> Path:
    """Return the file that holds a version's frames."""
    return FOLDER / f"v{version}.json"


def load(version: int) -> dict[str, list[bytes]]:
    """Return the frames of every message of a version, by type name."""
    stored: Golden = json.loads(path_of(version).read_text(encoding="utf-8"))
    return {name: [bytes.fromhex(frame) for frame in frames] for name, frames in stored.items()}


def typed_frames() -> dict[str, TypedFrame]:
    """Return one typed frame of every message type, by type name."""
    found: dict[str, TypedFrame] = {}
    for request in REQUESTS:
        found[type(request).__name__] = RequestFrame(SEQUENCE, request)
    for reply in REPLIES:
        found[type(reply).__name__] = ReplyFrame(SEQUENCE, EPOCH, reply)
    for event in EVENTS:
        found[type(event).__name__] = EventFrame(SEQUENCE, EPOCH, event)
    for body in PEER_BODIES:
        found[type(body).__name__] = PeerFrame(EPOCH, body)
    return found


def all_type_names() -> set[str]:
    """Return the names of all message types of this build."""
    types = (*get_args(Request), *get_args(Reply), ClientEvent, *get_args(PeerBody))
    return {cls.__name__ for cls in types}


def encode(frame: TypedFrame) -> list[bytes]:
    """Return the ZMQ frames of any typed frame."""
    match frame:
        case RequestFrame():
            return encode_request(frame)
        case PeerFrame():
            return encode_peer(frame)
        case ReplyFrame() | EventFrame():
            return encode_reply(frame)


def main() -> int:
    """Write what is missing; exit 1 if frames that are there would change."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rewrite", action="store_true", help="also change what is there")
    path = path_of(VERSION)
    old: Golden = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    new: Golden = {
        name: [part.hex() for part in encode(frame)] for name, frame in typed_frames().items()
    }
    changed = sorted(name for name in old if old[name] != new.get(name))
    if changed and not parser.parse_args().rewrite:
        sys.stderr.write(f"would change: {', '.join(changed)}\n")
        return 1
    path.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
