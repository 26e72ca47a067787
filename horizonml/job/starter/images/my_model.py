"""The network that job.yaml trains: change it, or replace it with your own."""

from torch import nn


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Halve the height and the width."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)
    )


def build(num_classes: int = 2, width: int = 32) -> nn.Module:
    """Take images of shape [batch, 3, height, width], and return a score for each class.

    HorizonML sets `num_classes` to the number of folders; `model.options` in the job file sets the rest. The ranks of a
    pipeline divide the layers among themselves.
    """
    return nn.Sequential(
        block(3, width),
        block(width, 2 * width),
        block(2 * width, 4 * width),
        block(4 * width, 8 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, num_classes),
    )
