"""Pods that do not belong to a job: what network policies leave open to them, and what the token leaves to those."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from horizonml.security.token import make_token
from tests.e2e.cluster import CLUSTER, JOB, NAMESPACE, Cluster, complete, overlay
from tests.e2e.conftest import cleaned
from tests.e2e.enforcer import Enforcer
from tests.e2e.tools import IMAGE, run, wait_for

KNOCK = """
import json, socket, sys, time
time.sleep(10)  # until the policies' rules name this pod
found = {}
for target in sys.argv[1:]:
    host, port = target.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 3).close()
        found[target] = "open"
    except TimeoutError:
        found[target] = "silent"
    except OSError as error:
        found[target] = "refused"  # by the machine itself, where nothing listens
print(json.dumps(found))
"""
RANK = {
    "app.kubernetes.io/name": "horizonml", "app.kubernetes.io/component": "worker", "app.kubernetes.io/instance": JOB,
}  # fmt: skip


def run_pod(cluster: Cluster, name: str, space: str, labels: dict[str, str], command: list[str], **env: str) -> str:
    """What a pod prints that runs a command to its end, with all the rights that a job's pods have but their token."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": space, "labels": {**labels, "stranger": "yes"}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "stranger",
                    "image": IMAGE,
                    "command": command,
                    "env": [{"name": key, "value": value} for key, value in env.items()],
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    try:
        where = ("-n", space)
        wait_for(
            lambda: (
                cluster.kubectl(*where, "get", "pod", name, "-o", "jsonpath={.status.phase}") in ("Succeeded", "Failed")
            ),
            f"the end of pod {name}",
            90,
        )
        return cluster.kubectl(*where, "logs", name)
    finally:
        cluster.kubectl("-n", space, "delete", "pod", name, "--grace-period", "1", timeout=60)


def knock(cluster: Cluster, name: str, space: str, labels: dict[str, str], targets: list[str]) -> dict[str, Any]:
    """What a pod finds at each target: "open", "silent" or "refused", once policies know of the pod."""
    return dict(json.loads(run_pod(cluster, name, space, labels, ["python", "-c", KNOCK, *targets])))


def addresses(cluster: Cluster) -> dict[str, str]:
    found = cluster.get("pods")["items"]
    return {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["status"]["podIP"] for pod in found}


@pytest.fixture(scope="module")
def enclosed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Enforcer]:
    """A job that trains while policies are enforced."""
    with cleaned(cluster), Enforcer(cluster) as enforcer:
        # A job of another name, because disks outlive tests, and with them what is trained to the end.
        folder = tmp_path_factory.mktemp("enclosed") / "job"
        cluster.apply(overlay(folder, "dp", 5, name="enclosed", epochs=40))
        wait_for(lambda: (cluster.metric(0, "horizonml_step") or 0) > 0, "the first step", 120)
        yield enforcer


def test_whoever_gets_past_the_policies_needs_the_token(enclosed: Enforcer, cluster: Cluster) -> None:
    rank = {
        "RANK": "1",
        "WORLD_SIZE": "5",
        "HORIZONML_RENDEZVOUS": f"{JOB}-rendezvous:29400",
        "HORIZONML_CACHE": "/tmp",
    }
    command = ["horizonml", "train", "digits", "-n", "5", "--set", "parallel.strategy=ddp"]
    command += ["--set", "rendezvous.timeout=20", "--set", "folder=/tmp/run"]
    wrong = run_pod(cluster, "wrong-token", NAMESPACE, RANK, command, HORIZONML_TOKEN=make_token().text, **rank)
    assert "it has another token" in wrong
    without = run_pod(cluster, "without-token", NAMESPACE, RANK, command, **rank)
    assert "this process has no token" in without
    said = cluster.kubectl("-n", NAMESPACE, "logs", f"deployment/{JOB}-rendezvous")
    assert "turned away a client" in said
    wait_for(lambda: complete(cluster, 5), "the end of a training with all else closed", 180)
    assert cluster.metric(0, "horizonml_generation") == 1


def test_policies_keep_strangers_out_and_let_the_job_train(enclosed: Enforcer, cluster: Cluster) -> None:
    wait_for(lambda: complete(cluster, 5), "the end of a training with all else closed", 180)
    at = addresses(cluster)
    service, metrics = f"{at['rendezvous']}:29400", f"{at['worker']}:9400"
    closed = {service: "silent", metrics: "silent"}
    everything = [service, metrics, f"{at['worker']}:29401"]
    for name, space, labels in (("same-namespace", NAMESPACE, {}), ("same-labels", "default", RANK)):
        found = knock(cluster, name, space, labels, everything)
        assert found == {**closed, everything[-1]: "silent"}, (name, found)
    found = knock(cluster, "monitoring", "horizonml-monitoring", {}, everything)
    assert found == {service: "silent", metrics: "open", everything[-1]: "silent"}
    # A worker reaches the service, and nothing that is not part of its job.
    prometheus = "prometheus.horizonml-monitoring.svc.cluster.local:9090"
    found = knock(cluster, "worker", NAMESPACE, RANK, [service, metrics, prometheus])
    assert found == {service: "open", metrics: "silent", prometheus: "silent"}
    enclosed.stop()
    found = knock(cluster, "without-policies", "default", {}, [service, metrics])
    enforced = found == closed
    print(f"the cluster's own network plugin {'enforces' if enforced else 'does not enforce'} network policies")
    assert enforced or set(found.values()) == {"open"}


def test_status_sees_ranks_that_the_api_server_cannot_reach(enclosed: Enforcer, cluster: Cluster) -> None:
    wait_for(lambda: complete(cluster, 5), "the end of the training", 180)
    # As if the pods were on other nodes, whose network plugin lets nobody in whom the policies do not name.
    rule = ("OUTPUT", "-p", "tcp", "--dport", "9400", "-j", "DROP")
    node = f"{CLUSTER}-control-plane"
    cluster.docker("exec", node, "iptables", "-I", *rule)
    try:
        assert not cluster.metrics(0)
        shown = run(
            sys.executable, "-m", "horizonml", "cluster", "status", "--json", "--context", f"kind-{CLUSTER}",
            env={**os.environ, **cluster.env},
        )  # fmt: skip
    finally:
        cluster.docker("exec", node, "iptables", "-D", *rule)
    rows = json.loads(shown)["ranks"]
    assert [row["phase"] for row in rows] == ["Complete"] * 5
    assert len({row["step"] for row in rows}) == 1
