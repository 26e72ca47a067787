"""Exports the computation of a model, as an ONNX graph or an archive of torch.export, and runs the file to compare.

Both begin with what torch.export records, with a batch of any size. The older ONNX exporter records TorchScript, which
PyTorch has deprecated.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from horizonml.api.exports.formats import Agreement, ComparedSamples, ExportFormat, compare, properties
from horizonml.api.exports.trained import Trained, flat_tensors
from horizonml.errors import ExportError, is_out_of_memory

_EXAMPLES = 2  # a batch of one would be taken for a size that never changes
_MOST_IN_ONE_FILE = 1 << 30  # bytes; a message of protobuf must stay below 2 GiB

Run = Callable[[tuple[Tensor, ...]], list[Tensor]]
"""Computes the outputs of an exported file for a batch of inputs."""


def write(format: ExportFormat, trained: Trained, samples: ComparedSamples, draft: Path) -> None:
    """Write the model's computation and its weights. Raises ExportError or OSError."""
    inputs = tuple(torch.cat([tensor] * _EXAMPLES)[:_EXAMPLES] for tensor in samples.inputs)
    args, kwargs = trained.arguments(inputs)
    with quietly(trained, format), torch.no_grad():
        recorded = torch.export.export(trained.module, args, kwargs, dynamic_shapes=_dynamic_shapes(trained))
        if format is ExportFormat.ONNX:
            _write_onnx(trained, samples, recorded, draft)
        else:
            torch.export.save(recorded, draft)


def verify(format: ExportFormat, trained: Trained, samples: ComparedSamples, draft: Path) -> Agreement:
    """Return how the outputs of the file agree with the model's. Raises ExportError if they do not.

    The samples are computed in two batches of different sizes, one of them a single sample: the batch must be free.
    """
    number = len(samples.inputs[0])
    with quietly(trained, format), torch.no_grad():
        run = _onnx(trained, draft) if format is ExportFormat.ONNX else _torch_export(trained, draft)
        found = [run(samples.rows(start, stop)) for start, stop in ((0, 1), (1, number)) if stop > start]
    parts = zip(*found, strict=True)
    joined = [torch.cat(tensors) if tensors[0].dim() else tensors[0] for tensors in parts]
    return compare(draft.name, samples.words, trained.outputs(samples.inputs), joined)


def _dynamic_shapes(trained: Trained) -> Any:
    """Return, for an exporter, that the first dimension of every input is the batch, of any size."""
    batch = torch.export.Dim("batch")
    shapes = [{0: batch} for _ in trained.info.inputs]
    return dict(zip(trained.input.names, shapes, strict=True)) if trained.input.names else tuple(shapes)


def _write_onnx(
    trained: Trained, samples: ComparedSamples, recorded: torch.export.ExportedProgram, draft: Path
) -> None:
    """Write the graph with its weights; weights of more than a gigabyte go into a second file, FILE.data.

    The names of classes, and how pictures are prepared, are properties of the file.
    """
    weights = sum(tensor.nbytes for tensor in trained.module.state_dict().values())
    args, kwargs = trained.arguments(samples.rows(0, 1))
    program = torch.onnx.export(
        recorded,
        dynamo=True,
        dynamic_shapes=_dynamic_shapes(trained),  # for the names of dimensions
        input_names=trained.input_names,
        output_names=_output_names(trained.module(*args, **kwargs)),
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props.update(properties(trained.job, trained.info))
    program.save(draft, external_data=weights > _MOST_IN_ONE_FILE)


def _onnx(trained: Trained, draft: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(draft, options, providers=["CPUExecutionProvider"])
    names = {entry.name for entry in session.get_inputs()}

    def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        feed = dict(zip(trained.input_names, (tensor.numpy() for tensor in inputs), strict=True))
        outputs = session.run(None, {name: value for name, value in feed.items() if name in names})
        return [torch.from_numpy(output) for output in outputs]

    return run


def _torch_export(trained: Trained, draft: Path) -> Run:
    module = torch.export.load(draft).module()

    def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        args, kwargs = trained.arguments(inputs)
        return flat_tensors(module(*args, **kwargs))

    return run


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


@contextmanager
def quietly(trained: Trained, format: ExportFormat) -> Iterator[None]:
    """Silence an exporter's own messages, and turn what it raises into an ExportError."""
    levels = {name: logging.getLogger(name).level for name in ("torch.onnx", "torch.export", "onnxscript")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ExportError:
        raise
    except Exception as error:  # exporters run the model's own code, and have errors of many kinds
        if isinstance(error, OSError) or is_out_of_memory(error):
            raise
        raise ExportError(f"{trained.job.model.name} cannot be exported to {format.words}: {_reason(error)}") from error
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _reason(error: BaseException) -> str:
    """Return what an exporter has to say, and what can be done about it."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    text = str(causes[-1]).strip() or type(causes[-1]).__name__
    if "batch" in text and ("specialized" in text or "Constraints violated" in text):
        return "its forward pass fixes the batch size; compute with x.shape[0] in the place of a number"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{lines[0][:300]} (a state dict or safetensors file needs no graph)"
