"""What the demo's router passes with a request: ``kv_transfer_params`` and the request id.

The keys are those of the routers of vLLM's MoRIIO connector. For READ the router knows the peer
from what the producer handed back; for WRITE both legs start at once, so the addresses of both
instances are in the request id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from moriiod.cli.demo.plan import HOST, DemoOptions, DemoRequest

#: What routers of the in-process connector call its second port; nobody dials it here.
NOTIFY_PORT: Final = 61005
#: What the engine puts behind a router's request id.
_ENGINE_SUFFIX: Final = "-0-1a2b3c4d"


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request as a router sends it.

    Attributes:
        request_id: As the engine sees it.
        prefill: Parameters of the prefill leg.
        decode: Parameters of the decode leg; None if the prefill leg hands them back (READ).
    """

    request_id: str
    prefill: Mapping[str, object]
    decode: Mapping[str, object] | None


def route(
    request: DemoRequest, options: DemoOptions, prefill_port: int, decode_port: int
) -> RoutedRequest:
    """Return what the router says about a request.

    Args:
        request: Which request, between which instances.
        options: Has the TP sizes.
        prefill_port: Control port of the prefill instance's rank 0.
        decode_port: The same of the decode instance.
    """
    to_prefill: dict[str, object] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "transfer_id": request.transfer_id,
        "remote_dp_size": 1,
        "remote_tp_size": options.decode_tp,
    }
    if request.mode == "read":
        return RoutedRequest(f"cmpl-{request.unique}{_ENGINE_SUFFIX}", to_prefill, None)
    to_decode: dict[str, object] = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "transfer_id": request.transfer_id,
        "remote_dp_size": 1,
        "remote_tp_size": options.prefill_tp,
    }
    request_id = (
        f"cmpl-___prefill_addr_{_address(prefill_port)}___decode_addr_{_address(decode_port)}_"
        f"{request.unique}{_ENGINE_SUFFIX}"
    )
    return RoutedRequest(request_id, to_prefill, to_decode)


def forward(returned: Mapping[str, object]) -> dict[str, Any]:
    """Return what a prefill answered as it arrives at the decode instance: through JSON."""
    forwarded: dict[str, Any] = json.loads(json.dumps(returned))
    return forwarded


def _address(port: int) -> str:
    return f"host:{HOST},handshake:{port},notify:{NOTIFY_PORT}"
