"""Control links: dialling, handshake, heartbeats. The decode side dials; answers come back.

An endpoint is dialled once, whoever asks. A Hello is repeated until its answer comes, and only the
answer with the nonce of the newest Hello counts (case T6). A link that lost its peer keeps saying
Hello while something waits for that peer, and so finds out that it came back, or who came instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from moriiod.core import topology
from moriiod.core.address import Endpoint
from moriiod.core.context import Context
from moriiod.core.effects import CloseRoute, OpenRoute, SendToPeer
from moriiod.core.faults import to_error, to_wire_error
from moriiod.core.ids import AttemptId, Epoch, Generation, PeerRoute
from moriiod.core.messages import (
    PROTOCOL_VERSIONS,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloRefused,
    Identity,
    UnknownEpoch,
    Welcome,
)
from moriiod.core.peers import Peer, Peers
from moriiod.errors import (
    Busy,
    EngineMismatch,
    InvalidTopology,
    MoriiodError,
    PeerRestarted,
    PeerUnreachable,
    SelfConnect,
    TopologyMismatch,
    VersionMismatch,
    WrongPeer,
)


@dataclass(frozen=True, slots=True)
class Expected:
    """Who should answer at an endpoint; ``tp_size`` is what the request or our default says."""

    dp_rank: int
    tp_rank: int
    tp_size: int


class LinkWaiter(Protocol):
    """Someone who needs a link to a certain rank."""

    def link_up(self, peer: Peer) -> None:
        """The link is up and it is the peer that was meant."""
        ...

    def link_failed(self, error: MoriiodError) -> None:
        """There will be no link."""
        ...


class GenerationSource(Protocol):
    """Names the registered worker generations."""

    def __call__(self) -> tuple[Generation, ...]:
        """Return them, in any order."""
        ...


@dataclass(eq=False)
class Link:
    """One dialled endpoint."""

    endpoint: Endpoint
    route: PeerRoute
    nonce: AttemptId
    hello_pause_s: float
    last_used: float
    #: The peer that answered last, None before the first Welcome.
    peer: Peer | None = None
    waiters: dict[LinkWaiter, Expected] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        """Whether the peer behind the link is alive, as far as we know."""
        return self.peer is not None and self.peer.is_up


class Links:
    """All dialled links, and the answers to those that dial us.

    Args:
        generations: Returns the worker generations that are registered here now.
        engines: Names of our engines, best first.
    """

    def __init__(
        self, ctx: Context, peers: Peers, engines: tuple[str, ...], generations: GenerationSource
    ) -> None:
        self._ctx = ctx
        self._peers = peers
        self._engines = engines
        self._generations = generations
        self._links: dict[Endpoint, Link] = {}
        self._by_route: dict[PeerRoute, Link] = {}
        self._next_route = 1
        #: Counts what we say about our generations, so that late copies are recognised.
        self._beats = 0
        #: Epochs we have welcomed and that have not spoken since, oldest first, bounded.
        self._welcomed: OrderedDict[Epoch, Identity] = OrderedDict()

    def __iter__(self) -> Iterator[Link]:
        return iter(self._links.values())

    def __len__(self) -> int:
        return len(self._links)

    # --- Dialling -----------------------------------------------------------------------------

    def connect(self, endpoint: Endpoint, expected: Expected, waiter: LinkWaiter) -> None:
        """Tell ``waiter`` when the endpoint's peer is there; dial it if need be."""
        link = self._links.get(endpoint)
        if link is None:
            if len(self._links) >= self._ctx.settings.max_peers:
                error = Busy("too many peers", limit="max_peers", retry_after_s=1.0)
                self._ctx.later(lambda: waiter.link_failed(error))
                return
            link = self._open(endpoint)
        link.last_used = self._ctx.now
        if link.is_up and link.peer is not None:
            self._answer(link.peer, expected, waiter)
            return
        link.waiters[waiter] = expected
        key = ("connect", link.route)
        if key not in self._ctx.timers:
            when = self._ctx.now + self._ctx.settings.connect_timeout_s
            self._ctx.timers.set(key, when, lambda: self._time_out(link))
            self._say_hello(link)

    def forget(self, waiter: LinkWaiter, endpoint: Endpoint) -> None:
        """``waiter`` needs the link no more."""
        link = self._links.get(endpoint)
        if link is not None:
            link.waiters.pop(waiter, None)

    def route_failed(self, route: PeerRoute, error: MoriiodError) -> None:
        """The shell cannot open the route."""
        link = self._by_route.get(route)
        if link is not None:
            self._fail_waiters(link, error)
            self._close(link)

    def _open(self, endpoint: Endpoint) -> Link:
        route = f"d:{self._next_route}"
        self._next_route += 1
        link = Link(
            endpoint,
            route,
            self._ctx.new_attempt(),
            self._ctx.settings.resend_first_s,
            self._ctx.now,
        )
        self._links[endpoint] = self._by_route[route] = link
        self._ctx.emit(OpenRoute(route, endpoint.host, endpoint.port))
        return link

    def _close(self, link: Link) -> None:
        for name in ("hello", "connect", "beat"):
            self._ctx.timers.cancel((name, link.route))
        del self._links[link.endpoint]
        del self._by_route[link.route]
        self._ctx.emit(CloseRoute(link.route))

    def _say_hello(self, link: Link) -> None:
        """Start a new handshake; answers to older ones no longer count."""
        link.nonce = self._ctx.new_attempt()
        link.hello_pause_s = self._ctx.settings.resend_first_s
        self._repeat_hello(link)

    def _repeat_hello(self, link: Link) -> None:
        hello = Hello(link.nonce, PROTOCOL_VERSIONS, self._ctx.identity, self._engines)
        self._ctx.emit(SendToPeer(link.route, hello))
        when = self._ctx.now + link.hello_pause_s
        link.hello_pause_s = min(2 * link.hello_pause_s, self._ctx.settings.resend_max_s)
        self._ctx.timers.set(("hello", link.route), when, lambda: self._repeat_hello(link))

    def _time_out(self, link: Link) -> None:
        error = PeerUnreachable(
            "no answer from the peer's control endpoint",
            endpoint=str(link.endpoint),
            waited_s=self._ctx.settings.connect_timeout_s,
        )
        self._fail_waiters(link, error)
        if link.peer is None or not link.peer.users:
            self._close(link)

    def _fail_waiters(self, link: Link, error: MoriiodError) -> None:
        waiters, link.waiters = link.waiters, {}
        for waiter in waiters:
            self._ctx.later(partial(waiter.link_failed, error))

    def _answer(self, peer: Peer, expected: Expected, waiter: LinkWaiter) -> None:
        error = _mismatch(expected, peer.identity)
        if error is None:
            self._ctx.later(lambda: waiter.link_up(peer))
        else:
            self._ctx.later(lambda: waiter.link_failed(error))

    # --- Handshake, dialling side -------------------------------------------------------------

    def on_welcome(self, route: PeerRoute, epoch: Epoch, message: Welcome) -> None:
        """A listener answered our Hello."""
        link = self._by_route.get(route)
        if link is None or message.nonce != link.nonce or message.identity.epoch != epoch:
            self._ctx.problem("stale_handshake", route)
            return
        if epoch == self._ctx.identity.epoch:
            self._refuse(
                link, SelfConnect("this endpoint is ourselves", endpoint=str(link.endpoint))
            )
            return
        if self._peers.is_void(epoch, message.identity):
            self._ctx.problem("stale_epoch", f"welcome of {epoch}")
            return
        if message.version not in PROTOCOL_VERSIONS:
            self._refuse(link, _version_mismatch((message.version,)))
            return
        before = link.peer
        link.peer = self._peers.greet(message.identity, route)
        if before is not None and before.epoch != epoch:
            restarted = PeerRestarted(
                "another epoch answers at the peer's endpoint",
                old_epoch=before.epoch,
                new_epoch=epoch,
            )
            self._peers.void(before, restarted)
        self._ctx.timers.cancel(("hello", route))
        self._ctx.timers.cancel(("connect", route))
        waiters, link.waiters = link.waiters, {}
        for waiter, expected in waiters.items():
            self._answer(link.peer, expected, waiter)
        if ("beat", route) not in self._ctx.timers:
            self._beat(link)

    def on_hello_refused(self, route: PeerRoute, message: HelloRefused) -> None:
        """A listener does not want a link with us."""
        link = self._by_route.get(route)
        if link is None or message.nonce != link.nonce:
            self._ctx.problem("stale_handshake", route)
            return
        self._refuse(link, to_error(message.error))

    def _refuse(self, link: Link, error: MoriiodError) -> None:
        self._fail_waiters(link, error)
        if link.peer is None or not link.peer.users:
            self._close(link)

    def on_unknown_epoch(self, route: PeerRoute, message: UnknownEpoch) -> None:
        """The listener has forgotten us, or is another process than before: shake hands again."""
        link = self._by_route.get(route)
        is_ours = message.seen_epoch == self._ctx.identity.epoch
        if link is not None and is_ours and ("hello", route) not in self._ctx.timers:
            self._say_hello(link)

    # --- Handshake, listening side ------------------------------------------------------------

    def on_hello(self, route: PeerRoute, epoch: Epoch, message: Hello) -> None:
        """Somebody dialled us, or a late Hello of a dead process arrived.

        So a Hello alone changes nothing: only its sender's next message proves that it lives, and
        may end an older epoch of the same rank.
        """
        error = self._objection(epoch, message)
        if error is not None:
            self._ctx.problem("hello_refused", f"{error.code}: {error.message}")
            self._ctx.emit(SendToPeer(route, HelloRefused(message.nonce, to_wire_error(error))))
            return
        version = max(set(message.versions) & set(PROTOCOL_VERSIONS))
        if self._peers.get(epoch) is None:
            self._welcomed[epoch] = message.identity
            self._welcomed.move_to_end(epoch)
            while len(self._welcomed) > self._ctx.settings.max_peers:
                self._welcomed.popitem(last=False)
        welcome = Welcome(message.nonce, version, self._ctx.identity, self._engines)
        self._ctx.emit(SendToPeer(route, welcome))

    def admit(self, route: PeerRoute, epoch: Epoch) -> Peer | None:
        """Return the peer of a welcomed epoch that speaks for the first time, else None."""
        identity = self._welcomed.pop(epoch, None)
        if identity is None or self._peers.is_void(epoch, identity):
            return None
        return self._peers.greet(identity, route)

    def _objection(self, epoch: Epoch, message: Hello) -> MoriiodError | None:
        identity = message.identity
        if identity.epoch == self._ctx.identity.epoch:
            return SelfConnect("you dialled yourself")
        if identity.epoch != epoch or self._peers.is_void(epoch, identity):
            return PeerRestarted("this epoch is over", old_epoch=epoch, new_epoch=identity.epoch)
        if identity.tp_rank >= identity.tp_size or identity.dp_rank >= identity.dp_size:
            return WrongPeer("the rank is not within its size")
        if not set(message.versions) & set(PROTOCOL_VERSIONS):
            return _version_mismatch(message.versions)
        if not set(message.engines) & set(self._engines):
            return EngineMismatch(
                "no engine in common",
                ours=", ".join(self._engines),
                theirs=", ".join(message.engines),
            )
        if self._peers.get(epoch) is None and len(self._peers) >= self._ctx.settings.max_peers:
            return Busy("too many peers", limit="max_peers", retry_after_s=1.0)
        return None

    # --- Heartbeats ---------------------------------------------------------------------------

    def _beat(self, link: Link) -> None:
        peer = link.peer
        idle_s = self._ctx.now - link.last_used
        if peer is not None and (peer.users or link.waiters):
            link.last_used = self._ctx.now
        elif peer is None or not peer.is_up or idle_s >= self._ctx.settings.link_idle_s:
            if not (peer is not None and peer.is_up and self._peers.outbox.count(peer.epoch)):
                self._close(link)
                return
        if link.peer is not None and link.is_up:
            self._beats += 1
            self._peers.send(link.peer.epoch, Heartbeat(self._beats, self._generations()))
        elif ("hello", link.route) not in self._ctx.timers:
            self._say_hello(link)
        when = self._ctx.now + self._ctx.settings.heartbeat_interval_s
        self._ctx.timers.set(("beat", link.route), when, lambda: self._beat(link))

    def on_heartbeat(self, peer: Peer, route: PeerRoute, message: Heartbeat) -> None:
        """The dialling side is alive; say that we are."""
        _note_generations(peer, message.sequence, message.generations)
        self._beats += 1
        reply = HeartbeatReply(self._beats, self._generations())
        self._ctx.emit(SendToPeer(route, reply, to=peer.epoch))

    def on_heartbeat_reply(self, peer: Peer, message: HeartbeatReply) -> None:
        """The listening side is alive."""
        _note_generations(peer, message.sequence, message.generations)


