"""What a running daemon says about itself: the status document, the pages, the metrics."""

from __future__ import annotations

import asyncio
import io
import json
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq
from rich.console import Console

from moriiod.cli.document import render_document
from moriiod.core.requests import GetStatus, StatusDocument
from moriiod.daemon.app import Daemon
from moriiod.wire.ipc import ReplyFrame, RequestFrame, decode_reply, encode_request
from tests.support.daemons import (
    HOST,
    address_of,
    attached_worker,
    free_base_port,
    running_daemon,
)
from tests.support.shell import RawClient

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


async def ask(context: zmq.Context[zmq.Socket[bytes]], daemon: Daemon) -> dict[str, Any]:
    """Ask for the status as the command line does: without an attach."""
    client = RawClient(context, f"ipc://{daemon.config.socket_path}")
    try:
        client.send(encode_request(RequestFrame(1, GetStatus())))
        reply = decode_reply(await client.reply())
    finally:
        client.close()
    assert isinstance(reply, ReplyFrame)
    assert reply.epoch == daemon.epoch
    assert isinstance(reply.body, StatusDocument)
    document: dict[str, Any] = json.loads(reply.body.json)
    return document


async def get(port: int, path: str) -> tuple[int, str]:
    """Return the status and the body of a page."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), body


async def test_document_has_every_part_that_the_manual_promises(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    table = OPERATIONS.read_text().partition("| Part |")[2].partition("\n\n")[0]
    promised = [
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    ]
    assert len(promised) > 10
    async with running_daemon(tmp_path) as daemon:
        document = await ask(context, daemon)
    assert set(promised) - set(document) == set()


async def test_status_shows_a_transfer_that_waits_and_renders_as_tables(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running_daemon(tmp_path / "p"))
        worker = await stack.enter_async_context(attached_worker(prefill.config.socket_path))
        worker.client.publish("waits", [[1, 2]], lease_s=30.0)
        await worker.client.ping()
        document = await ask(context, prefill)
    assert (document["state"], document["reason"]) == ("ready", "")
    assert document["identity"]["epoch"] == prefill.epoch
    assert document["addresses"]["socket"] == prefill.config.socket_path
    assert document["engine"]["name"] == "shm"
    (client,) = document["clients"]
    assert (client["state"], client["memory"], client["layers"]) == ("attached", "registered", 3)
    (row,) = document["transfers"]["rows"]
    assert (row["transfer_id"], row["role"], row["state"]) == ("waits", "publish", "open")
    assert row["pending_ack_ranks"] == [0]
    assert document["transfers"]["counts"] == [{"role": "publish", "state": "open", "count": 1}]
    (lease,) = document["leases"]["next_to_end"]
    assert 0 < lease["remaining_s"] <= 30
    assert document["limits"]["max_transfers"] == {"limit": 16384, "used": 1}
    output = io.StringIO()
    render_document(document, Console(file=output, width=160))
    assert "waits" in output.getvalue()


async def test_status_after_a_transfer_shows_peers_and_counts(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefill = await enter(running_daemon(tmp_path / "p"))
        decode = await enter(running_daemon(tmp_path / "d"))
        producer = await enter(attached_worker(prefill.config.socket_path))
        consumer = await enter(attached_worker(decode.config.socket_path))
        producer.client.publish("t1", [[1]])
        consumer.client.pull("t1", address_of(prefill), [[1]], [[2]])
        await consumer.end_of("t1", "pull")
        document = await ask(context, decode)
    (peer,) = document["peers"]
    assert (peer["instance"], peer["state"], peer["epoch"]) == ("p", "up", prefill.epoch)
    (link,) = document["links"]
    assert (link["host"], link["port"]) == (HOST, prefill.control_port)
    counters = document["counters"]
    assert counters["transfers"] == [
        {"role": "pull", "outcome": "received", "reason": "acked", "count": 1}
    ]
    assert counters["bytes"] == [{"direction": "read", "count": 3 * 4096}]
    assert counters["peer_bytes"] == [{"peer": "p", "direction": "read", "count": 3 * 4096}]
    assert counters["shells"]["engine_sessions"] == 1


async def test_Z6_garbage_is_counted_and_the_next_good_request_is_served(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    async with running_daemon(tmp_path) as daemon:
        ipc = RawClient(context, f"ipc://{daemon.config.socket_path}")
        tcp = RawClient(context, f"tcp://{HOST}:{daemon.control_port}")
        for frames in ([b""], [b"\xc1"], [b"GET / HTTP/1.1"], [b"x"] * 9, [b"\x01Q", b"Ping"]):
            ipc.send(frames)
            tcp.send([b"", *frames])
        ipc.send(encode_request(RequestFrame(1, GetStatus())))
        reply = decode_reply(await ipc.reply())
        assert isinstance(reply, ReplyFrame)
        document = await ask(context, daemon)
        ipc.close()
        tcp.close()
        assert daemon.health().is_ok
    problems = {row["kind"]: row["count"] for row in document["counters"]["protocol_problems"]}
    assert problems["ipc_malformed_request"] == 5


async def test_pages_follow_the_life_of_the_daemon(tmp_path: Path) -> None:
    port = free_base_port(1)
    more = {"telemetry.metrics_base_port": str(port)}
    async with running_daemon(tmp_path, more) as daemon:
        assert daemon.addresses.metrics == f"{HOST}:{port}"
        assert await get(port, "/healthz") == (200, "ok\n")
        assert await get(port, "/readyz") == (200, "ok\n")
        status, text = await get(port, "/metrics")
        assert status == 200
        assert f'epoch="{daemon.epoch}"' in text
        assert "moriiod_draining 0.0" in text
        async with attached_worker(daemon.config.socket_path) as worker:
            worker.client.publish("t1", [[1]])
            await worker.client.ping()
            daemon.drain(60.0)
            assert await get(port, "/healthz") == (200, "ok\n")
            assert await get(port, "/readyz") == (503, "draining\n")
            text = (await get(port, "/metrics"))[1]
            assert "moriiod_draining 1.0" in text
            assert 'moriiod_transfers_active{role="publish",state="open"} 1.0' in text


@pytest.mark.parametrize("name", ["rank0.sock", "rank0.fd.sock"])
async def test_S4_socket_file_that_disappears_turns_the_daemon_unhealthy(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moriiod.daemon.app._PATH_INTERVAL_S", 0.01)
    port = free_base_port(1)
    more = {"telemetry.metrics_base_port": str(port)}
    async with running_daemon(tmp_path, more) as daemon:
        (tmp_path / name).unlink()
        while daemon.health().is_ok:
            await get(port, "/readyz")
        status, text = await get(port, "/healthz")
        assert (status, name in text) == (503, True)
        assert json.loads(daemon.render_status())["state"] == "unhealthy"
