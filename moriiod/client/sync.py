"""``Client``: for a worker with its own step loop. No thread, no event loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from moriiod.client.base import (
    DEFAULT_TIMEOUT_S,
    GET_STATUS,
    PING,
    UNREGISTER,
    ClientBase,
    status_text,
)
from moriiod.client.types import ClientSettings, MemoryRegion
from moriiod.core.geometry import KvGroup
from moriiod.core.requests import Reply, Request, TransferEnded

if TYPE_CHECKING:
    import torch

    from moriiod.client.spec import GroupSpec


class Client(ClientBase):
    """A worker's connection to its daemon.

    Transfer calls (see ``TransferCalls``) send one message and return. What has ended comes out
    of ``poll``, which never blocks, or ``wait``. Only the calls that take ``timeout_s`` block.

    When the daemon restarts, the client notices in the next call, reports what ended with it,
    and connects, attaches and registers again from inside ``poll`` and ``wait``.

    Args:
        socket_path: Of the daemon: ``/run/moriiod/rank3.sock``, also with ``ipc://`` before it.
        name: For the daemon's logs and status; None = ``worker-<pid>``.
        settings: Limits and times; None = the defaults.

    Raises:
        InvalidAddress: The path cannot be a socket.
    """

    def __init__(
        self,
        socket_path: str,
        name: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        super().__init__(socket_path, name or f"worker-{os.getpid()}", settings)

    def __enter__(self) -> Self:
        try:
            self.connect()
        except BaseException:
            self.close(0.0)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def connect(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Attach to the daemon; while none is there, try again until the time is over.

        Also to be called when it was attached before: waits until it is again.

        Raises:
            DaemonLost: None answered in time. Retryable.
            InvalidAddress: We may not connect to the socket, or it is none.
            MoriiodError: The daemon refused us for good; see the code.
        """
        self._check_usable()
        self._protocol.start()
        self._until(self._is_settled, timeout_s)
        self._check_connected(timeout_s)

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Sequence[GroupSpec],
        timeout_s: float = 120.0,
    ) -> None:
        """Share the KV cache with the daemon, and describe it. Must come before any transfer.

        Tensors that lie in ordinary memory are moved into shared memory in place: tensors and
        views stay what they are, raw pointers (``data_ptr()``, ``numpy()``) taken before do not.
        ``allocate_kv_cache`` and ``KvMemPool`` allocate there in the first place.

        Registering the same again counts one more reference and costs one message.

        Args:
            kv_caches: Tensor of each layer by name.
            groups: What the layers of each KV group look like; see ``GroupSpec``.
            timeout_s: How long to wait for the daemon and its engine.

        Raises:
            InvalidGeometry: Description and tensors disagree, or could be read in two ways.
            InvalidArgument: A tensor cannot be shared (device, already shared otherwise).
            RegistrationFailed: Kernel or engine refused the memory.
            TransferConflict: Another cache is registered; unregister it first.
            Busy: A registration, or transfers of the former cache, are under way. Retryable.
            DaemonLost: No daemon, or no answer in time. Retryable.
        """
        described, regions = self._share(kv_caches, groups)
        self.register_regions(described, regions, timeout_s)

    def register_regions(
        self,
        groups: Sequence[KvGroup],
        regions: Sequence[MemoryRegion],
        timeout_s: float = 120.0,
    ) -> None:
        """Register memory without torch: layers name regions by index.

        Args:
            groups: The KV groups, in the order in which transfers name their blocks.
            regions: Sealed memfds; the client duplicates the descriptors.
            timeout_s: How long to wait for the daemon and its engine.

        Raises:
            MoriiodError: As ``register_kv_caches``.
        """
        self._begin_registration(groups, regions)
        try:
            self._until(self._is_registered, timeout_s)
        except BaseException:
            self._abandon_registration()
            raise
        self._end_registration(timeout_s)

    def unregister_kv_caches(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Drop one reference; with the last one the daemon lets go of the memory.

        Raises:
            NotRegistered: Nothing is registered.
            DaemonLost: No daemon, or no answer in time. Retryable.
        """
        self._ask_and_wait(UNREGISTER, timeout_s)
        self._end_unregistration()

    def wait(self, timeout_s: float | None = None) -> list[TransferEnded]:
        """Return what has ended, as ``poll``, but wait for the first one.

        Args:
            timeout_s: At most so long, then []; None = without limit.

        Raises:
            ClientUnusable: The client is closed, or was inherited by a forked process.
        """
        self._check_usable()
        ledger = self._protocol.ledger
        self._until(lambda: ledger.untaken > 0, timeout_s)
        return self._take()

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``poll`` has something to do.

        For ``select``, ``poll`` and ``epoll`` of the worker's own loop. While ``next_poll_s`` is
        not None, ``poll`` must also be called after that time.
        """
        self._check_usable()
        return self._driver.poll_fd

    def next_poll_s(self) -> float | None:
        """Return seconds until ``poll`` must be called without a signal; None = no need.

        It is not None while the client is reconnecting.
        """
        deadline = self._protocol.deadline
        return None if deadline is None else max(0.0, deadline - self._driver.now())

    def ping(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """Return the daemon's epoch, having heard from it.

        Raises:
            DaemonLost: No daemon, or no answer in time. Retryable.
        """
        self._ask_and_wait(PING, timeout_s)
        return self._protocol.epoch

    def status(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """Return the daemon's state as JSON text.

        Raises:
            DaemonLost: No daemon, or no answer in time. Retryable.
        """
        return status_text(self._ask_and_wait(GET_STATUS, timeout_s))

    def close(self, timeout_s: float = 5.0) -> bool:
        """Leave the daemon; transfers in flight are aborted and not reported any more.

        In a forked child this does nothing; the parent's client goes on.

        Args:
            timeout_s: How long to wait until the daemon has let go of everything.

        Returns:
            Whether nothing can touch the registered memory any more. If False, the memory must
            not be used for anything else as long as this process lives.
        """
        if os.getpid() != self._pid or self._has_left():
            return True
        self._protocol.leave(self._driver.now())
        self._until(self._has_left, timeout_s)
        return self._end_close()

    # --- Inside -------------------------------------------------------------------------------

    def _ask_and_wait(self, body: Request, timeout_s: float) -> Reply:
        sequence = self._ask(body)
        self._until(self._answer(sequence), timeout_s)
        return self._take_answer(sequence, timeout_s)

    def _until(self, is_done: Callable[[], bool], timeout_s: float | None) -> None:
        """Work until the condition holds or the time is over."""
        driver = self._driver
        give_up = None if timeout_s is None else driver.now() + timeout_s
        driver.service()
        while not is_done():
            left = 3600.0 if give_up is None else give_up - driver.now()
            if left <= 0:
                return
            driver.block(left)
            driver.service()
