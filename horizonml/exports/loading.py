"""Tells in a few lines of Python how an exported model is loaded, for model cards."""

from __future__ import annotations

from horizonml.data.dataset import DataInfo
from horizonml.exports.formats import Format
from horizonml.job.schema import Job
from horizonml.models.spec import TORCHVISION_MODELS


def how_to_load(format: Format, file: str, job: Job, info: DataInfo | None) -> str:
    """Return the lines as a code block of Markdown, with what they need."""
    names = list(info.names) if info is not None and info.names else []
    if format is Format.ONNX:
        feed = ", ".join(f'"{name}": {name}.numpy()' for name in names or ["input"])
        lines = [
            "import onnxruntime",
            "",
            f'session = onnxruntime.InferenceSession("{file}")',
            f"outputs = session.run(None, {{{feed}}})",
        ]
        after = "The inputs are NumPy arrays; any number of samples is one batch."
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
    return "\n".join(["```python", *lines, "```", "", after])


def _constructor(job: Job, info: DataInfo | None) -> tuple[list[str], str, str]:
    """Return the imports and the expression that build the job's model, and what to add about them."""
    options: dict[str, object] = dict(job.model.options)
    if job.model.name in TORCHVISION_MODELS:
        if info is not None:
            options = {"num_classes": info.outputs} | options
        if info is not None and job.model.name.startswith("vit"):
            options = {"image_size": info.inputs[0].shape[1]} | options
        return ["import torchvision"], f"torchvision.models.{job.model.name}({_keywords(options)})", ""
    if job.model.name == "digits_cnn":
        if info is not None:
            channels, size, _ = info.inputs[0].shape
            options = {"num_classes": info.outputs, "channels": channels, "image_size": size} | options
        return ["from horizonml.models.small import digits_cnn"], f"digits_cnn({_keywords(options)})", ""
    module, _, name = job.model.name.partition(":")
    if not name:
        return [], f"...  # {job.model.name}({_keywords(options)})", ""
    first = name.partition(".")[0]
    given = {"num_outputs", "num_classes"} & options.keys()
    note = f"; give it the number of outputs, {info.outputs}, if it takes one" if info and not given else ""
    return [f"from {module} import {first}"], f"{name}({_keywords(options)})", note


def _keywords(options: dict[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
