"""The parts of the core that every transfer table uses, as one argument."""

from __future__ import annotations

from dataclasses import dataclass

from moriiod.core.clients import Clients
from moriiod.core.context import Context
from moriiod.core.links import Links
from moriiod.core.ops import Ops
from moriiod.core.peers import Peers
from moriiod.core.sessions import Sessions
from moriiod.core.transfers import Admission


@dataclass(frozen=True, slots=True)
class Parts:
    """One of each; see their own modules.

    Attributes:
        max_span_bytes: Largest size of one span of a plan, as the engine says; 0 = no limit.
    """

    ctx: Context
    clients: Clients
    links: Links
    peers: Peers
    sessions: Sessions
    ops: Ops
    admission: Admission
    max_span_bytes: int
