"""What routers pass with a request (``kv_transfer_params`` and the request id), read and written.

Routers send numbers as ints or as strings, leave keys out, and pass on keys of others. That is
all accepted; a value that makes no sense is refused with a typed error that names it.

The keys are those of vLLM's MoRIIO connector; its ``handshake_port`` is our control base port.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from moriiod.client.arguments import (
    BlockIds,
    check_block_tokens,
    check_transfer_id,
    invalid,
    pack_groups,
)
from moriiod.core.address import (
    MAX_PORT,
    RequestAddresses,
    is_wildcard_host,
    normalise_host,
    parse_request_id,
)
from moriiod.core.ids import MAX_RANKS
from moriiod.core.requests import PeerAddress
from moriiod.core.topology import resolve_remote_tp_size
from moriiod.errors import InvalidAddress, InvalidArgument

_MAX_HOSTS: Final = 1024


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What a request says about its transfer.

    Attributes:
        role: ``producer``: we prefill, somebody else decodes. ``consumer``: the other way round.
        transfer_id: Chosen by the router; made from the request id if a producer got none.
        peer: The other instance, with its TP size resolved; None if the request does not say.
        remote_blocks: The producer's block ids of each KV group, for a consumer that pulls; None
            if the producer is yet to be told ours (WRITE).
        remote_engine_id: As the other instance calls itself; for logs only.
        remote_block_tokens: Tokens in a block of each of the producer's groups, for ``pull``; ()
            if the producer did not say.
    """

    role: Literal["producer", "consumer"]
    transfer_id: str
    peer: PeerAddress | None
    remote_blocks: tuple[tuple[int, ...], ...] | None
    remote_engine_id: str | None
    remote_block_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ProducerAddress:
    """How a producer instance presents itself to consumers.

    Attributes:
        engine_id: Name of the instance.
        host: Host of its rank 0, as consumers reach it.
        base_port: Control port of (dp 0, tp 0).
        notify_port: What routers expect beside it; moriiod does not use it.
        tp_size: Its TP size.
        dp_size: Its DP size.
        dp_rank: DP rank that holds the request.
        node_hosts: Hosts of a TP group that spans several; () = all on ``host``.
    """

    engine_id: str
    host: str
    base_port: int
    notify_port: int
    tp_size: int
    dp_size: int = 1
    dp_rank: int = 0
    node_hosts: tuple[str, ...] = ()


def parse_transfer_params(
    params: Mapping[str, object] | None, request_id: str, local_tp_size: int
) -> TransferParams | None:
    """Read a router's parameters.

    The peer's address is taken from the request id if it carries addresses, else from
    ``remote_host`` and ``remote_handshake_port``.

    Args:
        params: ``kv_transfer_params`` of the request; None = none.
        request_id: Id of the request, as the engine has it.
        local_tp_size: Our TP size, which an unknown TP size of the peer is taken to be.

    Returns:
        None if the request takes no part in a transfer.

    Raises:
        InvalidArgument: A value makes no sense, or the transfer id is missing; names the key.
        InvalidAddress: A host or port cannot be used, or the request id is broken.
    """
    if params is None:
        return None
    is_producer = _flag(params, "do_remote_decode")
    is_consumer = _flag(params, "do_remote_prefill")
    if is_producer and is_consumer:
        raise InvalidArgument(
            "do_remote_decode and do_remote_prefill cannot both be true", field="do_remote_decode"
        )
    if not is_producer and not is_consumer:
        return None
    addresses = parse_request_id(request_id)
    return TransferParams(
        role="producer" if is_producer else "consumer",
        transfer_id=_transfer_id(params, request_id, is_producer),
        peer=_peer(params, addresses, is_producer, local_tp_size),
        remote_blocks=_remote_blocks(params),
        remote_engine_id=_text(params, "remote_engine_id"),
        remote_block_tokens=_block_tokens(params),
    )


