"""What a shell is given to speak to its owner, the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moriiod.core.events import Event


@dataclass(frozen=True, slots=True)
class ShellHooks:
    """Callbacks of the driver. All are called on the loop's thread and return at once.

    Attributes:
        emit: Takes an event; events that arise while one is handled are queued, never nested.
        count_problem: Takes (kind, detail) of something wrong from outside that was contained.
            ``kind`` is one of the shell's documented names, fit for a metrics label.
        on_bug: Takes an exception that should not have been; the daemon ends with exit status 70.
    """

    emit: Callable[[Event], None]
    count_problem: Callable[[str, str], None]
    on_bug: Callable[[Exception], None]
