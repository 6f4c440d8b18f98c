"""Workers that die with memory registered (case M6): the daemon lets go of all of it."""

from __future__ import annotations

from collections import Counter

from tests.support.children import until
from tests.support.kv_cache import CacheShape
from tests.support.pair import Pair, wait_in_flight
from tests.support.process_fixtures import PairMaker, WorkerMaker

#: 64 MiB in two regions.
LARGE = CacheShape(layers=2, blocks=512, head_size=1024, heads=1)
N_CYCLES = 10
SETTINGS = {"control.heartbeat_interval_s": "0.1"}
#: The allocator and Python's caches may keep this much.
RSS_SLACK_BYTES = 4 << 20

#: At which moment of its life the worker is killed.
MOMENTS = ("registered", "mid-transfer", "idle")


def kill_at(moment: str, pair: Pair, transfer_id: str) -> None:
    """Bring the producer's worker to a moment of its life, and kill it."""
    if moment == "registered":
        pair.producer.process.kill()
        return
    pair.read(transfer_id)
    if moment == "mid-transfer":
        wait_in_flight(pair.decode)
        pair.producer.process.kill()
        failed = pair.consumer.wait_end("pull", transfer_id)
        assert (failed.outcome, failed.reason) == ("failed", "WORKER_LOST")
    else:
        pair.check_good(pair.read_ends(transfer_id))
        pair.producer.process.kill()


def test_M6_ten_dead_workers_leave_no_mapping_no_descriptor_and_no_memory(
    make_pair: PairMaker, make_worker: WorkerMaker
) -> None:
    # The first read goes well; then every other one is of a worker that dies before it ends.
    pair = make_pair(
        SETTINGS, decode_faults=f";none {'stall none ' * (N_CYCLES // 3)}", shape=LARGE
    )
    pair.check_works()
    pair.producer.process.kill()
    until(lambda: holds_nothing_of(pair, pair.producer.name), "the first worker is forgotten")
    without = resources(pair)
    after_first = 0
    for cycle in range(N_CYCLES):
        worker = make_worker(pair.prefill, LARGE, f"cycle{cycle}")
        assert len(pair.prefill.process.memfds(worker.name)) == 2
        pair.producer = worker
        kill_at(MOMENTS[cycle % 3], pair, f"t{cycle}")
        until(lambda: not resources(pair) - without, f"no more than before: {without}")
        assert pair.prefill.status()["clients"] == []
        if cycle == 0:
            after_first = pair.prefill.process.rss_bytes()
    assert pair.prefill.process.rss_bytes() <= after_first + RSS_SLACK_BYTES
    pair.producer = make_worker(pair.prefill, LARGE, "last")
    pair.check_works("last")


def holds_nothing_of(pair: Pair, name: str) -> bool:
    daemons = (pair.prefill, pair.decode)
    held = [file for daemon in daemons for file in daemon.process.fds() if name in file]
    return not held and pair.prefill.status()["clients"] == []


def resources(pair: Pair) -> Counter[str]:
    """Count the descriptors and mapped memfds of both daemons."""
    found: Counter[str] = Counter()
    for daemon in (pair.prefill, pair.decode):
        process = daemon.process
        found.update(f"{daemon.name} has open {target}" for target in process.fds())
        found.update(f"{daemon.name} has mapped {target}" for target in process.memfds())
    return found
