"""The error taxonomy: every failure moriiod can report, by type and by code.

Programs branch on ``code``; the text is for people. ``scope`` says how much an error may take down:
transfer < session < peer < daemon. ``docs/errors.md`` is generated from these classes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import ClassVar, Final

FieldValue = str | int | float | bool | None


class Scope(enum.Enum):
    """How much an error may take down, smallest first."""

    TRANSFER = "transfer"
    SESSION = "session"
    PEER = "peer"
    DAEMON = "daemon"


class MoriiodError(Exception):
    """Base of all errors moriiod raises or reports.

    Args:
        message: One sentence for people; **fields: the values it speaks of, for programs.
    """

    code: ClassVar[str] = "MORIIOD_ERROR"
    retryable: ClassVar[bool] = False
    scope: ClassVar[Scope] = Scope.TRANSFER
    #: What an operator should do about it; shown in docs/errors.md.
    remedy: ClassVar[str] = "See the message."

    def __init__(self, message: str, **fields: FieldValue) -> None:
        super().__init__(message)
        self.message: Final = message
        self.fields: Final[Mapping[str, FieldValue]] = dict(fields)

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        owner = _BY_CODE.setdefault(cls.code, cls)
        if owner is not cls:
            raise TypeError(f"error code {cls.code} is taken by {owner.__name__}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, {dict(self.fields)!r})"


_BY_CODE: dict[str, type[MoriiodError]] = {MoriiodError.code: MoriiodError}


def error_classes() -> Mapping[str, type[MoriiodError]]:
    """Return every error class by its code, in the order of definition."""
    return dict(_BY_CODE)


def error_from_code(code: str, message: str, fields: Mapping[str, FieldValue]) -> MoriiodError:
    """Rebuild an error that crossed a process boundary.

    A code this build does not know becomes a plain ``MoriiodError`` with a ``foreign_code`` field.
    """
    cls = _BY_CODE.get(code)
    if cls is None:
        return MoriiodError(message, **{**fields, "foreign_code": code})
    error = cls.__new__(cls)
    MoriiodError.__init__(error, message, **fields)
    return error


# --- Configuration and start ------------------------------------------------------------------


class ConfigError(MoriiodError):
    """A setting is missing, unknown, malformed, out of range or contradicts another one."""

    code = "CONFIG_ERROR"
    scope = Scope.DAEMON
    remedy = "Correct the named key; `moriiod config check FILE` tells when it is right."


class AddressInUse(MoriiodError):
    """A socket path or port that this daemon must own is held by a live process."""

    code = "ADDRESS_IN_USE"
    scope = Scope.DAEMON
    remedy = "Stop the other process or give this daemon another rank, port or runtime directory."


# --- Protocol ---------------------------------------------------------------------------------


class ProtocolError(MoriiodError):
    """A message does not follow the protocol (abstract: one of its subclasses is raised)."""

    code = "PROTOCOL_ERROR"


class MalformedFrame(ProtocolError):
    """Bytes from outside are not a message of this protocol."""

    code = "MALFORMED_FRAME"
    remedy = "The sender is not a moriiod, or it is broken."


class TooLarge(ProtocolError):
    """A message, list or value is larger than the stated limit."""

    code = "TOO_LARGE"
    remedy = "Split the request, or raise the named limit on both sides."


class UnknownMessage(ProtocolError):
    """The message type is not part of the protocol version in use."""

    code = "UNKNOWN_MESSAGE"
    remedy = "The sender is newer than this build; upgrade this side."


class VersionMismatch(ProtocolError):
    """The two ends speak no common protocol version."""

    code = "VERSION_MISMATCH"
    scope = Scope.PEER
    remedy = "Upgrade the older side; versions one apart always work together."


class UnexpectedMessage(ProtocolError):
    """A well-formed message that is not allowed in the present state."""

    code = "UNEXPECTED_MESSAGE"


# --- Requests that are refused ----------------------------------------------------------------


class InvalidArgument(MoriiodError):
    """A value in a request is outside what is allowed; the fields name it."""

    code = "INVALID_ARGUMENT"
    remedy = "Correct the caller; the same request will always be refused."


class OutOfRange(InvalidArgument):
    """A block id, offset or length lies outside the registered memory."""

    code = "OUT_OF_RANGE"
    remedy = "The caller's block table and the registered cache disagree."


class LengthMismatch(InvalidArgument):
    """Two lists that describe the same blocks differ in length."""

    code = "LENGTH_MISMATCH"


class TransferConflict(MoriiodError):
    """The transfer id is live and belongs to someone else, or was opened with other blocks."""

    code = "ALREADY_EXISTS"
    remedy = "The first owner keeps the id; use another transfer id."


class UnknownTransfer(MoriiodError):
    """No live transfer has this id here."""

    code = "UNKNOWN_TRANSFER"


class NotRegistered(MoriiodError):
    """The client has not attached, or has no KV cache registered."""

    code = "NOT_REGISTERED"
    remedy = "Attach and register again; the daemon may have restarted."


class DuplicateClient(MoriiodError):
    """Another live client holds this identity."""

    code = "DUPLICATE_CLIENT"


class ClientUnusable(MoriiodError):
    """The client object is closed, or was inherited by a forked process."""

    code = "CLIENT_UNUSABLE"
    remedy = "Make a client of your own, after the fork and in the process that uses it."


class Busy(MoriiodError):
    """A limit is reached; the request was not taken. Fields: limit, value, retry_after_s."""

    code = "BUSY"
    retryable = True
    remedy = "Retry later; if it is steady, raise the named limit or add capacity."


class Draining(MoriiodError):
    """The daemon is stopping and takes no new transfers."""

    code = "DRAINING"
    retryable = True
    scope = Scope.DAEMON
    remedy = "Use another instance, or wait for the restart."


# --- Topology and geometry --------------------------------------------------------------------


class InvalidTopology(MoriiodError):
    """Tensor-parallel or data-parallel sizes and ranks that cannot be."""

    code = "INVALID_TOPOLOGY"
    remedy = "Check the TP and DP sizes of both instances."


class TopologyMismatch(MoriiodError):
    """The request says one size, the peer's handshake says another."""

    code = "TOPOLOGY_MISMATCH"
    remedy = "The router or proxy passes the wrong size for this peer."


