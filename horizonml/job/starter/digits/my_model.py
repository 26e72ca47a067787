"""The network that job.yaml trains: change it, or replace it with your own."""

from torch import nn


def build(num_classes: int = 10, width: int = 32) -> nn.Module:
    """Take images of shape [batch, 1, 8, 8], and return a score for each class.

    HorizonML sets `num_classes` to the number of classes in the data; `model.options` in the job file sets the rest.
    A pipeline can be cut wherever a single tensor leads from one layer to the next.
    """
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )
