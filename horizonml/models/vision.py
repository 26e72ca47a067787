"""The convolutional models and the transformer that jobs can name: a small one of our own, and torchvision's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from horizonml.errors import ModelError
from horizonml.machine.torchvision import import_torchvision
from horizonml.models.small import digits_cnn
from horizonml.tasks.task import InputSpec


def vision_model(name: str, outputs: int, input: InputSpec) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    """Return a model's constructor and the keyword arguments that suit these outputs and this input.

    Raises ModelError unless the input has the shape `[channels, height, width]`.
    """
    (shape, *more) = (tensor.shape for tensor in input.tensors)
    if len(shape) != 3 or more:
        raise ModelError(
            f"model {name} takes inputs of shape [channels, height, width], but the data has inputs of shape "
            f"{list(shape)}; choose another model"
        )
    channels, height, _ = shape
    if name == "digits_cnn":
        return digits_cnn, {"num_classes": outputs, "channels": channels, "image_size": height}
    size = {"image_size": height} if name.startswith("vit") else {}
    return getattr(import_torchvision().models, name), {"num_classes": outputs, **size}