class UnsupportedTopology(MoriiodError):
    """The pair of TP sizes and the layout need more descriptors than a limit allows."""

    code = "UNSUPPORTED_TOPOLOGY"
    remedy = "Use the HND layout on both sides or equal TP sizes, or raise limits.max_token_spans."


class GeometryMismatch(MoriiodError):
    """The KV caches of the two sides differ in a way that cannot be bridged."""

    code = "GEOMETRY_MISMATCH"
    remedy = "Start both instances with the same model, dtype and layout; see docs/layouts.md."


class InvalidGeometry(MoriiodError):
    """The described KV layout does not fit the memory that was registered."""

    code = "INVALID_GEOMETRY"
    remedy = "The description and the tensors disagree; fix the caller."


class InvalidAddress(MoriiodError):
    """A host, port or combined peer address cannot be parsed or used."""

    code = "INVALID_ADDRESS"


# --- Transfers that failed --------------------------------------------------------------------


class TransferFailed(MoriiodError):
    """A transfer ended without its data (abstract: a subclass says why)."""

    code = "TRANSFER_FAILED"


class TransferTimedOut(TransferFailed):
    """The transfer did not end within its time."""

    code = "TIMED_OUT"


class TransferAborted(TransferFailed):
    """One of the two sides gave the transfer up."""

    code = "ABORTED"


class LeaseExpired(TransferFailed):
    """The producer's promise to keep the blocks ended before the data was confirmed."""

    code = "LEASE_EXPIRED"
    remedy = "Raise the lease, or find why the decode side starts so late."


class WorkerLost(TransferFailed):
    """The inference worker that owned the blocks is gone."""

    code = "WORKER_LOST"


class DaemonLost(TransferFailed):
    """The daemon restarted while the transfer was in flight."""

    code = "DAEMON_LOST"
    retryable = True


# --- Peers ------------------------------------------------------------------------------------


class PeerError(MoriiodError):
    """Something is wrong with a peer (abstract: a subclass says what)."""

    code = "PEER_ERROR"
    scope = Scope.PEER


class PeerUnreachable(PeerError):
    """No answer from the peer's control endpoint within the deadline."""

    code = "PEER_UNREACHABLE"
    retryable = True
    remedy = "Check that the peer runs and that its advertised address is reachable from here."


class PeerLost(PeerError):
    """A peer that was connected stopped answering."""

    code = "PEER_LOST"
    retryable = True


class PeerRestarted(PeerError):
    """The peer came back with a new epoch; everything of the old one is void."""

    code = "PEER_RESTARTED"
    retryable = True


class WrongPeer(PeerError):
    """The endpoint answered with another identity than the one that was meant."""

    code = "WRONG_PEER"
    remedy = "Two instances use overlapping ports, or the router has a stale address."


class SelfConnect(WrongPeer):
    """The endpoint is this daemon itself."""

    code = "SELF_CONNECT"
    remedy = "The peer advertises a wildcard or loopback address."


# --- Engines and memory -----------------------------------------------------------------------


class EngineError(MoriiodError):
    """The transfer engine failed (abstract: a subclass says how)."""

    code = "ENGINE_ERROR"
    scope = Scope.SESSION


class EngineOpFailed(EngineError):
    """A posted read or write ended with an error; fields carry the engine's own code."""

    code = "ENGINE_OP_FAILED"
    scope = Scope.TRANSFER


class EngineQueueFull(EngineError):
    """The engine has no room for the operation now; nothing was posted."""

    code = "ENGINE_QUEUE_FULL"
    retryable = True
    scope = Scope.TRANSFER


class EngineMismatch(EngineError):
    """The two daemons have no transfer engine in common that can reach each other."""

    code = "ENGINE_MISMATCH"
    scope = Scope.PEER


class SessionFailed(EngineError):
    """The engine could not pair local and remote memory."""

    code = "SESSION_FAILED"
    retryable = True


class SharedMemoryUnavailable(SessionFailed):
    """The peer's memory cannot be mapped from here (another host, user or namespace)."""

    code = "SHARED_MEMORY_UNAVAILABLE"
    retryable = False
    remedy = "The shm engine works within one host and user; use a network engine."


class RegistrationFailed(EngineError):
    """The engine or the kernel refused a memory region. Fields: n_bytes, errno, limit."""

    code = "REGISTRATION_FAILED"
    remedy = "Check LimitMEMLOCK, the NIC's limits and the seals of the memfd."


class InvariantViolation(MoriiodError):
    """A rule that must always hold was broken: a bug in moriiod. Carries the object's story."""

    code = "INVARIANT_VIOLATION"
    scope = Scope.DAEMON
    remedy = "Report it with the log; the daemon exits 70."
