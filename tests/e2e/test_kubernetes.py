"""The manifests in a real cluster, made by `make kind-up`: apply, watch, delete a pod, apply again, scale."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.tools import IMAGE, ROOT, USER, empty_panels, result_of, run, value, wait_for

CLUSTER = "horizonml-e2e"
NAMESPACE = "horizonml"
DISKS = 12


class Cluster:
    """A kind cluster, and how to talk to it."""

    def __init__(self) -> None:
        renamed = {"DOCKER_HOST": "KIND_DOCKER_HOST", "KUBECONFIG": "KIND_KUBECONFIG", "PATH": "KIND_PATH"}
        self.env = {name: os.environ[other] for name, other in renamed.items() if other in os.environ}

    def kubectl(self, *arguments: str, timeout: float = 60, check: bool = True, both: bool = False) -> str:
        command = ("kubectl", "--context", f"kind-{CLUSTER}", *arguments)
        return run(*command, env=self.env, timeout=timeout, check=check, both=both)

    def docker(self, *arguments: str, timeout: float = 120) -> str:
        return run("docker", *arguments, env=self.env, timeout=timeout)

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("-n", NAMESPACE, "get", *arguments, "-o", "json"))

    def pods(self) -> list[Any]:
        """The workers' pods, in the order of ranks."""
        found = self.get("pods", "-l", "app.kubernetes.io/component=worker")["items"]
        return sorted(found, key=lambda pod: pod["metadata"]["name"])

    def metrics(self, rank: int) -> str:
        """What a worker shows at /metrics, or nothing."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/worker-{rank}:9400/proxy/metrics"
        return self.kubectl("get", "--raw", path, check=False)

    def metric(self, rank: int, name: str) -> float | None:
        """One of a worker's metrics without further labels."""
        for line in self.metrics(rank).splitlines():
            if line.startswith(f'{name}{{rank="{rank}"}} '):
                return float(line.split()[-1])
        return None

    def log(self, rank: int) -> str:
        return self.kubectl("-n", NAMESPACE, "logs", f"worker-{rank}", check=False, both=True)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Ask the cluster's Prometheus."""
        service = "/api/v1/namespaces/horizonml-monitoring/services/prometheus:9090/proxy"
        text = self.kubectl(
            "get", "--raw", f"{service}/api/v1/query?query={urllib.parse.quote(expression)}", check=False
        )
        return result_of(text, expression) if text else []


@pytest.fixture(scope="session")
def cluster(image: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """`make kind-up`, and `make kind-down` in the end."""
    made = Cluster()
    options = [f"KIND_CLUSTER={CLUSTER}", "DOCKER_BUILD=true"]  # the image is there already
    load = []
    if "DOCKER_HOST" in made.env:
        bring_image(made, IMAGE, tmp_path_factory.mktemp("image"))
    if "PROMETHEUS_IMAGE" in os.environ:  # no registry: what is not loaded cannot run
        load = [os.environ["PROMETHEUS_IMAGE"]]
        options.append(f"MONITORING={without_grafana(tmp_path_factory.mktemp('monitoring'), load[0])}")
    shown = run("make", "kind-up", *options, f"KIND_LOAD={' '.join(load)}", env=made.env, timeout=400)
    assert "Next: kubectl apply -k k8s/dp" in shown
    prepare_disks(made)
    yield made
    run("make", "kind-down", *options, env=made.env, timeout=120)


def bring_image(cluster: Cluster, image: str, folder: Path) -> None:
    """From the usual Docker daemon to the one that kind uses."""
    run("docker", "save", "--output", str(folder / "image.tar"), image)
    cluster.docker("load", "--input", str(folder / "image.tar"))
    (folder / "image.tar").unlink()


def without_grafana(folder: Path, prometheus: str) -> Path:
    """The monitoring of k8s/kind with another image of Prometheus, and none of Grafana."""
    name, _, tag = prometheus.rpartition(":")
    overlay = {
        "resources": [os.path.relpath(ROOT / "k8s" / "kind", folder)],
        "images": [{"name": "prom/prometheus", "newName": name, "newTag": tag}],
        "replicas": [{"name": "grafana", "count": 0}],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    return folder


def prepare_disks(cluster: Cluster) -> None:
    """Volumes for clusters whose provisioner makes folders that only root may write to, as kind's own does not."""
    classes = json.loads(cluster.kubectl("get", "storageclass", "-o", "json"))["items"]
    if not any(found["provisioner"] == "kubernetes.io/host-path" for found in classes):
        return
    node = f"{CLUSTER}-control-plane"
    for number in range(DISKS):
        path = f"/tmp/disk-{number}"
        cluster.docker("exec", node, "sh", "-c", f"mkdir -p {path} && chmod 777 {path}")
    volumes = [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"disk-{number}"},
            "spec": {
                "storageClassName": "standard",
                "capacity": {"storage": "2Gi"},
                "accessModes": ["ReadWriteOnce"],
                "hostPath": {"path": f"/tmp/disk-{number}"},
            },
        }
        for number in range(DISKS)
    ]
    path = ROOT / "runs" / "e2e-volumes.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": volumes}))
    cluster.kubectl("apply", "-f", str(path))
    path.unlink()


