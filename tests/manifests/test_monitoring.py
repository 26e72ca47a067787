"""The monitoring of many jobs: the labels that tell them apart, and who may reach Prometheus and Grafana."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.manifests.policies import Pod, allowed, connections
from tests.manifests.test_manifests import CACHE, DNS, INTERNET, RANK, ROOT, SERVICE, find, render, validate
from tests.programs import need

SPACE = "horizonml-monitoring"
PROMETHEUS, GRAFANA, OTHER = (
    Pod(SPACE, {"app.kubernetes.io/name": name}) for name in ("prometheus", "grafana", "other")
)
API_SERVER = Pod(address="172.18.0.2")
TWIN = Pod("second-team", {**RANK.labels, "app.kubernetes.io/instance": "resnet"})


@pytest.fixture(autouse=True)
def kubectl() -> None:
    need("kubectl", "it renders the manifests as users apply them")


@pytest.fixture
def operator() -> list[dict[str, Any]]:
    return render(ROOT / "k8s" / "components" / "monitoring")


@pytest.fixture
def standalone() -> list[dict[str, Any]]:
    return render(ROOT / "k8s" / "kind")


def test_what_users_apply_once_is_valid(operator: list[dict[str, Any]], standalone: list[dict[str, Any]]) -> None:
    validate(operator)
    validate(standalone)
    assert standalone == render(ROOT / "k8s" / "components" / "monitoring-standalone")


def configuration(documents: list[dict[str, Any]]) -> dict[str, Any]:
    config = find(documents, "ConfigMap", "prometheus")["data"]["prometheus.yaml"]
    return dict(yaml.safe_load(config))


def test_the_operator_gives_each_series_the_job_and_the_node_and_heeds_our_objects(
    operator: list[dict[str, Any]],
) -> None:
    documents = operator
    spec = find(documents, "PodMonitor", "horizonml")["spec"]
    assert spec["namespaceSelector"] == {"any": True}
    assert spec["jobLabel"] == "app.kubernetes.io/instance"
    (endpoint,) = spec["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [{"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}]
    assert (endpoint["port"], endpoint["interval"]) == ("metrics", "15s")
    released = [d["kind"] for d in documents if d["metadata"]["labels"].get("release") == "kube-prometheus-stack"]
    assert sorted(released) == ["PodMonitor", "PrometheusRule"]
    boards = [d for d in documents if d["metadata"]["labels"].get("grafana_dashboard") == "1"]
    assert len(boards) == 4
    assert all(board["metadata"]["annotations"]["grafana_folder"] == "HorizonML" for board in boards)


def test_plain_prometheus_gives_the_same_labels_from_the_same_pods(standalone: list[dict[str, Any]]) -> None:
    (scraped,) = configuration(standalone)["scrape_configs"]
    (selector,) = scraped["kubernetes_sd_configs"][0]["selectors"]
    assert selector["label"] == "app.kubernetes.io/name=horizonml,app.kubernetes.io/component=worker"
    relabelled = {
        rule["target_label"]: rule["source_labels"] for rule in scraped["relabel_configs"] if "action" not in rule
    }
    prefix = "__meta_kubernetes_"
    assert relabelled == {
        "job": [f"{prefix}pod_label_app_kubernetes_io_instance"],
        "namespace": [f"{prefix}namespace"],
        "pod": [f"{prefix}pod_name"],
        "node": [f"{prefix}pod_node_name"],
    }


def test_all_look_as_often_as_grafana_is_told(operator: list[dict[str, Any]], standalone: list[dict[str, Any]]) -> None:
    compose = yaml.safe_load((ROOT / "grafana" / "prometheus" / "compose.yaml").read_text())
    source = yaml.safe_load((ROOT / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text())
    monitor = find(operator, "PodMonitor", "horizonml")
    found = {
        compose["global"]["scrape_interval"],
        configuration(standalone)["global"]["scrape_interval"],
        source["datasources"][0]["jsonData"]["timeInterval"],
        monitor["spec"]["podMetricsEndpoints"][0]["interval"],
    }
    assert found == {"15s"}  # a quarter of the shortest window of rules


def test_prometheus_may_list_pods_and_do_nothing_else(standalone: list[dict[str, Any]]) -> None:
    rules = [d["rules"] for d in standalone if d["kind"] in ("ClusterRole", "Role")]
    assert rules == [[{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]]
    grafana = find(standalone, "Deployment", "grafana")["spec"]["template"]["spec"]
    assert grafana["automountServiceAccountToken"] is False


def test_policies_of_the_monitoring_let_through_what_is_needed_and_nothing_else(
    standalone: list[dict[str, Any]],
) -> None:
    pods = {
        "PROMETHEUS": PROMETHEUS, "GRAFANA": GRAFANA, "OTHER": OTHER, "API_SERVER": API_SERVER, "RANK": RANK,
        "TWIN": TWIN, "SERVICE": SERVICE, "DNS": DNS, "CACHE": CACHE, "INTERNET": INTERNET,
    }  # fmt: skip
    ours = ("PROMETHEUS", "GRAFANA")
    ports = (22, 53, 80, 3000, 5432, 9090, 9400, 10250, 29400, 29401)
    found = connections(standalone, pods, ours, ports)
    look = {(source, "GRAFANA", 3000) for source in pods if source not in ours}
    assert found == look | {
        ("GRAFANA", "PROMETHEUS", 9090), ("PROMETHEUS", "RANK", 9400), ("PROMETHEUS", "TWIN", 9400),
        *((source, target, 53) for source in ours for target in ("DNS", "CACHE")),
    }  # fmt: skip
    assert allowed(standalone, PROMETHEUS, API_SERVER, 6443)
    assert not allowed(standalone, GRAFANA, API_SERVER, 6443)
    assert allowed(standalone, PROMETHEUS, DNS, 53, "UDP")
    assert allowed(standalone, GRAFANA, DNS, 53, "UDP")
