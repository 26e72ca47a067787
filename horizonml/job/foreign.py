"""Says what a device takes over from a job that came over the network: a list of what is allowed, field by field.

A job file is data, except where it names code, and it names places: files of the machine that runs it, and servers.
`TAKEN` has a row for each field of the schema. A field without a row, or a value that does not have the form that its
row allows, is refused, so a field that is added to the schema stays closed until somebody has thought about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from pydantic import BaseModel

from horizonml.errors import JobError
from horizonml.job.schema import Job
from horizonml.spec.base import Code, is_configuration, is_place_elsewhere

_MOST_TEXT, _MOST_PATH, _MOST_TEXTS = 200, 1000, 1000
_TORCHVISION = re.compile("[A-Z][A-Z0-9_]*")
_HUB = re.compile(r"hub:[\w][\w.-]*/[\w][\w.-]*")


class FieldKind(Enum):
    """What a device does with the value of a field."""

    VALUE = auto()  # a number, a truth value, or a text that the schema itself limits to some names or a pattern
    TEXT = auto()  # a text that is only compared with names
    CODE = auto()  # the name of something built in, or `module:callable`, which needs the device's consent
    OPTIONS = auto()  # keyword arguments: numbers, truth values and plain words, at any depth
    PLACE = auto()  # a file of the device or a URL, both of which need its consent
    OWN = auto()  # it is the device's own, whatever the job says


@dataclass(frozen=True)
class Row:
    """Says how a device takes over a field; a number above `most` is refused, or lowered to it."""

    kind: FieldKind
    most: int | None = None
    lowered: bool = False


def _rows(section: str, **fields: str) -> dict[str, Row]:
    """Return the rows of a section, whose fields are listed by kind."""
    found = {}
    for kind, names in fields.items():
        for name in names.split():
            found[f"{section}{name}"] = Row(FieldKind[kind.upper()])
    return found


TAKEN: dict[str, Row] = {
    **_rows(
        "",
        value="name seed epochs steps batch_size label_smoothing device precision memory_format compile",
        own="folder",
    ),
    **_rows("task.", code="name", options="options"),
    **_rows("model.", code="name", options="options", text="freeze"),
    **_rows("model.weights.", value="sha256 strict", place="source base_url"),
    **_rows("model.lora.", value="rank alpha dropout", text="targets train"),
    **_rows(
        "data.",
        code="name",
        options="options",
        place="folder path tokens",
        text="inputs targets",
        value="normalize download samples holdout image_size channels classes augment corrupt worker_kind length "
        "stride",
    ),
    "data.workers": Row(FieldKind.VALUE, 16, lowered=True),
    "data.prefetch": Row(FieldKind.VALUE, 64, lowered=True),
    "data.memory": Row(FieldKind.VALUE, 1 << 30, lowered=True),
    "data.disk": Row(FieldKind.VALUE, 4 << 30, lowered=True),
    **_rows("optimizer.", value="name lr momentum nesterov betas weight_decay clip_norm"),
    **_rows("lr_schedule.", value="name warmup_steps final every_epochs every_steps factor"),
    **_rows("ema.", value="decay warmup evaluate"),
    **_rows("evaluate.", value="every_epochs every_steps"),
    **_rows("early_stop.", value="patience min_delta best_is", text="metric"),
    **_rows(
        "parallel.",
        value="strategy workers min_workers max_workers schedule micro_batches exact activations gradient_compression "
        "replicas objective slowdown replan replan_threshold",
        text="deadline",
    ),
    "parallel.threads": Row(FieldKind.VALUE, 1024),
    **_rows("parallel.sync.", value="every fragments delay format learning_rate momentum"),
    **_rows("parallel.stages.", value="ranks shares split sync send layers"),
    **_rows("rendezvous.", value="timeout step_timeout replace_timeout max_attempts", own="address"),
    **_rows("security.", value="encrypt port"),
    **_rows("checkpoint.", value="every_steps best_is resume enabled background", text="keep_best"),
    "checkpoint.keep": Row(FieldKind.VALUE, 100),
    **_rows("recovery.", value="mirror mirror_budget"),
    "recovery.log_bytes": Row(FieldKind.VALUE, 4 << 30),
    **_rows("telemetry.", value="divergence_every timeline_every tensorboard", own="mlflow"),
}


@dataclass(frozen=True)
class Place:
    """Describes a file of this device, or a URL, that a job names."""

    field: str
    text: str

    @property
    def is_url(self) -> bool:
        """Return whether it is a URL."""
        return is_place_elsewhere(self.text)


def taken_over(job: Job, allow_code: bool) -> dict[str, object]:
    """Return the fields of a job from the network that this device takes over with another value, by name.

    Raises JobError for a field or a form that is not allowed.
    """
    changes: dict[str, object] = {}
    free = {entry.partition(".")[0] for entry in code_fields(job)} if allow_code else set()
    for name, value in _fields(job):
        row = TAKEN.get(name)
        if row is None:
            raise JobError(f"{name}: a device takes over no such field from a job that came over the network")
        if value is None:
            continue
        if row.kind is FieldKind.OWN or (name in ("data.folder", "data.path") and not _is_used(job, name)):
            changes[name] = None
        elif not (row.kind is FieldKind.OPTIONS and name.partition(".")[0] in free) and not _has_form(row.kind, value):
            raise JobError(
                f"{name}: {str(value)[:_MOST_TEXT]!a} does not have a form that a device takes over from the network; "
                "see docs/joining.md"
            )
        elif row.most is not None and isinstance(value, int) and value > row.most:
            if not row.lowered:
                raise JobError(
                    f"{name}: {value} is more than a device takes over from the network, which is {row.most}"
                )
            changes[name] = row.most
    return changes


def places(job: Job) -> list[Place]:
    """Return the files and URLs that a job reads, such as `data.path: /data/x.csv`."""
    return [
        Place(name, str(value))
        for name, value in _fields(job)
        if value is not None and name in TAKEN and TAKEN[name].kind is FieldKind.PLACE and _is_used(job, name)
    ]


def _is_used(job: Job, name: str) -> bool:
    """Return whether a job reads from a field that may name a place."""
    data = job.data
    match name:
        case "data.folder" | "data.path":
            return data.source.place == name.removeprefix("data.")
        case "data.tokens":
            return data.source.kind == "text" and data.tokens not in ("characters", "bytes")
        case "model.weights.source":
            return job.model.weights is not None and not _TORCHVISION.fullmatch(job.model.weights.source)
    return True


def _has_form(kind: FieldKind, value: Any) -> bool:
    """Return whether a value has the form that is allowed for fields of this kind."""
    match kind:
        case FieldKind.VALUE:
            return True  # the schema has checked it
        case FieldKind.TEXT:
            texts = value if isinstance(value, list) else [value]
            return len(texts) <= _MOST_TEXTS and all(len(one) <= _MOST_TEXT and one.isprintable() for one in texts)
        case FieldKind.OPTIONS:
            return is_configuration(value)
        case FieldKind.PLACE:
            if not value.isprintable() or len(value) > _MOST_PATH:
                return False
            return not value.startswith("hub:") or _HUB.fullmatch(value) is not None
    return True


def code_fields(job: Job) -> list[str]:
    """Return the fields of a job that name code which is imported and run, such as `model.name: mine:build`."""
    marks = dict(_marks(Job))
    return [f"{name}: {value}" for name, value in _fields(job) if name in marks and marks[name].named_by(value)]


def _marks(section: type[BaseModel]) -> Iterator[tuple[str, Code]]:
    """Yield the fields that may name code: each of them is `name` in a section of its own."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            inner = info.annotation.model_fields.get("name")
            yield from ((f"{name}.name", note) for note in (inner.metadata if inner else ()) if isinstance(note, Code))


def _fields(section: BaseModel, within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of all fields that are no sections, also of those in the sections inside this one."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        parts = value if isinstance(value, list) else [value]
        sections = [one for one in parts if isinstance(one, BaseModel)]
        for one in sections:
            yield from _fields(one, f"{within}{name}.")
        if not sections and not (value is None and f"{within}{name}" not in TAKEN):
            yield f"{within}{name}", value
