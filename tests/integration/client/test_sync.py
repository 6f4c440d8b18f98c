"""The blocking client against a scripted daemon on real sockets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from moriiod.client import (
    Client,
    ClientSettings,
    ClientState,
    MemoryRegion,
    PeerAddress,
    TransferEnded,
)
from moriiod.core.requests import (
    Abort,
    Attach,
    ConfirmEvents,
    Detach,
    Done,
    GetStatus,
    LayerReady,
    Ping,
    Publish,
    Pull,
    Push,
    Refused,
    RegisterCaches,
    Reject,
    Reserve,
    Seal,
    UnregisterCaches,
)
from moriiod.errors import (
    Busy,
    ClientUnusable,
    DaemonLost,
    InvalidAddress,
    InvalidArgument,
    MoriiodError,
    NotRegistered,
    RegistrationFailed,
    TooLarge,
    VersionMismatch,
)
from moriiod.wire.fdsocket import FdRefused
from moriiod.wire.memfd import create_sealed_memfd
from tests.support.caches import group
from tests.support.fake_daemon import IDENTITY, FakeDaemon, is_readable

PEER = PeerAddress("10.0.0.1", 6301, 4)
SETTINGS = ClientSettings(step_timeout_s=2.0, backoff_first_s=0.005, backoff_max_s=0.02)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "rank3.sock")


@pytest.fixture
def daemon(path: str) -> Iterator[FakeDaemon]:
    with FakeDaemon(path) as running:
        yield running


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with Client(daemon.path, "worker-a", SETTINGS) as connected:
        yield connected


@pytest.fixture
def region() -> Iterator[MemoryRegion]:
    fd = create_sealed_memfd("test", 1 << 20)
    yield MemoryRegion(fd, 1 << 20)
    os.close(fd)


def ended(transfer_id: str, role: str = "pull", outcome: str = "received") -> TransferEnded:
    return TransferEnded(transfer_id, role, outcome, "done")  # type: ignore[arg-type]


def ids(events: list[TransferEnded]) -> list[str]:
    return [event.transfer_id for event in events]


# --- connect --------------------------------------------------------------------------------------


def test_client_attaches_under_its_name(client: Client, daemon: FakeDaemon) -> None:
    assert client.state is ClientState.CONNECTED
    assert client.epoch == daemon.epoch
    assert client.identity == IDENTITY
    (attach,) = daemon.wait_for(Attach)
    assert attach.name == "worker-a"
    assert [worker.generation for worker in daemon.workers] == [attach.generation]


def test_connect_waits_for_a_daemon_that_starts_later(path: str) -> None:
    client = Client(path, settings=SETTINGS)
    with pytest.raises(DaemonLost) as raised:
        client.connect(timeout_s=0.05)
    assert raised.value.retryable
    assert "cannot connect" in raised.value.message
    with FakeDaemon(path):
        client.connect()
        assert client.state is ClientState.CONNECTED
        client.close()


def test_connect_that_is_refused_raises_the_daemons_error(daemon: FakeDaemon) -> None:
    daemon.answer(Attach, Refused("VERSION_MISMATCH", "speak 2", False, {"ours": "2"}))
    with pytest.raises(VersionMismatch) as raised, Client(daemon.path, settings=SETTINGS):
        pass
    assert raised.value.fields["ours"] == "2"


def test_connect_that_is_refused_on_the_fd_socket_raises_that_error(daemon: FakeDaemon) -> None:
    daemon.refuse_hello = FdRefused("DUPLICATE_CLIENT", "seen before")
    client = Client(daemon.path, settings=SETTINGS)
    with pytest.raises(MoriiodError) as raised:
        client.connect()
    assert raised.value.code == "DUPLICATE_CLIENT"
    client.close()


def test_socket_path_may_be_an_endpoint(daemon: FakeDaemon) -> None:
    with Client(f"ipc://{daemon.path}", settings=SETTINGS) as client:
        assert client.state is ClientState.CONNECTED


@pytest.mark.parametrize("bad", ["", "/x/" + "a" * 105 + ".sock", "/ü/" + "ü" * 52])
def test_path_that_cannot_be_a_socket_is_refused_at_once(bad: str) -> None:
    with pytest.raises(InvalidAddress):
        Client(bad)


def test_socket_we_may_not_use_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "rank0.fd.sock").mkdir()
    client = Client(str(tmp_path / "rank0.fd.sock" / "x.sock"), settings=SETTINGS)
    (tmp_path / "rank0.fd.sock").rmdir()
    (tmp_path / "rank0.fd.sock").touch()
    with pytest.raises(InvalidAddress):
        client.connect()
    client.close()


# --- transfers ------------------------------------------------------------------------------------


def test_calls_arrive_as_they_were_made(client: Client, daemon: FakeDaemon) -> None:
    client.publish("a", [[1, 2], []], lease_s=5, remote_tp_size=8)
    client.pull("b", PEER, [[7]], [[9]], local_first=[1], remote_first=[1], timeout_s=2.5)
    client.reject("c", PEER)
    client.reserve("d", PEER, [[3]], first=[4])
    client.push("e", [[3]], first=[4], remote_tp_size=2, timeout_s=9)
    client.layer_ready("e", 0)
    client.layer_ready("e", [1, 2])
    client.seal("e", 3)
    client.abort("d", "reserve")
    daemon.wait_for(Abort)
    one, two, three, seven, nine = (n.to_bytes(4, "little") for n in (1, 2, 3, 7, 9))
    assert daemon.requests[1:] == [
        Publish("a", (one + two, b""), 5.0, 8),
        Pull("b", PEER, (seven,), (nine,), (1,), (1,), 2.5),
        Reject("c", PEER),
        Reserve("d", PEER, (three,), (4,)),
        Push("e", (three,), (4,), 2, 9.0),
        LayerReady("e", (0,)),
        LayerReady("e", (1, 2)),
        Seal("e", 3),
        Abort("d", "reserve"),
    ]
    assert client.in_flight == 4


def test_ended_transfer_comes_out_of_wait_and_is_confirmed(
    client: Client, daemon: FakeDaemon
) -> None:
    client.pull("a", PEER, [[1]], [[1]])
    client.pull("b", PEER, [[1]], [[2]])
    daemon.wait_for(Pull, 2)
    assert client.poll() == []
    daemon.tell(ended("a"))
    assert ids(client.wait(5)) == ["a"]
    assert daemon.wait_for(ConfirmEvents) == [ConfirmEvents(1)]
    daemon.tell(ended("b"))
    assert ids(client.wait(5)) == ["b"]
    assert daemon.wait_for(ConfirmEvents, 2)[1] == ConfirmEvents(2)
    assert client.in_flight == 0


def test_wait_returns_nothing_when_its_time_is_over(client: Client) -> None:
    assert client.wait(0.01) == []
    assert client.wait(0.0) == []


def test_refused_transfer_ends_as_failed(client: Client, daemon: FakeDaemon) -> None:
    daemon.answer(Pull, Refused("OUT_OF_RANGE", "block 9", False, {"limit": 8}))
    client.pull("a", PEER, [[1]], [[9]])
    (event,) = client.wait(5)
    assert (event.outcome, event.reason, event.retryable) == ("failed", "OUT_OF_RANGE", False)
    assert client.take_problems() == []


def test_refused_repeat_is_a_problem(client: Client, daemon: FakeDaemon) -> None:
    client.pull("a", PEER, [[1]], [[1]])
    daemon.wait_for(Pull)
    daemon.answer(Pull, Refused("ALREADY_EXISTS", "live", False))
    client.pull("a", PEER, [[1]], [[2]])
    client.ping()
    assert client.poll() == []
    assert [p.code for p in client.take_problems()] == ["ALREADY_EXISTS"]
    daemon.tell(ended("a"))
    assert ids(client.wait(5)) == ["a"]


def test_bad_arguments_raise_and_send_nothing(client: Client, daemon: FakeDaemon) -> None:
    with pytest.raises(InvalidArgument):
        client.publish("a", [[-1]])
    with pytest.raises(InvalidArgument):
        client.publish("", [[1]])
    with pytest.raises(InvalidArgument):
        client.abort("a", "read")  # type: ignore[arg-type]
    client.ping()
    assert [type(request) for request in daemon.requests] == [Attach, Ping]
    assert client.in_flight == 0


def test_request_that_fits_no_message_is_refused(client: Client) -> None:
    import numpy as np

    many = np.zeros(1 << 20, dtype=np.int32)
    with pytest.raises(TooLarge):
        client.publish("a", [many] * 5)
    assert client.in_flight == 0
    assert client.state is ClientState.CONNECTED


def test_Z5_slow_reader_gets_all_20000_events_in_order(daemon: FakeDaemon) -> None:
    settings = ClientSettings(max_outstanding=30_000)
    with Client(daemon.path, settings=settings) as client:
        for index in range(20_000):
            client.publish(f"t{index}", [])
        daemon.wait_for(Publish, 20_000)
        for index in range(20_000):
            daemon.tell(ended(f"t{index}", "publish", "released"))
        taken: list[str] = []
        while len(taken) < 20_000:
            events = client.wait(5)
            assert events
            taken += ids(events)
        assert taken == [f"t{index}" for index in range(20_000)]
        assert client.in_flight == 0


def test_daemon_that_does_not_read_makes_the_client_busy_not_blocked(daemon: FakeDaemon) -> None:
    settings = ClientSettings(max_outstanding=50)
    daemon.answer(Publish, None)
    with Client(daemon.path, settings=settings) as client:
        for index in range(50):
            client.publish(f"t{index}", [])
        with pytest.raises(Busy) as raised:
            client.publish("t50", [])
        assert raised.value.fields["limit"] == "max_outstanding"
        assert client.in_flight == 50


# --- fileno ---------------------------------------------------------------------------------------


def test_fileno_wakes_for_an_event_and_sleeps_when_all_is_taken(
    client: Client, daemon: FakeDaemon
) -> None:
    client.pull("a", PEER, [[1]], [[1]])
    daemon.wait_for(Pull)
    client.ping()
    client.poll()
    assert not is_readable(client.fileno(), 0.0)
    assert client.next_poll_s() is None
    daemon.tell(ended("a"))
    assert is_readable(client.fileno(), 5.0)
    assert ids(client.poll()) == ["a"]


def test_fileno_wakes_for_events_that_came_while_something_else_was_waited_for(
    client: Client, daemon: FakeDaemon
) -> None:
    client.pull("a", PEER, [[1]], [[1]])
    daemon.wait_for(Pull)
    daemon.tell(ended("a"))
    client.ping()
    client.ping()
    assert is_readable(client.fileno(), 5.0)
    assert ids(client.poll()) == ["a"]


def test_fileno_is_not_put_to_sleep_by_sending(client: Client, daemon: FakeDaemon) -> None:
    for round_number in range(200):
        name = f"t{round_number}"
        client.pull(name, PEER, [[1]], [[1]])
        daemon.wait_for(Pull, round_number + 1)
        daemon.tell(ended(name))
        client.layer_ready("other", 0)
        got: list[str] = []
        while not got:
            assert is_readable(client.fileno(), 5.0)
            got = ids(client.poll())
        assert got == [name]


def test_fileno_wakes_when_the_daemon_goes(client: Client, daemon: FakeDaemon) -> None:
    client.poll()
    daemon.stop()
    assert is_readable(client.fileno(), 5.0)
    client.poll()
    assert client.state is ClientState.RECONNECTING
    assert client.next_poll_s() is not None


# --- questions ------------------------------------------------------------------------------------


def test_M9_ping_says_which_daemon_start_answers(client: Client, daemon: FakeDaemon) -> None:
    assert client.ping() == daemon.epoch


def test_status_is_passed_on(client: Client) -> None:
    assert client.status() == '{"fake": true}'


def test_refused_question_raises(client: Client, daemon: FakeDaemon) -> None:
    daemon.answer(Ping, Refused("BUSY", "no", True))
    with pytest.raises(Busy):
        client.ping()


def test_unanswered_question_raises_after_its_time(client: Client, daemon: FakeDaemon) -> None:
    daemon.answer(GetStatus, None)
    with pytest.raises(DaemonLost, match="no answer within"):
        client.status(timeout_s=0.02)
    assert client.state is ClientState.CONNECTED


# --- registration ---------------------------------------------------------------------------------


def test_M1_registered_twice_takes_two_to_unregister(
    client: Client, daemon: FakeDaemon, region: MemoryRegion
) -> None:
    client.register_regions([group()], [region])
    client.register_regions([group()], [region])
    assert daemon.wait_for(RegisterCaches, 2)[0] == RegisterCaches((group(),), (1 << 20,))
    assert [worker.regions for worker in daemon.workers] == [{0: 1 << 20}]
    client.unregister_kv_caches()
    client.unregister_kv_caches()
    daemon.answer(UnregisterCaches, Refused("NOT_REGISTERED", "nothing", False))
    with pytest.raises(NotRegistered):
        client.unregister_kv_caches()
    assert client.state is ClientState.CONNECTED


def test_M8_new_memory_has_a_new_generation(
    client: Client, daemon: FakeDaemon, region: MemoryRegion
) -> None:
    client.register_regions([group()], [region])
    client.unregister_kv_caches()
    fd = create_sealed_memfd("bigger", 2 << 20)
    client.register_regions([group()], [MemoryRegion(fd, 2 << 20)])
    os.close(fd)
    first, second = daemon.wait_for(Attach, 2)
    assert first.generation != second.generation
    assert [worker.regions for worker in daemon.workers] == [{0: 2 << 20}]
    assert client.state is ClientState.CONNECTED


def test_memory_that_can_shrink_is_refused_before_it_is_offered(client: Client) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(RegistrationFailed):
        client.register_regions([group()], [MemoryRegion(fd, 4096)])
    os.close(fd)


def test_registration_the_daemon_refuses_raises_and_can_be_tried_again(
    client: Client, daemon: FakeDaemon, region: MemoryRegion
) -> None:
    daemon.answer(RegisterCaches, Refused("REGISTRATION_FAILED", "ENOMEM", False, {"errno": 12}))
    with pytest.raises(RegistrationFailed) as raised:
        client.register_regions([group()], [region])
    assert raised.value.fields["errno"] == 12
    daemon.answer(RegisterCaches, Done())
    client.register_regions([group()], [region])
    assert client.state is ClientState.CONNECTED


def test_registration_that_takes_too_long_is_given_up_for_good(
    client: Client, daemon: FakeDaemon, region: MemoryRegion
) -> None:
    daemon.answer(RegisterCaches, None)
    with pytest.raises(DaemonLost, match="not registered within"):
        client.register_regions([group()], [region], timeout_s=0.05)
    client.connect()
    daemon.wait_for(Attach, 2)
    daemon.answer(RegisterCaches, Done())
    client.register_regions([group()], [region])


def test_nothing_is_no_kv_cache(client: Client, region: MemoryRegion) -> None:
    with pytest.raises(InvalidArgument):
        client.register_regions([], [region])
    with pytest.raises(InvalidArgument):
        client.register_regions([group()], [])


# --- close ----------------------------------------------------------------------------------------


def test_close_says_goodbye_and_is_final(daemon: FakeDaemon, region: MemoryRegion) -> None:
    client = Client(daemon.path, settings=SETTINGS)
    client.connect()
    client.register_regions([group()], [region])
    assert client.close() is True
    daemon.wait_for(Detach)
    assert client.state is ClientState.CLOSED
    assert client.close() is True
    for call in (client.poll, client.wait, client.ping, client.fileno, client.connect):
        with pytest.raises(ClientUnusable):
            call()
    with pytest.raises(ClientUnusable):
        client.publish("a", [])


def test_close_with_transfers_waits_until_the_daemon_lets_go(daemon: FakeDaemon) -> None:
    client = Client(daemon.path, settings=SETTINGS)
    client.connect()
    client.pull("a", PEER, [[1]], [[1]])
    assert client.close() is True


def test_close_without_proof_that_the_daemon_let_go_says_so(daemon: FakeDaemon) -> None:
    daemon.ends_when_detached = False
    client = Client(daemon.path, settings=SETTINGS)
    client.connect()
    client.pull("a", PEER, [[1]], [[1]])
    assert client.close(timeout_s=0.05) is False


def test_client_that_never_connected_can_be_closed(path: str) -> None:
    assert Client(path).close() is True
