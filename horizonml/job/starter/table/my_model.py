"""The network that job.yaml trains: change it, or replace it with your own."""

from torch import nn


def build(num_outputs: int = 1, values: int = 3, width: int = 64) -> nn.Module:
    """Take rows of a table, [batch, values], and return a number for each target or a score for each class.

    HorizonML sets `num_outputs`; `model.options` in the job file sets the rest. A row has one value for each column of
    numbers; a column of text has one value for each distinct text (one-hot).
    """
    return nn.Sequential(
        nn.Linear(values, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, num_outputs)
    )
