"""The manifests as `kubectl kustomize` renders them, against the schemas of the oldest and the newest Kubernetes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from horizonml.errors import JobError
from horizonml.job.jobfile import load
from horizonml.job.schema import Job
from horizonml.kube.render import ManifestSettings, WorkerClass
from horizonml.kube.render import render as objects_of
from tests.manifests.policies import Pod, allowed, connections
from tests.programs import need

ROOT = Path(__file__).resolve().parents[2]
OLDEST = "1.28"
OVERLAYS = ["dp", "mp", "hybrid"]
COMPONENTS = ["downloads", "open-network", "jetson", "gpu"]
WORKLOADS = ("StatefulSet", "Deployment", "Job")
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


@pytest.mark.parametrize("folder", [*OVERLAYS, "job", "unequal", "kind"])
def test_what_users_apply_is_valid(folder: str) -> None:
    validate(render(ROOT / "k8s" / folder))


@pytest.mark.parametrize("component", COMPONENTS)
def test_components_can_be_added(tmp_path: Path, component: str) -> None:
    documents = render(with_components(tmp_path, "dp", [component]))
    validate(documents)
    plain = render(ROOT / "k8s" / "dp")
    workers = find(documents, "StatefulSet", "digits-worker")["spec"]["template"]["spec"]
    if component in ("gpu", "jetson"):
        job = find(render(with_components(tmp_path / "job", "job", ["job", component])), "Job", "digits-job-worker")
        for pod in (workers, job["spec"]["template"]["spec"]):
            check_placed(pod, component)
    elif component == "open-network":
        assert {d["kind"] for d in plain} - {d["kind"] for d in documents} == {"NetworkPolicy"}
    else:
        assert len(documents) > len(plain)


def check_placed(pod: dict[str, Any], component: str) -> None:
    """That a component which is about nodes has reached a pod."""
    (worker,) = pod["containers"]
    if component == "gpu":
        assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert "memory" in worker["resources"]["limits"]
        assert {"name": "HORIZONML_DEVICE", "value": "cuda"} in worker["env"]
        return
    affinity = pod["affinity"]
    (term,) = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}]
    (rule,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"


def comparable(document: dict[str, Any], configs: set[str]) -> Any:
    """An object without the name of its ConfigMap, which is a hash, and without what only one of the two ways adds."""
    text = json.dumps(document)
    for name in configs:
        text = text.replace(name, "CONFIG")
    made = json.loads(text)
    made["metadata"].pop("annotations", None)
    for claim in made.get("spec", {}).get("volumeClaimTemplates", []):
        claim["metadata"].pop("labels", None)  # Kubernetes gives it those of the selector
    return made


@pytest.mark.parametrize("overlay", [*OVERLAYS, "job"])
def test_what_kubectl_applies_is_what_submit_sends(overlay: str) -> None:
    name = "digits-job" if overlay == "job" else "digits"
    path = ROOT / "k8s" / overlay / "job.yaml"
    settings = ManifestSettings("horizonml", name, form="job" if overlay == "job" else "statefulset")
    submitted = objects_of(load(path), settings, files={"job.yaml": path.read_text()})
    applied = {(one["kind"], one["metadata"]["name"]): one for one in render(ROOT / "k8s" / overlay)}
    hashed = next(key for key in applied if key[0] == "ConfigMap")
    names = {one["metadata"]["name"] for one in submitted if one["kind"] == "ConfigMap"} | {hashed[1]}
    for one in submitted:
        if one["kind"] != "Namespace":
            is_config = one["kind"] == "ConfigMap"
            other = applied.pop(hashed if is_config else (one["kind"], one["metadata"]["name"]))
            assert comparable(one, names) == comparable(other, names)
    assert not applied


def test_jobs_in_one_namespace_do_not_select_each_other() -> None:
    """What selects pods selects those of its own job alone, and no two jobs have an object of the same name."""
    jobs = [objects_of(Job(), ManifestSettings("team", name)) for name in ("one", "one-more")]
    names = [{(d["kind"], d["metadata"]["name"]) for d in documents if d["kind"] != "Namespace"} for documents in jobs]
    assert not names[0] & names[1]
    for name, documents in zip(("one", "one-more"), jobs, strict=True):
        selectors = list(found_in(documents, ("matchLabels", "selector")))
        assert len(selectors) > 8
        for selector in selectors:
            if "app.kubernetes.io/name" in selector:
                assert selector["app.kubernetes.io/instance"] == name
    ranks = [Pod("team", {**RANK.labels, "app.kubernetes.io/instance": name}) for name in ("one", "one-more")]
    everything = [document for documents in jobs for document in documents]
    assert allowed(everything, ranks[0], ranks[0], 29401)
    assert not allowed(everything, ranks[0], ranks[1], 29401)


def found_in(value: Any, keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The dictionaries of nested values that stand under one of some keys."""
    for key, found in value.items() if isinstance(value, dict) else enumerate(value):
        if key in keys and isinstance(found, dict):
            yield found
        if isinstance(found, dict | list):
            yield from found_in(found, keys)


