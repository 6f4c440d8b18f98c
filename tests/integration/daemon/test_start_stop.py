"""The life of a daemon: what start refuses, how a drain ends, what is left behind."""

from __future__ import annotations

import json
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from moriiod.core import events as ev
from moriiod.core.ids import Epoch
from moriiod.daemon.app import Daemon, Ended, Phase
from moriiod.engines.base import RegionExporter, TransferEngine
from moriiod.engines.factory import make_engine
from moriiod.engines.faulty import Fault, FaultyEngine
from moriiod.errors import AddressInUse, ConfigError, MoriiodError, RegistrationFailed
from tests.support.daemons import (
    HOST,
    Worker,
    address_of,
    attached_worker,
    free_base_port,
    make_daemon,
    running_daemon,
)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if not path.is_dir())


class Faulty:
    """Makes a faulty engine, and keeps it for the test."""

    def __init__(self, *faults: Fault) -> None:
        self._faults = faults
        self.engine: FaultyEngine | None = None

    def __call__(self, exporter: RegionExporter, epoch: Epoch) -> TransferEngine:
        self.engine = FaultyEngine(make_engine("shm", exporter, epoch))
        self.engine.script(*self._faults)
        return self.engine


# --- Start ----------------------------------------------------------------------------------------


async def test_Z2_second_daemon_of_a_rank_refuses_and_the_first_serves_on(tmp_path: Path) -> None:
    async with running_daemon(tmp_path) as first:
        second = make_daemon(tmp_path)
        with pytest.raises(AddressInUse, match=r"rank0.*sock"):
            await second.start()
        assert left_in(tmp_path) == ["rank0.fd.sock", "rank0.sock"]
        async with attached_worker(first.config.socket_path) as worker:
            assert await worker.client.ping() == first.epoch


async def test_P2_held_control_port_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    port = free_base_port(1)
    with socket.socket() as holder:
        holder.bind((HOST, port))
        holder.listen()
        daemon = make_daemon(tmp_path, {"control.base_port": str(port)})
        with pytest.raises(AddressInUse, match=str(port)):
            await daemon.start()
    assert left_in(tmp_path) == []
    assert daemon.phase is Phase.ENDED


async def test_held_metrics_port_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    port = free_base_port(1)
    with socket.socket() as holder:
        holder.bind((HOST, port))
        holder.listen()
        daemon = make_daemon(tmp_path, {"telemetry.metrics_base_port": str(port)})
        with pytest.raises(AddressInUse, match=str(port)):
            await daemon.start()
    assert left_in(tmp_path) == []


async def test_address_of_another_machine_is_a_configuration_error(tmp_path: Path) -> None:
    daemon = make_daemon(tmp_path, {"control.host": "192.0.2.1"})
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        await daemon.start()
    assert left_in(tmp_path) == []


async def test_engine_that_does_not_start_leaves_nothing(tmp_path: Path) -> None:
    def fail(exporter: RegionExporter, epoch: Epoch) -> TransferEngine:
        raise RegistrationFailed("no device")

    daemon = make_daemon(tmp_path, make=fail)
    with pytest.raises(RegistrationFailed):
        await daemon.start()
    assert left_in(tmp_path) == []


async def test_engine_that_is_not_in_this_build_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mori"):
        await make_daemon(tmp_path, {"engine.name": "mori"}).start()
    assert left_in(tmp_path) == []


async def test_auto_takes_the_best_engine_there_is(tmp_path: Path) -> None:
    async with running_daemon(tmp_path, {"engine.name": "auto"}) as daemon:
        assert json.loads(daemon.render_status())["engine"]["name"] == "shm"


async def test_ports_of_the_kernels_choice_are_advertised(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        daemons = [
            await stack.enter_async_context(running_daemon(tmp_path / str(n))) for n in range(3)
        ]
        ports = {daemon.control_port for daemon in daemons}
        assert len(ports) == 3
        for daemon in daemons:
            assert daemon.addresses.control == f"{HOST}:{daemon.control_port}"


async def test_dead_sockets_of_an_earlier_start_are_replaced(tmp_path: Path) -> None:
    for name in ("rank0.sock", "rank0.fd.sock"):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / name))
    async with running_daemon(tmp_path) as daemon:
        async with attached_worker(daemon.config.socket_path) as worker:
            assert await worker.client.ping() == daemon.epoch
    assert left_in(tmp_path) == []


# --- Drain ----------------------------------------------------------------------------------------


async def refusal(worker: Worker, transfer_id: str) -> str:
    """Publish, and return why it was refused."""
    worker.client.publish(transfer_id, [[9]])
    event = await worker.end_of(transfer_id, "publish")
    return event.reason


