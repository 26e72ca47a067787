"""The network that job.yaml trains: change it, or replace it by your own."""

from torch import nn


def build(num_outputs: int = 2, points: int = 64, width: int = 64) -> nn.Module:
    """Take curves of shape [batch, points], and return the numbers that are to be predicted.

    HorizonML sets `num_outputs` to the number of targets; `model.options` in the job file sets the rest. The ranks of a
    pipeline share the layers.
    """
    return nn.Sequential(
        nn.Linear(points, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, num_outputs)
    )
