"""One panel of a Grafana dashboard, as data, and the JSON that Grafana wants for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GREEN, YELLOW, BLUE, ORANGE, RED = "green", "yellow", "blue", "orange", "red"

PER_RANK = "rank {{rank}} on {{node}}"  # a legend: people know devices by their nodes, and not by pods
SAMPLES_PER_SECOND = "suffix:samples/s"  # Grafana's own units would say "3.0 K" and leave out of what

Query = tuple[str, str]  # expression, and legend without the job, which every legend names


@dataclass(frozen=True)
class Panel:
    """One panel. `width` is in 24ths of the screen, `height` in Grafana's rows."""

    kind: str  # timeseries, stat, bargauge, table
    title: str
    text: str
    unit: str
    queries: Sequence[Query]
    width: int = 8
    height: int = 8
    low: float | None = None
    high: float | None = None
    colours: dict[str, str] = field(default_factory=dict)  # by the name of a series, without its job
    steps: Sequence[tuple[float | None, str]] = ((None, GREEN),)  # thresholds, for stat and bargauge
    soft: float | None = None  # the axis reaches at least this far
    stacked: bool = False  # shares that add up to 1: those of several jobs have a part of the height each
    points: bool = False  # values as points, for what happens now and then
    decimals: int | None = None
    words: dict[int, tuple[str, str]] = field(default_factory=dict)  # value -> text and colour, for stat
    columns: dict[str, str] = field(default_factory=dict)  # label -> heading, for table
    without: str = ""  # what to say where there is no data, and need not be

    def to_json(self, number: int, x: int, y: int) -> dict[str, Any]:
        """As Grafana wants it, at a place on the grid."""
        defaults: dict[str, Any] = {
            "unit": self.unit,
            "color": {"mode": "palette-classic" if self.kind == "timeseries" else "thresholds"},
            "thresholds": {
                "mode": "absolute",
                "steps": [{"value": value, "color": colour} for value, colour in self.steps],
            },
        }
        for key, value in (("min", self.low), ("max", self.high), ("decimals", self.decimals)):
            if value is not None:
                defaults[key] = value
        if self.without:
            defaults["noValue"] = self.without
        if self.words:
            options = {
                str(value): {"text": text, "color": colour, "index": index}
                for index, (value, (text, colour)) in enumerate(self.words.items())
            }
            defaults["mappings"] = [{"type": "value", "options": options}]
        options, custom = self._options()
        if custom:
            defaults["custom"] = custom
        panel: dict[str, Any] = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.text,
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "targets": [self._target(index, *query) for index, query in enumerate(self.queries)],
            "fieldConfig": {
                "defaults": defaults,
                "overrides": [
                    {
                        "matcher": {"id": "byRegexp", "options": f"/^{re.escape(name)} \\(/"},
                        "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
                    }
                    for name, colour in self.colours.items()
                ],
            },
            "options": options,
        }
        if self.kind == "table":
            hidden = {name: True for name in ("Time", "Value", "namespace") if name not in self.columns}
            order = {label: index for index, label in enumerate(self.columns)}
            panel["transformations"] = [
                {
                    "id": "organize",
                    "options": {"excludeByName": hidden, "indexByName": order, "renameByName": self.columns},
                },
                {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": next(iter(self.columns.values()))}]}},
            ]
        return panel

    def _target(self, index: int, expression: str, legend: str) -> dict[str, Any]:
        target: dict[str, Any] = {
            "refId": "ABCDEFGH"[index],
            "datasource": DATASOURCE,
            "expr": expression,
            "legendFormat": f"{legend} ({{{{job}}}})" if legend else "{{job}}",
            "range": self.kind == "timeseries",
            "instant": self.kind != "timeseries",
        }
        if self.kind == "table":
            target["format"] = "table"
        return target

    def _options(self) -> tuple[dict[str, Any], dict[str, Any]]:
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        if self.kind == "timeseries":
            custom: dict[str, Any] = {
                "drawStyle": "points" if self.points else "line",
                "lineWidth": 1,
                "fillOpacity": 60 if self.stacked else 0 if any("{{" in legend for _, legend in self.queries) else 8,
                "showPoints": "always" if self.points else "never",
                "spanNulls": 60_000,
                "stacking": {"mode": "percent" if self.stacked else "none", "group": "A"},
            }
            if self.points:
                custom["pointSize"] = 8
            if self.soft is not None:
                custom["axisSoftMax"] = self.soft
            legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}, custom
        if self.kind == "stat":
            return {
                "reduceOptions": reduce,
                "colorMode": "value",
                "graphMode": "none",
                "justifyMode": "auto",
                "textMode": "auto",
                "orientation": "auto",
            }, {}
        if self.kind == "bargauge":
            return {
                "reduceOptions": reduce,
                "displayMode": "basic",
                "orientation": "horizontal",
                "showUnfilled": True,
            }, {}
        assert self.kind == "table", self.kind
        return {"showHeader": True, "cellHeight": "sm"}, {}


def curves(title: str, text: str, unit: str, queries: Sequence[Query], low: float | None = 0, **more: Any) -> Panel:
    """Values over time, from 0 unless `low` says otherwise."""
    return Panel("timeseries", title, text, unit, queries, low=low, **more)


def per_rank(title: str, text: str, unit: str, expression: str, low: float | None = 0, **more: Any) -> Panel:
    """The values of each rank over time."""
    return curves(title, text, unit, [(expression, PER_RANK)], low, **more)


def bars(title: str, text: str, unit: str, expression: str, **more: Any) -> Panel:
    """The newest value of each rank as a bar, the largest first."""
    return Panel("bargauge", title, text, unit, [(f"sort_desc({expression})", PER_RANK)], low=0, **more)


def number(title: str, text: str, unit: str, queries: Sequence[Query], **more: Any) -> Panel:
    """The newest value of each query, in a flat panel."""
    return Panel("stat", title, text, unit, queries, height=4, **more)
