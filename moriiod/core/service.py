"""Requests of local workers: each gets exactly one reply."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from moriiod.core import requests as req
from moriiod.core.clients import Client
from moriiod.core.effects import ReplyToClient
from moriiod.core.events import RequestReceived
from moriiod.core.faults import to_refused
from moriiod.core.ids import ClientRoute, Role, TransferId
from moriiod.errors import Draining, InvariantViolation, MoriiodError, UnexpectedMessage

if TYPE_CHECKING:
    from moriiod.core.machine import Machine


class _Table(Protocol):
    """All transfers of one role."""

    def abort(self, client: Client, transfer_id: TransferId) -> None:
        """The worker gives a transfer up."""
        ...


class Service:
    """Routes requests to the tables, and errors back to the client."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._ctx = machine.ctx
        self._clients = machine.clients

    def on_request(self, event: RequestReceived) -> None:
        """Serve one request; a refusal is a reply like any other."""
        try:
            reply = self._reply(event)
        except InvariantViolation:
            raise  # a bug of ours is nobody's refusal
        except MoriiodError as error:
            reply = to_refused(error)
        if reply is not None:
            self._ctx.emit(ReplyToClient(event.route, event.sequence, reply))

    def _reply(self, event: RequestReceived) -> req.Reply | None:
        match event.body:
            case req.Ping():
                return req.Done()
            case req.Attach():
                return self._attach(event.route, event.body)
            case req.GetStatus():
                raise UnexpectedMessage("the driver answers this from a snapshot")
            case _:
                return self._reply_to_worker(event)

    def _reply_to_worker(self, event: RequestReceived) -> req.Reply | None:
        client = self._clients.of_route(event.route)
        self._clients.heard(client)
        if isinstance(event.body, req.RegisterCaches):
            self._clients.register(client, (event.route, event.sequence), event.body)
            return None  # answered once the engine has the memory
        self._serve(client, event.body)
        return req.Done()

    def _attach(self, route: ClientRoute, body: req.Attach) -> req.Attached:
        if self._ctx.is_draining:
            raise Draining("the daemon is stopping")
        known = self._clients.get(body.generation)
        is_repeat = known is not None and known.route is not None
        client = self._clients.attach(route, body)
        if not is_repeat:
            self._machine.orphans.adopt(client, body)
        ours = self._ctx.identity
        return req.Attached(
            ours.instance,
            ours.tp_rank,
            ours.tp_size,
            ours.dp_rank,
            ours.dp_size,
            self._machine.engine,
        )

    def _serve(self, client: Client, body: req.Request) -> None:
        match body:
            case req.ConfirmEvents():
                self._clients.confirm_events(client, body.sequence)
            case req.UnregisterCaches():
                self._clients.unregister(client)
            case req.Detach():
                # Answered before the client is gone; then nothing more is sent to it.
                self._ctx.later(partial(self._clients.detach, client))
            case req.Abort():
                self._abort(client, body)
            case _:
                self._transfer(client, body)

    def _transfer(self, client: Client, body: req.Request) -> None:
        machine = self._machine
        match body:
            case req.Publish():
                machine.leases.publish(client, body)
            case req.Pull():
                machine.pulls.pull(client, body)
            case req.Reject():
                machine.pulls.reject(client, body)
            case req.Push():
                machine.pushes.push(client, body)
            case req.LayerReady():
                machine.pushes.layers_ready(client, body)
            case req.Seal():
                machine.pushes.seal(client, body)
            case req.Reserve():
                machine.orphans.check_free(client, body.transfer_id)
                machine.reserves.reserve(client, body)
            case _:
                raise UnexpectedMessage("not allowed here", type=type(body).__name__)

    def _abort(self, client: Client, body: req.Abort) -> None:
        machine = self._machine
        tables: dict[Role, _Table] = {
            "publish": machine.leases,
            "pull": machine.pulls,
            "push": machine.pushes,
            "reserve": machine.reserves,
        }
        tables[body.role].abort(client, body.transfer_id)
