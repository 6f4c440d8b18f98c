"""The other side of the fd socket: whatever a worker, a peer or an attacker may send."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from moriiod.wire.fdsocket import FdMessage, Packet, decode_packet, receive_packet, send_packet

#: More than any answer has.
MAX_FDS = 200


class FdClient:
    """One connection, used in the loop that serves it."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self.sock.connect(path)

    def send(self, message: FdMessage, fds: Sequence[int] = ()) -> None:
        """Send a message."""
        send_packet(self.sock, message, fds)

    def send_raw(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send any bytes."""
        socket.send_fds(self.sock, [data], list(fds)) if fds else self.sock.send(data)

    async def packet(self) -> Packet:
        """Wait for the next packet; empty at the end of the connection."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        loop.add_reader(self.sock, wake)
        try:
            await ready
        finally:
            loop.remove_reader(self.sock)
        try:
            return receive_packet(self.sock, MAX_FDS)
        except ConnectionResetError:
            return Packet(b"", (), is_cut=False)

    async def answer(self) -> FdMessage:
        """Wait for the next packet, which has no fds, and decode it."""
        packet = await self.packet()
        packet.close_fds()
        assert packet.data, "the connection was closed without an answer"
        return decode_packet(packet)

    async def ask(self, message: FdMessage, fds: Sequence[int] = ()) -> FdMessage:
        """Send, and wait for the answer."""
        self.send(message, fds)
        return await self.answer()

    async def is_closed(self) -> bool:
        """Wait until the other side closes."""
        return not (await self.packet()).data

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()
