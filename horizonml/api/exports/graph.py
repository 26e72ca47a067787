"""What the formats have in common that hold a model's computation: examples, a free batch size, and errors in words."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from horizonml.api.exports.formats import Format, Samples
from horizonml.api.exports.trained import Trained
from horizonml.errors import ExportError, is_out_of_memory

_EXAMPLES = 2  # a batch of one would be taken for a size that never changes


def record(trained: Trained, samples: Samples, format: Format) -> torch.export.ExportedProgram:
    """Return the recorded computation of a model, whose inputs have a batch of any size in their first dimension.

    Raises ExportError, which names the format that it is for.
    """
    inputs = tuple(torch.cat([tensor] * _EXAMPLES)[:_EXAMPLES] for tensor in samples.inputs)
    args, kwargs = trained.arguments(inputs)
    with quietly(trained, format), torch.no_grad():
        return torch.export.export(trained.module, args, kwargs, dynamic_shapes=dynamic_shapes(trained))


def dynamic_shapes(trained: Trained) -> Any:
    """Return, for an exporter, that the first dimension of every input is the batch, of any size."""
    batch = torch.export.Dim("batch")
    shapes = [{0: batch} for _ in trained.info.inputs]
    return dict(zip(trained.input.names, shapes, strict=True)) if trained.input.names else tuple(shapes)


def batches(samples: Samples) -> Iterator[tuple[Tensor, ...]]:
    """Yield the samples in two batches of different sizes, one of them a single sample: the batch must be free."""
    number = len(samples.inputs[0])
    yield samples.rows(0, 1)
    if number > 1:
        yield samples.rows(1, number)


def joined(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the outputs of several batches as those of one."""
    return [torch.cat(tensors) if tensors[0].dim() else tensors[0] for tensors in zip(*parts, strict=True)]


@contextmanager
def quietly(trained: Trained, format: Format) -> Iterator[None]:
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
