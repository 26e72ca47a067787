"""The manifests as `kubectl kustomize` renders them, against the schemas of the oldest and the newest Kubernetes."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from horizonml.job.jobfile import load
from tests.manifests.policies import Pod, allowed
from tests.programs import need

ROOT = Path(__file__).resolve().parents[2]
OLDEST = "1.28"
OVERLAYS = ["dp", "mp", "hybrid"]
COMPONENTS = ["monitoring", "monitoring-standalone", "downloads", "open-network", "jetson", "gpu"]
CUSTOM = ("monitoring.coreos.com/v1",)  # of the Prometheus operator: not in Kubernetes' schemas


@pytest.fixture(autouse=True)
def kubectl() -> None:
    need("kubectl", "it renders the manifests as users apply them")


def render(folder: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.load_all(rendered(folder), yaml.CSafeLoader) if document]


@cache
def rendered(folder: Path) -> str:
    result = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # no deprecated fields
    return result.stdout


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
    plain = render(ROOT / "k8s" / "dp")
    workers = find(documents, "StatefulSet", "worker")["spec"]["template"]["spec"]
    (worker,) = workers["containers"]
    if component == "gpu":
        assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert "memory" in worker["resources"]["limits"]
        assert {"name": "HORIZONML_DEVICE", "value": "cuda"} in worker["env"]
    elif component == "jetson":
        affinity = workers["affinity"]
        (term,) = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert term["matchExpressions"] == [{"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}]
        (rule,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rule["topologyKey"] == "kubernetes.io/hostname"
    elif component == "open-network":
        assert {d["kind"] for d in plain} - {d["kind"] for d in documents} == {"NetworkPolicy"}
    else:
        assert len(documents) > len(plain)


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


def test_the_number_of_replicas_is_the_one_knob(tmp_path: Path) -> None:
    folder = with_components(tmp_path, "dp", [])
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


def part(component: str) -> Pod:
    """A pod of a job."""
    return Pod("horizonml", {"app.kubernetes.io/name": "horizonml", "app.kubernetes.io/component": component})


RANK, SERVICE = part("worker"), part("rendezvous")
STRANGER = Pod("horizonml", {"app": "stranger"})
DISGUISED = Pod("default", RANK.labels)
PROMETHEUS = Pod("horizonml-monitoring", {"app": "any"}, {"horizonml/monitoring": "true"})
ELSEWHERE = Pod("monitoring", {"app.kubernetes.io/name": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"})
DNS = Pod("kube-system", {"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"})
CACHE, INTERNET = Pod(address="169.254.20.10"), Pod(address="151.101.0.223")
METADATA, ROUTER = Pod(address="169.254.169.254"), Pod(address="192.168.1.1")


@pytest.mark.parametrize("overlay", [*OVERLAYS, "job"])
def test_policies_let_through_what_is_needed_and_nothing_else(overlay: str) -> None:
    documents = render(ROOT / "k8s" / overlay)
    needed = {
        ("RANK", "SERVICE", 29400), ("RANK", "RANK", 29401), ("PROMETHEUS", "RANK", 9400), ("RANK", "DNS", 53),
        ("RANK", "CACHE", 53),
    }  # fmt: skip
    names = ["RANK", "SERVICE", "STRANGER", "DISGUISED", "PROMETHEUS", "ELSEWHERE", "DNS", "CACHE", "INTERNET",
             "METADATA", "ROUTER"]  # fmt: skip
    ports = (22, 53, 80, 443, 8400, 9400, 29400, 29401, 40000)
    pods = {name: globals()[name] for name in names}
    ours = ("RANK", "SERVICE")
    found = {
        (source, target, port)
        for source in names
        for target in names
        for port in ports
        if (source in ours or target in ours) and allowed(documents, pods[source], pods[target], port)
    }
    assert found == needed
    assert allowed(documents, RANK, DNS, 53, "UDP")
    assert not allowed(documents, SERVICE, DNS, 53, "UDP")


def test_downloads_reach_the_internet_alone(tmp_path: Path) -> None:
    documents = render(with_components(tmp_path, "dp", ["downloads"]))
    assert allowed(documents, RANK, INTERNET, 443)
    assert allowed(documents, RANK, RANK, 29401)
    for target, port in ((INTERNET, 80), (METADATA, 443), (ROUTER, 443), (STRANGER, 443), (SERVICE, 443)):
        assert not allowed(documents, RANK, target, port)
    assert not allowed(documents, SERVICE, INTERNET, 443)


@pytest.mark.parametrize("overlay", [*OVERLAYS, "job"])
def test_pods_have_the_token_from_a_secret_that_is_in_no_manifest_and_ports_that_services_use(overlay: str) -> None:
    documents = render(ROOT / "k8s" / overlay)
    assert not [d for d in documents if d["kind"] == "Secret"]
    pods = [d["spec"]["template"]["spec"] for d in documents if d["kind"] in ("StatefulSet", "Deployment", "Job")]
    assert len(pods) == 2
    for pod in pods:
        (container,) = pod["containers"]
        (file,) = [entry["value"] for entry in container["env"] if entry["name"] == "HORIZONML_TOKEN_FILE"]
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "token"]
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "token"]
        assert file == f"{mount['mountPath']}/token"
        assert mount["readOnly"] is True
        # Kubernetes gives such files to root, and lets the pod's group read them.
        assert volume["secret"] == {"secretName": "horizonml-token", "defaultMode": 0o400}
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"] == 10001
    opened = {
        (port["name"], port["containerPort"])
        for d in documents
        if d["kind"] in ("StatefulSet", "Deployment", "Job")
        for port in d["spec"]["template"]["spec"]["containers"][0]["ports"]
    }
    assert opened == {("rendezvous", 29400), ("data", 29401), ("metrics", 9400)}
    served = {
        (port["targetPort"], port["port"]) for d in documents if d["kind"] == "Service" for port in d["spec"]["ports"]
    }
    assert served == opened
