"""Times and limits the core decides by. ``config`` fills it; tests build their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Durations in seconds, limits in counts or bytes. All positive.

    Attributes:
        lease_s: How long published blocks are kept without a sign of life from a consumer.
        pull_timeout_s: A pull that has not ended by then is failed and drained.
        write_timeout_s: The same for push and reserve.
        early_ttl_s: How long a claim, grant or ACK waits for the local worker to speak.
        heartbeat_interval_s: Between two heartbeats of a link.
        link_timeout_s: A peer that was not heard for so long is lost.
        connect_timeout_s: A dialled endpoint that has not answered by then is unreachable.
        peer_forget_s: A lost peer that nothing waits for is forgotten after so long.
        link_idle_s: A dialled link that no transfer used for so long is closed.
        resend_first_s: First repeat of a message that must arrive; doubles each time.
        resend_max_s: Longest pause between two repeats.
        op_retry_s: First pause before an operation the engine had no room for is posted again.
        drain_grace_s: After the drain limit, time for aborted transfers to come to rest.
        max_clients: Attached workers.
        max_peers: Known peer epochs, and dialled endpoints.
        max_transfers: Transfers of all roles that are live or have messages to deliver.
        max_blocks_per_transfer: Block ids of one transfer, all groups together.
        max_early: Claims, grants and ACKs that wait for their transfer.
        max_tombstones: Ended attempts that are remembered to answer repeats.
        max_ops_in_flight: Operations posted to the engine; more wait in order.
        max_bytes_in_flight: Bytes of posted operations; one operation is always let through.
        max_unconfirmed_events: Events a client has not confirmed, with its live transfers.
        event_window: Events sent to a client ahead of its confirmations.
        max_token_spans: Descriptors of one token each that one operation may have.
        allow_uneven: Take peers whose TP size is neither a multiple nor a divisor of ours.
    """

    lease_s: float = 60.0
    pull_timeout_s: float = 120.0
    write_timeout_s: float = 120.0
    early_ttl_s: float = 30.0
    heartbeat_interval_s: float = 1.0
    link_timeout_s: float = 5.0
    connect_timeout_s: float = 10.0
    peer_forget_s: float = 60.0
    link_idle_s: float = 300.0
    resend_first_s: float = 0.25
    resend_max_s: float = 5.0
    op_retry_s: float = 0.002
    drain_grace_s: float = 1.0
    max_clients: int = 16
    max_peers: int = 1024
    max_transfers: int = 16384
    max_blocks_per_transfer: int = 1 << 18
    max_early: int = 4096
    max_tombstones: int = 8192
    max_ops_in_flight: int = 256
    max_bytes_in_flight: int = 1 << 34
    max_unconfirmed_events: int = 65536
    event_window: int = 512
    max_token_spans: int = 1 << 20
    allow_uneven: bool = False
