"""A harder set than the digits, made from them: two digits and clutter on a canvas, a class for each pair of digits.

No data can be downloaded everywhere, so the pictures are composed of the 1,797 digits that are part of the package
(`horizonml/data/digits.md` says whose they are, and under which licence). Each picture has a digit in its left half and
one in its right half, of random size, angle and place, which may overlap and leave the canvas; pieces of further
digits lie between them, and noise on top. The class is `10 * left + right`. Training pictures and held-out ones are
composed of different digits. Everything follows from the seed.

A job names the data and the model for it:

    model: {name: "benchmarks.clutter:net"}
    data: {name: "benchmarks.clutter:pictures"}
"""

from __future__ import annotations

import csv
import gzip
import math
from importlib.resources import files

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

SIDE, CLASSES = 28, 100
HELD_OUT_DIGITS = 359  # a fifth of them
PIECES = 2
BACKGROUND, GRAIN = 0.15, 0.08  # of the noise behind the digits, and on top of all
_AT_A_TIME = 1000


class Pictures(TensorDataset):
    """Pictures `[1, 28, 28]` and their classes."""

    classes = CLASSES


def pictures(train: int = 10000, held_out: int = 2000, seed: int = 0) -> tuple[Pictures, Pictures]:
    """Return the training pictures and the held-out ones, each with its class."""
    generator = torch.Generator().manual_seed(seed)
    content, digits = embedded_digits()
    order = torch.randperm(len(content), generator=generator)
    parts = (order[HELD_OUT_DIGITS:], train), (order[:HELD_OUT_DIGITS], held_out)
    made = [compose(content[members], digits[members], number, generator) for members, number in parts]
    return Pictures(*made[0]), Pictures(*made[1])


def embedded_digits() -> tuple[Tensor, Tensor]:
    """Return the digits of the package, `[samples, 1, 8, 8]` from 0 to 1, and which digits they are."""
    packed = (files("horizonml.data") / "digits.csv.gz").read_bytes()
    rows = torch.tensor([[int(value) for value in row] for row in csv.reader(gzip.decompress(packed).decode().split())])
    return (rows[:, :64].float() / 16).reshape(-1, 1, 8, 8), rows[:, 64]


def compose(content: Tensor, digits: Tensor, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return `number` pictures of these digits, and their classes."""
    made, classes = [], []
    for first in range(0, number, _AT_A_TIME):
        count = min(_AT_A_TIME, number - first)
        chosen = torch.randint(0, len(content), (2 + PIECES, count), generator=generator)
        canvas = BACKGROUND * torch.rand(count, 1, SIDE, SIDE, generator=generator)
        for place, members in enumerate(chosen):
            laid = _lay(content[members], place, generator)
            canvas = torch.maximum(canvas, laid)
        made.append(canvas + GRAIN * torch.randn(canvas.shape, generator=generator))
        classes.append(10 * digits[chosen[0]] + digits[chosen[1]])
    return torch.cat(made), torch.cat(classes)


def _lay(content: Tensor, place: int, generator: torch.Generator) -> Tensor:
    """Return canvases on which one digit each lies: in the left half (place 0), in the right half (1), or a piece."""

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(len(content), generator=generator)

    whole = place < 2
    angle, size = (uniform(-0.5, 0.5), uniform(0.4, 0.65)) if whole else (uniform(-math.pi, math.pi), uniform(0.2, 0.4))
    across = uniform(-0.6, -0.2) if place == 0 else uniform(0.2, 0.6) if place == 1 else uniform(-0.9, 0.9)
    down = uniform(-0.4, 0.4) if whole else uniform(-0.9, 0.9)
    brightness = uniform(0.6, 1.0) if whole else uniform(0.3, 0.7)
    if not whole:
        content = content.clone()
        content[:, :, :4] = 0  # half a digit
    cos, sin = angle.cos() / size, angle.sin() / size
    matrix = torch.stack(
        [
            torch.stack([cos, -sin, -cos * across + sin * down], 1),
            torch.stack([sin, cos, -sin * across - cos * down], 1),
        ],
        1,
    )
    grid = functional.affine_grid(matrix, [len(content), 1, SIDE, SIDE], align_corners=False)
    return functional.grid_sample(content, grid, align_corners=False) * brightness.view(-1, 1, 1, 1)


def net(num_classes: int = CLASSES) -> nn.Sequential:
    """Return five convolutions with batch normalisation and one linear layer: a quarter of a million parameters."""
    layers: list[nn.Module] = []
    incoming = 1
    for outgoing, stride, pooled in ((16, 1, False), (32, 2, False), (64, 1, True), (64, 1, False), (128, 1, True)):
        layers += [nn.Conv2d(incoming, outgoing, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outgoing), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pooled else []
        incoming = outgoing
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(incoming * 9, num_classes))
