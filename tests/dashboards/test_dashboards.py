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
from tests.programs import need

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
RULES = ROOT / "grafana" / "rules"
TESTS = ROOT / "tests" / "dashboards" / "rules.yaml"
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
# The rest of a histogram, and what other panels show in other words.
NOT_SHOWN = {
    "horizonml_step_phase_seconds_bucket",
    "horizonml_epoch",
    "horizonml_epochs_planned",
    "horizonml_plan_info",  # the whole plan in a line; `horizonml_stage_info` shows it rank by rank
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
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in suffixes}
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
            assert ("rate(" in target["expr"]) == ("$__rate_interval" in target["expr"]), where


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
    tests = yaml.safe_load(TESTS.read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    for rule in rules():
        if "alert" not in rule:
            continue
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        mine = [case for case in cases if case["alertname"] == rule["alert"]]
        assert any(case.get("exp_alerts") for case in mine), f"{rule['alert']} never fires in {TESTS.name}"
        assert any(not case.get("exp_alerts") for case in mine), f"{rule['alert']} is never seen quiet in {TESTS.name}"


def test_every_file_in_the_folder_of_rules_holds_rules() -> None:
    for path in RULES.iterdir():  # Prometheus is told to load them all
        assert yaml.safe_load(path.read_text()).keys() == {"groups"}, path


def test_rules_fire_and_keep_quiet_as_they_should() -> None:
    need("promtool", "Prometheus' own tester runs tests/dashboards/rules.yaml")
    for arguments in (["check", "rules", *sorted(map(str, RULES.iterdir()))], ["test", "rules", str(TESTS)]):
        result = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def test_the_configuration_of_prometheus_is_valid(tmp_path: Path) -> None:
    need("promtool", "Prometheus itself checks its configuration")
    (tmp_path / "rules").symlink_to(RULES)
    config = tmp_path / "prometheus.yaml"
    config.write_text((ROOT / "grafana" / "prometheus" / "compose.yaml").read_text())
    result = subprocess.run(["promtool", "check", "config", str(config)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
