"""Engines by name, imported only when they are asked for."""

from __future__ import annotations

from typing import Final

from moriiod.core.ids import Epoch
from moriiod.engines.base import RegionExporter, TransferEngine
from moriiod.engines.copier import STEP_BYTES
from moriiod.errors import ConfigError

#: Engines that need a library of their own, and the extra of this package that brings it.
_EXTRAS: Final = {"mori": "moriiod[mori]", "nixl": "moriiod[nixl]"}
_FAULTY: Final = "faulty:"


def why_missing(name: str) -> str | None:
    """Return why this build has no such engine, for people; None for one that it may have."""
    extra = _EXTRAS.get(name)
    return extra and f"engine {name} is not in this build yet; it will come with {extra}"


def make_engine(
    name: str,
    exporter: RegionExporter,
    epoch: Epoch,
    shm_chunk_bytes: int = STEP_BYTES,
) -> TransferEngine:
    """Return a new engine.

    Args:
        name: ``shm``. Tests may wrap it: ``faulty:shm,seed=7,fail=0.1`` (see ``engines.faulty``).
        exporter: Hands memory to peers on this host.
        epoch: Of this daemon start.
        shm_chunk_bytes: What ``shm`` copies between two looks at whether it was cancelled.

    Raises:
        ConfigError: No such engine, or not in this build.
    """
    if name.startswith(_FAULTY):
        from moriiod.engines.faulty import FaultyEngine, parse_faults

        inner, _, text = name.removeprefix(_FAULTY).partition(",")
        return FaultyEngine(
            make_engine(inner, exporter, epoch, shm_chunk_bytes), parse_faults(text)
        )
    if name == "shm":
        from moriiod.engines.shm import ShmEngine

        return ShmEngine(exporter, epoch, shm_chunk_bytes)
    missing = why_missing(name)
    if missing is not None:
        raise ConfigError(missing, key="engine", value=name, extra=_EXTRAS[name])
    raise ConfigError(f"there is no engine {name!r}; known: shm", key="engine", value=name[:64])
