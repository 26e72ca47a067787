"""Makes the schema of the chart's values, and the table of them in its README, from the comments in values.yaml."""

from __future__ import annotations

import json
import re
from typing import Any, cast

import yaml

from horizonml.job.jobfile import json_schema
from horizonml.kube.render import AMOUNT, CLASS_NAME, MOST_CLASS, NODE, TAKEN

TYPES = {bool: "boolean", int: "integer", str: "string", dict: "object", list: "array"}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
CLASS = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "count"],
    "properties": {
        "name": {"type": "string", "maxLength": MOST_CLASS, "pattern": f"^{CLASS_NAME}$", "not": {"enum": list(TAKEN)}},
        "count": {"type": "integer", "minimum": 1},
        "cpu": {"type": ["string", "number"], "pattern": f"^({NODE}|{AMOUNT})$", "exclusiveMinimum": 0},
        "memory": {"type": "string", "pattern": f"^{AMOUNT}$"},
        "arch": {"type": "string"},
        "accelerator": {"type": "string"},
        "node": STRINGS,
    },
}
# What the default of a value does not show.
RULES: dict[str, dict[str, Any]] = {
    "files": {**STRINGS, "propertyNames": {"pattern": r"^[A-Za-z_][A-Za-z0-9_]*\.py$"}},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "imagePullSecrets": {"items": {**STRINGS, "required": ["name"]}},
    "classes": {"items": CLASS, "minItems": 1},
    "disk": {"pattern": f"^({AMOUNT})?$"},
    "form": {"enum": ["statefulset", "job"]},
    "ttl": {"type": ["integer", "null"], "minimum": 0},
}


def schema(text: str) -> dict[str, Any]:
    """Return the schema of values, which names every key, and that of a job inside."""
    about, job = comments(text), cast(dict[str, Any], json_schema())
    fields = {key: value for key, value in job.items() if key in ("properties", "additionalProperties")}
    rules = {**RULES, "job": {**fields, "type": ["object", "string"]}}

    def of(value: Any, path: str = "") -> dict[str, Any]:
        made = {"description": about[path]} if path in about else {}
        made |= {"type": TYPES[type(value)]} if value is not None else {}
        if path in rules:
            return made | rules[path]
        if isinstance(value, dict):
            entries = {key: of(one, f"{path}.{key}".strip(".")) for key, one in value.items()}
            made |= {"additionalProperties": False, "properties": entries}
        return made

    made = {"$schema": job["$schema"], **of(yaml.safe_load(text)), "$defs": job["$defs"]}
    made["properties"]["global"] = {"type": "object", "description": "Of charts that contain this one; not used."}
    return made


def comments(text: str) -> dict[str, str]:
    """Return the comment above each value, by the value's path."""
    found: dict[str, str] = {}
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        if match := re.match(r" *# (.*)", line):
            comment.append(match[1])
        elif match := re.match(r"( *)(\w+):", line):
            path = [*path[: len(match[1]) // 2], match[2]]
            if comment:
                found[".".join(path)] = " ".join(comment)
            comment = []
    return found


def readme(page: str, text: str) -> str:
    """Return a page with the table of values in the place where it has one already."""
    rows = []
    for path, about in comments(text).items():
        value = yaml.safe_load(text)
        for key in path.split("."):
            value = value[key]
        default = value if isinstance(value, str) else json.dumps(value)
        rows.append(f"| `{path}` | {f'`{default}`' if value not in (None, '', {}, []) else ''} | {about} |")
    table = "\n".join(["| value | default | meaning |", "|---|---|---|", *rows])
    begin, end = "<!-- Made from values.yaml by `make generate`. -->", "<!-- end -->"
    head, tail = page.partition(begin)[0], page.partition(end)[2]
    return f"{head}{begin}\n{table}\n{end}{tail}"
