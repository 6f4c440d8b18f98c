"""``moriiod serve`` with a faulty engine, for tests that run it in a process of its own.

    main(FAULTS, section.key=value, ...)

FAULTS is what ``engines.faulty.parse_faults`` reads; after a semicolon may follow what happens to
the first operations, in order: ``seed=7;stall stall fail``. ``PLAIN`` is the real engine, and
``FENCES_AT_ONCE`` as well, in a daemon that takes silence for death: a planted bug.
SIGUSR1 opens the gate that held and late operations wait at, SIGUSR2 closes it for later ones.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Final

from moriiod.config.load import load
from moriiod.core.ids import Epoch
from moriiod.core.peers import Peer, Peers
from moriiod.daemon.lifecycle import serve
from moriiod.engines.base import RegionExporter
from moriiod.engines.factory import make_engine
from moriiod.engines.faulty import Fault, FaultyEngine, parse_faults

#: Instead of FAULTS.
PLAIN: Final = "plain"
FENCES_AT_ONCE: Final = "fences at once"


def main(arguments: Sequence[str]) -> int:
    """Run until stopped; return the exit status."""
    values = dict(argument.split("=", 1) for argument in arguments[1:])
    loaded = load(values, os.environ)
    if arguments[0] == FENCES_AT_ONCE:
        Peers.fence = _fence_at_once  # type: ignore[assignment]
    if arguments[0] in (PLAIN, FENCES_AT_ONCE):
        return serve(loaded)
    chances, _, script = arguments[0].partition(";")
    faults, first = parse_faults(chances), [Fault(word) for word in script.split()]
    chunk_bytes = loaded.config.engine.shm_chunk_bytes

    def make(exporter: RegionExporter, epoch: Epoch) -> FaultyEngine:
        engine = FaultyEngine(make_engine("shm", exporter, epoch, chunk_bytes), faults)
        engine.script(*first)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, engine.open_gate)
        loop.add_signal_handler(signal.SIGUSR2, engine.close_gate)
        return engine

    return serve(loaded, make)


def _fence_at_once(peers: Peers, peer: Peer) -> None:
    """Claim without any proof that nothing of a peer touches our memory any more."""
    peer.is_fenced = True
    for user in list(peer.users):
        user.peer_fenced()
