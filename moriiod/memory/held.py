"""File descriptors of workers' regions: who has offered what, and what the engine is using.

A region is *offered* until the engine takes it: whoever offered it may offer another one in its
place, and its death closes it. It is *held* from then on, and stays open until it is released,
whatever happens to the worker (safety rule S1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moriiod.core.ids import Generation
from moriiod.errors import Busy, TooLarge
from moriiod.memory.closer import FdCloser
from moriiod.memory.limits import FdLimits
from moriiod.wire.memfd import check_sealed_memfd


@dataclass(frozen=True, slots=True)
class HeldRegion:
    """A region that the engine may map; the same fields as ``engines.base.RegionHandle``.

    Attributes:
        kind: ``memfd``: sealed against shrinking.
        fd: Open until the generation is released; not the holder's to close.
        n_bytes: Size that the worker announced; the file is at least as large.
    """

    kind: Literal["memfd"]
    fd: int
    n_bytes: int


@dataclass(slots=True, eq=False)
class _Generation:
    offered: dict[int, HeldRegion] = field(default_factory=dict)
    held: tuple[HeldRegion, ...] = ()

    def take_offered(self) -> tuple[int, ...]:
        fds = tuple(region.fd for region in self.offered.values())
        self.offered.clear()
        return fds


class HeldRegions:
    """The fds of every generation; each is closed exactly once."""

    def __init__(self, limits: FdLimits) -> None:
        self._limits = limits
        self._generations: dict[Generation, _Generation] = {}
        self._closer = FdCloser()

    def __contains__(self, generation: Generation) -> bool:
        return generation in self._generations

    @property
    def n_fds(self) -> int:
        """Number of file descriptors that are open."""
        kept = sum(len(g.offered) + len(g.held) for g in self._generations.values())
        return kept + self._closer.n_open

    def add(self, generation: Generation) -> None:
        """A worker of this generation may offer regions from now on."""
        self._generations.setdefault(generation, _Generation())

    def offer(self, generation: Generation, region: int, n_bytes: int, fd: int) -> None:
        """Keep a region of a worker; the fd is ours once this returns, and not if it raises.

        Raises:
            InvalidArgument: The size cannot be.
            RegistrationFailed: Not a memfd sealed against shrinking and of that size.
            TooLarge: The generation has too many regions or bytes.
            Busy: The regions are in use by the engine.
        """
        check_sealed_memfd(fd, n_bytes)
        entry = self._generations[generation]
        if entry.held:
            raise Busy(
                "the regions of this generation are in use", limit="generations", retry_after_s=0.1
            )
        others = [r.n_bytes for index, r in entry.offered.items() if index != region]
        if len(others) >= self._limits.max_regions:
            raise TooLarge("too many regions", limit="max_regions", value=self._limits.max_regions)
        if sum(others) + n_bytes > self._limits.max_region_bytes:
            raise TooLarge(
                "the regions are too large together",
                limit="max_region_bytes",
                value=self._limits.max_region_bytes,
            )
        replaced = entry.offered.get(region)
        entry.offered[region] = HeldRegion("memfd", fd, n_bytes)
        if replaced is not None:
            self._closer.close_all((replaced.fd,))

    def hold(self, generation: Generation) -> tuple[HeldRegion, ...]:
        """Let the engine have the regions 0, 1, ... up to the first that was not offered.

        They stay open until ``release``. Holding again returns the same.
        """
        entry = self._generations.get(generation)
        if entry is None:
            return ()
        if not entry.held:
            regions: list[HeldRegion] = []
            while (region := entry.offered.pop(len(regions), None)) is not None:
                regions.append(region)
            entry.held = tuple(regions)
            self._closer.close_all(entry.take_offered())
        return entry.held

    def release(self, generation: Generation, *, is_connected: bool) -> None:
        """Close what was held; the engine has let go of it. Unknown generations are ignored.

        Pages of a large region that nobody else holds are given back a little later.
        """
        entry = self._generations.get(generation)
        if entry is None:
            return
        held, entry.held = entry.held, ()
        self._closer.close_all(region.fd for region in held)
        if not is_connected:
            self._drop(generation, entry)

    def worker_gone(self, generation: Generation) -> None:
        """Close what was only offered; keep what is held."""
        entry = self._generations.get(generation)
        if entry is None:
            return
        self._closer.close_all(entry.take_offered())
        if not entry.held:
            del self._generations[generation]

    def close(self) -> None:
        """Close everything. The engine is closed."""
        for generation in list(self._generations):
            self.release(generation, is_connected=False)
        self._closer.stop()

    def _drop(self, generation: Generation, entry: _Generation) -> None:
        self._closer.close_all(entry.take_offered())
        del self._generations[generation]
