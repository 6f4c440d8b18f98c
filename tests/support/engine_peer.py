"""A peer daemon's engine in a process of its own, for tests that kill it.

    python -m tests.support.engine_peer FOLDER N_BYTES

Registers N_BYTES of memory full of 0x5A and prints one JSON line that says how to reach it. Then
obeys lines on its standard input: ``open {json}`` maps the memory that the JSON describes,
``write`` copies all of its own memory into it, ``quit`` ends. Each is answered by one line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moriiod.core.geometry import RemoteLayout
from moriiod.engines.base import Session
from tests.support.engines import HOSTS, WorkerMemory, layout_of, simple_plan

FILLING = 0x5A


def to_json(epoch: str, remote: RemoteLayout) -> str:
    """Return a layout as one line."""
    return json.dumps(
        {
            "epoch": epoch,
            "generation": remote.layout.generation,
            "region_bytes": remote.layout.region_bytes,
            "engine": remote.engine,
            "descriptors": [descriptor.hex() for descriptor in remote.descriptors],
        }
    )


def from_json(text: str) -> tuple[str, RemoteLayout]:
    """Return (epoch, layout) of a line."""
    found = json.loads(text)
    layout = layout_of(found["generation"], found["region_bytes"])
    descriptors = tuple(bytes.fromhex(item) for item in found["descriptors"])
    return found["epoch"], RemoteLayout(layout, found["engine"], descriptors)


def say(line: str) -> None:
    """Answer one line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until told to quit, or killed."""
    folder, n_bytes = Path(sys.argv[1]), int(sys.argv[2])
    host, memory = HOSTS["shm"](folder), WorkerMemory(n_bytes)
    memory.bytes[:] = FILLING
    own = host.register(memory)
    session: Session | None = None
    say(to_json(host.epoch, own))
    for line in sys.stdin:
        order, _, rest = line.strip().partition(" ")
        if order == "quit":
            break
        if order == "open":
            epoch, remote = from_json(rest)
            session = host.engine.open_session(epoch, own.layout.generation, remote)
        if order == "write" and session is not None:
            host.transfer(session, "write", simple_plan([0], [0], n_bytes))
        say("done")
    host.close()
    memory.close()


if __name__ == "__main__":
    main()
