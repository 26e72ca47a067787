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
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import CLUSTER, NAMESPACE, Cluster, complete, overlay, ready
from tests.e2e.tools import ROOT, USER, empty_panels, value, wait_for


def test_dp_trains_to_the_end_and_does_not_train_again(clean: Cluster) -> None:
    started = time.monotonic()
    clean.kubectl("apply", "-k", "k8s/dp")
    wait_for(lambda: (clean.metric(0, "horizonml_step") or 0) > 0, "the first step", 120)
    print(f"seconds from apply to the first step: {time.monotonic() - started:.1f}")
    wait_for(lambda: complete(clean, 5), "the end of the training", 180)
    assert ready(clean) == 5
    assert float(clean.metric(0, "horizonml_held_out_accuracy_ratio") or 0) >= 0.95
    for rank, pod in enumerate(clean.pods()):
        (status,) = pod["status"]["containerStatuses"]
        assert status["restartCount"] == 0
        assert f"rank {rank} stays, to be watched" in clean.log(rank)
    wait_for(lambda: value(clean.query, "sum(horizonml_complete)") == 5, "Prometheus seeing all ranks", 60)
    assert value(clean.query, "count(up == 1)") == 5

    # Kubernetes starts a finished rank again: it finds its work done.
    clean.kubectl("-n", NAMESPACE, "delete", "pod", "worker-1", timeout=240)
    wait_for(lambda: ready(clean) == 5 and clean.metric(1, "horizonml_complete") == 1, "worker 1 being ready again", 90)
    assert clean.metric(1, "horizonml_samples_total") == 0
    assert clean.metric(0, "horizonml_generation") == 1

    shown = clean.kubectl(
        "-n", NAMESPACE, "exec", "worker-0", "--", "sh", "-c",
        "id -u; grep -E '^(CapEff|NoNewPrivs)' /proc/1/status; touch /new 2>&1; ls /var/run/secrets 2>&1; true",
    )  # fmt: skip
    assert shown.splitlines()[0] == str(USER)
    assert "CapEff:\t0000000000000000" in shown
    assert "NoNewPrivs:\t1" in shown
    assert "Read-only file system" in shown
    assert "No such file" in shown.splitlines()[-1]  # no service account token


def test_mp_survives_a_deleted_pod_and_scales(clean: Cluster, tmp_path: Path) -> None:
    clean.kubectl("apply", "-k", "k8s/mp")
    wait_for(lambda: complete(clean, 5), "the end of the training", 240)
    stages = {line for rank in range(5) for line in clean.metrics(rank).splitlines() if "stage_info{" in line}
    assert len({line.partition('stage="')[2][0] for line in stages}) == 5

    def restart_workers() -> None:
        # The kubelet may take a minute and more to remove a pod whose process has ended.
        clean.kubectl("-n", NAMESPACE, "delete", "pod", "-l", "app.kubernetes.io/component=worker", timeout=240)

    # More epochs, applied to the same job: it goes on where it was.
    clean.kubectl("apply", "-k", overlay(tmp_path / "longer", "mp", 5, epochs=400))
    restart_workers()
    wait_for(lambda: (clean.metric(0, "horizonml_epoch") or 0) > 10, "the eleventh epoch", 120)
    assert "resumed from step 184 of 9200" in clean.log(0)

    clean.kubectl("-n", NAMESPACE, "delete", "pod", "worker-2", "--wait=false")
    wait_for(lambda: (clean.metric(0, "horizonml_generation") or 0) >= 2, "the group of four", 120)
    wait_for(lambda: (clean.metric(0, "horizonml_generation") or 0) >= 3, "the group with the new pod", 120)
    assert "meeting again" in clean.log(0)
    wait_for(lambda: ready(clean) == 5, "all five being ready", 180)
    wait_for(lambda: clean.metric(0, "horizonml_world_size") == 5, "a group of five", 60)
    assert clean.metric(0, "horizonml_steps_repeated_total") == 0
    wait_for(lambda: not empty_panels(clean.query), "data in every panel", 60)

    # Fewer workers: the job resumes at the new world size, with three stages, and ends.
    before = clean.metric(0, "horizonml_step") or 0
    clean.kubectl("apply", "-k", overlay(tmp_path / "smaller", "mp", 3, epochs=400))
    restart_workers()
    wait_for(lambda: clean.metric(0, "horizonml_world_size") == 3, "a group of three", 120)
    wait_for(lambda: (clean.metric(0, "horizonml_step") or 0) > before, "more steps", 60)
    clean.kubectl("apply", "-k", overlay(tmp_path / "end", "mp", 3, epochs=60))
    restart_workers()
    wait_for(lambda: complete(clean, 3), "the end", 180)
    assert float(clean.metric(0, "horizonml_held_out_accuracy_ratio") or 1) >= 0.95


