"""Writes a model card: one page of Markdown about an exported model, with the lines of Python that load it.

The card is for people who find the file later and know nothing of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import yaml

from horizonml.api.exports.formats import ExportFormat, PicturePreparation, preparation_of
from horizonml.data.dataset import DataInfo
from horizonml.errors import HorizonError
from horizonml.files import checksum
from horizonml.job.schema import Job
from horizonml.models.spec import TORCHVISION_MODELS
from horizonml.plan.plan import Plan
from horizonml.report.records import RecordedRun, load_run
from horizonml.state.shards import Metadata
from horizonml.telemetry.record import metric_text
from horizonml.text import count, human_bytes, human_seconds

# HorizonML's own models: the module and the constructor.
_OWN = {"digits_cnn": ("small", "digits_cnn"), "gpt": ("gpt", "GPT")}

_ADAPTED = (
    "The file holds weights only, with peft's names: the layers of the original model as `base_layer`, and their "
    "adapters as `lora_A` and `lora_B`. `horizonml export --adapters` writes a folder that peft loads."
)


def how_to_load(format: ExportFormat, file: str, job: Job, info: DataInfo | None) -> str:
    """Return the lines as a code block of Markdown, with what they need."""
    names = list(info.names) if info is not None and info.names else []
    if format is ExportFormat.ONNX:
        lines, after = _onnx(file, names or ["input"], preparation_of(job, info), bool(info and info.labels))
    elif format is ExportFormat.TORCH_EXPORT:
        arguments = ", ".join(f"{name}={name}" for name in names) or "input"
        lines = ["import torch", "", f'model = torch.export.load("{file}").module()', f"outputs = model({arguments})"]
        after = "The archive runs without the model's code. Load only archives that you trust."
    else:
        reader = (
            ("import torch", f'torch.load("{file}", weights_only=True)')
            if format is ExportFormat.STATE_DICT
            else ("from safetensors.torch import load_file", f'load_file("{file}")')
        )
        imported, built, note = _constructor(job, info)
        lines = [reader[0], *imported, "", f"model = {built}", f"model.load_state_dict({reader[1]})", "model.eval()"]
        after = f"The file holds weights only, and fits the model that the job names{note}."
        if job.model.lora is not None:
            lines, after = [reader[0], "", f"weights = {reader[1]}"], _ADAPTED
    return "\n".join(["```python", *lines, "```", "", after])


def _onnx(
    file: str, names: Sequence[str], preparation: PicturePreparation | None, has_labels: bool
) -> tuple[list[str], str]:
    """Return the lines that run an ONNX file, for a picture where it takes pictures, and a sentence about them."""
    opened = f'session = onnxruntime.InferenceSession("{file}")'
    if preparation is None:
        feed = ", ".join(f'"{name}": {name}' for name in names)
        lines = ["import onnxruntime", "", opened, f"outputs = session.run(None, {{{feed}}})"]
        return lines, "The inputs are numpy arrays of samples, of which any number is one batch."
    imports = ["import numpy", "import onnxruntime", "from PIL import Image, ImageOps", ""]
    lines = [*imports, *preparation.lines("picture.png"), opened, '(outputs,) = session.run(None, {"input": input})']
    if not has_labels:
        return [*lines, "print(outputs.argmax(1))"], "Any number of pictures is one batch."
    names_of_classes = 'labels = json.loads(session.get_modelmeta().custom_metadata_map["labels"])'
    lines = ["import json", "", *lines, names_of_classes, "print(labels[outputs[0].argmax()])"]
    return lines, "Any number of pictures is one batch. The file's properties have this preparation, too."


def _constructor(job: Job, info: DataInfo | None) -> tuple[list[str], str, str]:
    """Return the imports and the expression that build the job's model, and what to add about them."""
    module, _, name = job.model.name.partition(":")
    options = {**_sizes(job.model.name, info), **job.model.options}
    given = ", ".join(f"{key}={value!r}" for key, value in options.items())
    if job.model.name in TORCHVISION_MODELS:
        return ["import torchvision"], f"torchvision.models.{module}({given})", ""
    if module == "timm":
        return ["import timm"], f"timm.create_model({', '.join([repr(name), given])})", ""
    if module == "transformers":
        note = ", with the sizes that the data gives it where the options do not say them"
        return [f"from transformers import {name}"], f"{name}({name}.config_class({given}))", note
    if not name:  # one of HorizonML's own
        place, name = _OWN.get(module, (module, module))
        return [f"from horizonml.models.{place} import {name}"], f"{name}({given})", ""
    outputs = {"num_outputs", "num_classes"} & options.keys()
    note = f"; give it the number of outputs, {info.outputs}, if it takes one" if info and not outputs else ""
    return [f"from {module} import {name.partition('.')[0]}"], f"{name}({given})", note


