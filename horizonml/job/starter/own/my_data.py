"""The data that job.yaml trains on: change it, or replace it with your own."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Curves(Dataset[tuple[Tensor, Tensor]]):
    """Noisy sine curves, whose frequency and phase the model predicts."""

    def __init__(self, samples: int = 2000, points: int = 64) -> None:
        """Make the samples. All ranks must make the same ones, so the random numbers begin with a seed."""
        generator = torch.Generator().manual_seed(0)
        self.targets = torch.rand(samples, 2, generator=generator)
        time = torch.linspace(0, 1, points)
        curves = torch.sin(6 * (1 + self.targets[:, :1]) * time + 3 * self.targets[:, 1:])
        self.inputs = curves + 0.1 * torch.randn(samples, points, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a sample: what the model takes, and what it predicts. Both may be any tree of tensors."""
        return self.inputs[index], self.targets[index]
