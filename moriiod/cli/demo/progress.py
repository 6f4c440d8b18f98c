"""Shows how far a demo is: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from moriiod.cli.demo.plan import Mode

#: Lines for one mode, where there is no terminal.
_LINES_PER_MODE: Final = 4
#: Drawing a bar for each of thousands of transfers would be most of the work.
_REDRAW_S: Final = 0.1


class PlainProgress:
    """One line for each step, and a few for each mode."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._label = ""
        self._total = 0
        self._shown = 0

    def step(self, text: str) -> None:
        """Something begins."""
        self._console.print(text)

    def start(self, mode: Mode, total: int) -> None:
        """So many transfers of one mode begin."""
        self._label, self._total, self._shown = mode.upper(), total, 0
        self._console.print(f"{self._label}: {total} transfers")

    def advance(self, done: int) -> None:
        """So many of them have ended."""
        quarter = done * _LINES_PER_MODE // self._total
        if quarter > self._shown:
            self._shown = quarter
            self._console.print(f"{self._label}: {done}/{self._total}")


class BarProgress:
    """A bar for each mode.

    Drawn only when something happens, not by a thread of its own: processes are forked meanwhile.
    """

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID | None = None
        self._total = 0
        self._drawn_at = 0.0

    def step(self, text: str) -> None:
        """Something begins."""
        self._bars.console.print(text)
        self._bars.refresh()

    def start(self, mode: Mode, total: int) -> None:
        """So many transfers of one mode begin."""
        self._task = self._bars.add_task(mode.upper(), total=total)
        self._total = total
        self._bars.refresh()

    def advance(self, done: int) -> None:
        """So many of them have ended."""
        if self._task is None:
            return
        now = time.monotonic()
        is_due = done == self._total or now - self._drawn_at >= _REDRAW_S
        self._bars.update(self._task, completed=done, refresh=is_due)
        if is_due:
            self._drawn_at = now


@contextmanager
def show_progress(console: Console) -> Iterator[PlainProgress | BarProgress]:
    """Choose by what the console is, and put a terminal back in order afterwards."""
    if not console.is_terminal:
        yield PlainProgress(console)
        return
    columns = (
        TextColumn("{task.description:>5}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("transfers"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, auto_refresh=False) as bars:
        yield BarProgress(bars)
