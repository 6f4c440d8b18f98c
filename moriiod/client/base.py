"""What is left of the waiting calls once the waiting is taken out: how they begin and end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from moriiod.client.calls import TransferCalls
from moriiod.client.session import Phase
from moriiod.client.types import ClientSettings, ClientState, MemoryRegion, Registration
from moriiod.core.faults import to_error
from moriiod.core.geometry import KvGroup
from moriiod.core.ids import MAX_GROUPS, MAX_REGIONS
from moriiod.core.requests import (
    GetStatus,
    Ping,
    Refused,
    Reply,
    Request,
    StatusDocument,
    TransferEnded,
    UnregisterCaches,
)
from moriiod.errors import DaemonLost, InvalidArgument, MoriiodError, UnexpectedMessage
from moriiod.wire.memfd import check_sealed_memfd

if TYPE_CHECKING:
    import torch

    from moriiod.client.spec import GroupSpec

#: How long calls wait for the daemon unless told otherwise.
DEFAULT_TIMEOUT_S: Final = 30.0


class ClientBase(TransferCalls):
    """Begins and ends the calls that wait; the shells do the waiting."""

    def __init__(self, socket_path: str, name: str, settings: ClientSettings | None) -> None:
        super().__init__(socket_path, name, settings)
        #: Whose descriptors are open.
        self._registrations: list[Registration] = []

    def poll(self) -> list[TransferEnded]:
        """Return what has ended since the last call; [] if nothing. Never blocks.

        What is returned is confirmed to the daemon, which keeps it until then: events of a slow
        reader are late, never lost. Reconnecting happens in here, too.

        Raises:
            ClientUnusable: The client is closed, or was inherited by a forked process.
        """
        self._check_usable()
        self._driver.service()
        events = self._take()
        self._noticed()
        return events

    def _take(self) -> list[TransferEnded]:
        ledger = self._protocol.ledger
        if not ledger.untaken:
            return []
        events = ledger.take_events()
        self._driver.confirm()
        return events

    # --- connect ------------------------------------------------------------------------------

    def _is_settled(self) -> bool:
        """Whether connecting succeeded, or failed in a way that trying again does not change."""
        error = self._protocol.attach_error
        return self.state is ClientState.CONNECTED or (error is not None and not error.retryable)

    def _check_connected(self, timeout_s: float) -> None:
        if self.state is ClientState.CONNECTED:
            return
        error = self._protocol.attach_error
        if error is not None and not isinstance(error, DaemonLost):
            raise error
        cause = "no answer" if error is None else error.message
        raise DaemonLost(
            f"not connected to a daemon within {timeout_s:g} s: {cause}",
            timeout_s=timeout_s,
            cause=cause,
        )

    # --- register -----------------------------------------------------------------------------

    def _share(
        self, kv_caches: Mapping[str, torch.Tensor], groups: Sequence[GroupSpec]
    ) -> tuple[tuple[KvGroup, ...], tuple[MemoryRegion, ...]]:
        from moriiod.client.layout import describe_groups
        from moriiod.client.tensors import share_kv_caches

        identity = self._protocol.identity
        tp_size = None if identity is None else identity.tp_size
        shared = share_kv_caches(kv_caches)
        return describe_groups(shared.tensors, groups, tp_size), shared.regions

    def _begin_registration(
        self, groups: Sequence[KvGroup], regions: Sequence[MemoryRegion]
    ) -> None:
        self._check_usable()
        if not 1 <= len(groups) <= MAX_GROUPS or not 1 <= len(regions) <= MAX_REGIONS:
            raise InvalidArgument(
                f"a KV cache has 1 to {MAX_GROUPS} groups and 1 to {MAX_REGIONS} regions",
                groups=len(groups),
                regions=len(regions),
            )
        memory = []
        for region in regions:
            check_sealed_memfd(region.fd, region.n_bytes)
            facts = os.fstat(region.fd)
            memory.append((facts.st_dev, facts.st_ino))
        registration = Registration(
            tuple(groups),
            tuple(region.n_bytes for region in regions),
            tuple(memory),
            tuple(os.dup(region.fd) for region in regions),
        )
        self._registrations.append(registration)
        try:
            self._protocol.register(registration, self._driver.now())
        except MoriiodError:
            self._close_unused()
            raise

    def _is_registered(self) -> bool:
        return self._protocol.caches.wanted is None

    def _end_registration(self, timeout_s: float) -> None:
        if not self._is_registered():
            self._abandon_registration()
            raise DaemonLost(
                f"the KV cache was not registered within {timeout_s:g} s", timeout_s=timeout_s
            )
        outcome = self._protocol.caches.take_outcome()
        self._close_unused()
        self._noticed()
        if isinstance(outcome, MoriiodError):
            raise outcome

    def _abandon_registration(self) -> None:
        """Nobody waits for it any more."""
        self._protocol.abandon_registration()
        self._driver.service()
        self._close_unused()
        self._noticed()

    def _end_unregistration(self) -> None:
        self._protocol.caches.unregistered()
        self._close_unused()

    def _close_unused(self) -> None:
        """Close the descriptors of registrations that nobody needs any more."""
        caches = self._protocol.caches
        kept: list[Registration] = []
        for registration in self._registrations:
            if registration is caches.held or registration is caches.wanted:
                kept.append(registration)
                continue
            for fd in registration.fds:
                os.close(fd)
        self._registrations = kept

    # --- ask ----------------------------------------------------------------------------------

    def _ask(self, body: Request) -> int:
        self._check_usable()
        sequence = self._driver.submit(body, is_waited_for=True)
        self._noticed()
        return sequence

    def _answer(self, sequence: int) -> Callable[[], bool]:
        return lambda: self._protocol.ledger.has_answer(sequence)

    def _take_answer(self, sequence: int, timeout_s: float) -> Reply:
        ledger = self._protocol.ledger
        answer = ledger.take_answer(sequence)
        self._noticed()
        if answer is None:
            ledger.stop_waiting(sequence)
            raise DaemonLost(f"no answer within {timeout_s:g} s", timeout_s=timeout_s)
        if isinstance(answer, MoriiodError):
            raise answer
        if isinstance(answer, Refused):
            raise to_error(answer)
        return answer

    # --- close --------------------------------------------------------------------------------

    def _has_left(self) -> bool:
        return self._protocol.phase is Phase.CLOSED

    def _end_close(self) -> bool:
        """Close what is left; say whether nothing can touch the memory any more."""
        protocol = self._protocol
        is_idle = not len(protocol.ledger.table)
        self._driver.close()
        protocol.caches.forget()
        self._close_unused()
        return protocol.has_left or is_idle


PING: Final = Ping()
GET_STATUS: Final = GetStatus()
UNREGISTER: Final = UnregisterCaches()


def status_text(reply: Reply) -> str:
    """Return the JSON text of a status reply.

    Raises:
        UnexpectedMessage: It is another reply.
    """
    if not isinstance(reply, StatusDocument):
        raise UnexpectedMessage("not an answer to GetStatus", got=type(reply).__name__)
    return reply.json
