"""Dashboards and rules against the metrics there are, without a running Grafana or Prometheus."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from horizonml.telemetry.metrics import Metrics
from tests.e2e.tools import VARIABLES
from tests.programs import need

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
RULES = ROOT / "grafana" / "rules"
TESTS = [ROOT / "tests" / "dashboards" / name for name in ("rules.yaml", "two_jobs.yaml")]
JOB = 'namespace=~"$namespace",job=~"$job"'
METRIC = re.compile(r"\bhorizonml_\w+")
# What somebody who knows the field looks for first, and the metric that answers it.
WANTED = {
    "accuracy": "horizonml_held_out_accuracy_ratio",
    "loss": "horizonml_held_out_loss",
    "epoch time": "horizonml_epoch_duration_seconds",
    "compute against communication": "horizonml_step_phase_seconds_sum",
    "CPU": "horizonml_cpu_seconds_total",
    "memory": "horizonml_resident_memory_bytes",
    "idle time": "horizonml_bubble_ratio",
    "gradient divergence": "horizonml_gradient_divergence",
    "bandwidth": "horizonml_sent_bytes_total",
    "goodput": "horizonml_goodput_ratio",
    "time to recover": "horizonml_recovery_seconds_sum",
    "what a loss would cost": "horizonml_replica_age_steps",
}
# What other panels show in other words.
NOT_SHOWN = {
    "horizonml_epoch",
    "horizonml_epochs_planned",
}


def load(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in FILES:
        for panel in load(path)["panels"]:
            yield path.stem, panel


def queries() -> Iterator[str]:
    for _, panel in panels():
        yield from (target["expr"] for target in panel["targets"])


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load((RULES / "horizonml.yaml").read_text())["groups"] for rule in group["rules"]
    ]


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """The names of all series that a rank can export."""
    names = set()
    for family in Metrics(0).registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "summary": ["_sum", "_count"]}
        names |= {family.name + suffix for suffix in suffixes.get(family.type, [""])}
    return names


def test_generated_files_are_up_to_date() -> None:
    code = (
        "import generate, sys; sys.exit(str([str(p) for p, t in generate.files().items() if p.read_text() != t] or 0))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "scripts", capture_output=True, text=True, check=False
    )
    assert result.stderr.strip() in ("", "0"), f"run `make generate`: {result.stderr}"


def test_grafanas_own_model_loses_nothing() -> None:
    register_default_plugins()
    for path in FILES:
        ours = load(path)
        theirs = json.loads(json.dumps(Dashboard.from_json(ours), cls=JSONEncoder))
        assert lost(ours, theirs) == [], path.stem


def lost(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where `theirs` lacks what `ours` has, or has something else; more than ours are defaults."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [place for key in ours for place in lost(ours[key], theirs.get(key), f"{path}/{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [place for i, pair in enumerate(zip(ours, theirs, strict=True)) for place in lost(*pair, f"{path}/{i}")]
    return [] if ours == theirs else [path]


def test_every_panel_has_a_unit_and_the_chosen_datasource() -> None:
    for name, panel in panels():
        where = f"{name}: {panel['title']}"
        assert panel["fieldConfig"]["defaults"]["unit"], where
        assert panel["datasource"]["uid"] == "${datasource}", where
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"]), where
        for target in panel["targets"]:
            assert ("rate(" in target["expr"]) <= ("$__rate_interval" in target["expr"]), where


def test_only_metrics_that_exist_are_asked_for(exported: set[str]) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for expression in [*queries(), *(rule["expr"] for rule in rules())]:
        for record in recorded:
            expression = expression.replace(record, "")
        assert set(METRIC.findall(expression)) <= exported, expression


def test_every_metric_is_seen_somewhere(exported: set[str]) -> None:
    seen = {name for text in [*queries(), *(rule["expr"] for rule in rules())] for name in METRIC.findall(text)}
    assert exported - seen == NOT_SHOWN


def test_what_everybody_looks_for_has_its_panel() -> None:
    for what, metric in WANTED.items():
        assert any(metric in expression for expression in queries()), what


def test_every_alert_says_what_to_do_and_is_tested() -> None:
    cases = [
        case
        for path in TESTS
        for test in yaml.safe_load(path.read_text())["tests"]
        for case in test.get("alert_rule_test", [])
    ]
    for rule in rules():
        if "alert" not in rule:
            continue
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        mine = [case for case in cases if case["alertname"] == rule["alert"]]
        assert any(case.get("exp_alerts") for case in mine), f"{rule['alert']} never fires in the tests"
        assert any(not case.get("exp_alerts") for case in mine), f"{rule['alert']} is never seen quiet in the tests"


def test_every_file_in_the_folder_of_rules_holds_rules() -> None:
    for path in RULES.iterdir():  # Prometheus is told to load them all
        assert yaml.safe_load(path.read_text()).keys() == {"groups"}, path


def test_rules_fire_and_keep_quiet_as_they_should() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", *sorted(map(str, RULES.iterdir())))
    promtool("test", "rules", *map(str, TESTS))


def promtool(*arguments: str) -> str:
    need("promtool", "Prometheus' own tool checks and tests what it is told")
    result = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_jobs_are_never_joined() -> None:
    for expression in [*queries(), *(rule["expr"] for rule in rules())]:
        for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
            assert labels.startswith("namespace, job"), expression
        for aggregation in re.finditer(r"\b(?:sum|max|min|avg|count|quantile)\b(?! by | without )", expression):
            raise AssertionError(f"{aggregation[0]} over all jobs in {expression}")
    for expression in queries():
        chosen = expression.count("{" + JOB)
        assert chosen == len(re.findall(r"\bhorizonml_\w+", expression)), f"not of the chosen jobs: {expression}"


def test_whatever_names_a_rank_names_its_node_and_its_job() -> None:
    for name, panel in panels():
        for target in panel["targets"]:
            legend = target["legendFormat"]
            if panel["type"] != "table":
                assert legend.endswith(("({{job}})", "{{job}}")), f"{name}: {panel['title']}"
            assert legend.count("rank {{rank}}") == legend.count("rank {{rank}} on {{node}}"), legend
            assert "{{pod}}" not in legend
    node = "{{ with $labels.node }} on {{ . }}{{ end }}"
    for rule in rules():
        if "alert" in rule:
            summary = rule["annotations"]["summary"]
            assert summary.startswith("{{ $labels.job }}: "), summary
            assert summary.count("$labels.rank }}") + summary.count("$labels.instance }}") == summary.count(node), (
                summary
            )


def test_lists_leave_over_what_was_chosen_before() -> None:
    for path in FILES:
        lists = [one for one in load(path)["templating"]["list"] if one["type"] == "query"]
        assert [one["name"] for one in lists] == ["namespace", "job", "rank"]
        assert [one["query"]["query"].count("=~") for one in lists] == [0, 1, 2]


def test_a_loss_that_is_the_first_is_seen_in_its_job_alone(tmp_path: Path) -> None:
    """Before the first loss there are no histograms, and a killed process is noticed after 0 s of silence."""
    panel = {panel["title"]: panel for name, panel in panels() if name == "faults"}
    born = "_x4 {value}x36"  # the first value that Prometheus sees, four minutes before it is asked
    series = {
        ("killed", "notice", 0.0): 1, ("silent", "notice", 5.5): 1, ("late", "notice", 9.0): 0,
        ("killed", "recovery", 1.5): 1, ("late", "recovery", 20.0): 0,
    }  # fmt: skip
    lines = []
    for (job, which, seconds), within in series.items():
        base = {"notice": "horizonml_loss_notice_seconds", "recovery": "horizonml_recovery_seconds"}[which]
        bounds = {"notice": ("6.0",), "recovery": ("4.0", "15.0")}[which]
        labels = f'namespace="lab",job="{job}",rank="0"' + (',source="replica"' if which == "recovery" else "")
        values = {f"_sum{{{labels}}}": seconds, f"_count{{{labels}}}": 1}
        values |= {f'_bucket{{{labels},le="{bound}"}}': within for bound in bounds}
        lines += [{"series": base + name, "values": born.format(value=value)} for name, value in values.items()]
    expected = {
        ("Time to notice", 0): {"killed": 0.0, "silent": 5.5, "late": 9.0},
        ("Time to recover", 0): {"killed": 1.5, "late": 20.0},
        ("Promises kept", 0): {"killed": 1, "silent": 1, "late": 0},
        ("Promises kept", 2): {"killed": 1, "late": 0},
    }
    tests = [
        {
            "expr": filled(panel[title]["targets"][number]["expr"]),
            "eval_time": "5m",
            "exp_samples": [
                {"labels": f'{{namespace="lab",job="{job}"}}', "value": value} for job, value in found.items()
            ],
        }
        for (title, number), found in expected.items()
    ]
    file = tmp_path / "panels.yaml"
    test = {"interval": "15s", "input_series": lines, "promql_expr_test": tests}
    file.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "15s", "tests": [test]}))
    promtool("test", "rules", str(file))


def filled(expression: str) -> str:
    """An expression with Grafana's variables filled in for all ranks of all jobs."""
    for name, value in VARIABLES.items():
        expression = expression.replace(f"${name}", value)
    return expression