def test_classes_of_workers_have_ranks_one_after_the_other(tmp_path: Path) -> None:
    texts = (
        "pc=2,cpu=8,memory=4Gi",
        "jetson=1,arch=arm64,accelerator=nvidia.com/gpu",
        "pi=3,cpu=node,example.com/board=pi5",
    )
    classes = tuple(map(WorkerClass.parse, texts))
    for form in ("statefulset", "job"):
        documents = objects_of(Job(), ManifestSettings("team", "mine", classes, form=form))
        validate(documents)
        kind = "StatefulSet" if form == "statefulset" else "Job"
        # Kubernetes cannot apply a budget to Jobs.
        assert ("PodDisruptionBudget" in {one["kind"] for one in documents}) is (kind == "StatefulSet")
        pods = [find(documents, kind, f"mine-{one.name}")["spec"]["template"] for one in classes]
        env = [{entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]} for pod in pods]
        assert [one["HORIZONML_RANKS"] for one in env] == ["0-1", "2-2", "3-5"]
        assert {one["HORIZONML_KUBE_OBJECT"].rpartition("/")[2] for one in env} == {"mine-pc"}
        assert find(documents, "Role", "mine-worker")["rules"][0]["resourceNames"] == [
            "mine-pc",
            "mine-jetson",
            "mine-pi",
        ]
        resources = [pod["spec"]["containers"][0]["resources"] for pod in pods]
        assert resources[0] == {key: {"cpu": "8", "memory": "4Gi"} for key in ("limits", "requests")}
        assert resources[1]["limits"]["nvidia.com/gpu"] == "1"
        assert "cpu" not in resources[2]["limits"]
        assert [pod["spec"].get("nodeSelector") for pod in pods] == [
            None, {"kubernetes.io/arch": "arm64"}, {"example.com/board": "pi5"},
        ]  # fmt: skip
        rendezvous = find(documents, "Deployment", "mine-rendezvous")["spec"]["template"]["spec"]["containers"][0]
        assert {"name": "WORLD_SIZE", "value": "6"} in rendezvous["env"]
    for text, words in (
        ("pi", "a number of workers"), ("Pi=2", "lower-case"), ("pi=0", "at least one"),
        ("pi=1,cores=4", "'cores=4' is neither"), ("pi=1,cpu=much", "not an amount"), ("pi=1,cpu", "not KEY=VALUE"),
        ("job=1", "is taken"), ("data=1", "is taken"),
    ):  # fmt: skip
        with pytest.raises(JobError, match=words):
            WorkerClass.parse(text)


