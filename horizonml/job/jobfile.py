"""Reads job files and plan files, and says what a device takes over from a job that came over the network.

Everything that can be checked without PyTorch, a socket or the data is checked here. Unknown keys are refused,
and every error names the field, the value and a way out. Plans are written to files in the same form.

A job file is data, except where it names code, and it names places: files of the machine that runs it, and servers.
`TAKEN` has a row for each field of the schema. A field without a row, or a value that does not have the form that its
row allows, is refused, so a field that is added to the schema stays closed until somebody has thought about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from horizonml.errors import JobError
from horizonml.files import write_atomically, writing
from horizonml.job.schema import Job
from horizonml.plan.plan import Plan, Sync
from horizonml.spec.base import Code, explain, is_configuration, is_place_elsewhere, parse_yaml, read_text, read_yaml
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
    return from_values(values, source, overrides)


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


def plan_values(plan: Plan) -> dict[str, object]:
    """Return a plan as a job's `parallel` section has it."""
    stages = [
        {
            "ranks": list(stage.ranks),
            "shares": list(stage.shares),
            "send": stage.send,
            "layers": [stage.start, stage.stop - 1],
            **({} if stage.sync is Sync.ALL_REDUCE or stage.sync.steps_alone else {"sync": stage.sync.name}),
        }
        for stage in plan.stages
    ]
    local = {"sync": plan.local.to_json()} if plan.local is not None else {}
    return {"schedule": plan.schedule, "micro_batches": plan.micro_batches, "stages": stages, **local}


def write_plan(plan: Plan, path: Path, names: Sequence[str] = ()) -> None:
    """Write a plan as YAML for `horizonml train --plan`; `names` are those of the ranks' devices. Raises JobError.

    Ranks that the plan leaves out are not in the file, and the others are numbered anew.
    """
    if plan.spare:
        kept = [rank for rank in range(plan.world_size) if rank not in plan.spare]
        place = {rank: number for number, rank in enumerate(kept)}
        stages = tuple(replace(stage, ranks=tuple(place[rank] for rank in stage.ranks)) for stage in plan.stages)
        plan, names = replace(plan, stages=stages, spare=()), [names[rank] for rank in kept] if names else ()
    lines = ["# A plan, made by `horizonml plan`: horizonml train JOB --plan THIS"]
    devices = {"devices": list(names)} if names else {}  # of ranks 0, 1, ...
    content = yaml.safe_dump({**devices, **plan_values(plan)}, sort_keys=False, default_flow_style=None, width=120)
    text = "\n".join([*lines, content])
    with writing(path):
        write_atomically(path, text.encode())


def read_plan(job: Job, path: Path) -> Job:
    """Return the job with the plan of a file. Raises JobError."""
    values = _read(path)
    if isinstance(values, dict):
        values.pop("devices", None)
    if isinstance(values, dict) and set(values) - {"sync"} == {"schedule", "micro_batches", "stages"}:
        values = {"sync": None, **values, "workers": None, "replicas": None}
    elif isinstance(values, dict) and set(values) == {"strategy", "workers"}:  # Horovod's, by version 0.1
        values = {**values, "micro_batches": None, "stages": None}
    else:
        raise JobError(f"{path}: not a plan; `horizonml plan JOB --out {path}` writes one")
    return changed(
        job, {f"parallel.{key}": value for key, value in values.items()}, f"{job.name} by the plan of {path}"
    )


def read_devices(path: Path) -> list[str]:
    """Return the names of the ranks' devices in a plan's file, or nothing if it has none. Raises JobError."""
    values = _read(path)
    names = values.get("devices", []) if isinstance(values, dict) else []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise JobError(f"{path}: devices: not a list of names; `horizonml plan JOB --out {path}` writes one")
    return names


def _read(path: Path) -> Any:
    return read_yaml(path, f"`horizonml plan JOB --out {path}` writes one")


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
        value="name seed epochs steps batch_size label_smoothing device precision memory_format",
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
    **_rows("parallel.sync.", value="every fragments delay late format learning_rate momentum"),
    **_rows("parallel.stages.", value="ranks shares split sync send layers"),
    **_rows("rendezvous.", value="timeout step_timeout replace_timeout max_attempts", own="address"),
    **_rows("security.", value="encrypt port"),
    **_rows("checkpoint.", value="every_steps best_is resume enabled background", text="keep_best", own="copy_to"),
    "checkpoint.keep": Row(FieldKind.VALUE, 100),
    "checkpoint.copies": Row(FieldKind.VALUE, 100),
    **_rows("recovery.", value="mirrors mirror_budget"),
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
        case FieldKind.TEXT:
            texts = value if isinstance(value, list) else [value]
            return len(texts) <= _MOST_TEXTS and all(len(one) <= _MOST_TEXT and one.isprintable() for one in texts)
        case FieldKind.OPTIONS:
            return is_configuration(value)
        case FieldKind.PLACE:
            if not value.isprintable() or len(value) > _MOST_PATH:
                return False
            return not value.startswith("hub:") or _HUB.fullmatch(value) is not None
    return True  # the schema has checked a VALUE; others need consent, or are not taken over


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
