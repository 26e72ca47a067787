"""Puts what pydantic finds wrong with a file into sentences that name the field, the value and the fix."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from horizonml.spec.base import Rule
from horizonml.text import nearest

_MOST_CHARACTERS = 80  # of a wrong value

_Section = type[BaseModel]


def explain(error: ValidationError, schema: _Section) -> str:
    """Return a line for every mistake in the values of a schema."""
    return "\n".join(f"  {_explain(details, schema)}" for details in error.errors())


def _explain(details: ErrorDetails, schema: _Section) -> str:
    """Return one mistake as a line: the field, what is wrong with which value, and the fix."""
    names, section, info = _locate(schema, details["loc"])
    field, value, kind = ".".join(names), details["input"], details["type"]
    context = details.get("ctx", {})
    if kind == "extra_forbidden":
        known = list(section.model_fields)
        return f"{field}: unknown key{nearest(names[-1], known) or '; known here: ' + ', '.join(known)}"
    if kind in ("literal_error", "union_tag_invalid"):
        text = str(context.get("expected") or context.get("expected_tags"))
        if kind == "union_tag_invalid":
            tag = str(context["discriminator"]).strip("'")
            field, value = f"{field}.{tag}", value.get(tag) if isinstance(value, Mapping) else value
        options = re.findall(r"'([^']*)'", text) or text.split(" or ")
        return f"{field}: {_shown(value)} is not one of {', '.join(options)}{nearest(str(value)[:99], options)}"
    if kind == "value_error":
        message = str(context["error"])
        # A section's validator names the field inside it.
        separator = "." if re.match(r"[a-z_.]+: ", message) else ": "
        return f"{field}{separator}{message}" if field else message
    if kind == "missing":
        return f"{field}: missing; give it a value"
    rule = next((note for note in info.metadata if isinstance(note, Rule)), None) if info is not None else None
    if rule is not None and (rule.always or kind == "string_pattern_mismatch"):
        return f"{field}: {_shown(value)} {rule.text}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{field or 'the file'}: {_shown(value)} must be a section of keys and values"
    message = re.sub("^(Input|String|List|Value) should ", "must ", details["msg"])
    message = re.sub(" after validation, not .*", "", message)
    return f"{field}: {_shown(value)} {message}"


def _shown(value: Any) -> str:
    """Return a value as it is written, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _locate(schema: _Section, location: Sequence[int | str]) -> tuple[list[str], _Section, FieldInfo | None]:
    """Return the names on the way to a place, the section that holds it, and its field, if the section has it.

    Where sections take turns, as optimizers do, pydantic puts the tag of the one that is meant behind the field's name;
    that tag is no name that the user has written.
    """
    names: list[str] = []
    section: _Section | None = schema
    holder, info = schema, None
    parts = iter(location)
    for part in parts:
        names.append(str(part))
        if isinstance(part, int):
            continue
        holder, info = section or holder, section.model_fields.get(part) if section is not None else None
        if info is None:
            section = None
            continue
        inside = _sections_in(info.annotation)
        if isinstance(info.discriminator, str):
            tag, name = next(parts, None), info.discriminator
            inside = [one for one in inside if tag in get_args(one.model_fields[name].annotation)] or inside
        section = inside[-1] if inside else None
    return names, holder, info


def _sections_in(annotation: Any) -> list[_Section]:
    """Return the sections inside an annotation such as `list[StageSpec] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in _sections_in(inner)]
