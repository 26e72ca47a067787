"""What pydantic finds wrong with a file, in sentences that name the field, the value and the fix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from horizonml.job.schema import Adam, Sgd
from horizonml.text import nearest

_TAGS = {"optimizer": {"sgd", "adam", "adamw"}}
_MOST_CHARACTERS = 80  # of a wrong value


def explain(error: ValidationError, schema: type[BaseModel]) -> str:
    """Return a line for every mistake in the values of a schema."""
    return "\n".join(f"  {_explain(details, schema)}" for details in error.errors())


def _explain(details: ErrorDetails, schema: type[BaseModel]) -> str:
    """Return one mistake as a line: the field, what is wrong with which value, and the fix."""
    location = [
        str(part)
        for index, part in enumerate(details["loc"])
        if not (index == 1 and part in _TAGS.get(str(details["loc"][0]), ()))
    ]
    field, value, kind = ".".join(location), details["input"], details["type"]
    context = details.get("ctx", {})
    if kind == "extra_forbidden":
        known = _keys_at(schema, location[:-1], details["loc"])
        return f"{field}: unknown key{nearest(location[-1], known) or '; known here: ' + ', '.join(known)}"
    if kind in ("literal_error", "union_tag_invalid"):
        text = str(context.get("expected") or context.get("expected_tags"))
        if kind == "union_tag_invalid":
            field, value = f"{field}.name", value.get("name") if isinstance(value, Mapping) else value
        options = re.findall(r"'([^']*)'", text) or text.split(" or ")
        return f"{field}: {_shown(value)} is not one of {', '.join(options)}{nearest(str(value)[:99], options)}"
    if kind == "value_error":
        message = str(context["error"])
        # A section's validator names the field inside it.
        separator = "." if re.match(r"[a-z_.]+: ", message) else ": "
        return f"{field}{separator}{message}" if field else message
    if kind == "missing":
        return f"{field}: missing; give it a value"
    if location[-1:] == ["name"] and kind == "string_pattern_mismatch":
        rule = "must begin with a letter or digit and contain only letters, digits, '.', '_' and '-'"
        return f"{field}: {_shown(value)} {rule}"
    if location[-1:] == ["address"]:
        return f"{field}: {_shown(value)} is not host:port, for example 192.168.1.10:29400"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{field or 'the file'}: {_shown(value)} must be a section of keys and values"
    message = re.sub("^(Input|String|List|Value) should ", "must ", details["msg"])
    message = re.sub(" after validation, not .*", "", message)
    return f"{field}: {_shown(value)} {message}"


def _shown(value: Any) -> str:
    """Return a value as it is written, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _keys_at(schema: type[BaseModel], location: list[str], raw: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the section of the schema at this place."""
    section: Any = schema
    for part in location:
        if part.isdigit():
            continue
        section = _section_of(section.model_fields[part].annotation, raw)
    return list(section.model_fields)


def _section_of(annotation: Any, raw: tuple[int | str, ...]) -> Any:
    """Return the section class inside an annotation such as `list[StageSpec] | None`; a union by its tag in `raw`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    candidates = [_section_of(inner, raw) for inner in getattr(annotation, "__args__", ())]
    candidates = [candidate for candidate in candidates if candidate is not None]
    if Adam in candidates and not {"adam", "adamw"} & set(raw):
        return Sgd
    return candidates[-1] if candidates else None
