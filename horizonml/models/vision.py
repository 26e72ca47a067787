"""The convolutional models and the transformer that jobs can name: a small one of our own, and torchvision's.

`digits_cnn` is a small convolutional network, for inputs as small as the embedded digits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn

from horizonml.errors import ModelError
from horizonml.machine.torchvision import import_torchvision
from horizonml.tasks.task import InputSpec


def digits_cnn(num_classes: int = 10, channels: int = 1, image_size: int = 8, width: int = 32) -> nn.Sequential:
    """Return six convolutions with batch normalisation, two halvings of height and width, and one linear layer.

    The network takes `[batch, channels, image_size, image_size]` and returns `[batch, num_classes]`.
    """
    if image_size < 4:
        raise ValueError(f"image_size must be at least 4, not {image_size}")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    incoming = channels
    for block, outgoing in enumerate((width, 2 * width, 4 * width), start=1):
        for half in ("a", "b"):
            layers[f"conv{block}{half}"] = nn.Conv2d(incoming, outgoing, 3, padding=1, bias=False)
            layers[f"norm{block}{half}"] = nn.BatchNorm2d(outgoing)
            layers[f"relu{block}{half}"] = nn.ReLU(inplace=True)
            incoming = outgoing
        if block < 3:
            layers[f"pool{block}"] = nn.MaxPool2d(2)
    layers["average"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(incoming, num_classes)
    return nn.Sequential(layers)


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
