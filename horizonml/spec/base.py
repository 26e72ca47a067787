"""The base of every part of a job file.

A spec stands in the file `spec.py` beside what it configures and imports nothing of its room, so that a job can be
read, checked and documented without PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

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


@dataclass(frozen=True)
class Place:
    """Marks a field whose text is a path or a URL, which is read or written on the machine that runs the job."""

    written: bool = False  # whether files are made or deleted there


@dataclass(frozen=True)
class Words:
    """Marks a field whose text is only compared with names, and leads neither to code nor to a file."""


PlainName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"),
    Rule("must begin with a letter or digit and contain only letters, digits, '.', '_' and '-'"),
]
"""A name that may become a folder, a label or a part of an address."""
