"""The manifests in a real cluster, made by `make kind-up`: apply, watch, delete a pod, apply again, scale."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import CLUSTER, NAMESPACE, Cluster, complete, overlay, ready
from tests.e2e.tools import ROOT, USER, empty_panels, value, wait_for


def test_dp_trains_to_the_end_and_is_replaced_by_mp(clean: Cluster) -> None:
    started = time.monotonic()
    clean.apply("k8s/dp")
    wait_for(lambda: (clean.metric(0, "horizonml_step") or 0) > 0, "the first step", 120)
    print(f"seconds from apply to the first step: {time.monotonic() - started:.1f}")
    again = clean.apply("k8s/dp").splitlines()  # which completes what Kubernetes adds
    again = clean.apply("k8s/dp").splitlines()
    assert [line for line in again if not line.endswith("unchanged")] == []
    wait_for(lambda: complete(clean, 5), "the end of the training", 180)
    assert ready(clean) == 5
    assert float(clean.metric(0, "horizonml_held_out_accuracy_ratio") or 0) >= 0.95
    for rank, pod in enumerate(clean.pods()):
        (status,) = pod["status"]["containerStatuses"]
        assert status["restartCount"] == 0
        assert f"rank {rank} stays, to be watched" in clean.log(rank)
    wait_for(lambda: value(clean.query, "sum(horizonml_complete)") == 5, "Prometheus seeing all ranks", 60)
    assert value(clean.query, 'count(up{job="digits"} == 1)') == 5

    # Kubernetes starts a finished rank again: it finds its work done.
    clean.kubectl("-n", NAMESPACE, "delete", "pod", "digits-worker-1", timeout=240)
    wait_for(lambda: ready(clean) == 5 and clean.metric(1, "horizonml_complete") == 1, "worker 1 being ready again", 90)
    assert clean.metric(1, "horizonml_samples_total") == 0
    assert clean.metric(0, "horizonml_generation") == 1

    shown = clean.kubectl(
        "-n", NAMESPACE, "exec", "digits-worker-0", "--", "sh", "-c",
        "id -u; grep -E '^(CapEff|NoNewPrivs)' /proc/1/status; touch /new 2>&1; true",
    )  # fmt: skip
    assert shown.splitlines()[0] == str(USER)
    assert "CapEff:\t0000000000000000" in shown
    assert "NoNewPrivs:\t1" in shown
    assert "Read-only file system" in shown
    # What a worker may do in the cluster: nothing but to show its progress.
    own = "statefulsets.apps/digits-worker"
    rights = {
        ("patch", own, "--subresource=status"): "yes", ("patch", own): "no", ("create", "events"): "yes",
        ("patch", own, "--subresource=scale"): "no",
        ("get", "secrets"): "no", ("patch", "statefulsets.apps/other", "--subresource=status"): "no",
    }  # fmt: skip
    account = f"--as=system:serviceaccount:{NAMESPACE}:digits-worker"
    for asked, answer in rights.items():
        assert clean.kubectl("-n", NAMESPACE, "auth", "can-i", *asked, account, check=False).strip() == answer, asked

    # Another job of the same name takes its place, without more than that it is applied.
    clean.apply("k8s/mp")
    wait_for(lambda: "trains stage 4 of 5" in clean.log(3), "the pipeline", 240)
    wait_for(lambda: complete(clean, 5), "the end of the pipeline's training", 240)
    stages = {line for rank in range(5) for line in clean.metrics(rank).splitlines() if "stage_info{" in line}
    assert len({line.partition('stage="')[2][0] for line in stages}) == 5

    clean.kubectl("delete", "-k", "k8s/mp", "--ignore-not-found", check=False, both=True, timeout=240)
    assert len(clean.get("pvc")["items"]) >= 5
    assert clean.get("secret", "digits-token")["data"]
    assert clean.kubectl("get", "namespace", NAMESPACE, "-o", "jsonpath={.status.phase}") == "Active"


def test_mp_survives_a_deleted_pod_and_scales_while_it_trains(clean: Cluster, tmp_path: Path) -> None:
    clean.apply(overlay(tmp_path / "long", "mp", 4, name="scaled", epochs=4000))
    wait_for(lambda: (clean.metric(0, "horizonml_epoch") or 0) > 2, "the third epoch", 180)

    clean.kubectl("-n", NAMESPACE, "delete", "pod", "digits-worker-2", "--wait=false")
    wait_for(lambda: (clean.metric(0, "horizonml_generation") or 0) >= 2, "the group of three", 120)
    wait_for(lambda: (clean.metric(0, "horizonml_generation") or 0) >= 3, "the group with the new pod", 120)
    assert "meeting again" in clean.log(0)
    wait_for(lambda: ready(clean) == 4, "all four being ready", 180)

    def scale(workers: int) -> None:
        before = clean.metric(0, "horizonml_step") or 0
        started = time.monotonic()
        clean.kubectl("-n", NAMESPACE, "scale", "statefulset", "digits-worker", f"--replicas={workers}")
        wait_for(lambda: clean.metric(0, "horizonml_world_size") == workers, f"a group of {workers}", 120)
        print(f"seconds to a group of {workers}: {time.monotonic() - started:.1f}")
        wait_for(lambda: (clean.metric(0, "horizonml_step") or 0) > before + 5, "more steps", 60)

    scale(5)
    wait_for(lambda: not empty_panels(clean.query), "data in every panel", 120)
    scale(3)
    assert clean.metric(0, "horizonml_steps_repeated_total") == 0
    assert all(pod["status"]["containerStatuses"][0]["restartCount"] == 0 for pod in clean.pods())

    # Fewer epochs, applied to the same job: it goes on where it was, and ends.
    done = int((clean.metric(0, "horizonml_epoch") or 0) + 40)
    clean.apply(overlay(tmp_path / "end", "mp", 3, name="scaled", epochs=done))
    wait_for(lambda: "resumed from step" in clean.log(0), "the workers being replaced", 300)
    wait_for(lambda: complete(clean, 3), "the end", 240)
    assert float(clean.metric(0, "horizonml_held_out_accuracy_ratio") or 1) >= 0.95


@pytest.mark.longest
def test_six_jobs_in_one_namespace_do_not_notice_each_other(clean: Cluster) -> None:
    horizonml = commands(clean, "--namespace", NAMESPACE)
    jobs = {f"job-{number}": 2 + number % 2 for number in range(6)}
    for name, workers in jobs.items():
        epochs = 60 if name in ("job-0", "job-1", "job-2") else 25  # those that something happens to
        options = ("--set", "parallel.strategy=ddp", "--set", f"epochs={epochs}", "--memory", "700Mi")
        horizonml("submit", "jobs/digits.yaml", "--name", name, "--workers", str(workers), *options)

    def figures(job: str, name: str) -> float:
        return clean.metric(0, f"horizonml_{name}", job) or 0

    wait_for(lambda: all(figures(job, "epoch") > 2 for job in jobs), "all six training", 300)
    listed = horizonml("list")
    assert all(name in listed for name in jobs)
    # One is killed, one grows, one is replaced.
    kill = "import os; [os.kill(int(p), 9) for p in os.listdir('/proc') if p.isdigit() and int(p) > 1 and " \
        "b'train' in open(f'/proc/{p}/cmdline', 'rb').read()]"  # fmt: skip
    clean.kubectl("-n", NAMESPACE, "exec", "job-0-worker-1", "--", "python", "-c", kill, check=False, both=True)
    horizonml("scale", "job-1", "2")
    other = ("--set", "parallel.strategy=pipeline", "--set", "epochs=40", "--memory", "700Mi")
    replaced = ("submit", "jobs/digits.yaml", "--name", "job-2", "--workers", "2", *other)
    assert "parallel.strategy: ddp -> pipeline" in horizonml(*replaced, code=2)
    horizonml(*replaced, "--replace")
    wait_for(lambda: figures("job-0", "generation") >= 3, "the killed worker being back", 240)
    wait_for(lambda: figures("job-1", "world_size") == 2, "a group of two", 120)
    jobs["job-1"] = 2
    for name, workers in jobs.items():
        wait_for(lambda: complete(clean, workers, name), f"the end of {name}", 600)  # noqa: B023
    for name in ("job-3", "job-4", "job-5"):
        assert figures(name, "generation") == 1
        assert all(pod["status"]["containerStatuses"][0]["restartCount"] == 0 for pod in clean.pods(name))
    assert figures("job-0", "steps_repeated_total") == figures("job-1", "steps_repeated_total") == 0
    assert horizonml("status", "job-0").count("Complete") == 2
    for name in jobs:
        assert f"deleted persistentvolumeclaim/data-{name}-worker-0" in horizonml("delete", name, "--data")


def ended(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of `horizonml cluster` that has ended."""
    command = [sys.executable, "-m", "horizonml", "cluster", *arguments, "--context", f"kind-{CLUSTER}"]
    env = {**os.environ, **cluster.env}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)


