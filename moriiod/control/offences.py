"""Who keeps sending what cannot be read: told once is an accident, again and again is enough."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from moriiod.core.ids import PeerRoute

#: Bad messages in a row until a route is not listened to any more.
MAX_IN_A_ROW: Final = 16
#: Routes remembered; beyond it the one that offended longest ago is forgotten.
MAX_REMEMBERED: Final = 1024


class Offences:
    """Counts bad messages in a row for each route, in bounded memory."""

    def __init__(self) -> None:
        self._counts: OrderedDict[PeerRoute, int] = OrderedDict()

    def is_muted(self, route: PeerRoute) -> bool:
        """Whether a route has used up its chances."""
        return self._counts.get(route, 0) >= MAX_IN_A_ROW

    def add(self, route: PeerRoute) -> bool:
        """Count a bad message; return whether this one was one too many."""
        count = self._counts.pop(route, 0) + 1
        self._counts[route] = count
        if len(self._counts) > MAX_REMEMBERED:
            self._counts.popitem(last=False)
        return count == MAX_IN_A_ROW

    def forgive(self, route: PeerRoute) -> None:
        """A good message came in, or the route is closed."""
        if self._counts:
            self._counts.pop(route, None)
