"""Drives a ``ClientProtocol`` as a shell would, without sockets: the daemon is the test."""

from __future__ import annotations

from moriiod.client.registration import SendPacket, SendRequest
from moriiod.client.session import ClientProtocol, CloseChannel, OpenChannel, Order
from moriiod.client.types import ClientSettings, Registration
from moriiod.core.requests import (
    Attach,
    Attached,
    Done,
    PeerAddress,
    RegisterCaches,
    Reply,
    Request,
    TransferEnded,
)
from moriiod.errors import DaemonLost
from moriiod.wire.fdsocket import OfferRegion, RegionTaken, WorkerHello, WorkerWelcome
from moriiod.wire.ipc import EventFrame, ReplyFrame
from tests.support.caches import group

PEER = PeerAddress("10.0.0.1", 6301, 4)
EPOCHS = tuple(letter * 32 for letter in "abcdef")
ATTACHED = Attached("decode-0", 3, 8, 0, 1, "shm")


def registration(inode: int = 1, n_regions: int = 1) -> Registration:
    """Return a registration of ``n_regions`` files; no file is behind it."""
    return Registration(
        groups=(group(),),
        region_bytes=(1 << 20,) * n_regions,
        memory=tuple((0, inode + index) for index in range(n_regions)),
        fds=tuple(100 + index for index in range(n_regions)),
    )


class Shell:
    """One client protocol and what it wants sent; ``now`` is whatever the test says."""

    def __init__(self, settings: ClientSettings | None = None) -> None:
        self.now = 100.0
        self._generations = 0
        self.protocol = ClientProtocol("w", self._generation, settings or ClientSettings())
        #: Requests that were sent, with their numbers.
        self.sent: list[tuple[int, Request]] = []
        self.epoch = EPOCHS[0]
        self.opened = 0
        self.closed: list[str] = []

    def _generation(self) -> str:
        self._generations += 1
        return f"{self._generations:032x}"

    def next_order(self) -> Order:
        """Take the next order and carry it out, as far as a test can see it."""
        order = self.protocol.orders.popleft()
        match order:
            case OpenChannel():
                self.opened += 1
            case CloseChannel(epoch):
                self.closed.append(epoch)
            case SendRequest(body):
                self.sent.append((self.protocol.ledger.next_sequence, body))
                self.protocol.step_sent()
            case SendPacket():
                pass
        return order

    def submit(self, body: Request, *, is_waited_for: bool = False) -> int:
        """Send a caller's request."""
        protocol = self.protocol
        protocol.check_connected()
        protocol.ledger.check_room(body)
        number = protocol.ledger.sent(
            body, protocol.epoch, protocol.generation, is_waited_for=is_waited_for
        )
        self.sent.append((number, body))
        return number

    def reply(self, sequence: int, body: Reply | None = None) -> None:
        """The daemon answers."""
        self.protocol.frame_received(ReplyFrame(sequence, self.epoch, body or Done()), self.now)

    def event(self, sequence: int, body: TransferEnded) -> None:
        """The daemon tells an event."""
        self.protocol.frame_received(EventFrame(sequence, self.epoch, body), self.now)

    def lose_daemon(self, *, is_dead: bool = True) -> str:
        """The daemon goes away; return its epoch."""
        epoch = self.protocol.epoch
        self.protocol.lost(DaemonLost("gone"), self.now)
        while self.protocol.orders:
            self.next_order()
        if is_dead:
            self.protocol.daemon_gone(epoch)
        return epoch

    def attach(self, epoch: str = EPOCHS[0]) -> Attach:
        """Play the daemon's part of an attach; return what it was asked."""
        self.epoch = epoch
        if not self.opened and not self.protocol.orders:
            self.protocol.start()
        self.protocol.timer(self.now)
        asked: list[Attach] = []
        while self.protocol.orders:
            match self.next_order():
                case OpenChannel():
                    self.protocol.opened(self.now)
                case SendPacket(WorkerHello()):
                    self.protocol.packet_received(WorkerWelcome(epoch), self.now)
                case SendPacket(OfferRegion(region, _)):
                    self.protocol.packet_received(RegionTaken(region), self.now)
                case SendRequest(Attach() as request):
                    asked.append(request)
                    self.reply(self.sent[-1][0], ATTACHED)
                case SendRequest(RegisterCaches()):
                    self.reply(self.sent[-1][0])
                case _:
                    pass
        return asked[0]

    def register(self, wanted: Registration) -> None:
        """Register as a caller, and play the daemon's part."""
        self.protocol.register(wanted, self.now)
        self.finish_steps()

    def finish_steps(self) -> None:
        """Answer every step with success."""
        while self.protocol.orders:
            match self.next_order():
                case OpenChannel():
                    self.protocol.opened(self.now)
                case SendPacket(WorkerHello()):
                    self.protocol.packet_received(WorkerWelcome(self.epoch), self.now)
                case SendPacket(OfferRegion(region, _)):
                    self.protocol.packet_received(RegionTaken(region), self.now)
                case SendRequest(Attach()):
                    self.reply(self.sent[-1][0], ATTACHED)
                case SendRequest():
                    self.reply(self.sent[-1][0])
                case _:
                    pass


def ended(
    transfer_id: str = "t1",
    role: str = "pull",
    outcome: str = "received",
    reason: str = "done",
) -> TransferEnded:
    """Return an event."""
    return TransferEnded(transfer_id, role, outcome, reason)  # type: ignore[arg-type]
