"""What a pull wants, and the plan it makes of it once a producer rank's cache is known."""

from __future__ import annotations

from dataclasses import dataclass

from moriiod.core.blocks import pair_for_read
from moriiod.core.headplan import HeadPlan
from moriiod.core.pairing import BlockTable
from moriiod.core.plan import TransferPlan
from moriiod.core.planner import Planner
from moriiod.core.sessions import PeerSession


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Blocks of every group on both sides, and who holds which heads.

    Attributes:
        local: Blocks to fill.
        remote: Blocks to read, with the same ids on every producer rank.
        heads: The plan of the two instances.
    """

    local: tuple[BlockTable, ...]
    remote: tuple[BlockTable, ...]
    heads: HeadPlan

    def plan(
        self,
        session: PeerSession,
        ranks: tuple[int, int],
        max_span_bytes: int,
        max_token_spans: int,
    ) -> TransferPlan:
        """Return what one consumer rank reads from one producer rank; may be empty.

        Args:
            session: Of the two ranks.
            ranks: Producer rank, consumer rank.
            max_span_bytes: See ``Planner``.
            max_token_spans: See ``Planner``.

        Raises:
            MoriiodError: The two caches do not fit for these blocks; says why.
        """
        session.check_groups(self.local)
        planner = Planner(
            session.local,
            session.remote_layout,
            pair_for_read(session.local, self.local, session.remote_layout, self.remote),
            max_span_bytes,
            self.heads.heads_for_read(*ranks),
            max_token_spans,
        )
        return planner.plan()
