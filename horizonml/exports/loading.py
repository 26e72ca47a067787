"""Tells in a few lines of Python how an exported model is loaded, for model cards."""

from __future__ import annotations

from collections.abc import Sequence

from horizonml.data.dataset import DataInfo
from horizonml.exports.formats import Format
from horizonml.exports.preparation import Preparation, preparation_of
from horizonml.job.schema import Job
from horizonml.models.spec import TORCHVISION_MODELS

# HorizonML's own models: the module and the constructor.
_OWN = {"digits_cnn": ("small", "digits_cnn"), "gpt": ("gpt", "GPT")}

_ADAPTED = (
    "The file holds weights only, with peft's names: the layers of the original model as `base_layer`, and their "
    "adapters as `lora_A` and `lora_B`. `horizonml export --adapters` writes a folder that peft loads."
)


def how_to_load(format: Format, file: str, job: Job, info: DataInfo | None) -> str:
    """Return the lines as a code block of Markdown, with what they need."""
    names = list(info.names) if info is not None and info.names else []
    if format is Format.ONNX:
        lines, after = _onnx(file, names or ["input"], preparation_of(job, info), bool(info and info.labels))
    elif format is Format.TORCH_EXPORT:
        arguments = ", ".join(f"{name}={name}" for name in names) or "input"
        lines = ["import torch", "", f'model = torch.export.load("{file}").module()', f"outputs = model({arguments})"]
        after = "The archive runs without the model's code. Load only archives that you trust."
    else:
        reader = (
            ("import torch", f'torch.load("{file}", weights_only=True)')
            if format is Format.STATE_DICT
            else ("from safetensors.torch import load_file", f'load_file("{file}")')
        )
        imported, built, note = _constructor(job, info)
        lines = [reader[0], *imported, "", f"model = {built}", f"model.load_state_dict({reader[1]})", "model.eval()"]
        after = f"The file holds weights only, and fits the model that the job names{note}."
        if job.model.lora is not None:
            lines, after = [reader[0], "", f"weights = {reader[1]}"], _ADAPTED
    return "\n".join(["```python", *lines, "```", "", after])


def _onnx(file: str, names: Sequence[str], preparation: Preparation | None, has_labels: bool) -> tuple[list[str], str]:
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