@pytest.fixture
def clean(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, in which the test's jobs are deleted in the end; their disks are kept."""
    yield cluster
    print(cluster.kubectl("-n", NAMESPACE, "get", "pods,pvc", check=False, both=True))
    print(cluster.log(0)[-3000:])
    parts = "statefulset,deployment,service,configmap"
    cluster.kubectl("-n", NAMESPACE, "delete", parts, "-l", "app.kubernetes.io/part-of=horizonml", timeout=120)
    wait_for(lambda: not cluster.pods(), "the end of all pods", 120)


def complete(cluster: Cluster, ranks: int) -> bool:
    return all(cluster.metric(rank, "horizonml_complete") == 1 for rank in range(ranks))


def ready(cluster: Cluster) -> int:
    statuses = [condition for pod in cluster.pods() for condition in pod["status"].get("conditions", [])]
    return sum(condition["type"] == "Ready" and condition["status"] == "True" for condition in statuses)


def overlay(folder: Path, base: str, workers: int, **changes: object) -> str:
    """An overlay over an overlay, as a user would write it: other values in the job, another number of workers."""
    job = yaml.safe_load((ROOT / "k8s" / base / "job.yaml").read_text())
    folder.mkdir(exist_ok=True)
    (folder / "job.yaml").write_text(yaml.safe_dump({**job, **changes}))
    text = (ROOT / "k8s" / base / "kustomization.yaml").read_text()
    text = text.replace("../base", os.path.relpath(ROOT / "k8s" / "base", folder)).replace(
        "count: 5", f"count: {workers}"
    )
    (folder / "kustomization.yaml").write_text(text)
    return str(folder)


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
    clean.kubectl("-n", NAMESPACE, "delete", "pod", "worker-1", timeout=90)
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
        clean.kubectl("-n", NAMESPACE, "delete", "pod", "-l", "app.kubernetes.io/component=worker", timeout=120)

    # More epochs, applied to the same job: it goes on where it was.
    clean.kubectl("apply", "-k", overlay(tmp_path / "longer", "mp", 5, epochs=400))
    restart_workers()
    wait_for(lambda: (clean.metric(0, "horizonml_epoch") or 0) > 10, "the eleventh epoch", 120)
    assert "resumed from step 184 of 9200" in clean.log(0)

    clean.kubectl("-n", NAMESPACE, "delete", "pod", "worker-2", "--wait=false")
    wait_for(lambda: (clean.metric(0, "horizonml_generation") or 0) >= 2, "the group of four", 120)
    wait_for(lambda: (clean.metric(0, "horizonml_generation") or 0) >= 3, "the group with the new pod", 120)
    assert "meeting again" in clean.log(0)
    wait_for(lambda: ready(clean) == 5, "all five being ready", 60)
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
    time.sleep(12)
    follow.send_signal(signal.SIGINT)
    followed, _ = follow.communicate(timeout=20)
    assert follow.returncode == 0, followed
    assert followed.count("rank 0 | epoch") > 2, followed

    # Fewer workers go on where three were.
    before = status()["ranks"][0]["step"]
    assert "its workers save a checkpoint and start again" in horizonml("scale", "2")
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
    assert "kept: data-worker-0, data-worker-1" in horizonml("delete")
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
