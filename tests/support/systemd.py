"""The listening end of ``NOTIFY_SOCKET``."""

from __future__ import annotations

import asyncio
import socket


class FakeSystemd:
    """Hears what a daemon tells systemd.

    Args:
        address: A path, or ``@name`` in the abstract namespace.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address[0] == "@" else address)
        self._socket.setblocking(False)
        self._all: list[str] = []

    def heard(self) -> list[str]:
        """Return everything that was said since the start, without waiting."""
        while True:
            try:
                self._all.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return self._all

    async def hears(self, state: str, n: int = 1) -> None:
        """Wait until a state was said so many times."""
        loop = asyncio.get_running_loop()
        while sum(message.startswith(state) for message in self.heard()) < n:
            readable: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self._socket, _wake, readable)
            try:
                await readable
            finally:
                loop.remove_reader(self._socket)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
