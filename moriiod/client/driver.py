"""Carries out what the protocol orders and tells it what happens. Never blocks by itself.

Everything a client waits for comes out of one epoll descriptor: both sockets, the end of daemon
processes, and ``wake`` for what was found while something else was being done. ``service`` costs
one system call when nothing happened.
"""

from __future__ import annotations

import os
import select
import time
import uuid
from collections.abc import Callable
from typing import Final

import zmq

from moriiod.client.channel import SEND_QUEUE, Channel, check_socket_path
from moriiod.client.registration import SendPacket, SendRequest
from moriiod.client.session import ClientProtocol, CloseChannel, OpenChannel
from moriiod.client.types import ClientSettings
from moriiod.core.ids import Epoch
from moriiod.core.requests import Request
from moriiod.errors import Busy, DaemonLost, MoriiodError
from moriiod.wire.ipc import RequestFrame, decode_reply, encode_request

#: With fewer unanswered requests than this the send queue cannot be full.
_SURELY_NOT_FULL: Final = SEND_QUEUE // 4


class ClientDriver:
    """Owns the sockets of one client and the protocol behind them.

    Args:
        socket_path: Path of the daemon's ZMQ socket.
        name: What the worker calls itself.
        settings: Limits and times.
        clock: Monotonic seconds.

    Raises:
        InvalidAddress: The path cannot be a socket.
    """

    def __init__(
        self,
        socket_path: str,
        name: str,
        settings: ClientSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = check_socket_path(socket_path)
        self._clock = clock
        self.protocol = ClientProtocol(name, _new_uuid, settings)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, select.EPOLLIN)
        self._channel: Channel | None = None
        #: pidfds of lost daemons whose end still has to be seen.
        self._watched: dict[int, Epoch] = {}

    @property
    def poll_fd(self) -> int:
        """Readable when ``service`` has something to do."""
        return self._poller.fileno()

    def now(self) -> float:
        """Return the time that deadlines are compared with."""
        return self._clock()

    def wake(self) -> None:
        """Make ``poll_fd`` readable until the next ``service``."""
        os.eventfd_write(self._wake, 1)

    def block(self, timeout_s: float) -> None:
        """Wait until ``poll_fd`` is readable, a deadline of the protocol has come, or so long."""
        deadline = self.protocol.deadline
        if deadline is not None:
            timeout_s = min(timeout_s, deadline - self._clock())
        self._poller.poll(max(0.0, timeout_s))

    def service(self) -> None:
        """Take in what has happened and send what is due."""
        for fd, _ in self._poller.poll(0):
            self._handle(fd)
        protocol = self.protocol
        if protocol.deadline is not None:
            protocol.timer(self._clock())
        if protocol.orders:
            self._carry_out()
        self.confirm()

    def submit(self, body: Request, *, is_waited_for: bool = False) -> int:
        """Send a request now; return its number.

        Raises:
            DaemonLost: Not connected at present.
            Busy: Too many requests have no answer yet, or too many transfers are in flight.
            TransferConflict: See ``Ledger.check_room``.
            TooLarge: The request does not fit a message.
        """
        protocol = self.protocol
        # A daemon that went away must not be taken for the one that came after it.
        self.service()
        protocol.check_connected()
        protocol.ledger.check_room(body)
        frames = encode_request(RequestFrame(protocol.ledger.next_sequence, body))
        channel = self._channel
        if channel is None or not channel.send(frames):
            raise self._unsendable()
        sequence = protocol.ledger.sent(
            body, protocol.epoch, protocol.generation, is_waited_for=is_waited_for
        )
        if channel.has_frames:
            # Looking at the socket took the signal of its descriptor: give another one.
            self.wake()
        return sequence

    def confirm(self) -> None:
        """Tell the daemon which events were taken, if it should know; later if it must be."""
        ledger = self.protocol.ledger
        channel = self._channel
        if channel is None or not ledger.is_confirmation_due:
            return
        confirmation = ledger.confirmation()
        frames = encode_request(RequestFrame(ledger.next_sequence, confirmation))
        if channel.send(frames):
            ledger.sent(confirmation, self.protocol.epoch, self.protocol.generation)
            ledger.confirmation_sent()
            if channel.has_frames:
                self.wake()

    def close(self) -> None:
        """Close everything; nothing is sent any more."""
        self.protocol.close()
        self._carry_out()
        for fd in list(self._watched):
            self._stop_watching(fd)
        self._poller.close()
        os.close(self._wake)
        self._context.term()

    # --- In -----------------------------------------------------------------------------------

    def _handle(self, fd: int) -> None:
        channel = self._channel
        if fd == self._wake:
            os.eventfd_read(self._wake)
            self._read_frames()
        elif fd in self._watched:
            self._daemon_gone(fd)
        elif channel is None:
            return
        elif fd == channel.zmq_fd:
            self._read_frames()
        elif fd == channel.unix_fd:
            self._read_packets()
        elif fd == channel.monitor_fd and channel.was_disconnected():
            self._read_frames()
            self._lost(DaemonLost("the daemon closed the ZMQ connection"))

    def _read_frames(self) -> None:
        channel = self._channel
        while channel is not None and channel is self._channel:
            frames = channel.receive()
            if frames is None:
                return
            try:
                frame = decode_reply(frames)
            except MoriiodError as error:
                self.protocol.frame_refused(error, self._clock())
            else:
                self.protocol.frame_received(frame, self._clock())
            self._close_if_ordered()

    def _read_packets(self) -> None:
        channel = self._channel
        while channel is not None and channel is self._channel:
            try:
                packet = channel.receive_packet()
            except MoriiodError as error:
                # What the daemon said before it went still counts.
                self._read_frames()
                if channel is self._channel:
                    channel.close_unix()
                    self.protocol.connection_ended(error, self._clock())
                    self._close_if_ordered()
                return
            if packet is None:
                return
            self.protocol.packet_received(packet, self._clock())
            self._close_if_ordered()

    def _lost(self, error: MoriiodError) -> None:
        self.protocol.lost(error, self._clock())
        self._close_if_ordered()

    def _close_if_ordered(self) -> None:
        orders = self.protocol.orders
        if orders and isinstance(orders[0], CloseChannel):
            self._close_channel(orders[0].epoch)
            orders.popleft()

    # --- Out ----------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        orders = self.protocol.orders
        while orders:
            match orders[0]:
                case OpenChannel():
                    orders.popleft()
                    self._open_channel()
                case CloseChannel(epoch):
                    orders.popleft()
                    self._close_channel(epoch)
                case SendPacket() as packet:
                    orders.popleft()
                    self._send_packet(packet)
                case SendRequest() as request:
                    if not self._send_step(request):
                        return

    def _send_packet(self, packet: SendPacket) -> None:
        if self._channel is None:
            return
        try:
            self._channel.send_packet(packet.message, packet.fd)
        except MoriiodError as error:
            self.protocol.step_unsendable(error, self._clock())

    def _send_step(self, request: SendRequest) -> bool:
        """Send the request at the head of the orders; False if the socket takes none now."""
        sequence = self.protocol.ledger.next_sequence
        try:
            frames = encode_request(RequestFrame(sequence, request.body))
        except MoriiodError as error:
            self.protocol.orders.popleft()
            self.protocol.step_unsendable(error, self._clock())
            return True
        if self._channel is None or not self._channel.send(frames):
            return False
        self.protocol.orders.popleft()
        self.protocol.step_sent()
        if self._channel.has_frames:
            self.wake()
        return True

    def _unsendable(self) -> MoriiodError:
        """Find out why a request cannot be sent."""
        if self._channel is not None:
            self._read_packets()
        outstanding = self.protocol.ledger.outstanding
        if self._channel is not None and outstanding < _SURELY_NOT_FULL:
            self._lost(DaemonLost("the ZMQ connection to the daemon is gone"))
        if self._channel is None:
            return DaemonLost("the daemon has just gone away")
        return Busy(
            "the daemon does not read its requests",
            limit="ipc_send_queue",
            value=outstanding,
            retry_after_s=0.1,
        )

    # --- The channel --------------------------------------------------------------------------

    def _open_channel(self) -> None:
        now = self._clock()
        try:
            self._channel = Channel(self._context, self._path, self._poller)
        except MoriiodError as error:
            self.protocol.failed(error, now)
        except (OSError, zmq.ZMQError) as error:
            self.protocol.failed(DaemonLost(f"cannot open a connection: {error}"), now)
        else:
            self.protocol.opened(now)

    def _close_channel(self, epoch: Epoch) -> None:
        channel, self._channel = self._channel, None
        if channel is None:
            return
        channel.close()
        if channel.pidfd is None:
            self.protocol.daemon_gone(epoch)
        elif epoch in self.protocol.ledger.table.lost_epochs():
            self._watched[channel.pidfd] = epoch
            self._poller.register(channel.pidfd, select.EPOLLIN)
        else:
            os.close(channel.pidfd)

    def _daemon_gone(self, pidfd: int) -> None:
        epoch = self._watched[pidfd]
        self._stop_watching(pidfd)
        self.protocol.daemon_gone(epoch)

    def _stop_watching(self, pidfd: int) -> None:
        del self._watched[pidfd]
        self._poller.unregister(pidfd)
        os.close(pidfd)


def _new_uuid() -> str:
    return uuid.uuid4().hex