def test_the_configuration_of_prometheus_is_valid(tmp_path: Path) -> None:
    (tmp_path / "rules").symlink_to(RULES)
    standalone = ROOT / "k8s" / "components" / "monitoring-standalone" / "prometheus.yaml"
    (in_cluster,) = [d for d in yaml.safe_load_all(standalone.read_text()) if d["kind"] == "ConfigMap"]
    own = (ROOT / "grafana" / "prometheus" / "compose.yaml").read_text()
    for text in (own, in_cluster["data"]["prometheus.yaml"].replace("/etc/prometheus/", "")):
        config = tmp_path / "prometheus.yaml"
        config.write_text(text)
        promtool("check", "config", str(config))


def test_compose_tells_prometheus_the_job(tmp_path: Path) -> None:
    mounts = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["prometheus"]["volumes"]
    (mount,) = [mount for mount in mounts if "workers.yaml" in mount]
    source, target, _ = mount.replace("${JOB:-digits}-${STRATEGY:-ddp}", "cifar10-auto").split(":")
    copied = {"/etc/prometheus/prometheus.yaml": "grafana/prometheus/compose.yaml", target: source}
    for place, original in copied.items():
        path = tmp_path / Path(place).relative_to("/etc/prometheus")
        path.parent.mkdir(exist_ok=True)
        path.write_text((ROOT / original).read_text())
    (tmp_path / "rules").symlink_to(RULES)
    found = json.loads(
        promtool("check", "service-discovery", "--timeout=5s", str(tmp_path / "prometheus.yaml"), "horizonml")
    )
    labels = [target["labels"] for target in found]
    assert [(one["job"], one["node"]) for one in labels] == [("cifar10-auto", f"worker-{rank}") for rank in range(5)]