def _sizes(name: str, info: DataInfo | None) -> dict[str, object]:
    """Return the arguments that the data determines of a model that is known by its name."""
    if info is None:
        return {}
    outputs, shape = info.outputs, info.inputs[0].shape
    if name == "digits_cnn":
        return {"num_classes": outputs, "channels": shape[0], "image_size": shape[1]}
    if name == "gpt":
        return {"vocabulary": outputs, "context": shape[0]}
    if name.startswith("timm:"):
        return {"num_classes": outputs, "in_chans": shape[0]}
    if name in TORCHVISION_MODELS:
        return {"num_classes": outputs, **({"image_size": shape[1]} if name.startswith("vit") else {})}
    return {}


_SHOWN = 20  # names of classes
_CARD = Template("""\
---
license: unknown # fill in, for example apache-2.0
---

# $name

`$file` ($format) holds $model, trained on $data with HorizonML $version.

| | |
|---|---|
| model | $model, $size |
| task | $task |
| data | $samples |
| inputs | $inputs |
$pictures| on held-out data | $metrics |
| file | `$file`, $bytes, SHA-256 `$digest` |
| check | $check |
| licence | **fill in**: what others may do with this model, given the licence of its data |

## How to load it

$loading

## How it was trained

$training

$plan

$devices

$energy

Software: $versions.

## The job

```yaml
$job
```
""")


@dataclass(frozen=True)
class Subject:
    """Holds what a card is about."""

    draft: Path  # the file, which will have the same name elsewhere
    format: ExportFormat
    path: Path  # of the checkpoint
    metadata: Metadata
    job: Job | None  # None where this version cannot read it; then there is no card
    info: DataInfo | None  # None where the checkpoint does not say it
    values: int  # in parameters and buffers
    check: str  # what was found when it was verified
    average: bool = False  # whether its parameters are their moving averages


def write_card(about: Subject) -> str:
    """Return the text of a model card."""
    run, extra = _run_of(about.path), about.metadata.model_extra or {}
    job = about.job
    assert job is not None
    versions: dict[str, str] = {key: str(extra[key]) for key in ("horizonml", "torch") if key in extra}
    versions |= run.lead.run.versions if run is not None else {}
    fields = {
        "name": job.name,
        "file": about.draft.name,
        "format": about.format.words,
        "model": f"`{job.model.name}`",
        "size": f"{about.values:,} values in parameters and buffers" + ", moving averages" * about.average,
        "version": versions.get("horizonml", "of an unknown version"),
        "data": _data(job),
        "samples": _samples(job, about.info),
        "inputs": _inputs(about.info),
        "pictures": _pictures(job, about.info),
        "task": _task(job, about.info),
        "metrics": _metrics(about.metadata.metrics),
        "bytes": human_bytes(sum(part.stat().st_size for part in about.draft.parent.iterdir())),
        "digest": checksum(about.draft),
        "check": about.check,
        "loading": how_to_load(about.format, about.draft.name, job, about.info),
        "training": _training(job, about.metadata, run),
        "plan": _plan(about.metadata, run),
        "devices": _devices(run),
        "energy": _energy(run),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(versions.items())) or "not recorded",
        "job": _job(job),
    }
    return _CARD.substitute(fields)


def _run_of(path: Path) -> RecordedRun | None:
    """Return the records of the run that a checkpoint belongs to, if they lie beside it."""
    folder = path.absolute().parent.parent
    try:
        return load_run(folder.name, folder)
    except (HorizonError, OSError, ValueError):
        return None  # the checkpoint was copied without them, or they are damaged; a card can be written without


def _data(job: Job) -> str:
    """Return the name of the data for people."""
    return "a folder of images" if job.data.name == "folder" else job.data.name


def _samples(job: Job, info: DataInfo | None) -> str:
    if info is None:
        return f"{_data(job)}; the checkpoint does not say how many samples"
    return f"{_data(job)}, {info.train:,} training and {count(info.held_out, 'held-out sample')}"


def _inputs(info: DataInfo | None) -> str:
    if info is None:
        return "not recorded"
    names = info.names or ("input",) * len(info.inputs)
    kinds = (
        f"`{name}`: {str(spec.dtype).removeprefix('torch.')} `{['batch', *spec.shape]}`".replace("'", "")
        for name, spec in zip(names, info.inputs, strict=True)
    )
    return ", ".join(kinds) + (f"; {count(info.outputs, 'output')}" if info.outputs else "")


