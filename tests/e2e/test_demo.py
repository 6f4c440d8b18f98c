"""`moriiod demo` with real processes: it passes, it notices what is wrong, it leaves nothing."""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moriiod.cli.demo import messages as msg
from moriiod.cli.demo.messages import Channel
from moriiod.cli.demo.plan import HOST
from moriiod.cli.demo.ports import find_base_ports
from moriiod.errors import AddressInUse

#: Environment variable that marks every process of one demo.
MARK = "DEMO_TEST_MARK"
SMALL = ("--blocks", "16", "--layers", "2", "--requests", "4", "--timeout", "60")
ONE_TO_TWO = ("--prefill-tp", "1", "--decode-tp", "2")
#: So many requests that the demo is still at it when it is disturbed.
LONG = (*ONE_TO_TWO, "--blocks", "64", "--layers", "2", "--requests", "10000")
PATIENCE_S = 60.0


class Demo:
    """A running demo, and what it leaves behind.

    Args:
        folder: Temporary directory of the demo; its path is short.
        arguments: Of ``moriiod demo``.
        program: Arguments of Python that start the command line.
    """

    def __init__(
        self, folder: Path, *arguments: str, program: tuple[str, ...] = ("-m", "moriiod")
    ) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MORIIOD_")}
        environment |= {"TMPDIR": str(folder), MARK: self.mark, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *program, "demo", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []

    def read_until(self, text: str) -> None:
        """Read its output up to a line that contains the text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        pytest.fail(f"{text!r} was never printed:\n{self.output}")

    def finish(self) -> int:
        """Read the rest and return the exit status."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.readlines()
        return self.process.wait()

    @property
    def output(self) -> str:
        """What was read so far."""
        return "".join(self.lines)

    def pids(self, *words: str) -> list[int]:
        """Return this demo's running processes with all these words in their command line."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if f"{MARK}={self.mark}".encode() in environment and set(words) <= set(command):
                found.append(int(entry.name))
        return found

    def is_parent_of(self, pid: int) -> bool:
        """Say whether the demo itself started this process."""
        # The name in brackets may hold anything; state and parent come after it.
        _, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(parent) == self.process.pid

    def left(self) -> list[str]:
        """Return the files and sockets that are still there."""
        return sorted(path.name for path in self.folder.rglob("*") if not path.is_dir())

    def close(self) -> None:
        """End it, whatever it is doing."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: what the demo puts below it must fit the address of a socket.
    with tempfile.TemporaryDirectory(prefix="md") as path:
        yield Path(path)


@contextmanager
def running(
    folder: Path, *arguments: str, program: tuple[str, ...] = ("-m", "moriiod")
) -> Iterator[Demo]:
    demo = Demo(folder, *arguments, program=program)
    try:
        yield demo
    finally:
        demo.close()


def run(folder: Path, *arguments: str) -> Demo:
    """Run a demo to its end and check that no process of it is left."""
    with running(folder, *arguments) as demo:
        demo.finish()
        assert demo.pids() == []
    return demo


# --- It passes --------------------------------------------------------------------------------


def test_small_demo_passes_in_both_modes_and_leaves_nothing(folder: Path) -> None:
    demo = run(folder, *ONE_TO_TWO, *SMALL)
    assert demo.process.returncode == 0, demo.output
    assert demo.lines[-1] == "PASS\n"
    assert re.search(r"^READ +4 +\d+ +8 ", demo.output, re.MULTILINE)
    assert re.search(r"^WRITE +4 +\d+ +8 ", demo.output, re.MULTILINE)
    # Four reads, each acknowledged by both decode ranks.
    assert re.search(r"^P0/0 +D0/0\.\.1 +8 +8 +8 +8$", demo.output, re.MULTILINE), demo.output
    assert list(folder.iterdir()) == []


def test_prefill_ranks_that_nobody_reads_are_released_too(folder: Path) -> None:
    demo = run(folder, "--prefill-tp", "2", "--decode-tp", "1", "--kv-heads", "1", *SMALL)
    assert demo.process.returncode == 0, demo.output
    assert re.search(r"^P0/1 +nobody; released by D0/0 +8 +8 +4 +4$", demo.output, re.MULTILINE), (
        demo.output
    )


def test_decode_rank_gathers_its_heads_from_several_prefill_ranks(folder: Path) -> None:
    sizes = ("--prefill-tp", "2", "--decode-tp", "1")
    demo = run(folder, *sizes, "--kv-heads", "4", "--layout", "fused", *SMALL)
    assert demo.process.returncode == 0, demo.output
    assert re.search(r"^D0/0 +attention +0\.\.1 of P0, 2\.\.3 of P1$", demo.output, re.MULTILINE)
    assert re.search(r"^P0/1 +D0/0 +8 +8 +4 +4$", demo.output, re.MULTILINE), demo.output


def test_hybrid_model_moves_latent_and_recurrent_state(folder: Path) -> None:
    demo = run(folder, *ONE_TO_TWO, "--model", "kimi-linear-48b", *SMALL)
    assert demo.process.returncode == 0, demo.output
    assert "kda-state  16..31 of P0" in demo.output


def test_every_decode_instance_gets_from_every_prefill_instance_as_json(folder: Path) -> None:
    instances = ("--prefill-instances", "2", "--decode-instances", "2")
    sizes = ("--prefill-tp", "1", "--decode-tp", "1")
    with running(folder, *sizes, *instances, *SMALL, "--json") as demo:
        assert demo.finish() == 0, demo.output
    document = json.loads(demo.output[demo.output.index("{\n") :])
    assert document["result"] == "PASS"
    assert [mode["transfers"] for mode in document["modes"]] == [4, 4]
    prefill = [row for row in document["ranks"] if row["rank"].startswith("P")]
    assert [row["released_once"] for row in prefill] == [4, 4]
    assert [row["acks"] >= row["expected_acks"] == 2 for row in prefill] == [True, True]


def test_kept_directory_has_settings_and_logs_but_no_sockets(folder: Path) -> None:
    demo = run(folder, *ONE_TO_TWO, *SMALL, "--mode", "read", "--keep-dir")
    assert demo.process.returncode == 0, demo.output
    assert demo.left() == sorted(
        ["zygote.log", *["moriiod.toml"] * 2]
        + [f"{who}{rank}.log" for who in ("rank", "worker") for rank in (0, 0, 1)]
    )


# --- It notices -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("flip-byte", "D0/0: layer 1 piece 0: byte"),
        ("touch-canary", "D0/0: unused blocks of layer 1"),
        ("lose-release", "publish ended 0 times, not once"),
        ("double-release", "publish ended 2 times, not once"),
    ],
)
def test_planted_fault_fails_the_demo(folder: Path, fault: str, problem: str) -> None:
    demo = run(folder, *ONE_TO_TWO, *SMALL, "--fault", fault)
    assert demo.process.returncode == 1, demo.output
    problems = [line for line in demo.lines if line.startswith("problem: ")]
    assert len(problems) == 1
    assert problem in problems[0]
    assert "FAIL\n" in demo.lines
    assert not [name for name in demo.left() if name.endswith((".sock", ".notify"))]


