"""Grafana's dashboards, as tables of panels: `make generate` writes grafana/dashboards/*.json from them.

A panel's title names what it shows, and its description begins with the question that it answers. Queries use the
metrics of horizonml/telemetry/table.py and Grafana's own variables only, so they work in any Prometheus, with or
without the rules.
"""

from __future__ import annotations

import json
from typing import Any

from dashboards import devices, faults, overview, time
from dashboards.panel import DATASOURCE
from dashboards.queries import JOB

DASHBOARDS = {
    "overview": ("HorizonML: overview", overview.PANELS),
    "time": ("HorizonML: step time", time.PANELS),
    "faults": ("HorizonML: faults", faults.PANELS),
    "devices": ("HorizonML: devices", devices.PANELS),
}


def _variable(name: str, label: str, chosen: str = "") -> dict[str, Any]:
    """A list to choose from: the values of a label among the ranks that the lists before it leave over."""
    query = f"label_values(horizonml_ready{chosen and f'{{{chosen}}}'}, {name})"
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
        "refresh": 2,
        "sort": 3,
    }


def dashboard(name: str) -> dict[str, Any]:
    """A dashboard as Grafana's JSON."""
    title, panels = DASHBOARDS[name]
    placed, x, y, height = [], 0, 0, 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > 24:
            x, y = 0, y + height
        placed.append(panel.to_json(number, x, y))
        x, height = x + panel.width, panel.height
    return {
        "uid": f"horizonml-{name}",
        "title": title,
        "tags": ["horizonml"],
        "schemaVersion": 41,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",  # as often as Prometheus asks the ranks
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "title": DASHBOARDS[other][0].partition(": ")[2].capitalize(),
                "type": "link",
                "url": f"/d/horizonml-{other}",
                "icon": "dashboard",
                "tooltip": "",
                "tags": [],
                "asDropdown": False,
                "targetBlank": False,
                "includeVars": True,
                "keepTime": True,
            }
            for other in DASHBOARDS
            if other != name
        ],
        "templating": {
            "list": [
                {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus"},
                _variable("namespace", "Namespace"),
                _variable("job", "Job", 'namespace=~"$namespace"'),
                _variable("rank", "Rank", JOB),
            ]
        },
        "panels": placed,
    }


def text(name: str) -> str:
    """The file of a dashboard."""
    return json.dumps(dashboard(name), indent=2) + "\n"
