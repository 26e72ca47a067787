"""The base of every part of a job file, and the errors about it.

A spec stands in the file `spec.py` beside what it configures and imports nothing of its room, so that a job can be
read, checked and documented without PyTorch. What pydantic finds wrong is put into sentences that name the field, the
value and the fix. Durations are read as people write them: 30s, 10m, 1h30m.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from horizonml.errors import JobError
from horizonml.text import nearest


class Spec(BaseModel):
    """A section of the job file: strict about types and unknown keys, and immutable once it is read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Rule:
    """A field's rule in words, which its error message states when a text does not match the field's pattern."""

    text: str
    always: bool = False  # whether the message states it for values of another type, too


@dataclass(frozen=True)
class Code:
    """Marks a field whose text may be `module:callable`, which is imported and run.

    Whoever adds a field that leads to code marks it with this, so that a job that came from elsewhere is not run
    without the user's consent (`horizonml.job.foreign`).
    """

    libraries: tuple[str, ...] = ()  # what may stand before the colon without being a module of the user's own

    def named_by(self, text: str) -> bool:
        """Return whether a value of the field names code."""
        module, colon, _ = text.partition(":")
        return bool(colon) and module not in self.libraries


PlainName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"),
    Rule("must begin with a letter or digit and contain only letters, digits, '.', '_' and '-'"),
]
"""A name that may become a folder, a label or a part of an address."""

_URL = re.compile(
    r"(?P<scheme>[a-z0-9]+)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(?P<rest>[/?][^\\]*)?"
)
_CONFIGURATION = re.compile(r"[\w .,+*|()=%-]{0,200}")
_FREE = ("id2label", "label2id")  # options of transformers that only name classes


def is_place_elsewhere(text: str) -> bool:
    """Return whether the text of a path has the form of a URL, or of several that a library would chain."""
    return "://" in text or "::" in text


def check_url(text: str, schemes: tuple[str, ...] = ("http", "https")) -> None:
    """Raise ValueError unless a text is a URL of one of these schemes that names a host and a file, and nothing more.

    Libraries understand far more: chains (`a::b`), local files, archives, templates, and names and passwords.
    """
    match = _URL.fullmatch(text)
    if match is None or match["scheme"] not in schemes or "::" in (match["rest"] or "") or not text.isprintable():
        known = ", ".join(f"{scheme}://HOST/..." for scheme in schemes)
        raise ValueError(
            f"{text[:200]!r} is not a URL that is read; use {known}, without a chain (::), a user's name or a password"
        )


def is_configuration(value: Any) -> bool:
    """Return whether an option is made of numbers, truth values and plain words only, at any depth.

    Such a value names no file, server or code, whatever a library makes of it.
    """
    if isinstance(value, str):
        return _CONFIGURATION.fullmatch(value) is not None and ".." not in value
    if isinstance(value, dict):
        return all(
            is_configuration(str(key)) and (str(key) in _FREE or is_configuration(inner))
            for key, inner in value.items()
        )
    if isinstance(value, list | tuple):
        return all(map(is_configuration, value))
    return value is None or isinstance(value, bool | int | float)


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|min|s|m|h)\s*")


def duration(text: str, option: str, least: float = 0.0) -> float:
    """Return the seconds that an option asks for, which must be more than `least`. Raises JobError."""
    rest, seconds = text.strip().lower(), 0.0
    if re.fullmatch(r"\d+(\.\d+)?", rest):
        raise JobError(f"{option}: {text!r} has no unit; did you mean {rest}s, or {rest}m?")
    while part := _PART.match(rest):
        seconds += float(part[1]) * _UNITS[part[2]]
        rest = rest[part.end() :]
    if rest or not text.strip():
        raise JobError(f"{option}: {text!r} is not a duration, for example 30s, 10m or 1h30m")
    if seconds <= least:
        raise JobError(f"{option}: {text} is too short; it must be longer than {least:g}s")
    return seconds


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
