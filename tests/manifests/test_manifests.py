"""The manifests as `kubectl kustomize` renders them, against the schemas of the oldest and the newest Kubernetes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from horizonml.job.jobfile import load
from tests.programs import need

ROOT = Path(__file__).resolve().parents[2]
OLDEST = "1.28"
OVERLAYS = ["dp", "mp", "hybrid"]
COMPONENTS = ["monitoring", "monitoring-standalone", "network-policy", "jetson"]
CUSTOM = ("monitoring.coreos.com/v1",)  # of the Prometheus operator: not in Kubernetes' schemas


@pytest.fixture(autouse=True)
def kubectl() -> None:
    need("kubectl", "it renders the manifests as users apply them")


def render(folder: Path) -> list[dict[str, Any]]:
    result = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # no deprecated fields
    return [document for document in yaml.safe_load_all(result.stdout) if document]


def with_components(tmp_path: Path, base: str, components: list[str]) -> Path:
    """An overlay as a user writes it, with components."""
    relative = Path("k8s")
    copy = tmp_path / "k8s"
    shutil.copytree(ROOT / relative, copy)
    shutil.copytree(ROOT / "grafana", tmp_path / "grafana")
    path = copy / base / "kustomization.yaml"
    values = yaml.safe_load(path.read_text())
    values["components"] = [f"../components/{name}" for name in components]
    path.write_text(yaml.safe_dump(values))
    return path.parent


def find(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


def validate(documents: list[dict[str, Any]]) -> None:
    for document in documents:
        if document["apiVersion"] in CUSTOM:
            continue
        for version in (OLDEST, kubernetes_validate.latest_version()):
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("folder", [*OVERLAYS, "kind"])
def test_what_users_apply_is_valid(folder: str) -> None:
    validate(render(ROOT / "k8s" / folder))


@pytest.mark.parametrize("component", COMPONENTS)
def test_components_can_be_added(tmp_path: Path, component: str) -> None:
    documents = render(with_components(tmp_path, "dp", [component]))
    validate(documents)
    assert len(documents) > len(render(ROOT / "k8s" / "dp")) or component == "jetson"


def test_the_job_component_takes_the_place_of_the_stateful_set() -> None:
    documents = render(ROOT / "k8s" / "job")
    validate(documents)
    assert not [d for d in documents if d["kind"] == "StatefulSet"]
    job, workers = find(documents, "Job", "worker"), find(render(ROOT / "k8s" / "dp"), "StatefulSet", "worker")
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (5, 5, "Indexed")
    # All but what a Job must have otherwise is the same.
    ours, theirs = (d["spec"]["template"]["spec"] for d in (job, workers))
    ours, theirs = dict(ours), dict(theirs)
    for container in (ours["containers"][0], theirs["containers"][0]):
        container["env"] = [entry for entry in container["env"] if entry["name"] != "POD_INDEX"]
        container["args"] = container["args"][:2]
    for key in ("restartPolicy", "subdomain", "volumes"):
        ours.pop(key), theirs.pop(key, None)
    assert ours == theirs


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_conventions(overlay: str) -> None:
    documents = render(ROOT / "k8s" / overlay)
    workers, service = find(documents, "StatefulSet", "worker"), find(documents, "Service", "worker")
    assert workers["spec"]["podManagementPolicy"] == "Parallel"
    assert workers["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    for document in documents:
        assert document["metadata"]["labels"]["app.kubernetes.io/part-of"] == "horizonml"
        if document["kind"] not in ("StatefulSet", "Deployment"):
            continue
        selector = document["spec"]["selector"]["matchLabels"]
        assert "app.kubernetes.io/part-of" not in selector
        pod = document["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = pod["containers"]
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert "livenessProbe" not in container
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
        assert not container["image"].endswith(":latest")
    (worker,) = workers["spec"]["template"]["spec"]["containers"]
    env = {entry["name"]: entry for entry in worker["env"]}
    assert env["WORLD_SIZE"]["value"] == str(workers["spec"]["replicas"])
    assert env["OMP_NUM_THREADS"]["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"
    assert "--stay" in worker["args"]
    namespace = find(documents, "Namespace", "horizonml")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_number_of_replicas_is_the_one_knob(tmp_path: Path, overlay: str) -> None:
    folder = with_components(tmp_path, overlay, [])
    path = folder / "kustomization.yaml"
    path.write_text(path.read_text().replace("count: 5", "count: 3"))
    workers = find(render(folder), "StatefulSet", "worker")
    (worker,) = workers["spec"]["template"]["spec"]["containers"]
    assert workers["spec"]["replicas"] == 3
    assert {entry["name"]: entry.get("value") for entry in worker["env"]}["WORLD_SIZE"] == "3"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_job_files_are_valid_and_what_the_overlay_says(overlay: str) -> None:
    job = load(ROOT / "k8s" / overlay / "job.yaml", [])
    assert job.parallel.strategy == {"dp": "ddp", "mp": "pipeline", "hybrid": "hybrid"}[overlay]
    data = next(d for d in render(ROOT / "k8s" / overlay) if d["kind"] == "ConfigMap")["data"]
    assert data == {"job.yaml": (ROOT / "k8s" / overlay / "job.yaml").read_text()}


def test_the_network_policy_leaves_only_what_is_needed(tmp_path: Path) -> None:
    policy = find(render(with_components(tmp_path, "dp", ["network-policy"])), "NetworkPolicy", "horizonml")
    assert policy["spec"]["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "horizonml"}}
    inside, prometheus = policy["spec"]["ingress"]
    assert "ports" not in inside  # gloo takes any port
    assert prometheus["ports"] == [{"port": 9400, "protocol": "TCP"}]
    ranks, names = policy["spec"]["egress"]
    assert "ports" not in ranks
    assert {port["port"] for port in names["ports"]} == {53}


def test_arm_devices_are_wanted_and_shared_with_no_other_worker(tmp_path: Path) -> None:
    workers = find(render(with_components(tmp_path, "mp", ["jetson"])), "StatefulSet", "worker")
    affinity = workers["spec"]["template"]["spec"]["affinity"]
    (term,) = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}]
    (rule,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