@pytest.mark.parametrize(
    ("victim", "culprit"),
    [(("serve", "1"), "daemon D0/1"), (("moriiod.cli.demo.zygote",), "zygote")],
)
def test_killed_process_fails_the_demo_and_is_named(
    folder: Path, victim: tuple[str, ...], culprit: str
) -> None:
    with running(folder, *LONG) as demo:
        demo.read_until("READ: ")
        # The workers have the zygote's command line, but are not the demo's own children.
        (pid,) = (pid for pid in demo.pids(*victim) if demo.is_parent_of(pid))
        os.kill(pid, signal.SIGKILL)
        assert demo.finish() == 1
        assert demo.pids() == []
    assert re.search(
        rf"^problem: {culprit} \(pid \d+\) has ended with status -9", demo.output, re.M
    )
    assert f"end of the log of {culprit}:" in demo.output


ELSEWHERE = """
import sys
from moriiod.cli.demo import fleet
from moriiod.cli.main import main

fleet.HOST = "192.0.2.1"  # for documentation, so of no machine
sys.exit(main())
"""


def test_daemon_that_cannot_start_shows_why(folder: Path) -> None:
    with running(folder, *ONE_TO_TWO, *SMALL, program=("-c", ELSEWHERE)) as demo:
        assert demo.finish() == 1
        assert demo.pids() == []
    assert re.search(r"^problem: daemon ../. \(pid \d+\) has ended with", demo.output, re.MULTILINE)
    assert "192.0.2.1" in demo.output.partition("end of the log of")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--prefill-tp", "4", "--decode-tp", "6"),
        ("--kv-heads", "6"),
        ("--model", "no-such"),
        ("--engine", "pigeon"),
        ("--prefill-instances", "2", "--requests", "1"),
        ("--mode", "both-ways"),
    ],
)
def test_impossible_demo_is_refused_before_anything_starts(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    demo = run(folder, *arguments)
    assert demo.process.returncode == 2
    assert len(demo.lines) == 1
    assert list(folder.iterdir()) == []


# --- It ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_ends_everything(folder: Path, number: signal.Signals) -> None:
    with running(folder, *LONG) as demo:
        demo.read_until("READ: ")
        demo.process.send_signal(number)
        assert demo.finish() == 128 + number
        assert demo.pids() == []
    assert list(folder.iterdir()) == []


def test_killed_demo_takes_its_processes_along(folder: Path) -> None:
    with running(folder, *LONG) as demo:
        demo.read_until("READ: ")
        pidfds = [os.pidfd_open(pid) for pid in demo.pids() if pid != demo.process.pid]
        # Three daemons, the zygote and three workers.
        assert len(pidfds) == 7
        demo.process.kill()
        poller = select.poll()
        for pidfd in pidfds:
            poller.register(pidfd, select.POLLIN)
        while pidfds:
            ended = poller.poll(PATIENCE_S * 1000)
            assert ended, "a process outlived the demo"
            for pidfd, _ in ended:
                poller.unregister(pidfd)
                os.close(pidfd)
                pidfds.remove(pidfd)


# --- Ports ------------------------------------------------------------------------------------


def test_ranges_are_free_and_do_not_overlap() -> None:
    bases = find_base_ports([4, 8, 8], random.Random(1))
    ranges = [range(base, base + size) for base, size in zip(bases, (4, 8, 8), strict=True)]
    ports = [port for each in ranges for port in each]
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as probe:
            probe.bind((HOST, port))


def test_held_port_is_passed_over() -> None:
    (first,) = find_base_ports([3], random.Random(7))
    with socket.socket() as holder:
        holder.bind((HOST, first + 1))
        holder.listen()
        (second,) = find_base_ports([3], random.Random(7))
    assert first + 1 not in range(second, second + 3)


def test_no_free_range_is_an_error_and_not_a_wait() -> None:
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        holder.listen()
        with pytest.raises(AddressInUse):
            find_base_ports([1], _Stuck(holder.getsockname()[1]))


class _Stuck(random.Random):
    """Dice that always show the same number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def randint(self, a: int, b: int) -> int:
        return self._number


RACE = """
import socket, sys
from moriiod.cli.demo import fleet
from moriiod.cli.main import main

find = fleet.find_base_ports
holders = []

def find_and_lose(sizes, dice):
    bases = find(sizes, dice)
    if not holders:
        holders.append(socket.create_server(("127.0.0.1", bases[-1])))
    return bases

fleet.find_base_ports = find_and_lose
sys.exit(main())
"""


def test_port_taken_before_a_daemon_binds_it_costs_a_second_try(folder: Path) -> None:
    with running(folder, *ONE_TO_TWO, *SMALL, "--keep-dir", program=("-c", RACE)) as demo:
        assert demo.finish() == 0, demo.output
    logs = [path.read_text() for path in folder.rglob("rank0.log")]
    assert any("ADDRESS_IN_USE" in log and log.count("starting") == 2 for log in logs)


# --- The channel ------------------------------------------------------------------------------


def test_message_larger_than_the_socket_takes_arrives_whole() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    sender, receiver = Channel(ours), Channel(theirs)
    command = msg.Prefill(1, "read", "cmpl-x", {}, list(range(200_000)))
    sender.send(command)
    assert sender.has_unsent
    received: list[msg.Message] = []
    while not received:
        received = receiver.receive()
        sender.flush()
    assert received == [command]
    assert not sender.has_unsent
    sender.close()
    assert receiver.receive() == []
    assert receiver.is_closed
    receiver.send(msg.Leave())  # to nobody: no error, reading has told
    receiver.close()
