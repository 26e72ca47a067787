from __future__ import annotations

import gzip
import math
import os
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from horizonml.engine.clock import StepResult, Totals
from horizonml.errors import PeerLost
from horizonml.job.jobfile import parse
from horizonml.job.schema import Job
from horizonml.machine.host import MachineInfo, device_name, memory_left, memory_used, throttled_seconds
from horizonml.machine.signals import StopRequest
from horizonml.plan.plan import Plan, Stage
from horizonml.rendezvous.identity import Identity
from horizonml.rendezvous.messages import Lost
from horizonml.runtime.worker import Worker, noticed_after
from horizonml.telemetry.http import Limits, MetricsServer
from horizonml.telemetry.metrics import Metrics
from horizonml.telemetry.record import EvaluationRecord, StateSource, StepRecord
from horizonml.telemetry.recorder import Lines
from horizonml.telemetry.run_info import JobFacts, PlanFacts, RunInfo
from tests.web import get


def values(metrics: Metrics) -> dict[str, float]:
    """Every sample as Prometheus would read it: `name{labels}` -> value, without the rank."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            assert sample.labels.pop("rank") == "3"
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def record(number: int) -> StepRecord:
    return StepRecord(
        step=number, epoch=1, time=100.0 + number, wall=0.2, compute=0.1, transfer=0.04, wait=0.06, samples=16,
        batch=64, loss=2.0, metrics={"accuracy": 0.25}, lr=0.1, bytes_sent=30, bytes_received=12, cpu_seconds=0.1,
        rss_bytes=1, divergence=0.5, joules=2.5, links={"previous": (10, 5), "next": (20, 7), "members": (0, 0)},
    )  # fmt: skip


STEP = StepResult(
    Totals(2.0, {"accuracy": 0.25}, 64),
    0.2,
    0.1,
    0.04,
    0.06,
    16,
    16,
    {"previous": (10, 5), "next": (20, 7), "members": (0, 0)},
    0.5,
    [],
)
JOB = parse("{name: digits, parallel: {strategy: pipeline}}", "job")
PLAN = Plan((Stage(0, 3, (0,), (1.0,), send="int8"), Stage(3, 9, (2, 1), (1.0, 1.0))), schedule="1f1b", micro_batches=4)
INFO = RunInfo(
    rank=1,
    started_as_rank=3,
    world_size=3,
    generation=2,
    host="pi-4",
    node="boot/10.0.0.4",
    job=JobFacts.model_validate(JOB.model_dump()),
    layers=["a"],
    rss_idle_bytes=1,
    threads=1,
    cores=4.0,
    memory=1e9,
    machine=MachineInfo("a"),
    versions={"horizonml": "1", "torch": "2"},
    plan=PlanFacts.model_validate(PLAN.to_json()),
    total_steps=40,
    total_epochs=4,
    forecast=0.25,
    expected_memory=6e8,
)


def test_a_worker_tells_how_many_ranks_the_job_was_started_with() -> None:
    metrics = Metrics(3)
    Worker(Job(), Identity(3, 5, "a test"), None, metrics, StopRequest())
    assert values(metrics)["horizonml_world_size_wanted"] == 5


def test_metrics_tell_what_happened() -> None:
    metrics = Metrics(3)
    assert metrics.unready == "starting"
    before = values(metrics)
    assert before["horizonml_ready"] == 0
    assert "horizonml_training_loss" not in before  # not 0, which would be a lie
    assert "horizonml_checkpoint_timestamp_seconds" not in before
    metrics.wanted(5)
    metrics.waiting([4, 2])
    assert metrics.unready == "waiting for rank 2, 4"
    assert values(metrics)["horizonml_waiting_for_rank{peer=4}"] == 1
    metrics.formed(2, 4)
    assert metrics.unready is None
    metrics.started(INFO, JOB, PLAN, done=10)
    metrics.step(record(11), STEP)
    assert "horizonml_gradient_norm" not in values(metrics)
    metrics.step(replace(record(12), gradient_norm=1.5), STEP)
    metrics.evaluation(EvaluationRecord(12, 2, 0.0, 0.3, 1.5, {"accuracy": 0.75}, 10))
    metrics.checkpoint(12, True, 0.4)
    metrics.checkpoint(12, False, 0.4)
    metrics.checkpoint_skipped()
    metrics.lost(2, 5.2)
    metrics.slowdown(1.5)
    now = values(metrics)
    expected = {
        "horizonml_world_size": 4,
        "horizonml_world_size_wanted": 5,
        "horizonml_generation": 2,
        "horizonml_ready": 1,
        "horizonml_stage_info{layers=3-8,member=1,node=pi-4,stage=1,stages=2}": 1,
        "horizonml_plan_step_seconds": 0.25,
        "horizonml_plan_memory_bytes": 6e8,
        "horizonml_slowdown_ratio": 1.5,
        "horizonml_step": 12,
        "horizonml_steps_planned": 40,
        "horizonml_samples_total": 32,
        "horizonml_rank_samples_total": 32,
        "horizonml_training_loss": 2.0,
        "horizonml_training_accuracy_ratio": 0.25,
        "horizonml_held_out_accuracy_ratio": 0.75,
        "horizonml_epoch_duration_seconds": 0.4,
        "horizonml_step_duration_seconds_count": 2,
        "horizonml_step_duration_seconds_bucket{le=0.1}": 0,
        "horizonml_step_duration_seconds_bucket{le=0.25}": 2,
        "horizonml_step_phase_seconds_sum{phase=compute}": 0.2,
        "horizonml_step_phase_seconds_sum{phase=transfer}": 0.08,
        "horizonml_step_phase_seconds_sum{phase=wait}": 0.12,
        "horizonml_bubble_ratio": 0.3,
        "horizonml_gradient_divergence": 0.5,
        "horizonml_gradient_norm": 1.5,
        "horizonml_sent_bytes_total{direction=next}": 40,
        "horizonml_received_bytes_total{direction=previous}": 10,
        "horizonml_checkpoints_total": 1,
        "horizonml_checkpoint_failures_total": 1,
        "horizonml_checkpoint_step": 12,
        "horizonml_checkpoints_skipped_total": 1,
        "horizonml_peers_lost_total": 2,
        "horizonml_loss_notice_seconds_bucket{le=6.0}": 1,
        "horizonml_generations_total": 1,
        "horizonml_complete": 0,
    }
    assert {key: now.get(key) for key in expected} == pytest.approx(expected)
    assert not any("waiting_for_rank" in key for key in now)
    metrics.waiting([])
    assert values(metrics)["horizonml_ready"] == 0
    metrics.completed()
    assert (values(metrics)["horizonml_complete"], values(metrics)["horizonml_ready"], metrics.unready) == (1, 1, None)


def test_faults_are_counted_and_lost_time_grows_while_it_is_lost() -> None:
    now = 100.0
    metrics = Metrics(3, clock=lambda: now)
    before = values(metrics)
    for later in ("goodput_ratio", "loss_notice_seconds", "recovery_seconds"):
        assert not any(later in name for name in before)
    metrics.formed(1, 3)
    for number in (1, 2, 3, 4):
        now += 0.2
        metrics.step(record(number), STEP)
    assert values(metrics)["horizonml_goodput_ratio"] == 1
    now += 5
    metrics.lost(1, 0.0)  # a connection that was closed tells at once
    during = values(metrics)
    assert during["horizonml_lost_seconds_total{cause=outage}"] == pytest.approx(5)
    assert during["horizonml_loss_notice_seconds_count"] == during["horizonml_loss_notice_seconds_bucket{le=6.0}"] == 1
    assert not any("recovery_seconds" in name for name in during)
    now += 1
    metrics.formed(2, 2)
    now += 0.2
    metrics.step(record(4), STEP)
    metrics.recovered(1.2, 1, StateSource.REPLICA)
    now += 2.6
    after = values(metrics)
    expected = {
        "horizonml_generation": 2,
        "horizonml_generations_total": 2,
        "horizonml_peers_lost_total": 1,
        "horizonml_recovery_seconds_sum{source=replica}": 1.2,
        "horizonml_recovery_seconds_bucket{le=2.0,source=replica}": 1,
        "horizonml_steps_repeated_total": 1,
        "horizonml_lost_seconds_total{cause=outage}": 6,
        "horizonml_lost_seconds_total{cause=repeated}": 0.2,
        "horizonml_goodput_ratio": 1 - 6.2 / 9.6,
    }
    assert {key: after.get(key) for key in expected} == pytest.approx(expected)
    assert not any("disk" in name for name in after)
    assert values(metrics)["horizonml_lost_seconds_total{cause=outage}"] == pytest.approx(6)  # looking adds nothing


def test_what_tunnels_carry_is_counted_on_although_a_new_one_begins_from_nothing() -> None:
    metrics, carried = Metrics(3), {}
    metrics.link(lambda: carried)
    assert "horizonml_link_sent_bytes_total" not in values(metrics)
    for sent, total in ((100.0, 100.0), (250.0, 250.0), (40.0, 290.0), (40.0, 290.0)):
        carried["link_sent_bytes"] = sent
        assert values(metrics)["horizonml_link_sent_bytes_total"] == total


def test_a_replica_is_shown_only_where_there_is_one() -> None:
    metrics = Metrics(3)
    names = ("horizonml_replicated", "horizonml_replica_age_steps")
    assert not any(name in values(metrics) for name in names)  # nobody has asked for one
    metrics.replica(7)
    assert values(metrics)["horizonml_replica_age_steps"] == 7
    assert values(metrics)["horizonml_replicated"] == 1
    metrics.replica(None)  # other members hold it
    assert "horizonml_replica_age_steps" not in values(metrics)
    assert values(metrics)["horizonml_replicated"] == 1
    metrics.replica(None, covered=False)
    assert values(metrics)["horizonml_replicated"] == 0


def test_the_metrics_of_any_task_are_shown_and_recorded_under_their_names() -> None:
    metrics, means = Metrics(3), {"mean absolute error": 0.125}
    metrics.step(replace(record(1), metrics=means), STEP)
    metrics.evaluation(EvaluationRecord(1, 1, 0.0, 0.3, 1.5, means, 10))
    now = values(metrics)
    assert now["horizonml_training_mean_absolute_error"] == now["horizonml_held_out_mean_absolute_error"] == 0.125
    assert not any("accuracy" in name for name in now)
    assert replace(record(1), metrics=means).to_json()["mean_absolute_error"] == 0.125
    with pytest.raises(AssertionError, match="rename the task's metric"):
        replace(record(1), metrics={"wall": 1.0}).to_json()


def test_an_evaluation_within_an_epoch_says_so_and_ends_no_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    within = EvaluationRecord(5, 1, 0.0, 0.3, 0.5, {}, 10, within_epoch=True, best=True)
    Lines(8).evaluation(within)
    assert capsys.readouterr().out == "epoch 1/8, step 5: held-out loss 0.5000 (10 samples)\n"
    assert {key: within.to_json()[key] for key in ("within_epoch", "best")} == {"within_epoch": True, "best": True}
    metrics = Metrics(3)
    metrics.started(INFO, JOB, PLAN, done=0)
    for number in (1, 2, 3):
        metrics.step(record(number), STEP)
        if number == 2:
            metrics.evaluation(within)
            assert "horizonml_epoch_duration_seconds" not in values(metrics)
    metrics.evaluation(replace(within, within_epoch=False))
    assert values(metrics)["horizonml_epoch_duration_seconds"] == pytest.approx(0.6)
    metrics.step(replace(record(4), epoch=2), STEP)
    metrics.evaluation(replace(within, within_epoch=False))
    assert values(metrics)["horizonml_epoch_duration_seconds"] == pytest.approx(0.2)


@pytest.mark.parametrize("version", [1, 2])
def test_the_container_is_read_from_its_cgroup(tmp_path: Path, version: int) -> None:
    files = {
        1: {
            "memory/memory.usage_in_bytes": "1000\n",
            "memory/memory.limit_in_bytes": "4000\n",
            "cpu/cpu.stat": "nr_periods 5\nnr_throttled 2\nthrottled_time 1500000000\n",
            "cpu/cpu.cfs_quota_us": "40000\n",
            "cpu/cpu.cfs_period_us": "100000\n",
        },
        2: {
            "memory.current": "1000\n",
            "memory.max": "4000\n",
            "cpu.stat": "usage_usec 9\nthrottled_usec 1500000\n",
            "cpu.max": "40000 100000\n",
        },
    }[version]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = values(Metrics(3, tmp_path))
    assert found["horizonml_memory_used_bytes"] == 1000
    assert found["horizonml_memory_limit_bytes"] == 4000
    assert found["horizonml_cpu_limit_cores"] == 0.4
    assert found["horizonml_cpu_throttled_seconds_total"] == pytest.approx(1.5)
    assert found["horizonml_resident_memory_bytes"] > 1 << 20
    nothing = tmp_path / "nothing"
    assert memory_left(tmp_path) == 3000
    assert memory_used(nothing) is throttled_seconds(nothing) is None
    assert memory_left(nothing) > 3000  # of the machine
    assert "horizonml_memory_used_bytes" not in values(Metrics(3, nothing))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(3)


@pytest.fixture
def port(metrics: Metrics) -> Iterator[int]:
    server = MetricsServer(metrics.registry, ("127.0.0.1", 0), lambda: metrics.unready)
    assert server.port is not None
    yield server.port
    server.close()


def test_the_server_tells_health_readiness_and_metrics(metrics: Metrics, port: int) -> None:
    assert get(port, "/healthz") == (200, "alive\n")
    assert get(port, "/readyz") == (503, "starting\n")
    metrics.waiting([1])
    assert get(port, "/readyz") == (503, "waiting for rank 1\n")
    metrics.formed(1, 2)
    assert get(port, "/readyz") == (200, "ready\n")
    assert 'horizonml_ready{rank="3"} 1.0' in get(port, "/metrics?x=1")[1]
    assert get(port, "/etc/passwd")[0] == 404


def test_metrics_are_compressed_for_those_who_offer_it(port: int) -> None:
    plain = get(port, "/metrics")[1]
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(asked, timeout=5) as response:
        body = response.read()
        assert response.headers["Content-Encoding"] == "gzip"
    assert len(body) < len(plain) / 3  # and a fifth when every metric has a value
    names = {line.split(" ")[0] for line in plain.splitlines()}
    assert {line.split(" ")[0] for line in gzip.decompress(body).decode().splitlines()} == names


def test_a_scrape_of_one_of_five_ranks_is_small_whatever_has_happened(metrics: Metrics, port: int) -> None:
    metrics.wanted(5)
    metrics.formed(2, 5)
    metrics.started(INFO, JOB, PLAN, done=10)
    metrics.link(lambda: {f"link_{what}": 2.5e9 for what in ("sent_bytes", "received_bytes", "cpu_seconds", "refused")})
    for number in range(11, 60):
        metrics.step(replace(record(number), gradient_norm=1 / 3, loss=1 / number), STEP)
    metrics.evaluation(EvaluationRecord(59, 2, 0.0, 1 / 3, 1.5, {"accuracy": 0.75}, 10))
    metrics.checkpoint(59, True, 0.4)
    metrics.slowdown(1 / 3)
    metrics.replica(3)
    metrics.lost(1, 5.2)
    metrics.recovered(1.2, 1, StateSource.REPLICA)
    page = get(port, "/metrics")[1]
    assert len(page) < 8000
    lines = page.splitlines()
    typed = {line.split()[2] for line in lines if line.startswith("#")}
    series = {line.partition("{")[0] for line in lines if not line.startswith("#")}
    assert all(re.sub("_(bucket|sum|count)$", "", name) in typed or name in typed for name in series)
    assert len(typed) <= len(series)  # none without a value
    assert len(gzip.compress(page.encode(), 1)) < 1800


def test_every_loss_has_a_time_to_notice_it() -> None:
    silent = (Lost(1, "pi", "gives no sign of life", 5.2),)
    for lost, timed_out, seconds in (((), False, 0.0), ((), True, 60.0), (silent, True, 5.2)):
        error = PeerLost("rank 1 closed its connection", timed_out=timed_out)
        assert noticed_after(lost, error, step_timeout=60.0) == seconds


def test_a_device_is_called_as_its_user_or_its_cluster_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORIZONML_NAME", "pi\n4 ")
    assert device_name() == "pi 4"
    monkeypatch.setenv("HORIZONML_NAME", "")
    assert device_name() == socket.gethostname()


def test_a_rank_that_is_done_waits_for_the_last_look_of_those_who_come_regularly(metrics: Metrics) -> None:
    server = MetricsServer(metrics.registry, ("127.0.0.1", 0), lambda: None)
    assert server.port is not None
    server.last_look(lambda: pytest.fail("nobody has ever come"))
    get(server.port, "/metrics")
    done = threading.Event()
    waiting = threading.Thread(target=lambda: (server.last_look(lambda: False), done.set()))
    waiting.start()
    assert not done.wait(0.3)
    get(server.port, "/metrics")
    assert done.wait(5)
    server.last_look(lambda: True)  # asked to stop
    server.close()


def test_a_taken_port_is_a_warning_only(port: int, metrics: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    second = MetricsServer(metrics.registry, ("127.0.0.1", port), lambda: None)
    assert second.port is None
    assert f"metrics are not served at 127.0.0.1:{port}: Address already in use" in caplog.text
    second.close()


def test_slow_rude_and_many_clients_do_no_harm(port: int) -> None:
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    idle[0].sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")  # and no more
    idle[1].sendall(b"\x00\xff rubbish\r\n\r\n")
    idle[2].sendall(b"POST /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert get(port, "/metrics")[0] == 200  # which would run into its time-out if it had to wait for one of them
    for connection in idle:
        connection.close()
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(get(port, "/metrics")[0])) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 30


def test_slow_clients_keep_neither_others_out_nor_threads_or_descriptors(metrics: Metrics) -> None:
    server = MetricsServer(metrics.registry, ("127.0.0.1", 0), lambda: metrics.unready, Limits(seconds=1.0))
    port = server.port
    assert port is not None
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    slow = []
    try:
        for number in range(300):  # the beginning of a request, nothing, or one that was answered and left open
            slow.append(socket.create_connection(("127.0.0.1", port), timeout=20))
            slow[-1].sendall((b"GET /metr", b"", b"GET /healthz HTTP/1.1\r\n\r\n")[number % 3])
        assert get(port, "/metrics")[0] == 200
        assert threading.active_count() == before[0]
        assert len(os.listdir("/proc/self/fd")) <= before[1] + len(slow) + 40  # our ends, and a few of the server's
        assert time_until_dropped(slow[297]) < 10
    finally:
        server.close()
        for connection in slow:
            connection.close()


def time_until_dropped(connection: socket.socket) -> float:
    """Send a byte now and then, as long as that is possible."""
    started = time.monotonic()
    try:
        while time.monotonic() - started < 20:
            connection.sendall(b"x")
            time.sleep(0.1)
    except OSError:
        return time.monotonic() - started
    return math.inf


def test_a_large_answer_reaches_a_client_that_reads_slowly(metrics: Metrics, port: int) -> None:
    metrics.waiting(list(range(4096)))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        while part := client.recv(20000):
            received += part
    assert b'peer="4095"' in received
    assert received.endswith(b"\n")