def _pictures(job: Job, info: DataInfo | None) -> str:
    """Return the rows of the table that only models of pictures, or those whose classes have names, have."""
    preparation, labels = preparation_of(job, info), info.labels if info is not None else ()
    rows = f"| preparation | {preparation.words()} |\n" if preparation is not None else ""
    if labels:
        named = ", ".join(f"{number}: {name}" for number, name in enumerate(labels[:_SHOWN]))
        rows += f"| classes | {named.replace('|', '&#124;')}{', ...' * (len(labels) > _SHOWN)} |\n"
    return rows


def _task(job: Job, info: DataInfo | None) -> str:
    name = info.task if job.task.name == "auto" and info is not None else job.task.name
    return name.replace("_", " ") if ":" not in name else f"`{name}`"


def _metrics(metrics: Mapping[str, float]) -> str:
    held_out = {
        name.removeprefix("held_out_"): value for name, value in metrics.items() if name.startswith("held_out_")
    }
    if not held_out:
        return "not evaluated"
    when = f", after epoch {metrics['epoch']}" if "epoch" in metrics else ""
    return ", ".join(f"{name} {metric_text(name, value)}" for name, value in held_out.items()) + when


def _training(job: Job, metadata: Metadata, run: RecordedRun | None) -> str:
    optimizer = f"{job.optimizer.name.upper()} with a learning rate of {job.optimizer.lr:g} ({job.lr_schedule.name})"
    text = f"{count(metadata.step, 'update')} of {count(job.batch_size, 'sample')}, by {optimizer}, seed {job.seed}"
    if not metadata.complete:
        text += "; the run had not ended when this checkpoint was saved"
    if run is not None and run.steps:
        text += f". Its steps took {human_seconds(sum(step.wall for step in run.steps))} altogether"
    return f"{text}.{_beginning(job, metadata)}"


def _beginning(job: Job, metadata: Metadata) -> str:
    """Return with which pretrained weights the training began, if with any."""
    weights, digest = job.model.weights, metadata.compatible.get("weights")
    if weights is None:
        return ""
    frozen = " Parameters that `model.freeze` selects are as they were." if job.model.freeze else ""
    return f" It began with the weights `{weights.source}`" + (f", SHA-256 `{digest}`." if digest else ".") + frozen


def _plan(metadata: Metadata, run: RecordedRun | None) -> str:
    try:
        plan = Plan.from_json(metadata.plan.model_dump())
        layers = run.lead.run.layers if run is not None else []
        names = layers if len(layers) == plan.layers else None
        lines = plan.describe(names).splitlines()
    except (KeyError, TypeError, ValueError):
        return "The plan was not recorded."
    return "\n".join(["The plan of the last group of ranks:", "", *(f"- {line}" for line in lines)])


def _devices(run: RecordedRun | None) -> str:
    if run is None:
        return "The run's records did not lie beside the checkpoint, so its devices are not known."
    rows = [
        f"| {rank.run.rank} | {rank.run.host or '-'} | {rank.run.machine.processor if rank.run.machine else '-'} "
        f"| {rank.run.cores:g} | {human_bytes(rank.run.memory) if rank.run.memory else '-'} |"
        for rank in run.ranks
    ]
    return "\n".join(["| rank | device | processor | cores | memory |", "|---|---|---|---|---|", *rows])


def _energy(run: RecordedRun | None) -> str:
    ranks: Sequence[Any] = run.ranks if run is not None else ()
    measured = {
        rank.run.node or rank.run.host: sum(step.joules or 0.0 for step in rank.steps)
        for rank in ranks
        if any(step.joules is not None for step in rank.steps)
    }
    if not measured:
        return "Energy: no device measured it."
    devices = len({rank.run.node or rank.run.host for rank in ranks})
    joules = sum(measured.values())
    where = (
        "by all devices" if len(measured) == devices else f"by the {len(measured)} of {devices} devices that measure it"
    )
    return f"Energy: {joules:,.0f} J ({joules / 3.6e6:.2g} kWh) in the recorded steps, {where}."


def _job(job: Job) -> str:
    """Return the job without what is only about where it ran."""
    values = job.model_dump(mode="json", exclude_defaults=True, exclude={"rendezvous", "folder", "telemetry"})
    return yaml.safe_dump({"name": job.name, **values}, sort_keys=False, width=110, allow_unicode=True).rstrip()
