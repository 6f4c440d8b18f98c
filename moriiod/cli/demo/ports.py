"""Finds control ports for the demo's instances: whole ranges that nobody holds."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from moriiod.cli.demo.plan import HOST
from moriiod.errors import AddressInUse

_LOWEST: Final = 20000
_KERNELS_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_FIRST: Final = 32768
_TRIES: Final = 200


def find_base_ports(sizes: list[int], dice: random.Random) -> list[int]:
    """Return the first port of a free range for each size; no two ranges overlap.

    A port that is free now may be taken a moment later, so whoever binds it must still be ready
    to ask again.

    Args:
        sizes: Ports each range needs.
        dice: Where to look; two demos that start together should look in different places.

    Raises:
        AddressInUse: No free ranges were found.
    """
    taken: set[int] = set()
    return [_find(size, taken, dice) for size in sizes]


def _find(size: int, taken: set[int], dice: random.Random) -> int:
    for base in _candidates(size, dice):
        ports = range(base, base + size)
        if taken.isdisjoint(ports) and all(_is_free(port) for port in ports):
            taken.update(ports)
            return base
    raise AddressInUse(f"found no {size} free ports in a row on {HOST}", n_ports=size)


def _candidates(size: int, dice: random.Random) -> Iterator[int]:
    # Above, the kernel takes ports for outgoing connections at any moment.
    highest = max(_first_of_kernel() - size, _LOWEST + _TRIES)
    for _ in range(_TRIES):
        yield dice.randint(_LOWEST, highest)


def _first_of_kernel() -> int:
    try:
        return int(_KERNELS_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_FIRST


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the daemon will: what is left of closed connections does not keep it from binding.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
