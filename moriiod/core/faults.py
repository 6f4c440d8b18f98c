"""Errors as values: between an exception class, a reply to a client and a wire error."""

from __future__ import annotations

from moriiod.core.messages import WireError
from moriiod.core.requests import Refused
from moriiod.errors import MoriiodError, error_from_code

_MAX_TEXT = 2000


def refused(error: MoriiodError) -> Refused:
    """Return an error as a reply to a local client."""
    return Refused(error.code, error.message[:_MAX_TEXT], error.retryable, error.fields)


def wire_error(error: MoriiodError) -> WireError:
    """Return an error as a peer is told of it."""
    return WireError(error.code, error.message[:_MAX_TEXT], error.retryable, error.fields)


def from_wire(error: WireError) -> MoriiodError:
    """Return a peer's error as one of ours."""
    return error_from_code(error.code, error.message, error.fields)
