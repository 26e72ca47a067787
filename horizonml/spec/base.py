"""The base of every part of a job file.

A spec stands in the file `spec.py` beside what it configures and imports nothing of its room, so that a job can be
read, checked and documented without PyTorch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


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
