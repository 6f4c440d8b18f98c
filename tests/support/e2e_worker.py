"""A worker in a process of its own: a client, a KV cache without torch, and a test's commands.

    main('{"socket_path": ..., "fds": [...], "channel": 5, ...}')

Commands and answers are JSON objects, one a packet. A command that opens a transfer is answered
when the transfer ends, by ``{"ended": ...}``; before that, the blocks are checked and given back
in this process, at once, so that whatever still reads or writes them shows.
"""

from __future__ import annotations

import dataclasses
import json
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from moriiod.client import Client, ClientSettings, PeerAddress, TransferEnded
from moriiod.errors import MoriiodError
from tests.support.kv_cache import CacheShape, KvCache, Origin

PACKET_BYTES: Final = 1 << 17
_LEAVE_S: Final = 10.0
#: Reconnects fast: the tests wait for it.
_SETTINGS: Final = ClientSettings(backoff_first_s=0.01, backoff_max_s=0.1)


@dataclass(slots=True)
class _Held:
    """Blocks of a transfer in flight: what is or will be in them, and how many layers are."""

    blocks: list[int]
    origin: Origin
    layers: int


class Worker:
    """Obeys commands until told to quit.

    Args:
        cache: Its memory.
        client: Not connected yet.
        tp_rank: Of its daemon.
        channel: To the test.
    """

    def __init__(
        self, cache: KvCache, client: Client, tp_rank: int, channel: socket.socket
    ) -> None:
        self._cache = cache
        self._client = client
        self._tp_rank = tp_rank
        self._channel = channel
        self._held: dict[tuple[str, str], _Held] = {}

    def serve(self) -> None:
        """Work until the test says quit or is gone."""
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        poller.register(self._client, select.POLLIN)
        while True:
            pause_s = self._client.next_poll_s()
            poller.poll(None if pause_s is None else pause_s * 1000)
            self._take_events()
            try:
                packet = self._channel.recv(PACKET_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            if not packet or not self._obey(json.loads(packet)):
                return

    def _say(self, **message: Any) -> None:
        self._channel.sendall(json.dumps(message).encode())

    def _obey(self, command: dict[str, Any]) -> bool:
        name, number = command.pop("do"), command.pop("number", None)
        if name == "quit":
            self._say(answer=number, is_clean=self._client.close(_LEAVE_S))
            return False
        if number is not None:
            self._say(answer=number, **getattr(self, f"_{name}")(**command))
        else:
            self._open(name, command)
        return True

    # --- Transfers ----------------------------------------------------------------------------

    def _open(self, role: str, command: dict[str, Any]) -> None:
        transfer_id: str = command["transfer_id"]
        try:
            getattr(self, f"_{role}")(**command)
        except MoriiodError as error:
            if (role, transfer_id) in self._held and error.code == "DAEMON_LOST":
                return  # it was open already, and its end will come
            self._give_back(role, transfer_id)
            self._say(refused=transfer_id, role=role, code=error.code)

    def _hold(
        self, role: str, transfer_id: str, blocks: list[int], tp_rank: int, layers: int
    ) -> None:
        self._held[role, transfer_id] = _Held(blocks, Origin(tp_rank, transfer_id), layers)

    def _give_back(self, role: str, transfer_id: str) -> _Held | None:
        held = self._held.pop((role, transfer_id), None)
        if held is not None:
            self._cache.blank(held.blocks)
        return held

    def _publish(self, transfer_id: str, blocks: list[int], **more: Any) -> None:
        n_layers = self._cache.shape.layers
        for layer in range(n_layers):
            self._cache.fill(blocks, Origin(self._tp_rank, transfer_id), layer)
        try:
            self._client.publish(transfer_id, [blocks], **more)
        except MoriiodError:
            self._cache.blank(blocks)
            raise
        self._hold("publish", transfer_id, blocks, self._tp_rank, n_layers)

    def _pull(
        self,
        transfer_id: str,
        peer: dict[str, Any],
        remote: list[int],
        blocks: list[int],
        source: int,
        **more: Any,
    ) -> None:
        self._client.pull(transfer_id, PeerAddress(**peer), [remote], [blocks], **more)
        self._hold("pull", transfer_id, blocks, source, self._cache.shape.layers)

    def _reserve(
        self, transfer_id: str, peer: dict[str, Any], blocks: list[int], source: int, **more: Any
    ) -> None:
        self._client.reserve(transfer_id, PeerAddress(**peer), [blocks], **more)
        self._hold("reserve", transfer_id, blocks, source, self._cache.shape.layers)

    def _push(
        self, transfer_id: str, blocks: list[int], n_layers: int | None = None, **more: Any
    ) -> None:
        """Push; with ``n_layers`` only so many layers get ready, and it is never sealed."""
        self._client.push(transfer_id, [blocks], **more)
        self._hold("push", transfer_id, blocks, self._tp_rank, 0)
        held = self._held["push", transfer_id]
        n_all = self._cache.shape.layers
        for layer in range(n_all if n_layers is None else n_layers):
            self._cache.fill(blocks, held.origin, layer)
            held.layers = layer + 1
            self._client.layer_ready(transfer_id, layer)
        if n_layers is None:
            self._client.seal(transfer_id, n_all)

    def _abort(self, transfer_id: str, role: str) -> dict[str, Any]:
        self._client.abort(transfer_id, role)  # type: ignore[arg-type]
        return {}

    def _reject(self, transfer_id: str, peer: dict[str, Any]) -> dict[str, Any]:
        self._client.reject(transfer_id, PeerAddress(**peer))
        return {}

    def _take_events(self) -> None:
        for event in self._client.poll():
            held = self._give_back_checked(event)
            self._say(ended=dataclasses.asdict(event), wrong=held)

    def _give_back_checked(self, event: TransferEnded) -> str:
        held = self._held.get((event.role, event.transfer_id))
        if held is None:
            return "an end of a transfer that is not in flight"
        wrong = ""
        if event.role in ("publish", "push") or event.outcome == "received":
            # The producer's blocks must never change; the consumer's must be right on success.
            wrong = self._cache.find_wrong(held.blocks, held.origin, range(held.layers))
        self._give_back(event.role, event.transfer_id)
        return wrong

    # --- Questions ----------------------------------------------------------------------------

    def _sweep(self) -> dict[str, Any]:
        used = [block for held in self._held.values() for block in held.blocks]
        return {"touched": self._cache.find_touched(used)}

    def _sync(self) -> dict[str, Any]:
        """The daemon has taken in everything that was sent to it."""
        self._client.ping()
        return {}

    def _look(self) -> dict[str, Any]:
        problems = [f"{p.request} {p.code}: {p.message}" for p in self._client.take_problems()]
        return {
            "state": self._client.state.value,
            "epoch": self._client.epoch,
            "in_flight": self._client.in_flight,
            "problems": problems,
        }


def main(arguments: Sequence[str]) -> None:
    """Connect, register, report, serve."""
    setup = json.loads(arguments[0])
    channel = socket.socket(fileno=setup["channel"])
    shape = CacheShape(**setup["shape"])
    cache = KvCache(shape, setup["fds"], is_new=True)
    with channel, Client(setup["socket_path"], setup["name"], _SETTINGS) as client:
        client.register_regions((shape.group(),), cache.regions)
        worker = Worker(cache, client, setup["tp_rank"], channel)
        channel.sendall(json.dumps({"ready": client.epoch}).encode())
        worker.serve()
