"""The fd socket: workers introduce themselves and hand over memory, peers fetch it.

Does I/O and decides nothing. All of it runs in callbacks of the loop; whatever comes in, no
exception leaves them, except those of bugs, which go to ``ShellHooks.on_bug``.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from dataclasses import dataclass, field
from typing import Final

from moriiod.core.events import RegionOffered, WorkerConnected, WorkerDied
from moriiod.core.ids import Epoch, Generation
from moriiod.errors import (
    AddressInUse,
    Busy,
    ConfigError,
    DuplicateClient,
    MalformedFrame,
    MoriiodError,
    SharedMemoryUnavailable,
    UnexpectedMessage,
    WorkerLost,
)
from moriiod.memory.connection import Connection
from moriiod.memory.exports import Exports
from moriiod.memory.held import HeldRegion, HeldRegions
from moriiod.memory.limits import FdLimits
from moriiod.wire.fdsocket import (
    FdMessage,
    FetchRegions,
    OfferRegion,
    Packet,
    Regions,
    RegionTaken,
    WorkerHello,
    WorkerWelcome,
    decode_packet,
    refusal,
)
from moriiod.zmqio.hooks import ShellHooks
from moriiod.zmqio.sockpath import prepare_socket_path, publish_socket, remove_socket

#: Kinds of problems this shell counts.
PACKET_REFUSED: Final = "fd_packet_refused"
CONNECTION_REFUSED: Final = "fd_connection_refused"
ANSWER_UNDELIVERED: Final = "fd_answer_undelivered"

_BACKLOG: Final = 128
#: Pause before the next accept where the process has no room for another fd.
_ACCEPT_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class FdServerSettings:
    """Where the socket is and how much it takes.

    Attributes:
        path: Absolute file name of the socket; peers get it in descriptors.
        mode: Its permission bits, whatever the umask is.
        group: Name of the group that owns it; None = the group of the process.
        limits: Bounds.
    """

    path: str
    mode: int = 0o660
    group: str | None = None
    limits: FdLimits = field(default_factory=FdLimits)


class FdServer:
    """The listening socket, its connections, and the fds that came through them.

    Args:
        settings: Where and how much.
        epoch: Of this daemon start.
        hooks: The driver.

    Attributes:
        exports: What peers may fetch; the ``RegionExporter`` of the engine.
    """

    def __init__(self, settings: FdServerSettings, epoch: Epoch, hooks: ShellHooks) -> None:
        self.exports: Final = Exports(settings.path, settings.limits.max_fetchers)
        self._settings = settings
        self._epoch = epoch
        self._hooks = hooks
        self._held = HeldRegions(settings.limits)
        self._connections: set[Connection] = set()
        self._workers: dict[Generation, Connection] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: socket.socket | None = None
        self._resume: asyncio.TimerHandle | None = None
        #: (device, inode) of the socket file that is ours.
        self._file: tuple[int, int] | None = None

    # --- Life ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Listen, on the running loop.

        Raises:
            ConfigError: The path is too long, its directory cannot be used, or the group is
                unknown.
            AddressInUse: A live process serves the path.
        """
        self._loop = asyncio.get_running_loop()
        path = self._settings.path
        prepare_socket_path(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(path)
            self._file = _identity(path)
            publish_socket(path, self._settings.mode, self._settings.group)
            listener.listen(_BACKLOG)
        except BaseException as error:
            listener.close()
            self._remove_file()
            if isinstance(error, OSError):
                raise _bind_error(path, error) from error
            raise
        self._listener = listener
        self.exports.open(self._loop)
        self._loop.add_reader(listener, self._on_acceptable)

    @property
    def n_connections(self) -> int:
        """Number of open connections, of workers and of peers."""
        return len(self._connections)

    @property
    def n_region_fds(self) -> int:
        """Number of region fds that are open on behalf of workers."""
        return self._held.n_fds

    def is_path_intact(self) -> bool:
        """Say whether who connects now gets here: the file is there and is ours."""
        return self._file is not None and self._file == _identity(self._settings.path)

    def close(self) -> None:
        """Close everything and remove the socket file, if it is still ours. Idempotent.

        The engine is closed: nothing uses the regions any more.
        """
        self._remove_file()
        if self._resume is not None:
            self._resume.cancel()
        if self._listener is not None and self._loop is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            connection.close()
        self._connections.clear()
        self._workers.clear()
        self._held.close()
        self.exports.close()

    # --- Orders of the driver -------------------------------------------------------------------

    def disconnect(self, generation: Generation) -> None:
        """Close a worker's connection without a further event; unknown ones are ignored."""
        connection = self._workers.get(generation)
        if connection is not None:
            self._drop(connection)

    def hold(self, generation: Generation) -> tuple[HeldRegion, ...]:
        """Return a worker's regions, in order, for the engine; they stay open until ``release``.

        Empty if the generation is unknown or has offered no region 0.
        """
        return self._held.hold(generation)

    def release(self, generation: Generation) -> None:
        """Close a worker's regions: the engine does not use them (any more)."""
        self._held.release(generation, is_connected=generation in self._workers)

    # --- Callbacks of the loop ------------------------------------------------------------------

    def _on_acceptable(self) -> None:
        if self._listener is None or self._loop is None:
            return
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            self._hooks.count_problem(CONNECTION_REFUSED, f"accept: {error.strerror}")
            self._pause_accepting()
            return
        sock.setblocking(False)
        if len(self._connections) >= self._settings.limits.max_connections:
            sock.close()
            self._hooks.count_problem(CONNECTION_REFUSED, "too many connections")
            return
        connection = Connection(sock, self._loop, self._on_packet, self._on_end)
        connection.close_when_idle(self._settings.limits.idle_timeout_s)
        self._connections.add(connection)

    def _pause_accepting(self) -> None:
        """The listener stays readable while there is no room for another fd."""
        if self._loop is not None and self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._resume = self._loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        self._resume = None
        if self._loop is not None and self._listener is not None:
            self._loop.add_reader(self._listener, self._on_acceptable)

    def _on_end(self, connection: Connection) -> None:
        generation = connection.generation
        self._drop(connection)
        if generation is not None:
            self._hooks.emit(WorkerDied(generation))

    def _on_packet(self, connection: Connection, packet: Packet) -> None:
        kept: set[int] = set()
        try:
            self._handle(connection, packet, kept)
        except MoriiodError as error:
            self._refuse(connection, error)
        except OSError as error:
            self._refuse(connection, _descriptor_error(error))
        except Exception as error:  # noqa: BLE001 - a bug: reported, and the loop goes on
            self._hooks.on_bug(error)
            self._drop(connection)
        finally:
            for fd in packet.fds:
                if fd not in kept:
                    os.close(fd)

    def _handle(self, connection: Connection, packet: Packet, kept: set[int]) -> None:
        message = decode_packet(packet)
        expected = 1 if isinstance(message, OfferRegion) else 0
        if len(packet.fds) != expected:
            raise MalformedFrame(
                f"{type(message).__name__} comes with {expected} fds, this one has"
                f" {len(packet.fds)}",
                fds=len(packet.fds),
                expected=expected,
            )
        match message:
            case WorkerHello(generation):
                self._greet(connection, generation)
            case OfferRegion(region, n_bytes):
                self._take(connection, region, n_bytes, packet.fds[0], kept)
            case FetchRegions():
                self._hand_out(connection, message)
            case _:
                raise UnexpectedMessage("only the daemon says this", got=type(message).__name__)

    # --- Messages -------------------------------------------------------------------------------

    def _greet(self, connection: Connection, generation: Generation) -> None:
        if connection.generation is not None:
            raise UnexpectedMessage("this connection has introduced itself before")
        if generation in self._workers or generation in self._held:
            raise DuplicateClient("this generation is in use", generation=generation)
        connection.watch_process()
        connection.stay_open()
        connection.generation = generation
        self._workers[generation] = connection
        self._held.add(generation)
        credentials = connection.credentials
        self._hooks.emit(WorkerConnected(generation, credentials.pid, credentials.uid))
        self._answer(connection, WorkerWelcome(self._epoch))

    def _take(
        self, connection: Connection, region: int, n_bytes: int, fd: int, kept: set[int]
    ) -> None:
        if connection.generation is None:
            raise UnexpectedMessage("a worker introduces itself before it offers memory")
        self._held.offer(connection.generation, region, n_bytes, fd)
        kept.add(fd)
        self._hooks.emit(RegionOffered(connection.generation, region, n_bytes))
        self._answer(connection, RegionTaken(region))

    def _hand_out(self, connection: Connection, request: FetchRegions) -> None:
        if connection.generation is not None:
            raise UnexpectedMessage("a worker does not fetch memory")
        uid = connection.credentials.uid
        if uid not in (os.geteuid(), 0):
            raise SharedMemoryUnavailable(
                f"memory is handed to the same user only (uid {uid}, here {os.geteuid()})",
                theirs=uid,
                ours=os.geteuid(),
            )
        connection.close_when_idle(self._settings.limits.idle_timeout_s)
        pid = connection.credentials.pid
        fds, sizes = self.exports.fetch(request, pid, connection.open_pidfd)
        self._answer(connection, Regions(sizes), fds)

    def _answer(
        self, connection: Connection, message: FdMessage, fds: tuple[int, ...] = ()
    ) -> None:
        if connection.is_closed or connection.send(message, fds):
            return
        self._hooks.count_problem(ANSWER_UNDELIVERED, type(message).__name__)
        self._on_end(connection)

    def _refuse(self, connection: Connection, error: MoriiodError) -> None:
        self._hooks.count_problem(PACKET_REFUSED, f"{error.code}: {error.message}")
        connection.send(refusal(error))
        self._on_end(connection)

    # --- Small ----------------------------------------------------------------------------------

    def _drop(self, connection: Connection) -> None:
        connection.close()
        self._connections.discard(connection)
        generation, connection.generation = connection.generation, None
        if generation is not None:
            self._workers.pop(generation, None)
            self._held.worker_gone(generation)

    def _remove_file(self) -> None:
        if self.is_path_intact():
            remove_socket(self._settings.path)
        self._file = None


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _bind_error(path: str, error: OSError) -> MoriiodError:
    """Say why a path cannot be bound, after ``prepare_socket_path`` found nothing against it."""
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(f"socket path {path} is in use", path=path)
    return ConfigError(f"cannot create the socket {path}: {error.strerror}", path=path)


def _descriptor_error(error: OSError) -> MoriiodError:
    """Say why a process cannot be watched."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return Busy("no room for another file descriptor", limit="RLIMIT_NOFILE")
    return WorkerLost(f"the process that connected has ended: {error.strerror}")
