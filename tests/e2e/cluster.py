"""The kind cluster of the end-to-end tests, and what they ask it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.tools import ROOT, run

CLUSTER = "horizonml-e2e"
NAMESPACE, JOB = "horizonml", "digits"  # of the overlays
DISKS = 60


class Cluster:
    """A kind cluster, and how to talk to it."""

    def __init__(self) -> None:
        renamed = {"DOCKER_HOST": "KIND_DOCKER_HOST", "KUBECONFIG": "KIND_KUBECONFIG", "PATH": "KIND_PATH"}
        self.env = {name: os.environ[other] for name, other in renamed.items() if other in os.environ}

    def kubectl(
        self, *arguments: str, timeout: float = 60, check: bool = True, both: bool = False, stdin: str | None = None
    ) -> str:
        command = ("kubectl", "--context", f"kind-{CLUSTER}", *arguments)
        return run(*command, env=self.env, timeout=timeout, check=check, both=both, stdin=stdin)

    def docker(self, *arguments: str, timeout: float = 120) -> str:
        return run("docker", *arguments, env=self.env, timeout=timeout)

    def nodes(self) -> list[str]:
        """The containers that are the cluster's nodes."""
        return self.docker("ps", "--format", "{{.Names}}", "--filter", f"label=io.x-k8s.kind.cluster={CLUSTER}").split()

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("-n", NAMESPACE, "get", *arguments, "-o", "json"))

    def apply(self, folder: str) -> str:
        """`kubectl apply -k`; clusters before 1.21 get the PodDisruptionBudget in the version that they know."""
        if "policy/v1\n" in self.kubectl("api-versions") + "\n":
            return self.kubectl("apply", "-k", folder)
        made = run("kubectl", "kustomize", folder).replace("apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n")
        return self.kubectl("apply", "-f", "-", stdin=made)

    def token(self, job: str = JOB) -> None:
        """Make the Secret with a job's token, unless it is there."""
        secret = run(sys.executable, "scripts/new_token.py", "secret", job)
        self.kubectl("-n", NAMESPACE, "create", "-f", "-", stdin=secret, check=False, both=True)

    def pods(self, job: str = JOB) -> list[Any]:
        """A job's workers' pods, in the order of ranks."""
        found = self.get("pods", "-l", f"app.kubernetes.io/component=worker,app.kubernetes.io/instance={job}")["items"]
        return sorted(found, key=lambda pod: pod["metadata"]["name"])

    def metrics(self, rank: int, job: str = JOB) -> str:
        """What a worker shows at /metrics, or nothing."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{job}-worker-{rank}:9400/proxy/metrics"
        return self.kubectl("get", "--raw", path, check=False)

    def metric(self, rank: int, name: str, job: str = JOB) -> float | None:
        """One of a worker's metrics without further labels."""
        for line in self.metrics(rank, job).splitlines():
            if line.startswith(f'{name}{{rank="{rank}"}} '):
                return float(line.split()[-1])
        return None

    def log(self, rank: int, job: str = JOB) -> str:
        return self.kubectl("-n", NAMESPACE, "logs", f"{job}-worker-{rank}", check=False, both=True)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Ask the cluster's Prometheus."""
        # In its own container, because policies keep others away, the API server's proxy included.
        inside = ("-n", "horizonml-monitoring", "exec", "deployment/prometheus", "--")
        asked = ("promtool", "query", "instant", "-o", "json", "http://localhost:9090", expression)
        text = self.kubectl(*inside, *asked, check=False)
        return list(json.loads(text)) if text else []


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
    # As in kind: a disk is chosen once its pod has a node with room for it.
    cluster.kubectl("delete", "storageclass", "standard")
    default = {"name": "standard", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
    later = {
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": default,
        "provisioner": "kubernetes.io/no-provisioner", "volumeBindingMode": "WaitForFirstConsumer",
    }  # fmt: skip
    nodes = [node for node in cluster.nodes() if not node.endswith("-control-plane")] or cluster.nodes()
    script = f"for n in $(seq 0 {DISKS - 1}); do mkdir -p /tmp/disk-$n; chmod 777 /tmp/disk-$n; done"
    for node in cluster.nodes():
        cluster.docker("exec", node, "sh", "-c", script)
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
                "nodeAffinity": {  # where its files are
                    "required": {
                        "nodeSelectorTerms": [
                            {
                                "matchExpressions": [
                                    {
                                        "key": "kubernetes.io/hostname",
                                        "operator": "In",
                                        "values": [nodes[number % len(nodes)]],
                                    }
                                ]
                            }
                        ]
                    }
                },
            },
        }
        for number in range(DISKS)
    ]
    path = ROOT / "runs" / "e2e-volumes.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": [later, *volumes]}))
    cluster.kubectl("apply", "-f", str(path))
    path.unlink()


def complete(cluster: Cluster, ranks: int, job: str = JOB) -> bool:
    return all(cluster.metric(rank, "horizonml_complete", job) == 1 for rank in range(ranks))


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
