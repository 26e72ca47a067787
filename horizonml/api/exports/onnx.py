"""Exports the model as an ONNX graph, and runs it with onnxruntime to compare.

The exporter is the one on top of torch.export. The older one records TorchScript, which PyTorch has deprecated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from horizonml.api.exports.formats import Agreement, Format, Samples, compare, properties
from horizonml.api.exports.graph import batches, dynamic_shapes, joined, quietly, record
from horizonml.api.exports.trained import Trained

_MOST_IN_ONE_FILE = 1 << 30  # bytes; a message of protobuf must stay below 2 GiB


def write(trained: Trained, samples: Samples, draft: Path) -> None:
    """Write the graph with its weights; weights of more than a gigabyte go into a second file, FILE.data.

    The batch dimension of every input is named `batch` and may have any size. The names of classes, and how pictures
    are prepared, are properties of the file. Raises ExportError or OSError.
    """
    recorded = record(trained, samples, Format.ONNX)
    weights = sum(tensor.nbytes for tensor in trained.module.state_dict().values())
    args, kwargs = trained.arguments(samples.rows(0, 1))
    with quietly(trained, Format.ONNX), torch.no_grad():
        program = torch.onnx.export(
            recorded,
            dynamo=True,
            dynamic_shapes=dynamic_shapes(trained),  # for the names of dimensions
            input_names=trained.input_names,
            output_names=_output_names(trained.module(*args, **kwargs)),
            verbose=False,
        )
        assert program is not None
        program.model.metadata_props.update(properties(trained.job, trained.info))
        program.save(draft, external_data=weights > _MOST_IN_ONE_FILE)


def verify(trained: Trained, samples: Samples, draft: Path) -> Agreement:
    """Return how the outputs of onnxruntime agree with the model's. Raises ExportError if they do not."""
    found = []
    with quietly(trained, Format.ONNX):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        session = onnxruntime.InferenceSession(draft, options, providers=["CPUExecutionProvider"])
        names = {entry.name for entry in session.get_inputs()}
        for inputs in batches(samples):
            feed = dict(zip(trained.input_names, (tensor.numpy() for tensor in inputs), strict=True))
            outputs = session.run(None, {name: value for name, value in feed.items() if name in names})
            found.append([torch.from_numpy(output) for output in outputs])
    return compare(draft.name, samples.words, trained.outputs(samples.inputs), joined(found))


def _output_names(output: Any, name: str = "") -> list[str]:
    """Return a name for each tensor of the model's output: its keys in mappings, and its numbers in sequences."""
    if isinstance(output, Tensor):
        return [name or "output"]
    if isinstance(output, Mapping):
        inner = [(f"{name}_{key}" if name else str(key), value) for key, value in output.items()]
    elif isinstance(output, list | tuple):
        inner = [(f"{name or 'output'}_{number}", value) for number, value in enumerate(output)]
    else:
        inner = []
    return [found for key, value in inner for found in _output_names(value, key)]
