"""Bounds of the fd socket."""

from __future__ import annotations

from dataclasses import dataclass

from moriiod.core.ids import MAX_OFFSET, MAX_REGIONS


@dataclass(frozen=True, slots=True)
class FdLimits:
    """How much the fd socket takes in.

    Attributes:
        max_connections: Workers and peers connected at once.
        max_regions: Regions of one generation.
        max_region_bytes: Bytes of all regions of one generation.
        max_fetchers: Peers (epochs) that have fetched memory and are remembered for a fence.
        idle_timeout_s: A connection that is no worker's and says nothing for so long is closed.
    """

    max_connections: int = 512
    max_regions: int = MAX_REGIONS
    max_region_bytes: int = MAX_OFFSET
    max_fetchers: int = 4096
    idle_timeout_s: float = 10.0
