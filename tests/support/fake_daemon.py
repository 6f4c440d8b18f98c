"""A daemon for client tests: real sockets and the real wire format, answers by script.

``FakeDaemon`` runs on a thread of the test's process. ``DaemonProcess`` runs one in a process of
its own, to be killed: only then is the end of a daemon's process something a client can see.
Run as a script it is that process: ``python -m tests.support.fake_daemon PATH``.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from moriiod.core.requests import (
    Attach,
    Attached,
    Detach,
    Done,
    GetStatus,
    Refused,
    RegisterCaches,
    Reply,
    Request,
    StatusDocument,
    TransferEnded,
)
from moriiod.wire.fdsocket import (
    FdMessage,
    FdRefused,
    OfferRegion,
    RegionTaken,
    WorkerHello,
    WorkerWelcome,
    decode_packet,
    receive_packet,
    send_packet,
)
from moriiod.wire.ipc import EventFrame, ReplyFrame, RequestFrame, decode_request, encode_reply

ROOT = Path(__file__).parents[2]
IDENTITY = Attached("decode-0", 3, 8, 0, 1, "shm")
#: Longest wait for something that must happen.
PATIENCE_S = 10.0

#: Returns the answer; None = stay silent.
Answer = Callable[[Request], Reply | None]


@dataclass(eq=False)
class Worker:
    """One fd connection, and the route that attached with its generation."""

    unix: socket.socket
    generation: str = ""
    route: bytes = b""
    regions: dict[int, int] = field(default_factory=dict)


class FakeDaemon:
    """Serves one socket path. Answers sensibly unless ``answers`` says otherwise.

    Attributes:
        answers: By request type; replaces the sensible answer.
        refuse_hello: Refuse on the fd socket with this, instead of a welcome.
        requests: Everything received, in order.
        ends_when_detached: Close the fd connection after a Detach, as a daemon does once it has
            let go of everything.
    """

    def __init__(self, path: str | Path, epoch: str | None = None) -> None:
        self.path = str(path)
        self.epoch = epoch or uuid.uuid4().hex
        self.answers: dict[type[Any], Answer] = {}
        self.refuse_hello: FdRefused | None = None
        self.ends_when_detached = True
        self.requests: list[Request] = []
        self._news = threading.Condition()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._next_event: dict[bytes, int] = {}
        self._is_over = False
        self._thread: threading.Thread | None = None

    # --- Life ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Bind both sockets and serve."""
        self._bind()
        self._thread = threading.Thread(target=self._run, name="fake-daemon")
        self._thread.start()

    def stop(self) -> None:
        """Close every socket at once, as a dying process does."""
        if self._thread is not None:
            self._do(self._end)
            self._thread.join()
            self._thread = None

    def serve(self) -> None:
        """Serve on this thread, until the process ends."""
        self._bind()
        os.write(1, b"ready\n")
        self._run()

    # --- What a test says and asks ------------------------------------------------------------

    def answer(self, kind: type[Any], reply: Reply | None) -> None:
        """Answer all requests of a type with this from now on; None = stay silent."""
        self._wait_done(lambda: self.answers.__setitem__(kind, lambda _request: reply))

    def tell(self, event: TransferEnded, sequence: int | None = None) -> None:
        """Send an event to the worker that attached last, by default as its next one."""
        self._do(lambda: self._tell(event, sequence))

    def drop_workers(self) -> None:
        """Close all fd connections, and live on."""
        self._do(self._drop)

    def wait_for(self, kind: type[Any], count: int = 1) -> list[Any]:
        """Return the first ``count`` requests of a type, once there are so many."""

        def found() -> list[Any]:
            return [request for request in self.requests if isinstance(request, kind)]

        with self._news:
            if not self._news.wait_for(lambda: len(found()) >= count, PATIENCE_S):
                raise TimeoutError(f"{count} x {kind.__name__} never came: {self.requests}")
            return found()[:count]

    @property
    def workers(self) -> list[Worker]:
        """Workers that are connected, in order of their coming."""
        return list(self._workers)

    # --- The thread ---------------------------------------------------------------------------

    def _bind(self) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.bind(f"ipc://{self.path}")
        unix_path = self.path.removesuffix(".sock") + ".fd.sock"
        Path(unix_path).unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(unix_path)
        self._listener.listen()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)

    def _do(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        os.eventfd_write(self._wake, 1)

    def _wait_done(self, order: Callable[[], None]) -> None:
        done = threading.Event()
        self._do(order)
        self._do(done.set)
        if not done.wait(PATIENCE_S):
            raise TimeoutError("the fake daemon is stuck")

    def _run(self) -> None:
        while not self._is_over:
            poller = zmq.Poller()
            poller.register(self._router, zmq.POLLIN)
            for fd in (self._wake, self._listener.fileno()):
                poller.register(fd, zmq.POLLIN)
            for worker in self._workers:
                poller.register(worker.unix.fileno(), zmq.POLLIN)
            ready = dict(poller.poll())
            if self._router in ready:
                self._read_requests()
            if self._listener.fileno() in ready:
                self._workers.append(Worker(self._listener.accept()[0]))
            for worker in list(self._workers):
                if worker.unix.fileno() in ready:
                    self._read_packet(worker)
            if self._wake in ready:
                os.eventfd_read(self._wake)
                while not self._orders.empty():
                    self._orders.get()()

    def _end(self) -> None:
        self._is_over = True
        self._drop()
        self._listener.close()
        self._router.close()
        self._context.term()
        os.close(self._wake)

    def _drop(self) -> None:
        for worker in self._workers:
            worker.unix.close()
        self._workers.clear()

    # --- Sockets ------------------------------------------------------------------------------

    def _read_requests(self) -> None:
        while self._router.poll(0):
            route, *frames = self._router.recv_multipart()
            frame = decode_request(frames)
            reply = self._answer_to(route, frame)
            with self._news:  # before the reply: who has that may look at once
                self.requests.append(frame.body)
                self._news.notify_all()
            if reply is not None:
                self._send(route, ReplyFrame(frame.sequence, self.epoch, reply))
            self._after(route, frame.body)

    def _answer_to(self, route: bytes, frame: RequestFrame) -> Reply | None:
        scripted = self.answers.get(type(frame.body))
        if scripted is not None:
            return scripted(frame.body)
        match frame.body:
            case Attach(generation):
                for worker in self._workers:
                    if worker.generation == generation:
                        worker.route = route
                        self._next_event[route] = 1
                        return IDENTITY
                return Refused("NOT_REGISTERED", "say hello first", False)
            case GetStatus():
                return StatusDocument('{"fake": true}')
            case RegisterCaches(_, sizes):
                holder = self._worker_of(route)
                if holder is None or len(holder.regions) < len(sizes):
                    return Refused("INVALID_GEOMETRY", "a region is missing", False)
                return Done()
            case _:
                return Done()

    def _after(self, route: bytes, body: Request) -> None:
        match body:
            case Attach(orphans=orphans) if Attach not in self.answers:
                for orphan in orphans:
                    self._tell(_failed(orphan.transfer_id))
            case Detach() if self.ends_when_detached:
                for worker in [w for w in self._workers if w.route == route]:
                    worker.unix.close()
                    self._workers.remove(worker)
            case _:
                pass

    def _worker_of(self, route: bytes) -> Worker | None:
        return next((worker for worker in self._workers if worker.route == route), None)

    def _tell(self, event: TransferEnded, sequence: int | None = None) -> None:
        route = next(worker.route for worker in reversed(self._workers) if worker.route)
        number = self._next_event[route] if sequence is None else sequence
        self._next_event[route] = max(self._next_event[route], number + 1)
        self._send(route, EventFrame(number, self.epoch, event))

    def _send(self, route: bytes, frame: ReplyFrame | EventFrame) -> None:
        self._router.send_multipart([route, *encode_reply(frame)])

    def _read_packet(self, worker: Worker) -> None:
        try:
            packet = receive_packet(worker.unix, max_fds=4)
        except ConnectionError:
            packet = None
        if packet is None or not packet.data:
            worker.unix.close()
            self._workers.remove(worker)
            return
        answer = self._answer_packet(worker, decode_packet(packet), packet.fds)
        packet.close_fds()
        # A worker that has left meanwhile needs no answer.
        with contextlib.suppress(BrokenPipeError):
            send_packet(worker.unix, answer)

    def _answer_packet(self, worker: Worker, message: FdMessage, fds: tuple[int, ...]) -> FdMessage:
        match message:
            case WorkerHello(generation):
                worker.generation = generation
                return self.refuse_hello or WorkerWelcome(self.epoch)
            case OfferRegion(region, n_bytes) if len(fds) == 1:
                if os.fstat(fds[0]).st_size < n_bytes:
                    return FdRefused("REGISTRATION_FAILED", "too small")
                worker.regions[region] = n_bytes
                return RegionTaken(region)
            case _:
                return FdRefused("UNEXPECTED_MESSAGE", f"{type(message).__name__}, {len(fds)} fds")


class DaemonProcess:
    """A fake daemon in a process of its own.

    Reservations that a client brings from a lost daemon are ended right after the attach, and
    ``SIGUSR1`` makes it close all fd connections.
    """

    def __init__(self, path: str | Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(path)], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.kill()
            raise RuntimeError("the fake daemon did not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def drop_workers(self) -> None:
        """Close all fd connections, and live on."""
        self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def is_readable(fd: int, timeout_s: float) -> bool:
    """Wait for a descriptor, as a worker's own loop would."""
    return bool(select.select([fd], [], [], timeout_s)[0])


def _failed(transfer_id: str) -> TransferEnded:
    return TransferEnded(transfer_id, "reserve", "failed", "DAEMON_LOST", "fenced", True)


def main() -> None:
    """Serve until killed."""
    daemon = FakeDaemon(sys.argv[1])
    signal.signal(signal.SIGUSR1, lambda _number, _frame: daemon.drop_workers())
    daemon.serve()


if __name__ == "__main__":
    main()
