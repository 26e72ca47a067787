"""A small convolutional network, for inputs as small as the embedded digits."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


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