def test_the_overlay_for_unequal_nodes_has_its_job_file_by_a_hash() -> None:
    documents = render(ROOT / "k8s" / "unequal")
    (config,) = [d for d in documents if d["kind"] == "ConfigMap"]
    workloads = [d for d in documents if d["kind"] in WORKLOADS]
    assert [d["metadata"]["name"] for d in workloads] == [
        "digits-unequal-rendezvous", "digits-unequal-pc", "digits-unequal-pi",
    ]  # fmt: skip
    for workload in workloads:
        volumes = {volume["name"]: volume for volume in workload["spec"]["template"]["spec"]["volumes"]}
        assert volumes["job"]["configMap"]["name"] == config["metadata"]["name"] != "digits-unequal-job"
    assert load(ROOT / "k8s" / "unequal" / "job.yaml").parallel.strategy == "auto"


@pytest.mark.parametrize("name", ["jobset/jobset.yaml", "kubeflow/runtime.yaml", "kubeflow/trainjob.yaml"])
def test_objects_of_kubeflow_and_jobset_are_what_those_projects_models_read(name: str) -> None:
    """The models drop what they do not know, so what comes back must be equal."""
    kinds = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    for document in yaml.safe_load_all((ROOT / "k8s" / name).read_text()):
        if document["kind"] not in kinds:
            validate([document])
            continue
        made = kinds[document["kind"]].from_dict(document)
        assert made is not None
        assert made.to_dict() == document
        if document["kind"] != "TrainJob":
            spec = document["spec"].get("template", document)["spec"]
            for member in spec["replicatedJobs"]:
                template = {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": "x"},
                    "spec": member["template"]["spec"]["template"]["spec"],
                }
                validate([template])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_conventions(overlay: str) -> None:
    documents = render(ROOT / "k8s" / overlay)
    workers, service = find(documents, "StatefulSet", "digits-worker"), find(documents, "Service", "digits-worker")
    assert workers["spec"]["podManagementPolicy"] == "Parallel"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    for document in documents:
        assert document["metadata"]["labels"]["app.kubernetes.io/part-of"] == "horizonml"
        if document["kind"] not in ("StatefulSet", "Deployment"):
            continue
        selector = document["spec"]["selector"]["matchLabels"]
        assert "app.kubernetes.io/part-of" not in selector
        pod = document["spec"]["template"]["spec"]
        # Only workers may write something to the cluster: see test_a_worker_may_write_its_own_progress_alone.
        assert pod["automountServiceAccountToken"] is (document["kind"] == "StatefulSet")
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
    assert "WORLD_SIZE" not in env
    assert env["OMP_NUM_THREADS"]["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"
    assert "--stay" in worker["args"]
    assert not [d for d in documents if d["kind"] in ("Namespace", "Secret")]  # which `kubectl delete -k` would delete
    namespace = yaml.safe_load((ROOT / "k8s" / "namespace.yaml").read_text())
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_the_number_of_replicas_is_the_one_knob(tmp_path: Path) -> None:
    folder = with_components(tmp_path, "dp", [])
    path = folder / "kustomization.yaml"
    path.write_text(path.read_text().replace("count: 5", "count: 3"))
    documents = render(folder)
    assert find(documents, "StatefulSet", "digits-worker")["spec"]["replicas"] == 3
    (service,) = find(documents, "Deployment", "digits-rendezvous")["spec"]["template"]["spec"]["containers"]
    assert {entry["name"]: entry.get("value") for entry in service["env"]}["WORLD_SIZE"] == "3"


def test_a_worker_may_write_its_own_progress_alone() -> None:
    documents = render(ROOT / "k8s" / "dp")
    # The status of an object and its annotations, and not what runs there.
    own = {"apiGroups": ["apps"], "resources": ["statefulsets/status"], "resourceNames": ["digits-worker"]}
    assert find(documents, "Role", "digits-worker")["rules"] == [
        {**own, "verbs": ["patch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    ]  # fmt: skip
    binding = find(documents, "RoleBinding", "digits-worker")
    assert binding["roleRef"]["name"] == "digits-worker"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "digits-worker", "namespace": "horizonml"}]
    assert not [d for d in documents if d["kind"] in ("ClusterRole", "ClusterRoleBinding")]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_job_files_are_valid_and_what_the_overlay_says(overlay: str) -> None:
    job = load(ROOT / "k8s" / overlay / "job.yaml", [])
    assert job.parallel.strategy == {"dp": "ddp", "mp": "pipeline", "hybrid": "hybrid"}[overlay]
    data = next(d for d in render(ROOT / "k8s" / overlay) if d["kind"] == "ConfigMap")["data"]
    assert data == {"job.yaml": (ROOT / "k8s" / overlay / "job.yaml").read_text()}


def part(component: str, instance: str = "digits") -> Pod:
    """A pod of a job."""
    labels = {"app.kubernetes.io/name": "horizonml", "app.kubernetes.io/component": component}
    return Pod("horizonml", {**labels, "app.kubernetes.io/instance": instance})


RANK, SERVICE = part("worker"), part("rendezvous")
STRANGER = Pod("horizonml", {"app": "stranger"})
DISGUISED = Pod("default", RANK.labels)
PROMETHEUS = Pod("horizonml-monitoring", {"app": "any"}, {"horizonml/monitoring": "true"})
ELSEWHERE = Pod("monitoring", {"app.kubernetes.io/name": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"})
DNS = Pod("kube-system", {"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"})
CACHE, INTERNET = Pod(address="169.254.20.10"), Pod(address="151.101.0.223")
METADATA, ROUTER = Pod(address="169.254.169.254"), Pod(address="192.168.1.1")
OTHER_JOB = part("worker", "other")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_policies_let_through_what_is_needed_and_nothing_else(overlay: str) -> None:
    documents = render(ROOT / "k8s" / overlay)
    needed = {
        ("RANK", "SERVICE", 29400), ("RANK", "RANK", 29401), ("RANK", "RANK", 29402), ("PROMETHEUS", "RANK", 9400),
        ("RANK", "DNS", 53), ("RANK", "CACHE", 53),
    }  # fmt: skip
    names = ["RANK", "SERVICE", "STRANGER", "OTHER_JOB", "DISGUISED", "PROMETHEUS", "ELSEWHERE", "DNS", "CACHE",
             "INTERNET", "METADATA", "ROUTER"]  # fmt: skip
    ports = (22, 53, 80, 443, 8400, 9400, 29400, 29401, 29402, 40000)
    pods = {name: globals()[name] for name in names}
    assert connections(documents, pods, ("RANK", "SERVICE"), ports) == needed
    assert allowed(documents, RANK, DNS, 53, "UDP")
    assert not allowed(documents, SERVICE, DNS, 53, "UDP")
    # The API server may have any private address.
    assert allowed(documents, RANK, ROUTER, 6443)
    assert not allowed(documents, RANK, INTERNET, 6443)
    assert not allowed(documents, SERVICE, ROUTER, 6443)


def test_downloads_reach_the_internet_alone(tmp_path: Path) -> None:
    documents = render(with_components(tmp_path, "dp", ["downloads"]))
    assert allowed(documents, RANK, INTERNET, 443)
    assert allowed(documents, RANK, RANK, 29401)
    for target, port in ((INTERNET, 80), (METADATA, 443), (ROUTER, 443), (STRANGER, 443), (SERVICE, 443)):
        assert not allowed(documents, RANK, target, port)
    assert not allowed(documents, SERVICE, INTERNET, 443)


@pytest.mark.parametrize("overlay", [*OVERLAYS, "job"])
def test_pods_have_the_token_from_a_secret_that_is_in_no_manifest_and_ports_that_services_use(overlay: str) -> None:
    documents, name = render(ROOT / "k8s" / overlay), "digits-job" if overlay == "job" else "digits"
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
        assert volume["secret"] == {"secretName": f"{name}-token", "defaultMode": 0o400}
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
