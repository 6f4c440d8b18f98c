"""Keeps account of what should happen and what did; the demo's verdict is its list of problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from moriiod.cli.demo.figures import DaemonFigures
from moriiod.cli.demo.messages import Checked, Ended
from moriiod.cli.demo.plan import DemoOptions, DemoRequest, Rank

#: Role, outcome and reason of a transfer that went well, by mode and side.
_GOOD_ENDS = {
    ("read", "prefill"): ("publish", "released", "acked"),
    ("read", "decode"): ("pull", "received", None),
    ("write", "prefill"): ("push", "released", "acked"),
    ("write", "decode"): ("reserve", "received", None),
}


@dataclass(slots=True)
class Audit:
    """The books of one demo.

    Args:
        options: The whole demo.
    """

    options: DemoOptions
    #: What went wrong, in words.
    problems: list[str] = field(default_factory=list)
    requests: list[DemoRequest] = field(default_factory=list)
    #: Bytes that were compared with what the producer wrote.
    verified_bytes: int = 0
    #: Bytes of unused blocks that were looked at.
    canary_bytes: int = 0
    _ends: dict[tuple[Rank, int], list[Ended]] = field(default_factory=dict)
    _checked: set[tuple[Rank, int]] = field(default_factory=set)

    # --- What is said -------------------------------------------------------------------------

    def open(self, request: DemoRequest) -> None:
        """A request starts."""
        self.requests.append(request)

    def ended(self, rank: Rank, end: Ended) -> None:
        """A worker reported the end of a transfer."""
        self._ends.setdefault((rank, end.number), []).append(end)

    def checked(self, rank: Rank, check: Checked) -> None:
        """A worker compared bytes."""
        if check.wrong:
            self.problems.append(f"{rank.name}: {check.wrong}")
        if check.number is None:
            self.canary_bytes += check.n_bytes
        else:
            self.verified_bytes += check.n_bytes
            self._checked.add((rank, check.number))

    def ranks_of(self, request: DemoRequest, side: str) -> list[Rank]:
        """Return the ranks of a request's prefill or decode instance."""
        if side == "prefill":
            return self.options.ranks_of("prefill", request.producer)
        return self.options.ranks_of("decode", request.consumer)

    def without_end(
        self, requests: Iterable[DemoRequest], side: str
    ) -> list[tuple[Rank, DemoRequest]]:
        """Return which ranks have not reported the end of which requests."""
        return [
            (rank, request)
            for request in requests
            for rank in self.ranks_of(request, side)
            if (rank, request.number) not in self._ends
        ]

    def ends(self, requests: Iterable[DemoRequest], side: str) -> list[Ended]:
        """Return the ends that the ranks of one side reported."""
        return [
            end
            for request in requests
            for rank in self.ranks_of(request, side)
            for end in self._ends.get((rank, request.number), ())
        ]

    # --- Judgement ----------------------------------------------------------------------------

    def judge_transfers(self) -> None:
        """Note every transfer that did not end exactly once, well, complete and compared."""
        for request in self.requests:
            for rank in self.ranks_of(request, "prefill"):
                self._judge_end(request, rank)
            for rank in self.ranks_of(request, "decode"):
                self._judge_end(request, rank)
                if (rank, request.number) not in self._checked:
                    self._note(request, rank, "its bytes were not compared")

    def _judge_end(self, request: DemoRequest, rank: Rank) -> None:
        ends = self._ends.get((rank, request.number), [])
        role, outcome, reason = _GOOD_ENDS[request.mode, rank.side]
        if len(ends) != 1:
            self._note(request, rank, f"{role} ended {len(ends)} times, not once")
        for end in ends:
            if (end.role, end.outcome) != (role, outcome) or (reason and end.reason != reason):
                text = f": {end.text}" if end.text else ""
                self._note(request, rank, f"{end.role} {end.outcome} ({end.reason}){text}")
            elif rank.side == "decode" and end.n_bytes != self.bytes_of(request):
                wanted = self.bytes_of(request)
                self._note(request, rank, f"{end.n_bytes} bytes came, not {wanted}")

    def bytes_of(self, request: DemoRequest) -> int:
        """Return what each decode rank gets of a request."""
        return self.options.shape("decode").request_bytes(request.decode_blocks)

    def judge_daemons(self, figures: Mapping[Rank, DaemonFigures]) -> None:
        """Note every daemon whose own books differ from ours."""
        for rank, found in figures.items():
            n_requests = len(self.requests_of(rank))
            ended = found.released if rank.side == "prefill" else found.received
            for what, got, wanted in (
                ("transfers still live", found.live, 0),
                ("transfers in quarantine", found.quarantined, 0),
                ("transfers failed", found.failed, 0),
                ("transfers ended well", ended, n_requests),
            ):
                if got != wanted:
                    self.problems.append(f"daemon {rank.name}: {what}: {got}, not {wanted}")
            expected = self.expected_acks(rank)
            # An ACK is repeated until it is confirmed, so a busy machine sees some twice.
            if found.acks < expected:
                self.problems.append(f"daemon {rank.name}: {found.acks} of {expected} ACKs")

    def requests_of(self, rank: Rank) -> list[DemoRequest]:
        """Return the requests that a rank takes part in."""
        return [request for request in self.requests if rank in self.ranks_of(request, rank.side)]

    def pairs(self) -> dict[str, int]:
        """Return how many requests went from each prefill to each decode instance."""
        counts = Counter((request.producer, request.consumer) for request in self.requests)
        return {f"P{p} to D{d}": count for (p, d), count in sorted(counts.items())}

    def expected_acks(self, rank: Rank) -> int:
        """Return how many ACKs of consumer ranks a rank needs for all its READ requests."""
        if rank.side == "decode":
            return 0
        n_reads = sum(request.mode == "read" for request in self.requests_of(rank))
        return n_reads * len(self.options.heads.ack_set(rank.tp_rank))

    def released_once(self, rank: Rank) -> int:
        """Return how many requests a producer rank has released exactly once."""
        return sum(
            [end.outcome for end in self._ends.get((rank, request.number), [])] == ["released"]
            for request in self.requests_of(rank)
        )

    def _note(self, request: DemoRequest, rank: Rank, what: str) -> None:
        self.problems.append(f"{rank.name} {request.mode} {request.transfer_id}: {what}")
