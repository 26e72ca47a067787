"""The Helm chart: it makes the same objects as `render`, refuses what makes none, and can be packaged."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from horizonml import __version__
from horizonml.job.jobfile import load
from horizonml.job.schema import Job
from horizonml.kube.render import ManifestSettings, WorkerClass, render
from horizonml.security.token import make_token, parse_token
from tests.manifests.test_manifests import comparable, find, validate
from tests.programs import need

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "k8s" / "chart"
OPERATOR = "monitoring.coreos.com/v1"
Documents = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(autouse=True)
def installed() -> None:
    need("helm", "it renders the chart (`make helm` gets it)")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=60, check=False)


def template(folder: Path, values: dict[str, Any], *options: str, name: str = "mine") -> list[dict[str, Any]]:
    """What a release with these values consists of, without the test."""
    made = helm("template", name, str(CHART), "--namespace", "team", *given(folder, values), "--skip-tests", *options)
    assert made.returncode == 0, made.stderr
    return [document for document in yaml.load_all(made.stdout, yaml.CSafeLoader) if document]


def given(folder: Path, values: dict[str, Any]) -> tuple[str, str]:
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    return "--values", str(path)


def without_helm(document: dict[str, Any]) -> Any:
    """An object without what only Helm adds, and with what it says in JSON as an object."""
    labels, annotations = document["metadata"]["labels"], document["metadata"].get("annotations", {})
    assert labels.pop("app.kubernetes.io/managed-by") == "Helm"
    assert labels.pop("helm.sh/chart") == f"horizonml-{__version__}"
    annotations.pop("helm.sh/resource-policy", None)
    return document


BOARD = WorkerClass("pi", 3, "node", arch="arm64", node={"example.com/board": "pi5"})
BIG = WorkerClass("pc", 2, "8", "4Gi", accelerator="nvidia.com/gpu")
NPU = WorkerClass("npu", 1, accelerator="example.com/npu", node={"example.com/x": "1", "example.com/y": "true"})
CASES: dict[str, tuple[dict[str, Any], tuple[WorkerClass, ...], dict[str, Any]]] = {
    "defaults": ({}, (WorkerClass("worker", 3),), {}),
    "one class": ({}, (BOARD,), {"ttl": 0}),
    "several classes": ({}, (BIG, BOARD, NPU), {"disk": "8Gi", "storage_class": "fast", "ttl": 3600}),
    "queue": ({}, (WorkerClass("worker", 4, memory="2Gi"),), {"queue": "devices", "form": "job", "ttl": 60}),
    "job": ({}, (BIG, BOARD), {"form": "job", "disk": "5Gi", "storage_class": "shared"}),
    "own files": (
        {"job": {"model": {"name": "mine:Net"}, "seed": 12345678, "parallel": {"strategy": "hybrid", "workers": 3}},
         "files": {"mine.py": "class Net:  # {{ ü }}\n    pass\n"}},
        (WorkerClass("worker", 3),), {},
    ),
    "a job file": ({"job": (ROOT / "k8s" / "dp" / "job.yaml").read_text()}, (WorkerClass("worker", 3),), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_release_is_what_submit_sends(tmp_path: Path, case: str) -> None:
    values, classes, changes = CASES[case]
    image = "registry.example/worker:1.0"
    listed = [
        {key: value for key, value in vars(one).items() if value not in (None, {})} | {"count": one.count}
        for one in classes
    ]
    own = {{"storage_class": "storageClass"}.get(key, key): value for key, value in changes.items() if key != "form"}
    own |= {"form": changes["form"]} if "queue" not in changes and "form" in changes else {}
    documents = template(
        tmp_path,
        {"image": {"repository": "registry.example/worker", "tag": "1.0"}, "classes": listed, **own, **values},
    )
    made = {(one["kind"], one["metadata"]["name"]): without_helm(one) for one in documents}
    config = next(one for kind, one in made.items() if kind[0] == "ConfigMap")
    parse_token(made["Secret", "mine-token"].pop("stringData")["token"])
    settings = ManifestSettings("team", "mine", classes, image, **changes)
    expected = render(Job(), settings, make_token(), config["data"])
    names = {one["metadata"]["name"] for one in expected if one["kind"] == "ConfigMap"} | {config["metadata"]["name"]}
    for one in expected[1:]:
        hashed = ("ConfigMap", config["metadata"]["name"])
        other = made.pop(hashed if one["kind"] == "ConfigMap" else (one["kind"], one["metadata"]["name"]))
        if one["kind"] == "Deployment":
            del one["metadata"]["annotations"]
        for container in other.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            assert container.pop("imagePullPolicy") == "IfNotPresent"
        one.pop("stringData", None)
        assert comparable(other, names) == comparable(one, names)
    assert not made
    text = values.get("job") or {"parallel": {"strategy": "ddp"}}
    (tmp_path / "given.yaml").write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    (tmp_path / "job.yaml").write_text(config["data"].pop("job.yaml"))
    workers = f"parallel.workers={sum(one.count for one in classes)}"
    assert load(tmp_path / "job.yaml", [workers]) == load(tmp_path / "given.yaml", [workers])
    assert config["data"] == values.get("files", {})


def test_what_only_the_chart_has(tmp_path: Path) -> None:
    values = {
        "token": {"existingSecret": "ours"}, "downloads": True, "priorityClassName": "low",
        "imagePullSecrets": [{"name": "registry"}],
        "monitoring": {"enabled": True, "release": "stack", "grafanaFolder": "Ours"},
    }  # fmt: skip
    documents = template(tmp_path, values)
    validate(documents)
    for document in documents:
        without_helm(document)
    assert not [one for one in documents if one["kind"] == "Secret"]
    for kind, name in (("Deployment", "mine-rendezvous"), ("StatefulSet", "mine-worker")):
        pod = find(documents, kind, name)["spec"]["template"]["spec"]
        assert (pod["priorityClassName"], pod["imagePullSecrets"]) == ("low", [{"name": "registry"}])
        assert {"secretName": "ours", "defaultMode": 0o400} in [volume.get("secret") for volume in pod["volumes"]]
    downloads = find(documents, "NetworkPolicy", "mine-worker-downloads")["spec"]
    assert downloads["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "mine"
    assert downloads["egress"][0]["ports"] == [{"port": 443, "protocol": "TCP"}]
    monitor, rules = find(documents, "PodMonitor", "mine-worker"), find(documents, "PrometheusRule", "horizonml")
    assert monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/instance"] == "mine"
    assert "namespaceSelector" not in monitor["spec"]
    assert {one["metadata"]["labels"]["release"] for one in (monitor, rules)} == {"stack"}
    assert rules["spec"] == yaml.safe_load((ROOT / "grafana" / "rules" / "horizonml.yaml").read_text())
    for path in sorted((ROOT / "grafana" / "dashboards").glob("*.json")):
        board = find(documents, "ConfigMap", f"horizonml-dashboard-{path.stem}")
        assert board["data"] == {path.name: path.read_text()}
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert board["metadata"]["annotations"] == {"grafana_folder": "Ours"}
    closed = {"networkPolicies": {"enabled": False}, "podDisruptionBudget": {"enabled": False}, "downloads": True}
    assert not {"NetworkPolicy", "PodDisruptionBudget"} & {one["kind"] for one in template(tmp_path, closed)}
    fewer = {"monitoring": {"enabled": True, "rules": False, "dashboards": False}}
    assert [one["kind"] for one in template(tmp_path, fewer) if one["apiVersion"] == OPERATOR] == ["PodMonitor"]


def test_another_job_has_another_name_and_another_number_of_workers_has_not(tmp_path: Path) -> None:
    def name(values: dict[str, Any]) -> str:
        return next(str(one["metadata"]["name"]) for one in template(tmp_path, values) if one["kind"] == "ConfigMap")

    names = [
        name(one) for one in ({}, {"files": {"a.py": "x = 1"}}, {"job": {"seed": 1, "parallel": {"strategy": "ddp"}}})
    ]
    assert len(set(names)) == 3
    assert name({"classes": [{"name": "worker", "count": 5}], "image": {"tag": "other"}}) == names[0]


def test_the_pod_of_helm_test_is_as_confined_as_the_workers(tmp_path: Path) -> None:
    made = helm("template", "mine", str(CHART), "--show-only", "templates/test.yaml")
    (pod,) = [document for document in yaml.safe_load_all(made.stdout) if document]
    validate([pod])
    worker = find(template(tmp_path, {}), "StatefulSet", "mine-worker")["spec"]["template"]["spec"]
    (container,), (like,) = pod["spec"]["containers"], worker["containers"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["securityContext"] == worker["securityContext"]
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert {key: container[key] for key in ("securityContext", "image")} == {
        key: like[key] for key in ("securityContext", "image")
    }
    assert {mount["name"] for mount in container["volumeMounts"]} == {"data", "tmp"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"image": {"tga": "x"}}, "image.*tga.* allowed"),
        ({"replicas": 3}, "replicas.* allowed"),
        ({"job": {"epoch": 3}}, "job.*epoch.* allowed"),
        ({"job": {"parallel": {"strategy": "dpd"}}}, "job.parallel.strategy.*must be one of.*single.*ddp"),
        ({"job": {"epochs": 0}}, "job.epochs.*1"),
        ({"job": "epochs: [1"}, "job: the text is not the YAML of a job file"),
        ({"job": {"seed": 3}}, "single trains on 1 worker, and classes has 3"),
        ({"job": {"parallel": {"strategy": "ddp", "workers": 5}}}, "job.parallel.workers is 5, and classes has 3"),
        ({"files": {"job.yaml": "x"}}, "job.yaml.*not match"),
        ({"classes": []}, "classes.*1"),
        ({"classes": [{"name": "a"}]}, "classes.0.*count"),
        ({"classes": [{"name": "a", "count": 1, "cores": 2}]}, "classes.0.*cores.* allowed"),
        ({"classes": [{"name": "a", "count": 1, "memory": "2GB"}]}, "classes.0.memory.*not match"),
        ({"classes": [{"name": "a", "count": 1}] * 2}, 'two classes have the name "a"'),
        ({"classes": [{"name": "big-pi", "count": 1}]}, "classes.0.name.*not match"),
        ({"classes": [{"name": "job", "count": 1}]}, "classes.0.name"),
        ({"form": "deployment"}, "form.*must be one of.*statefulset.*job"),
        ({"ttl": -1}, "ttl.*0"),
    ],
)
def test_values_that_make_no_job_are_refused(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    made = helm("template", "mine", str(CHART), *given(tmp_path, values))
    assert made.returncode != 0
    assert re.search(words, made.stderr)  # Helm 3 and 4 have their own words


def test_names_that_kubernetes_or_the_pods_cannot_have_are_refused() -> None:
    for name in ("1st", "a" * 36, "a.b"):
        assert "makes no name for a job" in helm("template", name, str(CHART)).stderr


def test_every_token_is_new_and_valid(tmp_path: Path) -> None:
    tokens = [find(template(tmp_path, {}), "Secret", "mine-token")["stringData"]["token"] for _ in range(5)]
    assert len({parse_token(token).id for token in tokens}) == 5


def test_the_chart_is_clean_and_a_package_needs_nothing_around_it(tmp_path: Path) -> None:
    checked = helm("lint", "--strict", str(CHART))
    assert checked.returncode == 0, checked.stdout
    packed = helm("package", str(CHART), "--destination", str(tmp_path))
    assert packed.returncode == 0, packed.stderr
    archive = tmp_path / f"horizonml-{__version__}.tgz"
    with tarfile.open(archive) as files:
        assert all(entry.isfile() for entry in files)
        assert "horizonml/monitoring/dashboards/overview.json" in files.getnames()
    options = ("--set", "monitoring.enabled=true", "--set", "token.existingSecret=t")
    both = [helm("template", "mine", str(chart), *options).stdout for chart in (archive, CHART)]
    assert both[0] == both[1] != ""
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert described["version"] == described["appVersion"] == __version__


def test_every_value_is_described() -> None:
    properties = json.loads((CHART / "values.schema.json").read_text())["properties"]
    for name, value in properties.items():
        for one in [value] if name in ("job", "files") or "properties" not in value else value["properties"].values():
            assert one["description"], name
