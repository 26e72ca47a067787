"""Says what a job that came from elsewhere would do to this machine beyond computing.

A job file is data, except where it names code, and it may name places on the machine that runs it. Which fields do is
marked in the schema itself, where each of them is defined.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel

from horizonml.job.schema import Job
from horizonml.spec.base import Code, Place

Mark = TypeVar("Mark")


def code_fields(job: Job) -> list[str]:
    """Return the fields of a job that name code which is imported and run, such as `model.name: mine:build`."""
    return [f"{name}: {text}" for name, mark, text in _marked(job, Code) if mark.named_by(text)]


def place_fields(job: Job, written: bool = False) -> list[str]:
    """Return the fields of a job that name a path or URL, such as `data.path: /data/x.csv`.

    With `written`, return only those where files are made or deleted. Defaults, such as runs/NAME, are not returned.
    """
    known = [(name, text) for name, mark, text in _marked(job, Place) if mark.written or not written]
    return [f"{name}: {text}" for name, text in known if name != "data.tokens" or text not in _NO_FILES]


_NO_FILES = ("characters", "bytes")  # of data.tokens


def _marked(section: BaseModel, kind: type[Mark], within: str = "") -> Iterator[tuple[str, Mark, str]]:
    """Yield the names, marks and values of the fields that are marked, also in sections inside this one."""
    for name, info in type(section).model_fields.items():
        value: Any = getattr(section, name)
        marks = [note for note in info.metadata if isinstance(note, kind)]
        if marks and isinstance(value, str):
            yield f"{within}{name}", marks[0], value
        inner = value if isinstance(value, list) else [value]
        for one in inner:
            if isinstance(one, BaseModel):
                yield from _marked(one, kind, f"{within}{name}.")
