"""Structured logging on the standard library: key=value for people, or JSON lines.

Any module logs with ``logging.getLogger("moriiod.<part>")`` and gives its values as ``extra``:

    _log.info("client attached", extra={"client": name, "pid": pid})

The formatters here turn every such value into a field. Nothing that comes from outside can break
out of its field or its line: what is not printable is escaped, and lengths are bounded.
"""

from __future__ import annotations

import enum
import json
import logging
import math
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

from moriiod.core.effects import CountProblem, Transition

LogFormat = Literal["human", "json"]
_ROOT: Final = "moriiod"
_TRANSFER_LOG: Final = logging.getLogger("moriiod.transfer")
_PROBLEM_LOG: Final = logging.getLogger("moriiod.problem")
#: Longest value of one field, and longest message, in characters; tracebacks get more.
MAX_FIELD: Final = 1024
MAX_MESSAGE: Final = 2048
MAX_TRACEBACK: Final = 16384
#: Attributes that every record has; all others came as ``extra``.
_STANDARD: Final = frozenset(
    {*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"}
)
_OWN_KEYS: Final = frozenset({"time", "level", "logger", "message", "error", "traceback"})


class Level(enum.IntEnum):
    """The levels that configuration knows."""

    DEBUG = logging.DEBUG
    INFO = logging.INFO
    WARNING = logging.WARNING
    ERROR = logging.ERROR


def configure(
    level: str, log_format: LogFormat, bound: Mapping[str, object], stream: TextIO | None = None
) -> None:
    """Send everything that ``moriiod.*`` logs to a stream, replacing an earlier configuration.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        log_format: ``human`` or ``json``.
        bound: Fields of every line: the rank, the epoch.
        stream: Where to; None means stderr.
    """
    formatter = JsonFormatter(bound) if log_format == "json" else HumanFormatter(bound)
    handler = _StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger(_ROOT)
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(Level[level.upper()])
    root.propagate = False


class _StreamHandler(logging.StreamHandler[TextIO]):
    """A handler that never fails its caller, and never writes about itself.

    A log that nobody reads any more (a closed pipe, a full disk) must not take the daemon down.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], OSError | ValueError):
            return
        super().handleError(record)


class _Formatter(logging.Formatter):
    """Collects the fields of a record in order: bound ones, then its own."""

    def __init__(self, bound: Mapping[str, object]) -> None:
        super().__init__()
        self._bound: Final = {_free_key(key): _plain(value) for key, value in bound.items()}

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        fields = dict(self._bound)
        for key, value in record.__dict__.items():
            if key not in _STANDARD:
                fields[_free_key(key)] = _plain(value)
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            fields["error"] = _cut(f"{type(error).__name__}: {error}", MAX_FIELD)
            fields["traceback"] = _cut("".join(traceback.format_exception(error)), MAX_TRACEBACK)
        return fields

    @staticmethod
    def _time(record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    @staticmethod
    def _message(record: logging.LogRecord) -> str:
        return _cut(record.getMessage(), MAX_MESSAGE)


class JsonFormatter(_Formatter):
    """One JSON object on each line; ASCII only, so no reader can be confused by the encoding."""

    def format(self, record: logging.LogRecord) -> str:
        head = {
            "time": self._time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._message(record),
        }
        return json.dumps({**head, **self._fields(record)}, allow_nan=False)


class HumanFormatter(_Formatter):
    """Time, level, logger and message, then key=value; values with blanks are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{self._time(record)} {record.levelname:<7} {record.name}"
        message = escape(self._message(record))
        fields = " ".join(f"{k}={_quoted(v)}" for k, v in self._fields(record).items())
        return f"{head}: {message}{' ' if fields else ''}{fields}"


def escape(text: str) -> str:
    """Return text on one line, with everything that is not printable as a Python escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if text and text.isprintable() and not any(c in text for c in ' ="\\'):
        return text
    return '"' + escape(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _plain(value: object) -> Any:
    """Return a value that JSON can hold; numbers and bools stay what they are."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    return _cut(str(value), MAX_FIELD)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}...({len(text)} characters)"


def _free_key(key: str) -> str:
    """Return a field name that is one word and none of the names every line has."""
    word = "".join(c if c.isalnum() or c in "_.-" else "_" for c in key) or "_"
    return f"field_{word}" if word in _OWN_KEYS else word


def log_transition(transition: Transition) -> None:
    """Log a state change of a transfer, at debug."""
    if _TRANSFER_LOG.isEnabledFor(logging.DEBUG):
        _TRANSFER_LOG.debug(
            "%s -> %s",
            transition.old,
            transition.new,
            extra={
                "transfer": transition.transfer_id,
                "role": transition.role,
                "detail": transition.detail,
            },
        )


def log_token_spans(peer: str, n_spans: int, n_bytes: int) -> None:
    """Warn that the heads of an NHD layout are split, which costs a descriptor a token."""
    _TRANSFER_LOG.warning(
        "heads are split in an NHD layout: one descriptor for each token; HND on both sides needs "
        "one for each block",
        extra={"peer": peer, "descriptors": n_spans, "bytes": n_bytes},
    )


class ProblemLog:
    """Logs problems that came from outside, a few of each kind in a while.

    A flood of bad messages is counted in the metrics in full; the log says that it happens.

    Args:
        burst: Lines of one kind in one interval.
        interval_s: Length of the interval in seconds.
    """

    def __init__(self, burst: int = 5, interval_s: float = 10.0) -> None:
        self._burst: Final = burst
        self._interval_s: Final = interval_s
        #: For each kind: start of its interval, lines written, lines left out. Kinds are few: the
        #: daemon's own words.
        self._windows: dict[str, tuple[float, int, int]] = {}

    def log(self, problem: CountProblem, now: float) -> bool:
        """Log a problem at warning, unless there were too many of its kind.

        Args:
            problem: What happened.
            now: Of the loop's clock, in seconds.

        Returns:
            Whether a line was written.
        """
        start, written, left_out = self._windows.get(problem.kind, (now, 0, 0))
        if now - start >= self._interval_s:
            start, written = now, 0
        if written >= self._burst:
            self._windows[problem.kind] = (start, written, left_out + 1)
            return False
        self._windows[problem.kind] = (start, written + 1, 0)
        extra: dict[str, object] = {"kind": problem.kind, "detail": problem.detail}
        if left_out:
            extra["left_out"] = left_out
        _PROBLEM_LOG.warning("contained a problem from outside", extra=extra)
        return True
