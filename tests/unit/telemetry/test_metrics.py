"""Metrics: what is counted, and label sets that cannot grow."""

from __future__ import annotations

import random
import timeit
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moriiod.errors import error_classes
from moriiod.telemetry.catalog import ACTIVE, COUNTERS, GAUGES, HISTOGRAMS, INFO
from moriiod.telemetry.metrics import DaemonInfo, GaugeValues, LabelCap, Metrics

INFO_OF_TEST = DaemonInfo("decode-0", 3, 8, 0, 1, "shm", "e" * 32)


def new_metrics(values: GaugeValues | None = None, max_peer_labels: int = 64) -> Metrics:
    return Metrics(INFO_OF_TEST, lambda: values or GaugeValues(), max_peer_labels)


def samples(metrics: Metrics) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def value_of(metrics: Metrics, name: str, **labels: str) -> float:
    found = [v for n, have, v in samples(metrics) if n == name and have == labels]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def n_series(metrics: Metrics) -> int:
    return len({(name, *sorted(labels.items())) for name, labels, _ in samples(metrics)})


def test_an_ended_transfer_is_counted_with_its_time_and_bytes() -> None:
    metrics = new_metrics()
    metrics.transfer_ended("pull", "received", "acked", 0.2, 1000)
    metrics.transfer_ended("publish", "released", "acked", 0.2, 0)
    metrics.transfer_ended("push", "failed", "LEASE_EXPIRED", 9.0, 24)
    transfers = "moriiod_transfers_total"
    assert value_of(metrics, transfers, role="pull", outcome="received", reason="acked") == 1
    assert value_of(metrics, transfers, role="push", outcome="failed", reason="LEASE_EXPIRED") == 1
    assert value_of(metrics, "moriiod_bytes_total", direction="read") == 1000
    assert value_of(metrics, "moriiod_bytes_total", direction="write") == 24
    assert value_of(metrics, "moriiod_transfer_duration_seconds_count", role="push") == 1


def test_every_counter_is_moved_by_its_method() -> None:
    metrics = new_metrics()
    metrics.op_ended("read", True, 0.001)
    metrics.op_ended("write", False, 0.001)
    metrics.peer_bytes("prefill-0", "read", 7)
    metrics.peer_lost("prefill-0")
    metrics.token_spans("prefill-0", 96)
    metrics.request("Publish", True)
    metrics.ack(True)
    metrics.event_sent(is_repeat=True)
    metrics.problem("ipc_malformed_request")
    metrics.early_dropped()
    metrics.loop_lag(-0.1)
    metrics.transfer_ended("pull", "received", "acked", 0.1, 1)
    moved = {name for name, _, value in samples(metrics) if value and name.endswith("_total")}
    assert moved >= {spec.name for spec in COUNTERS}
    for name, labels in (
        ("moriiod_engine_ops_total", {"direction": "write", "result": "failed"}),
        ("moriiod_peers_lost_total", {"peer": "prefill-0"}),
        ("moriiod_protocol_problems_total", {"kind": "ipc_malformed_request"}),
        ("moriiod_loop_lag_seconds_count", {}),
        ("moriiod_op_duration_seconds_count", {"direction": "read"}),
    ):
        assert value_of(metrics, name, **labels) == 1


def test_gauges_are_read_when_somebody_scrapes() -> None:
    values = GaugeValues(clients=1)
    metrics = Metrics(INFO_OF_TEST, lambda: values)
    assert value_of(metrics, "moriiod_clients") == 1
    values = GaugeValues(
        clients=2, quarantined_bytes=4096, is_draining=True, transfers_active={("pull", "open"): 3}
    )
    assert value_of(metrics, "moriiod_clients") == 2
    assert value_of(metrics, "moriiod_quarantined_bytes") == 4096
    assert value_of(metrics, "moriiod_draining") == 1
    assert value_of(metrics, "moriiod_transfers_active", role="pull", state="open") == 3


def test_info_says_which_daemon_it_is() -> None:
    labels = next(have for name, have, _ in samples(new_metrics()) if name == "moriiod_info")
    assert labels["instance"] == "decode-0"
    assert (labels["tp_rank"], labels["tp_size"]) == ("3", "8")


