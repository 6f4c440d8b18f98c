"""What the client costs the worker: ``python -m tests.bench.client``.

Prints the median and the 99th percentile of each call in microseconds, against a scripted daemon
on this machine. The costs are the worker's own: the calls do not wait for the daemon.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moriiod.client import Client, ClientSettings, PeerAddress
from tests.support.fake_daemon import FakeDaemon

PEER = PeerAddress("10.0.0.1", 6301, 4)
SETTINGS = ClientSettings(max_outstanding=1 << 20, max_in_flight=1 << 20)


def measure(name: str, call: Callable[[int], object], rounds: int, inner: int = 1) -> float:
    """Print and return the median time of one call, in microseconds."""
    times = []
    for index in range(rounds):
        start = time.perf_counter()
        for _ in range(inner):
            call(index)
        times.append((time.perf_counter() - start) / inner * 1e6)
    times.sort()
    median = statistics.median(times)
    print(f"{name:<44} {median:9.2f} us   p99 {times[int(len(times) * 0.99)]:9.2f} us")
    return median


def main() -> None:
    """Measure."""
    ids = {n: list(range(n)) for n in (16, 2048, 16384)}
    arrays = {n: np.arange(n, dtype=np.int64) for n in ids}
    with tempfile.TemporaryDirectory() as folder, FakeDaemon(Path(folder) / "d.sock") as daemon:
        with Client(daemon.path, settings=SETTINGS) as client:
            client.poll()
            idle = measure("poll(), nothing happened", lambda _i: client.poll(), 2000, 100)
            for n, blocks in ids.items():
                measure(
                    f"pull(), {n} blocks as lists",
                    lambda i, n=n, b=blocks: client.pull(f"l{n}-{i}", PEER, [b], [b]),
                    300,
                )
            for n, array in arrays.items():
                measure(
                    f"pull(), {n} blocks as arrays",
                    lambda i, n=n, b=array: client.pull(f"a{n}-{i}", PEER, [b], [b]),
                    300,
                )
            client.push("push", [ids[16]])
            measure("layer_ready()", lambda i: client.layer_ready("push", i % 61), 1000)
            client.ping()
            client.poll()
            measure("ping(), there and back", lambda _i: client.ping(), 500)
            print(f"poll() is {'within' if idle < 5 else 'OVER'} the aim of 5 us")


if __name__ == "__main__":
    main()