def producer_params(
    transfer_id: str,
    blocks: Sequence[BlockIds],
    address: ProducerAddress,
    block_tokens: Sequence[int] = (),
) -> dict[str, object]:
    """Return what a producer hands back to the router, for the consumer (READ).

    Args:
        transfer_id: As published.
        blocks: Block ids of each KV group.
        address: Where the blocks are.
        block_tokens: Tokens in a block of each group, for consumers with blocks of other sizes.

    Raises:
        InvalidArgument: A block id or the transfer id cannot be.
        InvalidAddress: The host means any interface, or is no host.
    """
    pack_groups("blocks", blocks)
    if is_wildcard_host(address.host):
        raise InvalidAddress(f"{address.host!r} names no host a consumer can reach")
    returned: dict[str, object] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": check_transfer_id(transfer_id),
        "remote_block_ids": [[int(block) for block in group] for group in blocks],
        "remote_engine_id": address.engine_id,
        "remote_host": normalise_host(address.host),
        "remote_handshake_port": address.base_port,
        "remote_notify_port": address.notify_port,
        "remote_dp_rank": address.dp_rank,
        "remote_dp_rank_override": True,
        "remote_dp_size": address.dp_size,
        "remote_dp_size_local": address.dp_size,
        "tp_size": address.tp_size,
    }
    if block_tokens:
        returned["remote_block_tokens"] = list(check_block_tokens("block_tokens", block_tokens))
    if address.node_hosts:
        returned["remote_hosts"] = [normalise_host(host) for host in address.node_hosts]
    return returned


def _transfer_id(params: Mapping[str, object], request_id: str, is_producer: bool) -> str:
    value = params.get("transfer_id")
    if value is None:
        if not is_producer or not request_id:
            raise InvalidArgument("transfer_id is missing", field="transfer_id")
        # The consumer learns it from what the producer hands back.
        value = f"sidecar-{request_id}"
    if not isinstance(value, str):
        raise invalid("transfer_id", value, "text")
    return check_transfer_id(value)


def _peer(
    params: Mapping[str, object],
    addresses: RequestAddresses | None,
    is_producer: bool,
    local_tp_size: int,
) -> PeerAddress | None:
    if addresses is not None:
        theirs = addresses.decode if is_producer else addresses.prefill
        host, port = theirs.host, theirs.handshake_port
    else:
        said_host = _text(params, "remote_host")
        said_port = _whole(params, "remote_handshake_port", 1, MAX_PORT)
        if said_host is None and said_port is None:
            return None
        if said_host is None or said_port is None:
            raise InvalidAddress("remote_host and remote_handshake_port belong together")
        host, port = _host(said_host), said_port
    sizes = {key: _whole(params, key, 0, MAX_RANKS) for key in ("remote_tp_size", "tp_size")}
    try:
        tp_size = resolve_remote_tp_size(sizes, local_tp_size)
    except ValueError as error:
        raise InvalidArgument(str(error), field="tp_size") from error
    return PeerAddress(
        host=host,
        base_port=port,
        tp_size=tp_size,
        dp_size=_whole(params, "remote_dp_size", 0, MAX_RANKS) or 1,
        dp_rank=_whole(params, "remote_dp_rank", 0, MAX_RANKS - 1) or 0,
        node_hosts=_hosts(params),
    )


def _hosts(params: Mapping[str, object]) -> tuple[str, ...]:
    value = params.get("remote_hosts")
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise invalid("remote_hosts", value, "a list of hosts")
    if len(value) > _MAX_HOSTS:
        raise invalid("remote_hosts", len(value), f"at most {_MAX_HOSTS} hosts")
    for host in value:
        if not isinstance(host, str):
            raise invalid("remote_hosts", host, "a list of hosts")
    return tuple(_host(host) for host in value)


def _host(host: str) -> str:
    if is_wildcard_host(host):
        raise InvalidAddress(f"{host!r} names no host that can be reached", host=host)
    return normalise_host(host)


def _remote_blocks(params: Mapping[str, object]) -> tuple[tuple[int, ...], ...] | None:
    """One list for each KV group; a plain list of ids is that of the only group."""
    value = params.get("remote_block_ids")
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise invalid("remote_block_ids", value, "lists of block ids")
    is_nested = any(isinstance(group, Sequence) for group in value)
    groups = value if is_nested else [value]
    pack_groups("remote_block_ids", groups)
    return tuple(tuple(group) for group in groups)


def _block_tokens(params: Mapping[str, object]) -> tuple[int, ...]:
    value = params.get("remote_block_tokens")
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise invalid("remote_block_tokens", value, "a list of block sizes")
    return check_block_tokens("remote_block_tokens", value)


def _flag(params: Mapping[str, object], key: str) -> bool:
    value = params.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise invalid(key, value, "true or false")


def _text(params: Mapping[str, object], key: str) -> str | None:
    value = params.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value or len(value) > 256:
        raise invalid(key, value, "text of 1 to 256 characters")
    return value


def _whole(params: Mapping[str, object], key: str, low: int, high: int) -> int | None:
    """Return a whole number, also if it came as text; None if the key says nothing."""
    value = params.get(key)
    if value is None:
        return None
    number = value if type(value) is int else None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        number = int(value)
    if number is None or not low <= number <= high:
        raise invalid(key, value, f"a whole number from {low} to {high}")
    return number
