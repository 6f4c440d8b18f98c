"""The calls that both clients share: they send one message and return at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Final

from moriiod.client.arguments import (
    BlockIds,
    check_block_tokens,
    check_layer_count,
    check_layers,
    check_peer,
    check_positions,
    check_role,
    check_seconds,
    check_tp_size,
    check_transfer_id,
    pack_groups,
)
from moriiod.client.driver import ClientDriver
from moriiod.client.types import ClientProblem, ClientSettings, ClientState
from moriiod.core.ids import Role
from moriiod.core.requests import (
    Abort,
    Attached,
    LayerReady,
    PeerAddress,
    Publish,
    Pull,
    Push,
    Reject,
    Request,
    Reserve,
    Seal,
)
from moriiod.errors import ClientUnusable, DaemonLost


class TransferCalls:
    """What a worker asks of its daemon without waiting for an answer.

    ``publish``, ``pull``, ``push`` and ``reserve`` open a transfer. From then on exactly one
    ``TransferEnded`` for (role, transfer id) comes out of ``poll`` or ``wait``, and until it has
    come the blocks belong to the transfer: they must not be freed or reused. A daemon that
    refuses the transfer ends it in the same way, with outcome ``failed`` and its error code as
    the reason.

    Refusals that end no transfer are kept for ``take_problems``: a ``layer_ready`` with a wrong
    index, or a second ``pull`` with the id of a transfer that is in flight (which stays as it
    is).

    All of these calls raise, with nothing sent:
        InvalidArgument: A value is outside what is allowed; the error names it.
        TooLarge: More blocks than fit a message.
        DaemonLost: No daemon is connected at present. Retryable.
        Busy: A limit of this client is reached, or the daemon does not keep up. Retryable.
        TransferConflict: The id belongs to a transfer that a lost daemon left behind.
        ClientUnusable: The client is closed, or was inherited by a forked process.

    Not thread-safe: one thread (or one event loop) uses a client.
    """

    def __init__(self, socket_path: str, name: str, settings: ClientSettings | None) -> None:
        self._settings = settings or ClientSettings()
        self._driver = ClientDriver(socket_path, name, self._settings)
        self._protocol: Final = self._driver.protocol
        self._pid = os.getpid()

    # --- READ ---------------------------------------------------------------------------------

    def publish(
        self,
        transfer_id: str,
        blocks: Sequence[BlockIds],
        *,
        lease_s: float | None = None,
        remote_tp_size: int = 0,
    ) -> None:
        """Producer: these blocks hold a finished prefill; keep them until they have been read.

        Ends as ``released`` (every consumer rank has acknowledged, or it was aborted) or
        ``failed``. Either way the blocks are free then.

        Args:
            transfer_id: Chosen by the router or engine; unique among transfers in flight.
            blocks: Block ids of each KV group, in the order of the registered groups.
            lease_s: How long the blocks are promised, in seconds; None = the daemon's setting.
            remote_tp_size: TP size of the consumer instance; 0 = not known (yet).
        """
        self._send(
            Publish(
                check_transfer_id(transfer_id),
                pack_groups("blocks", blocks),
                check_seconds("lease_s", lease_s),
                check_tp_size("remote_tp_size", remote_tp_size),
            )
        )

    def pull(  # noqa: PLR0913 - one argument for each field of Pull
        self,
        transfer_id: str,
        peer: PeerAddress,
        remote_blocks: Sequence[BlockIds],
        local_blocks: Sequence[BlockIds],
        *,
        local_first: Sequence[int] = (),
        remote_first: Sequence[int] = (),
        remote_block_tokens: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> None:
        """Consumer: copy the producer's blocks into these local blocks.

        Lists are matched by position in the prompt, never by length: ``local_blocks[g][i]`` is
        block ``local_first[g] + i`` of the prompt, and likewise for the remote list. Both must
        end at the same position; what comes before the local list (a prefix hit) is not read.

        Ends as ``received`` (every byte is there and was valid) or ``failed``.

        Args:
            transfer_id: As the producer published it.
            peer: The producer's instance, as the router names it.
            remote_blocks: The producer's block ids of each KV group.
            local_blocks: Our block ids of each KV group, without repeats.
            local_first: Position of each local list's first block, in blocks; () = all 0.
            remote_first: The same for the remote lists, in blocks of the producer.
            remote_block_tokens: Tokens in a block of each of the producer's groups, where they
                differ from ours (``TransferParams.remote_block_tokens``); () = the same.
            timeout_s: Give up after so many seconds; None = the daemon's setting.
        """
        self._send(
            Pull(
                check_transfer_id(transfer_id),
                check_peer(peer),
                pack_groups("remote_blocks", remote_blocks),
                pack_groups("local_blocks", local_blocks),
                check_positions("local_first", local_first),
                check_positions("remote_first", remote_first),
                check_seconds("timeout_s", timeout_s),
                check_block_tokens("remote_block_tokens", remote_block_tokens),
            )
        )

    def reject(self, transfer_id: str, peer: PeerAddress) -> None:
        """Consumer: this rank will never pull the transfer; let the producer free it.

        Opens no transfer and ends without an event.
        """
        self._send(Reject(check_transfer_id(transfer_id), check_peer(peer)))

    # --- WRITE --------------------------------------------------------------------------------

    def reserve(
        self,
        transfer_id: str,
        peer: PeerAddress,
        blocks: Sequence[BlockIds],
        *,
        first: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> None:
        """Consumer: the producer may write this transfer into these local blocks.

        Ends as ``received`` (every byte is there) or ``failed``. When the daemon is lost, the end
        comes only after its successor has made sure that no producer writes any more.

        Args:
            transfer_id: As the producer pushes it.
            peer: The producer's instance, as the router names it.
            blocks: Our block ids of each KV group, without repeats.
            first: Position of each list's first block in the prompt, in blocks; () = all 0.
            timeout_s: Give up after so many seconds; None = the daemon's setting.
        """
        self._send(
            Reserve(
                check_transfer_id(transfer_id),
                check_peer(peer),
                pack_groups("blocks", blocks),
                check_positions("first", first),
                check_seconds("timeout_s", timeout_s),
            )
        )

    def push(
        self,
        transfer_id: str,
        blocks: Sequence[BlockIds],
        *,
        first: Sequence[int] = (),
        remote_tp_size: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Producer: these blocks are being filled; write each layer once it is ready.

        Followed by ``layer_ready`` for every layer and one ``seal``. Ends as ``released`` (all
        writes have ended) or ``failed``. Either way the blocks are free then.

        Args:
            transfer_id: As the consumer reserved it.
            blocks: Block ids of each KV group.
            first: Position of each list's first block in the prompt, in blocks; () = all 0.
            remote_tp_size: TP size of the consumer instance; 0 = the same as ours.
            timeout_s: Give up after so many seconds; None = the daemon's setting.
        """
        self._send(
            Push(
                check_transfer_id(transfer_id),
                pack_groups("blocks", blocks),
                check_positions("first", first),
                check_tp_size("remote_tp_size", remote_tp_size),
                check_seconds("timeout_s", timeout_s),
            )
        )

    def layer_ready(self, transfer_id: str, layers: int | Iterable[int]) -> None:
        """Producer: these layers of a push hold their final bytes.

        Args:
            transfer_id: Of a ``push``.
            layers: One index or several, counted over all groups in the registered order.
        """
        self._send(LayerReady(check_transfer_id(transfer_id), check_layers(layers)))

    def seal(self, transfer_id: str, n_layers: int) -> None:
        """Producer: ``n_layers`` distinct layers belong to this push; no more will come."""
        self._send(Seal(check_transfer_id(transfer_id), check_layer_count(n_layers)))

    def abort(self, transfer_id: str, role: Role) -> None:
        """Give up a transfer of ours: ``role`` is the call that opened it.

        The end comes as for any transfer, once nothing touches the blocks any more. To abort one
        that has ended already is no error.
        """
        self._send(Abort(check_transfer_id(transfer_id), check_role(role)))

    # --- State --------------------------------------------------------------------------------

    @property
    def state(self) -> ClientState:
        """Where this client stands with its daemon."""
        return self._protocol.state

    @property
    def epoch(self) -> str | None:
        """uuid4 hex of the daemon start we are attached to; None while there is none."""
        return self._protocol.epoch if self.state is ClientState.CONNECTED else None

    @property
    def identity(self) -> Attached | None:
        """Rank, sizes, instance and engine of the daemon; None before the first attach."""
        return self._protocol.identity

    @property
    def in_flight(self) -> int:
        """Transfers that have not ended yet, ended ones that ``poll`` has not returned included."""
        ledger = self._protocol.ledger
        return len(ledger.table) + ledger.untaken

    def take_problems(self) -> list[ClientProblem]:
        """Return, and forget, what was refused without ending a transfer, oldest first."""
        return self._protocol.ledger.take_problems()

    # --- Inside -------------------------------------------------------------------------------

    def _send(self, body: Request) -> None:
        self._check_usable()
        try:
            self._driver.submit(body)
        except DaemonLost:
            # What was noticed on the way (the daemon went) still has to be carried out.
            self._driver.wake()
            raise
        self._noticed()

    def _noticed(self) -> None:
        """Something may have come in while something else was done: it must not be slept over."""
        if self._protocol.ledger.untaken:
            self._driver.wake()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClientUnusable(
                "this client belongs to the process that forked this one",
                owner_pid=self._pid,
                pid=os.getpid(),
            )
        if self.state is ClientState.CLOSED:
            raise ClientUnusable("this client is closed")