def _note_generations(peer: Peer, sequence: int, generations: tuple[Generation, ...]) -> None:
    if sequence > peer.heartbeat_sequence:  # a repeat or late copy says nothing new
        peer.heartbeat_sequence = sequence
        peer.generations = frozenset(generations)


def _mismatch(expected: Expected, identity: Identity) -> MoriiodError | None:
    try:  # the size that the peer itself registered, whatever a router says (case R6)
        topology.check_dp_rank(expected.dp_rank, identity.dp_size)
    except InvalidTopology as error:
        return error
    if expected.tp_size != identity.tp_size:
        return TopologyMismatch(
            "the request and the peer's handshake disagree on its TP size",
            requested_tp_size=expected.tp_size,
            peer_tp_size=identity.tp_size,
            instance=identity.instance,
        )
    if (expected.dp_rank, expected.tp_rank) != (identity.dp_rank, identity.tp_rank):
        return WrongPeer(
            "another rank answers at this endpoint",
            expected=f"dp {expected.dp_rank} tp {expected.tp_rank}",
            got=f"dp {identity.dp_rank} tp {identity.tp_rank}",
            instance=identity.instance,
        )
    return None


def _version_mismatch(theirs: tuple[int, ...]) -> VersionMismatch:
    return VersionMismatch(
        "no protocol version in common",
        ours=", ".join(map(str, PROTOCOL_VERSIONS)),
        theirs=", ".join(map(str, theirs)),
    )
