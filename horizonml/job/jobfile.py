"""Reads job files: from YAML to a checked `Job`, with errors that the user can act on.

Everything that can be checked without PyTorch, a socket or the data is checked here. Unknown keys are refused,
and every error names the field, the value and a way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from horizonml.errors import JobError
from horizonml.job.schema import Job
from horizonml.spec.mistakes import explain
from horizonml.spec.reading import parse_yaml, read_text
from horizonml.text import nearest


def load(path: Path, overrides: Iterable[str] = ()) -> Job:
    """Read a job file, or a ready job by its name, and apply overrides like `section.key=value`. Raises JobError."""
    ready = ready_jobs()
    file = ready.get(str(path), path) if not path.is_file() else path
    hint = f"give the path of a job file, or the name of a ready one ({', '.join(ready)}){nearest(path.stem, ready)}"
    return parse(read_text(file, hint), str(path), overrides)


def ready_jobs() -> dict[str, Path]:
    """Return the job files that come with the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parents[1] / "jobs").glob("*.yaml"))}


def parse(text: str, source: str, overrides: Iterable[str] = ()) -> Job:
    """Return the job of a job file's text, as `load` does; `source` names it in errors. Raises JobError."""
    values = parse_yaml(text, source)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise JobError(f"{source}: a job file is a mapping of keys to values, not a {type(values).__name__}")
    for override in overrides:
        _apply(values, override)
    return _checked(values, source)


def from_values(values: Mapping[str, object], source: str, overrides: Iterable[str] = ()) -> Job:
    """Return the job with the fields of a mapping and overrides, as `load` does. Raises JobError."""
    changed_values = dict(values)
    for override in overrides:
        _apply(changed_values, override)
    return _checked(changed_values, source)


def changed(job: Job, changes: Mapping[str, Any], source: str | None = None) -> Job:
    """Return the job with some fields changed, named as `section.field`, and checked again.

    Raises JobError, which names the `source`: by default the job and the changes.
    """
    values = job.model_dump()
    for key, value in changes.items():
        *sections, last = key.split(".")
        target = values
        for section in sections:
            target = target[section]
        target[last] = value
    return _checked(
        values, source or f"{job.name} with {', '.join(f'{key}={value}' for key, value in changes.items())}"
    )


def overridden(job: Job, overrides: Iterable[str]) -> Job:
    """Return the job with overrides like `section.key=value` applied, as `load` does. Raises JobError."""
    values: dict[str, object] = job.model_dump()
    for override in overrides:
        _apply(values, override)
    return _checked(values, job.name)


def _checked(values: Mapping[str, object], source: str) -> Job:
    """Return the job with these values. Raises JobError, which names every mistake."""
    try:
        return Job.model_validate(values)
    except ValidationError as error:
        raise JobError(f"{source} is not a valid job:\n{explain(error, Job)}") from None


def json_schema() -> dict[str, object]:
    """Return the job file's JSON schema, for editors."""
    schema = Job.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "HorizonML job", **schema}


def _apply(values: dict[str, object], override: str) -> None:
    """Change the values of a job file as an override `section.key=value` says. Raises JobError."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise JobError(f"--set {override}: write it as section.key=value")
    *sections, last = key.split(".")
    target = values
    for section in sections:
        inner = target.setdefault(section, {})
        if not isinstance(inner, dict):
            raise JobError(f"--set {override}: {section} is {inner!r}, which has no keys")
        target = inner
    target[last] = parse_yaml(text, f"--set {override}")
