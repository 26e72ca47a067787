"""Reading job files: YAML to a checked `Job`, with errors a user can act on.

Everything that can be checked without PyTorch, a socket or the data is checked here. Unknown keys are refused,
and every error names the field, the value and a way out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from horizonml.errors import JobError
from horizonml.job import Adam, Job, Sgd
from horizonml.text import nearest


def load(path: Path, overrides: Iterable[str] = ()) -> Job:
    """Read a job file and apply overrides of the form `section.key=value`. Raises JobError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise JobError(f"{path}: {error.strerror or error}; give the path of a job file (see jobs/)") from error
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: not a text file ({error.reason} at byte {error.start})") from error
    return parse(text, str(path), overrides)


def parse(text: str, source: str, overrides: Iterable[str] = ()) -> Job:
    """Like `load`, from the text of a job file; `source` names it in errors."""
    values = _yaml(text, source)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise JobError(f"{source}: a job file is a mapping of keys to values, not a {type(values).__name__}")
    for override in overrides:
        _apply(values, override)
    return _checked(values, source)


def changed(job: Job, changes: Mapping[str, Any]) -> Job:
    """The job with some fields changed, named as `section.field`, and checked again. Raises JobError."""
    values = job.model_dump()
    for key, value in changes.items():
        *sections, last = key.split(".")
        target = values
        for section in sections:
            target = target[section]
        target[last] = value
    return _checked(values, f"{job.name} with {', '.join(f'{key}={value}' for key, value in changes.items())}")


def _checked(values: dict[str, Any], source: str) -> Job:
    try:
        return Job.model_validate(values)
    except ValidationError as error:
        lines = [f"  {_explain(details)}" for details in error.errors()]
        raise JobError(f"{source} is not a valid job:\n" + "\n".join(lines)) from None


def json_schema() -> dict[str, Any]:
    """The job file's JSON schema, for editors."""
    schema = Job.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "HorizonML job", **schema}


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses duplicate keys and reads 1e-3 as a number (YAML 1.1 reads a string)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # noqa: S506  (a subclass of SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise JobError(f"{where}: {error.problem or 'not YAML'}") from None
    except yaml.YAMLError as error:
        raise JobError(f"{source}: not YAML: {error}") from None


def _apply(values: dict[str, Any], override: str) -> None:
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
    target[last] = _yaml(text, f"--set {override}")


_TAGS = {"optimizer": {"sgd", "adam", "adamw"}}


def _explain(details: ErrorDetails) -> str:
    """One pydantic error as a line: field, what is wrong with which value, and the fix."""
    location = [
        str(part)
        for index, part in enumerate(details["loc"])
        if not (index == 1 and part in _TAGS.get(str(details["loc"][0]), ()))
    ]
    field, value, kind = ".".join(location), details["input"], details["type"]
    context = details.get("ctx", {})
    if kind == "extra_forbidden":
        known = _keys_at(location[:-1], details["loc"])
        return f"{field}: unknown key{nearest(location[-1], known) or '; known here: ' + ', '.join(known)}"
    if kind in ("literal_error", "union_tag_invalid"):
        text = str(context.get("expected") or context.get("expected_tags"))
        if kind == "union_tag_invalid":
            field, value = f"{field}.name", value.get("name") if isinstance(value, Mapping) else value
        options = re.findall(r"'([^']*)'", text) or text.split(" or ")
        return f"{field}: {value!r} is not one of {', '.join(options)}{nearest(str(value), options)}"
    if kind == "value_error":
        message = str(context["error"])
        return f"{field}.{message}" if field else message
    if kind == "missing":
        return f"{field}: missing; give it a value"
    if location[-1:] == ["address"]:
        return f"{field}: {value!r} is not host:port, for example 192.168.1.10:29400"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{field}: {value!r} must be a section of keys and values"
    message = re.sub("^(Input|String|List) should ", "must ", details["msg"])
    return f"{field}: {value!r} {message}"


def _keys_at(location: list[str], raw: tuple[int | str, ...]) -> list[str]:
    """The keys of the section of the schema at this place in the job."""
    section: Any = Job
    for part in location:
        if part.isdigit():
            continue
        annotation = section.model_fields[part].annotation
        section = _section_of(annotation, raw)
    return list(section.model_fields)


def _section_of(annotation: Any, raw: tuple[int | str, ...]) -> Any:
    """The section class inside an annotation such as `list[StageSpec] | None`; a union by its tag in `raw`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    candidates = [_section_of(inner, raw) for inner in getattr(annotation, "__args__", ())]
    candidates = [candidate for candidate in candidates if candidate is not None]
    if Adam in candidates and not {"adam", "adamw"} & set(raw):
        return Sgd
    return candidates[-1] if candidates else None