def test_two_daemons_in_one_process_do_not_share_anything() -> None:
    one, two = new_metrics(), new_metrics()
    one.early_dropped()
    assert value_of(two, "moriiod_early_dropped_total") == 0


def traffic(metrics: Metrics, seed: int, n: int) -> None:
    """Transfers of many ids, peers and reasons, and labels that should never have come."""
    dice = random.Random(seed)
    nasty: list[Any] = ["", "x\ny", 'a"b', "\\", "\x00", "é" * 500, None, 5, b"x", ["a"]]
    for number in range(n):
        peer = f"peer-{dice.randrange(500)}"
        role = dice.choice(["publish", "pull", "push", "reserve"])
        reason = dice.choice(["acked", "LEASE_EXPIRED", f"tx-{number}", dice.choice(nasty)])
        metrics.transfer_ended(role, dice.choice(["failed", "released"]), reason, 0.1, 10)
        metrics.peer_bytes(dice.choice([peer, dice.choice(nasty)]), "read", 10)
        metrics.peer_lost(peer)
        metrics.problem(dice.choice(["stale_epoch", f"tx-{number}", dice.choice(nasty)]))
        metrics.request(dice.choice(["Publish", dice.choice(nasty)]), bool(number % 2))


def test_S5_the_number_of_series_does_not_grow_with_traffic(seed: int) -> None:
    metrics = new_metrics(max_peer_labels=16)
    traffic(metrics, seed, 3000)
    after_few = n_series(metrics)
    traffic(metrics, seed + 1, 10_000)
    assert n_series(metrics) == after_few
    peers = {have["peer"] for _, have, _ in samples(metrics) if "peer" in have}
    assert len(peers) == 16 + 1
    assert "other" in peers


def test_S5_no_transfer_or_client_id_is_in_any_label(seed: int) -> None:
    metrics = new_metrics()
    traffic(metrics, seed, 2000)
    text = metrics.render().decode()
    assert "tx-" not in text
    names = {label for spec in (*COUNTERS, *HISTOGRAMS, ACTIVE, *GAUGES) for label in spec.labels}
    assert names <= {"role", "outcome", "reason", "direction", "peer", "result", "type", "kind"} | {
        "delivery",
        "state",
    }


def test_S5_a_scrape_of_a_full_set_takes_less_than_100_ms(seed: int) -> None:
    metrics = new_metrics(max_peer_labels=64)
    traffic(metrics, seed, 5000)
    best = min(timeit.repeat(metrics.render, number=1, repeat=5))
    assert best < 0.1


def test_reasons_are_error_codes_or_other() -> None:
    metrics = new_metrics()
    for code in error_classes():
        metrics.transfer_ended("pull", "failed", code, 0.1, 0)
    metrics.transfer_ended("pull", "failed", "made up", 0.1, 0)
    metrics.transfer_ended("nobody", "nothing", "acked", 0.1, 0)
    reasons = {have["reason"] for _, have, _ in samples(metrics) if "reason" in have}
    assert reasons == {*error_classes(), "other", "acked"}
    assert value_of(
        metrics, "moriiod_transfers_total", role="other", outcome="other", reason="acked"
    )


def test_a_cap_keeps_the_first_and_folds_the_rest() -> None:
    cap = LabelCap(2, str.islower)
    assert [cap(v) for v in ("a", "b", "c", "a", "B", 5)] == [
        "a",
        "b",
        "other",
        "a",
        "other",
        "other",
    ]
    assert LabelCap(0, str.islower)("a") == "other"


def test_states_from_the_core_are_capped_and_summed() -> None:
    many = {("pull", f"state{n}"): 1 for n in range(200)}
    metrics = new_metrics(GaugeValues(transfers_active=many))
    active = [v for name, _, v in samples(metrics) if name == ACTIVE.name]
    assert sum(active) == 200
    assert len(active) <= 65


@pytest.mark.parametrize(
    "spec", [*COUNTERS, *HISTOGRAMS, *GAUGES, ACTIVE, INFO], ids=lambda s: s.name
)
def test_every_metric_has_our_prefix_and_a_sentence(spec: Any) -> None:
    assert spec.name.startswith("moriiod_")
    assert spec.text.endswith(".")
