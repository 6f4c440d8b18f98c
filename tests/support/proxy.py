"""A wire between two daemons that loses, repeats and delays the messages a test names.

The decode side dials the proxy in place of the producer's control port. Messages are passed on as
they are, in a thread; what is decoded is only the type of each message.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import zmq

from moriiod.wire.frames import MAX_FRAMES
from tests.support.children import HOST, take_ports

#: More than any test lets happen: stands for "always".
ALWAYS: Final = 1 << 30
_IDLE_MS: Final = 200


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to messages of one type.

    Attributes:
        lose: So many are lost, counted from the first.
        copies: Of each that is passed on.
        delay_s: Each copy comes so late; the second one twice as late, and so on.
    """

    lose: int = 0
    copies: int = 1
    delay_s: float = 0.0


@dataclass(order=True)
class _Delayed:
    due: float
    number: int
    frames: list[bytes]
    client: bytes
    is_for_client: bool


class Proxy:
    """Listens on a port of its own and passes on to one control port.

    Args:
        target: ``tcp://host:port`` of the producer's daemon.
        rules: By name of the message type; others are passed on at once.
    """

    def __init__(self, target: str, rules: Mapping[str, Rule]) -> None:
        self.port = take_ports(1)
        #: Messages that came, by type; only grows.
        self.seen: Counter[str] = Counter()
        self._target = target
        self._rules = rules
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.LINGER, 0)
        self._front.bind(f"tcp://{HOST}:{self.port}")
        self._stop_receiver = self._context.socket(zmq.PAIR)
        self._stop_receiver.bind("inproc://stop")
        self._stop_sender = self._context.socket(zmq.PAIR)
        self._stop_sender.connect("inproc://stop")
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._delayed: list[_Delayed] = []
        self._numbers = 0
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_sender.send(b"")
        self._thread.join()
        self._stop_sender.close()
        self._context.term()

    # --- Thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for sock in (self._front, self._stop_receiver):
            poller.register(sock, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._pause_ms()))
            if self._stop_receiver in ready:
                break
            if self._front in ready:
                client, *frames = self._front.recv_multipart()
                if client not in self._backs:
                    poller.register(self._open_back(client), zmq.POLLIN)
                self._take(frames, client, is_for_client=False)
            for client, back in list(self._backs.items()):
                if back in ready:
                    self._take(back.recv_multipart(), client, is_for_client=True)
            self._pass_on_due()
        for sock in (self._front, self._stop_receiver, *self._backs.values()):
            sock.close(0)

    def _open_back(self, client: bytes) -> zmq.Socket[bytes]:
        back = self._context.socket(zmq.DEALER)
        back.setsockopt(zmq.LINGER, 0)
        # The target knows the client by the same name as if it had been dialled directly.
        back.setsockopt(zmq.ROUTING_ID, client)
        back.connect(self._target)
        self._backs[client] = back
        return back

    def _take(self, frames: list[bytes], client: bytes, *, is_for_client: bool) -> None:
        name = frames[1].decode("ascii", "replace") if 1 < len(frames) <= MAX_FRAMES else ""
        rule = self._rules.get(name, Rule())
        self.seen[name] += 1
        if self.seen[name] <= rule.lose:
            return
        now = time.monotonic()
        for copy in range(rule.copies):
            self._numbers += 1
            due = now + rule.delay_s * (copy + 1)
            heapq.heappush(
                self._delayed, _Delayed(due, self._numbers, frames, client, is_for_client)
            )

    def _pass_on_due(self) -> None:
        while self._delayed and self._delayed[0].due <= time.monotonic():
            item = heapq.heappop(self._delayed)
            if item.is_for_client:
                self._front.send_multipart([item.client, *item.frames])
            else:
                self._backs[item.client].send_multipart(item.frames)

    def _pause_ms(self) -> int:
        if not self._delayed:
            return _IDLE_MS
        return max(0, math.ceil((self._delayed[0].due - time.monotonic()) * 1000))