async def test_L9_idle_daemon_drains_at_once_and_says_goodbye(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        decode = await enter(running_daemon(tmp_path / "d"))
        consumer = await enter(attached_worker(decode.config.socket_path))
        prefill = make_daemon(tmp_path / "p")
        await prefill.start()
        producer = await enter(attached_worker(prefill.config.socket_path))
        producer.client.publish("t1", [[1]])
        consumer.client.pull("t1", address_of(prefill), [[1]], [[2]])
        await consumer.end_of("t1", "pull")
        await producer.end_of("t1", "publish")
        assert len(decode.machine.peers) == 1
        prefill.drain(60.0)
        assert await prefill.wait_ended() == Ended(is_clean=True)
        await prefill.close()
        while len(decode.machine.peers):  # the goodbye is on its way
            await consumer.client.ping()
        assert not decode.machine.peers.fencing
    assert left_in(tmp_path / "p") == []


async def test_L9_drain_refuses_new_work_and_waits_for_the_old(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(running_daemon(tmp_path / "p"))
        decode = await enter(running_daemon(tmp_path / "d"))
        producer = await enter(attached_worker(prefill.config.socket_path, seed=1))
        consumer = await enter(attached_worker(decode.config.socket_path))
        producer.client.publish("t1", [[1]])
        await producer.client.ping()
        prefill.drain(60.0)
        assert await refusal(producer, "t2") == "DRAINING"
        assert not prefill.readiness().is_ok
        consumer.client.pull("t1", address_of(prefill), [[1]], [[2]])
        assert (await consumer.end_of("t1", "pull")).outcome == "received"
        assert (await producer.end_of("t1", "publish")).outcome == "released"
        assert await prefill.wait_ended() == Ended(is_clean=True)


async def test_L9_what_is_left_at_the_limit_is_aborted_and_told(tmp_path: Path) -> None:
    async with running_daemon(tmp_path) as daemon:
        async with attached_worker(daemon.config.socket_path) as worker:
            worker.client.publish("t1", [[1]])
            await worker.client.ping()
            daemon.drain(0.05)
            event = await worker.end_of("t1", "publish")
            assert (event.outcome, event.reason) == ("failed", "DRAINING")
            assert await daemon.wait_ended() == Ended(is_clean=True)


async def test_L9_slow_read_is_waited_for(tmp_path: Path) -> None:
    faulty = Faulty(Fault.LATE)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(running_daemon(tmp_path / "p"))
        decode = await enter(running_daemon(tmp_path / "d", make=faulty))
        producer = await enter(attached_worker(prefill.config.socket_path, seed=1))
        consumer = await enter(attached_worker(decode.config.socket_path))
        await read_in_flight(producer, consumer, prefill, decode)
        decode.drain(60.0)
        await consumer.client.ping()
        assert not decode.readiness().is_ok
        assert faulty.engine is not None
        faulty.engine.open_gate()
        assert (await consumer.end_of("t1", "pull")).outcome == "received"
        assert await decode.wait_ended() == Ended(is_clean=True)


async def read_in_flight(
    producer: Worker, consumer: Worker, prefill: Daemon, decode: Daemon
) -> None:
    """Start a read, and wait until the engine has it."""
    producer.client.publish("t1", [[1]])
    consumer.client.pull("t1", address_of(prefill), [[1]], [[2]])
    while not decode.machine.ops.in_flight:
        await consumer.client.ping()


async def test_S1_forced_end_still_waits_until_nothing_touches_memory(tmp_path: Path) -> None:
    faulty = Faulty(Fault.STALL)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(running_daemon(tmp_path / "p"))
        decode = make_daemon(tmp_path / "d", make=faulty)
        await decode.start()
        producer = await enter(attached_worker(prefill.config.socket_path))
        consumer = await enter(attached_worker(decode.config.socket_path))
        await read_in_flight(producer, consumer, prefill, decode)
        decode.drain(60.0)
        decode.end()
        assert await decode.wait_ended() == Ended(is_clean=False)
        await decode.close()
        assert faulty.engine is not None
        assert faulty.engine.in_flight == 0
        assert len(decode.machine.ops) == 0, "the core was not told of the end"
    assert left_in(tmp_path / "d") == []


# --- Bugs -----------------------------------------------------------------------------------------


async def test_bug_ends_the_daemon_and_everything_is_still_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon(tmp_path)
    await daemon.start()
    async with attached_worker(daemon.config.socket_path) as worker:
        bug = KeyError("planted")

        def fail(event: ev.Event, now: float) -> None:
            raise bug

        monkeypatch.setattr(daemon.machine, "step", fail)
        worker.client.publish("t1", [[1]])
        assert await daemon.wait_ended() == Ended(is_clean=False, bug=bug)
        assert not daemon.health().is_ok
        assert json.loads(await worker.client.status())["state"] == "unhealthy"
        await daemon.close()
        assert left_in(tmp_path) == []


async def test_daemon_that_was_not_started_says_so(tmp_path: Path) -> None:
    daemon = make_daemon(tmp_path)
    with pytest.raises(RuntimeError, match="not started"):
        daemon.render_status()
    with pytest.raises(RuntimeError, match="not started"):
        await daemon.wait_ended()
    await daemon.close()
    await daemon.close()


async def test_error_of_the_worker_is_no_bug_of_the_daemon(tmp_path: Path) -> None:
    async with running_daemon(tmp_path) as daemon:
        async with attached_worker(daemon.config.socket_path) as worker:
            worker.client.publish("t1", [[10**6]])
            event = await worker.end_of("t1", "publish")
            assert event.reason == "OUT_OF_RANGE"
            assert daemon.health().is_ok
            with pytest.raises(MoriiodError):
                await worker.client.register_regions((), ())