def test_the_cluster_commands_from_submit_to_delete(cluster: Cluster) -> None:
    space = ("--namespace", "commands", "--context", f"kind-{CLUSTER}")

    def horizonml(*arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "horizonml", "cluster", *arguments, *space]
        result = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **cluster.env},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        shown = result.stdout + result.stderr
        assert result.returncode == code, shown
        assert "Traceback" not in shown
        return shown

    def status() -> dict[str, Any]:
        return dict(json.loads(horizonml("status", "--json")))

    def training(ranks: int) -> bool:
        rows = status()["ranks"]
        return len(rows) == ranks and all(row["phase"] == "Training" and row["samples_per_second"] for row in rows)

    endless = ("--set", "parallel.strategy=pipeline", "--set", "epochs=5000", "--cpu", "300m")
    assert "no job in namespace commands" in horizonml("status", code=1)
    shown = horizonml("submit", "jobs/digits.yaml", "--workers", "3", *endless)
    assert "applied statefulset/worker" in shown
    assert "applied secret/horizonml-token" in shown
    assert "digits: 3 workers, strategy pipeline, namespace commands" in shown
    wait_for(lambda: training(3), "three ranks training", 120)
    rows = status()["ranks"]
    assert [row["stage"] for row in rows] == ["0", "1", "2"]
    assert all(sum(row[part] for part in ("compute", "transfer", "wait")) == pytest.approx(1) for row in rows)
    table = horizonml("status")
    assert "samples/s" in table
    assert f"{CLUSTER}-control-plane" in table
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

    # Fewer workers go on where three were.
    before = status()["ranks"][0]["step"]
    scaled = horizonml("scale", "2")
    assert "its workers save a checkpoint and start again" in scaled
    assert "secret" not in scaled  # the service has the token that it started with
    wait_for(lambda: training(2), "two ranks training", 120)
    assert status()["ranks"][0]["step"] > before

    # What cannot run says why, and what to do.
    def problem() -> str:
        return " ".join(status()["problems"])

    horizonml("submit", "jobs/digits.yaml", "--workers", "2", *endless, "--memory", "900Gi")
    found = wait_for(lambda: "Pending" in str(status()["ranks"]) and problem(), "the lack of memory being seen", 60)
    assert f"asks for memory 900Gi; the nearest node {CLUSTER}-control-plane has" in found
    horizonml("submit", "jobs/digits.yaml", "--workers", "2", *endless, "--image", "horizonml/no-such-image:1")
    found = wait_for(lambda: "cannot be pulled" in problem() and problem(), "the missing image being seen", 90)
    assert "the image horizonml/no-such-image:1 cannot be pulled on node" in found
    secrets = ("-n", "commands", "get", "secret", "horizonml-token")
    token = cluster.kubectl(*secrets, "-o", "jsonpath={.data.token}")
    deleted = horizonml("delete")
    assert "kept: data-worker-0, data-worker-1" in deleted
    assert "deleted secret/horizonml-token" in deleted
    assert "deleted networkpolicy/worker" in deleted
    assert "NotFound" in cluster.kubectl(*secrets, check=False, both=True)
    assert base64.b64decode(token).decode() not in shown + table + deleted
    assert "deleted persistentvolumeclaim/data-worker-0" in horizonml("delete", "--data")
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
    assert "you may not read the StatefulSet worker in namespace commands" in result.stderr
    assert "kubectl auth can-i" in result.stderr
