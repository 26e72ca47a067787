"""The network that job.yaml trains: change it, or replace it with your own."""

from torch import nn


def build(num_outputs: int = 2, points: int = 64, width: int = 64) -> nn.Module:
    """Take curves of shape [batch, points], and return the predicted numbers.

    HorizonML sets `num_outputs` to the number of targets; `model.options` in the job file sets the rest. The ranks of a
    pipeline divide the layers among themselves.
    """
    return nn.Sequential(
        nn.Linear(points, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, num_outputs)
    )
