"""Plays the router: sends each request to a prefill and a decode instance and sees it through."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from moriiod.cli.demo import messages as msg
from moriiod.cli.demo.audit import Audit
from moriiod.cli.demo.fleet import DemoFailed, Fleet
from moriiod.cli.demo.hub import Hub, HubEvent, Said
from moriiod.cli.demo.params import RoutedRequest, forward, route
from moriiod.cli.demo.plan import DemoOptions, DemoRequest, Mode, Rank, plan_waves

#: How long to wait for an event before a producer is asked what it still waits for.
_ASK_AGAIN_S: Final = 0.5
_SHOWN_MISSING: Final = 8


class Progress(Protocol):
    """Where the demo says how far it is."""

    def step(self, text: str) -> None:
        """Something begins."""

    def start(self, mode: Mode, total: int) -> None:
        """So many transfers of one mode begin."""

    def advance(self, done: int) -> None:
        """So many of them have ended."""


@dataclass(slots=True)
class ModeResult:
    """Figures of one mode.

    Attributes:
        seconds: From the first leg of a wave to its last byte, over all waves; checks excluded.
        latencies_s: From a consumer rank's request to its ``received``.
    """

    mode: Mode
    waves: int = 0
    requests: int = 0
    transfers: int = 0
    n_bytes: int = 0
    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)


class Router:
    """Runs the waves of a demo.

    Args:
        fleet: Running.
        hub: Where the workers are heard.
        audit: Gets everything that happens.
        progress: Gets how far it is.
    """

    def __init__(self, fleet: Fleet, hub: Hub, audit: Audit, progress: Progress) -> None:
        self._fleet = fleet
        self._hub = hub
        self._audit = audit
        self._progress = progress
        self._options: DemoOptions = fleet.options
        self._routed: dict[int, RoutedRequest] = {}
        #: Ranks whose prefill of a request is not done (READ: decode waits for them).
        self._prefilling: dict[int, set[Rank]] = {}
        self._returned: dict[int, Mapping[str, object]] = {}
        self._by_number: dict[int, DemoRequest] = {}

    def run(self, mode: Mode) -> ModeResult:
        """Run all requests of one mode.

        Raises:
            DemoFailed: A process ended, or a transfer did not.
        """
        result = ModeResult(mode)
        consumers = self._options.decode_tp
        self._progress.start(mode, self._options.requests * consumers)
        for wave in plan_waves(self._options, mode):
            self._run_wave(wave, result)
            result.waves += 1
            result.requests += len(wave)
        return result

    def _run_wave(self, wave: Sequence[DemoRequest], result: ModeResult) -> None:
        started_at = time.monotonic()
        for request in wave:
            self._audit.open(request)
            self._start(request)
        self._wait_received(wave, result)
        ends = self._audit.ends(wave, "decode")
        result.transfers += len(ends)
        result.n_bytes += sum(end.n_bytes for end in ends)
        result.seconds += max(end.ended_at for end in ends) - started_at
        result.latencies_s += [end.ended_at - end.started_at for end in ends]
        self._wait_released(wave)
        self._check(wave)

    # --- Legs ---------------------------------------------------------------------------------

    def _start(self, request: DemoRequest) -> None:
        routed = route(
            request,
            self._options,
            self._fleet.base_port("prefill", request.producer),
            self._fleet.base_port("decode", request.consumer),
        )
        self._routed[request.number] = routed
        self._by_number[request.number] = request
        if routed.decode is None:
            self._prefill(request, routed)
            return
        # Both legs at once: either may come first.
        if request.number % 2:
            self._prefill(request, routed)
            self._decode(request, routed.decode)
        else:
            self._decode(request, routed.decode)
            self._prefill(request, routed)

    def _prefill(self, request: DemoRequest, routed: RoutedRequest) -> None:
        ranks = self._audit.ranks_of(request, "prefill")
        self._prefilling[request.number] = set(ranks)
        command = msg.Prefill(
            request.number,
            request.mode,
            routed.request_id,
            routed.prefill,
            list(request.prefill_blocks),
        )
        for rank in ranks:
            self._hub.send(rank, command)

    def _decode(self, request: DemoRequest, params: Mapping[str, object]) -> None:
        command = msg.Decode(
            request.number,
            request.mode,
            self._routed[request.number].request_id,
            params,
            list(request.decode_blocks),
            request.producer,
            self._options.prefill_tp,
        )
        for rank in self._audit.ranks_of(request, "decode"):
            self._hub.send(rank, command)

    def _prefilled(self, rank: Rank, done: msg.Prefilled) -> None:
        """A rank has done its prefill; the instance answers the router when all have."""
        if done.params is not None:
            self._returned[done.number] = done.params
        waiting = self._prefilling[done.number]
        waiting.discard(rank)
        request = self._by_number[done.number]
        if not waiting and request.mode == "read":
            self._decode(request, forward(self._returned[done.number]))

    # --- Waiting ------------------------------------------------------------------------------

    def _wait_received(self, wave: Sequence[DemoRequest], result: ModeResult) -> None:
        """Wait until every consumer rank has reported the end of every request."""
        total = sum(len(self._audit.ranks_of(request, "decode")) for request in wave)
        while missing := self._audit.without_end(wave, "decode"):
            self._take(self._next(missing))
            self._progress.advance(result.transfers + total - len(missing))
        self._progress.advance(result.transfers + total)

    def _wait_released(self, wave: Sequence[DemoRequest]) -> None:
        """Wait until every producer rank has reported the end of every request.

        A producer that waits for nothing any more, but has not told of a release, never will:
        that is left to the audit.
        """
        deadline = self._deadline()
        asked: set[Rank] = set()
        silent: set[Rank] = set()
        while missing := [
            pair for pair in self._audit.without_end(wave, "prefill") if pair[0] not in silent
        ]:
            now = time.monotonic()
            event = self._hub.next(min(deadline, now + _ASK_AGAIN_S))
            match event:
                case Said(rank, msg.Open(count)):
                    asked.discard(rank)
                    if not count:
                        silent.add(rank)
                case None:
                    if now >= deadline:
                        raise self._late(missing)
                    for rank in {rank for rank, _ in missing} - asked:
                        self._hub.send(rank, msg.CountOpen())
                        asked.add(rank)
                case _:
                    self._take(event)

    def _check(self, wave: Sequence[DemoRequest]) -> None:
        """Let the workers compare every byte: of the requests, and of the unused blocks."""
        waiting = {rank: 1 for rank in self._options.ranks}
        for request in wave:
            for rank in self._audit.ranks_of(request, "decode"):
                self._hub.send(rank, msg.Verify(request.number))
                waiting[rank] += 1
        for rank in waiting:
            self._hub.send(rank, msg.Sweep())
        while any(waiting.values()):
            event = self._hub.next(self._deadline())
            if event is None:
                late = [rank for rank, count in waiting.items() if count]
                raise DemoFailed(
                    f"not compared within {self._options.timeout_s:g} s: {_names(late)}",
                    tuple(self._fleet.workers[rank] for rank in late),
                )
            self._take(event)
            if isinstance(event, Said) and isinstance(event.message, msg.Checked):
                waiting[event.rank] -= 1

    def _next(self, missing: Sequence[tuple[Rank, DemoRequest]]) -> HubEvent:
        event = self._hub.next(self._deadline())
        if event is None:
            raise self._late(missing)
        return event

    def _take(self, event: HubEvent) -> None:
        match event:
            case Said(rank, msg.Ended() as end):
                self._audit.ended(rank, end)
            case Said(rank, msg.Prefilled() as done):
                self._prefilled(rank, done)
            case Said(rank, msg.Checked() as check):
                self._audit.checked(rank, check)
            case Said(_, msg.Open()):
                return  # the answer to a question that has been settled meanwhile
            case _:
                raise self._fleet.unexpected(event)

    def _late(self, missing: Sequence[tuple[Rank, DemoRequest]]) -> DemoFailed:
        ranks = sorted({rank for rank, _ in missing})
        ids = sorted({request.transfer_id for _, request in missing})
        return DemoFailed(
            f"{len(missing)} transfers did not end within {self._options.timeout_s:g} s: "
            f"ranks {_names(ranks)}; {', '.join(ids[:_SHOWN_MISSING])}",
            tuple(self._fleet.daemons[rank] for rank in ranks),
        )

    def _deadline(self) -> float:
        return time.monotonic() + self._options.timeout_s


def _names(ranks: Sequence[Rank]) -> str:
    return ", ".join(rank.name for rank in ranks)