def commands(cluster: Cluster, *options: str) -> Callable[..., str]:
    """What runs `horizonml cluster` with these options."""

    def horizonml(*arguments: str, code: int = 0) -> str:
        result = ended(cluster, *arguments, *options)
        shown = result.stdout + result.stderr
        assert result.returncode == code, shown
        assert "Traceback" not in shown
        return shown

    return horizonml


def test_a_job_is_submitted_from_inside_the_cluster_by_an_account_with_few_rights(clean: Cluster) -> None:
    clean.kubectl("-n", NAMESPACE, "apply", "-f", "k8s/submitter.yaml")
    try:
        wait_for(lambda: (clean.metric(0, "horizonml_step", "from-inside") or 0) > 0, "the first step", 120)
        print(clean.kubectl("-n", NAMESPACE, "logs", "job/submit-digits", check=False, both=True))
    finally:
        clean.kubectl("-n", NAMESPACE, "delete", "-f", "k8s/submitter.yaml", timeout=120)


def test_the_cluster_commands_from_submit_to_delete(cluster: Cluster) -> None:
    space = ("--namespace", "commands", "--context", f"kind-{CLUSTER}")
    horizonml = commands(cluster, "--namespace", "commands")

    def status() -> dict[str, Any]:
        result = ended(cluster, "status", "--json", "--namespace", "commands")
        found = dict(json.loads(result.stdout))
        assert result.returncode == (1 if found["problems"] else 0), result.stderr
        return found

    def training(ranks: int) -> bool:
        rows = status()["ranks"]
        return len(rows) == ranks and all(row["phase"] == "Training" and row["samples_per_second"] for row in rows)

    endless = ("--set", "parallel.strategy=pipeline", "--set", "epochs=5000", "--cpu", "300m")
    assert "no job in namespace commands" in horizonml("status", code=1)
    shown = horizonml("submit", "jobs/digits.yaml", "--workers", "3", *endless)
    assert "applied statefulset/digits-worker" in shown
    assert "applied secret/digits-token" in shown
    assert "digits: 3 workers, strategy pipeline, namespace commands" in shown
    wait_for(lambda: training(3), "three ranks training", 120)
    rows = status()["ranks"]
    assert [row["stage"] for row in rows] == ["0", "1", "2"]
    assert all(sum(row[part] for part in ("compute", "transfer", "wait")) == pytest.approx(1) for row in rows)
    table = horizonml("status")
    assert "samples/s" in table
    assert f"{CLUSTER}-" in table
    assert "rank 0 | epoch" in horizonml("logs", "--tail", "3")

    follow = subprocess.Popen(
        [sys.executable, "-m", "horizonml", "cluster", "logs", "--follow", "--tail", "1", *space],
        cwd=ROOT,
        env={**os.environ, **cluster.env, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert follow.stdout is not None
    too_late = threading.Timer(120, follow.kill)
    too_late.start()
    lines: list[str] = []
    while "".join(lines).count("rank 0 | epoch") < 3:
        lines.append(follow.stdout.readline())
        assert lines[-1], lines
    too_late.cancel()
    follow.send_signal(signal.SIGINT)
    followed, _ = follow.communicate(timeout=60)
    assert follow.returncode == 0, followed

    # Fewer workers go on where three were, and nobody is restarted.
    before = status()["ranks"][0]["step"]
    assert "3 workers become 2, while they train" in horizonml("scale", "digits", "2")
    wait_for(lambda: training(2), "two ranks training", 120)
    assert status()["ranks"][0]["step"] > before

    # What cannot run says why, and what to do.
    def problem() -> str:
        return " ".join(status()["problems"])

    horizonml("submit", "jobs/digits.yaml", "--workers", "2", *endless, "--memory", "900Gi", "--replace")
    found = wait_for(
        lambda: "Pending" in str(status()["ranks"]) and "memory" in problem() and problem(),
        "the lack of memory being seen",
        60,
    )
    assert f"asks for memory 900Gi; the nearest node {CLUSTER}-" in found
    horizonml(
        "submit", "jobs/digits.yaml", "--workers", "2", *endless, "--image", "horizonml/no-such-image:1", "--replace"
    )
    found = wait_for(lambda: "cannot be pulled" in problem() and problem(), "the missing image being seen", 90)
    assert "the image horizonml/no-such-image:1 cannot be pulled on node" in found
    secrets = ("-n", "commands", "get", "secret", "digits-token")
    token = cluster.kubectl(*secrets, "-o", "jsonpath={.data.token}")
    deleted = horizonml("delete", "digits")
    assert "kept: data-digits-worker-0, data-digits-worker-1" in deleted
    assert "deleted secret/digits-token" in deleted
    assert "deleted networkpolicy/digits-worker" in deleted
    assert "NotFound" in cluster.kubectl(*secrets, check=False, both=True)
    assert base64.b64decode(token).decode() not in shown + table + deleted
    assert "deleted persistentvolumeclaim/data-digits-worker-0" in horizonml("delete", "digits", "--data")
    assert "no job in namespace commands" in horizonml("logs", code=1)

    # Somebody without rights is told so.
    cluster.kubectl("-n", "commands", "create", "serviceaccount", "nobody")
    secrets = json.loads(cluster.kubectl("-n", "commands", "get", "secrets", "-o", "json"))["items"]
    tokens = [s["data"]["token"] for s in secrets if s["metadata"]["name"].startswith("nobody-token")]
    if tokens:  # newer clusters make no such secret by themselves
        token = base64.b64decode(tokens[0]).decode()
    else:
        token = cluster.kubectl("-n", "commands", "create", "token", "nobody").strip()
    config = json.loads(cluster.kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    config["users"][0]["user"] = {"token": token}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        command = [sys.executable, "-m", "horizonml", "cluster", "status", "--namespace", "commands"]
        env = {**os.environ, "KUBECONFIG": file.name}
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "you may not list the deployments in namespace commands" in result.stderr
    assert "kubectl auth can-i" in result.stderr
