"""ACKs of peers that speak no moriiod protocol: the single frames of vLLM's in-process connector.

Two forms exist: the bare transfer id as UTF-8 text, and a msgpack map with ``type: release``. They
are told apart by their first bytes alone, never by trying to parse: a map starts with 0x80-0x8f
(never the start of UTF-8 text), or with 0xde or 0xdf and a byte below 0x80 (likewise; the maps
this leaves out have more than 32,767 entries). So ``t`` and ``7`` are transfer ids, although
msgpack would read them as the numbers 116 and 55.

Maps are read like other people's formats have to be: keys we do not know are ignored.
"""

from __future__ import annotations

from typing import Any, Final

from moriiod.core.fanin import TransferAck
from moriiod.core.ids import MAX_RANKS, MAX_TRANSFER_ID_BYTES
from moriiod.errors import InvalidArgument, MalformedFrame, TooLarge, UnknownMessage
from moriiod.wire.codec import unpack_map

#: Longest single frame worth reading.
MAX_LEGACY_BYTES: Final = 4096


def decode_legacy_ack(frame: bytes, source: str) -> TransferAck:
    """Return the ACK that a single frame of an old peer is.

    Args:
        frame: The only frame of the message, without the routing id.
        source: The connection it came in on.

    Raises:
        MalformedFrame: It is empty, not UTF-8, or a broken map.
        TooLarge: It is longer than any such ACK.
        UnknownMessage: A map of another ``type`` than ``release``.
        InvalidArgument: The transfer id or ``consumer_tp_size`` cannot be; ``field`` says which.
    """
    if len(frame) > MAX_LEGACY_BYTES:
        raise TooLarge(
            "single-frame message is too large", limit="max_legacy_bytes", value=MAX_LEGACY_BYTES
        )
    if not frame:
        raise MalformedFrame("single-frame message is empty")
    if not _is_map(frame):
        return TransferAck.plain(_transfer_id(_text(frame)), source)
    values = unpack_map(frame)
    if values.get("type") != "release":
        raise UnknownMessage(
            "single-frame message is not a release", type=repr(values.get("type"))[:64]
        )
    transfer_id = _transfer_id(values.get("transfer_id"))
    size = values.get("consumer_tp_size")
    if size is None:
        return TransferAck.plain(transfer_id, source)
    return TransferAck.release(transfer_id, _size(size), source)


def _is_map(frame: bytes) -> bool:
    first = frame[0]
    return 0x80 <= first <= 0x8F or (first in (0xDE, 0xDF) and len(frame) > 1 and frame[1] < 0x80)


def _text(frame: bytes) -> str:
    try:
        return frame.decode("utf-8")
    except UnicodeDecodeError:
        raise MalformedFrame(
            "single-frame message is neither UTF-8 nor a map", n_bytes=len(frame)
        ) from None


def _transfer_id(value: Any) -> str:
    is_valid = (
        isinstance(value, str)
        and value != ""
        and value.isprintable()
        and len(value.encode("utf-8")) <= MAX_TRANSFER_ID_BYTES
    )
    if not is_valid:
        raise InvalidArgument(
            f"transfer_id is not printable text of 1 to {MAX_TRANSFER_ID_BYTES} bytes",
            field="transfer_id",
        )
    return str(value)


def _size(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANKS:
        raise InvalidArgument(
            f"consumer_tp_size is not an integer from 1 to {MAX_RANKS}",
            field="consumer_tp_size",
            got=repr(value)[:64],
        )
    return value
