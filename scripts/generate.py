"""Writes what is made from code: `make generate`. A test fails where a generated file is out of date.

These are docs/metrics.md, docs/job-file.md, grafana/dashboards/*.json, the rules as a PrometheusRule, the forms of a
job in Kubernetes other than that of k8s/base, and the Helm chart.
"""

from __future__ import annotations

from pathlib import Path

import chart
import dashboards
import manifests
import reference
import yaml

from horizonml.telemetry.table import document

ROOT = Path(__file__).resolve().parent.parent


def files() -> dict[Path, str]:
    """Return every generated file with its text."""
    made = {
        ROOT / "docs" / "metrics.md": document(),
        ROOT / "docs" / "job-file.md": reference.document(),
    }
    made |= manifests.files() | chart.files()
    for name in dashboards.DASHBOARDS:
        made[ROOT / "grafana" / "dashboards" / f"{name}.json"] = dashboards.text(name)
    made[ROOT / "k8s" / "components" / "monitoring" / "rules.yaml"] = operator_rules()
    return made


def operator_rules() -> str:
    """Return grafana/rules/horizonml.yaml as a PrometheusRule."""
    rules = yaml.safe_load((ROOT / "grafana" / "rules" / "horizonml.yaml").read_text())
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "horizonml", "namespace": "horizonml"},
        "spec": rules,
    }
    return "# Made from grafana/rules/horizonml.yaml by `make generate`.\n" + yaml.safe_dump(
        resource, sort_keys=False, width=120
    )


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
