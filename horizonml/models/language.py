"""The language models that jobs can name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from horizonml.errors import ModelError
from horizonml.models.gpt import GPT
from horizonml.tasks.task import InputSpec


def gpt_model(outputs: int, input: InputSpec) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    """Return the constructor of the small GPT, and the keyword arguments that suit this vocabulary and this input.

    Raises ModelError unless the input is a sequence of tokens.
    """
    length = sequence_length(input)
    if length is None:
        raise ModelError(
            "model gpt takes sequences of tokens, int64 of shape [positions], but the data has inputs of shape "
            f"{' and '.join(str(list(tensor.shape)) for tensor in input.tensors)}; choose another model"
        )
    return GPT, {"vocabulary": outputs, "context": length}


def sequence_length(input: InputSpec) -> int | None:
    """Return the number of tokens in a sample, or None if the samples are no sequences of tokens."""
    shape, dtype = input.tensors[0].shape, input.tensors[0].dtype
    return shape[0] if len(shape) == 1 and not dtype.is_floating_point else None
