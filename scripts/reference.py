"""The job file reference, from the schema that reads job files: `make generate` writes docs/job-file.md from it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from horizonml.job.jobfile import json_schema
from horizonml.plan.schedules import SCHEDULES

INTRODUCTION = """\
# Job file reference

<!-- Made from horizonml/job/schema.py by `make generate`; change the descriptions there. -->

A job file is a YAML mapping. Every field has a default, so an empty file is a valid job, and a field or section that
does not exist is refused with the name of the nearest one. You can override any field on the command line with
`--set SECTION.FIELD=VALUE`. `horizonml validate JOB` shows a job with all defaults filled in, and `horizonml validate
--schema` prints the JSON schema that this page is made from, for your editor.

```yaml
name: cifar10
epochs: 30
batch_size: 320
model: {name: resnet18}
data: {name: cifar10, augment: true}
optimizer: {name: sgd, lr: 0.2, nesterov: true}
lr_schedule: {name: cosine, warmup_steps: 200}
parallel: {strategy: pipeline, workers: 5}
```
"""
HEADINGS = {
    "Sgd": "`optimizer` (sgd)",
    "Adam": "`optimizer` (adam, adamw)",
    "StageSpec": "`parallel.stages` (each stage)",
}
TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "mapping"}


def document() -> str:
    """Return docs/job-file.md."""
    schema = json_schema()
    sections, plain, parts = schema["$defs"], {}, []
    for name, field in schema["properties"].items():
        references = list(_references(field))
        if not references:
            plain[name] = field
        for reference in references:
            parts += _section(f"`{name}`", reference, sections)
    required = schema.get("required", ())
    return "\n".join([INTRODUCTION, "## Top level\n", _table(plain, required), *parts, _schedules()])


def _references(value: Any) -> Iterator[str]:
    """Yield the names of the sections that a part of the schema refers to."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner.rpartition("/")[2]
            elif key != "discriminator":
                yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _section(heading: str, reference: str, sections: dict[str, Any]) -> list[str]:
    """Return a section's part of the page, followed by those of the sections inside it."""
    section = sections[reference]
    heading = HEADINGS.get(reference, heading)
    parts = [
        f"## {heading}\n",
        section["description"] + "\n",
        _table(section["properties"], section.get("required", ())),
    ]
    for name, field in section["properties"].items():
        for nested in _references(field):
            parts += _section(f"{heading}: `{name}`", nested, sections)
    return parts


def _table(fields: dict[str, Any], required: Collection[str]) -> str:
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "required" if name in required else _default(field)
        meaning = field.get("description", "The name that selects this section.")
        lines.append(f"| `{name}` | {_type(field)} | {default} | {_text(meaning)} |")
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    return "" if value is None else f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _type(field: dict[str, Any]) -> str:
    """Return what values a field takes, in words."""
    choices = [choice for choice in field.get("anyOf", [field]) if choice.get("type") != "null"]
    return " or ".join(_one_type(choice) for choice in choices)


def _one_type(field: dict[str, Any]) -> str:
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "$ref" in field or "oneOf" in field:
        return "section"
    if "type" not in field:
        return "any value"
    if field["type"] == "array":
        length = field.get("maxItems")
        of = "sections" if "$ref" in field["items"] else TYPES[field["items"]["type"]] + "s"
        return f"list of {length} {of}" if length else f"list of {of}"
    bounds = [
        f"{words} {field[key]:g}"
        for key, words in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if key in field
    ]
    return ", ".join([TYPES[field["type"]], " and ".join(bounds)]) if bounds else TYPES[field["type"]]


def _schedules() -> str:
    lines = [
        "## Schedules\n",
        "These are the values of `parallel.schedule`. Each is a function in `horizonml/plan/schedules/`, which",
        "describes it in detail.\n",
        "| name | what it does |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {_text(schedule.about)} |" for name, schedule in SCHEDULES.items()]
    return "\n".join(lines) + "\n"
