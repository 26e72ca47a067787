"""Models for tests, named in jobs as `tests.models:NAME`."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def plain(num_classes: int = 10) -> nn.Sequential:
    """No BatchNorm and no dropout: every plan must give the gradients of the whole batch. Takes `[b, 1, 8, 8]`."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, padding=1, stride=2),
        nn.Tanh(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.Tanh(),
        nn.Linear(32, num_classes),
    )


def complaining(num_classes: int = 10) -> nn.Sequential:
    """Warns. Takes `[b, 1, 8, 8]`."""
    warnings.warn("of the model's own", stacklevel=1)
    return plain(num_classes)


def wide(num_classes: int = 10) -> nn.Sequential:
    """Like `plain`, with more parameters than are summed along a tree on one machine. Takes `[b, 1, 8, 8]`."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 1600), nn.Tanh(), nn.Linear(1600, 1600), nn.Tanh(), nn.Linear(1600, num_classes)
    )


def frozen(num_classes: int = 10) -> nn.Sequential:
    """Much state, small gradients: 8 MB of parameters, nearly all of which stay as they are. Takes `[b, 1, 8, 8]`."""
    still = nn.Linear(64, 32768)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), still.requires_grad_(False), nn.AdaptiveAvgPool1d(64), nn.Tanh(),
        nn.Linear(64, num_classes),
    )  # fmt: skip


def heavy(num_classes: int = 10, layers: int = 20) -> nn.Sequential:
    """64 MB a layer, 1.3 GB of parameters. Takes `[b, 1, 8, 8]`."""
    body = [nn.Linear(4096, 4096, bias=False) for _ in range(layers)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4096), *body, nn.Linear(4096, num_classes))


def normed(num_classes: int = 10) -> nn.Sequential:
    """With BatchNorm. Takes `[b, 1, 8, 8]`."""
    layers: list[nn.Module] = []
    for incoming, outgoing in ((1, 8), (8, 8), (8, 16), (16, 16)):
        layers += [nn.Conv2d(incoming, outgoing, 3, padding=1, bias=False), nn.BatchNorm2d(outgoing), nn.Tanh()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, num_classes))


class Masked(nn.Identity):
    """Has a mask of so many bytes that counts, which come behind it among the buffers, are not aligned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([1, 0, 1], dtype=torch.uint8))


def masked(num_classes: int = 10) -> nn.Sequential:
    """Like `normed`, with buffers of several types."""
    return nn.Sequential(Masked(), *normed(num_classes))


def narrow(num_classes: int = 10) -> nn.Sequential:
    """A layer of two channels. Takes `[b, 1, 8, 8]`."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.Tanh(), nn.Linear(2, num_classes))


class Residual(nn.Module):
    """As in a ResNet: two convolutions with BatchNorm, and a third one beside them."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(incoming, outgoing, 3, 2, 1, bias=False), nn.BatchNorm2d(outgoing)
        self.conv2, self.bn2 = nn.Conv2d(outgoing, outgoing, 3, 1, 1, bias=False), nn.BatchNorm2d(outgoing)
        self.side = nn.Conv2d(incoming, outgoing, 1, 2)

    def forward(self, value: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(value)))
        return functional.relu(self.bn2(self.conv2(inner)) + self.side(value))


def residual(num_classes: int = 10) -> nn.Sequential:
    """Residual blocks; a picture of 2 by 2 is flattened between a convolution and a linear layer."""
    return nn.Sequential(
        Residual(1, 8), nn.Conv2d(8, 6, 1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, num_classes)
    )


def depthwise(num_classes: int = 10) -> nn.Sequential:
    """As in MobileNet: depthwise convolutions, with a partner and without. Takes `[b, 1, 8, 8]`."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 1),
        nn.Softmax(1), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Softmax(1),
        nn.Flatten(), nn.Linear(384, num_classes),
    )  # fmt: skip


def dropping(num_classes: int = 10) -> nn.Sequential:
    """With dropout. Takes `[b, 1, 8, 8]`."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.Dropout(0.5),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, num_classes),
    )


class BranchesOnMode(nn.Module):
    """Its forward differs between training and evaluation, so it must stay one layer."""

    def forward(self, value: Tensor) -> Tensor:
        return functional.dropout(value, 0.5, self.training) + (1 if self.training else 2)


class BranchesOnValue(nn.Module):
    """Its forward cannot be traced, so it must stay one layer."""

    def forward(self, value: Tensor) -> Tensor:
        return value * 2 if len(value) > 1 else value


class Tied(nn.Module):
    """Uses one weight at the start and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.after = nn.Linear(8, 4)

    def forward(self, value: Tensor) -> Tensor:
        value = self.tied(value)
        value = torch.tanh(self.middle(value))
        value = self.tied(value)
        return self.after(value)


def tied_in_front(num_classes: int = 10) -> nn.Sequential:
    """Two layers near the beginning share a weight. Takes `[b, 1, 8, 8]`."""
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    return nn.Sequential(
        nn.Flatten(), first, nn.Tanh(), second, nn.Tanh(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(),
        nn.Linear(16, num_classes),
    )  # fmt: skip


class LanguageModel(nn.Module):
    """Embeds pixels, taken for numbers of words, and shares the embedding with the output. Takes `[b, 1, 8, 8]`."""

    def __init__(self, num_classes: int = 10, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, 12)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(12, num_classes, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, value: Tensor) -> Tensor:
        words = value.flatten(1).abs().mul(3).long().clamp(0, self.embedding.num_embeddings - 1)
        return self.head(self.blocks(self.embedding(words)).mean(1))


class TwoTensors(nn.Module):
    """Two tensors are alive in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, value: Tensor) -> Tensor:
        left = self.left(value)
        right = self.right(value)
        return self.out(left.tanh() + right.relu())


class UNet(nn.Module):
    """Goes down and up again, with skip connections; two to four tensors are alive nearly everywhere."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1) for a, b in ((1, 4), (4, 6), (6, 8))])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1) for a, b in ((16, 6), (12, 4), (8, 4))])
        self.out = nn.Linear(4 * 64, num_classes)

    def forward(self, value: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            value = layer(value).tanh()
            kept.append(value)
            value = functional.avg_pool2d(value, 2)
        value = self.middle(value).tanh()
        for layer in self.up:
            value = functional.interpolate(value, scale_factor=2)
            value = layer(torch.cat([value, kept.pop()], 1)).tanh()
        return self.out(value.flatten(1))


class TwoBranches(nn.Module):
    """Runs two branches side by side, of which one also uses the input, and joins them at the end."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.left = nn.ModuleList([nn.Linear(64 if n == 0 else 12, 12) for n in range(4)])
        self.right = nn.ModuleList([nn.Linear(64 if n == 0 else 6, 6) for n in range(4)])
        self.late = nn.Linear(64, 6)
        self.out = nn.Linear(24, num_classes)

    def forward(self, value: Tensor) -> Tensor:
        value = value.flatten(1)
        left, right = value, value
        for one, other in zip(self.left, self.right, strict=True):
            left, right = one(left).tanh(), other(right).tanh()
        return self.out(torch.cat([left, right, self.late(value).tanh()], 1))


class Returning(nn.Module):
    """Uses one module at the start and at the end, which keeps all between in one stage. Takes `[b, 1, 8, 8]`."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem, self.gate, self.out = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, num_classes)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(8)))

    def forward(self, value: Tensor) -> Tensor:
        value = self.gate(self.stem(value.flatten(1)))
        return self.out(self.gate(self.body(value)))


class Stubborn(nn.Module):
    """Branches on what it is given, so it cannot be traced. Takes `[b, 1, 8, 8]`."""

    def __init__(self, num_classes: int = 10, shared: bool = False) -> None:
        super().__init__()
        block = nn.Linear(64, 64)
        self.blocks = nn.ModuleList([block if shared and n % 2 == 0 else nn.Linear(64, 64) for n in range(5)])
        self.register_buffer("shift", torch.full((64,), 0.5), persistent=False)
        self.dropout, self.out = nn.Dropout(0.5), nn.Linear(64, num_classes)

    def forward(self, value: Tensor) -> Tensor:
        if not torch.isfinite(value).all():
            raise ValueError("values that are not finite")
        value = value.flatten(1) + self.shift
        for block in self.blocks:
            value = value + self.dropout(block(value).tanh())
        return self.out(value)


class StubbornUNet(nn.Module):
    """A U-Net of `Sequential` that fits what it joins, which cannot be traced. Takes `[b, 1, 8, 8]`."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()

        def block(incoming: int, outgoing: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(incoming, outgoing, 3, padding=1), nn.ReLU(inplace=True))

        self.down = nn.ModuleList([block(a, b) for a, b in ((1, 4), (4, 6), (6, 8))])
        self.up = nn.ModuleList([block(a, b) for a, b in ((14, 6), (10, 4))])
        self.out = nn.Linear(4 * 64, num_classes)

    def forward(self, value: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            value = layer(value)
            kept.append(value)
            value = functional.avg_pool2d(value, 2)
        value = kept.pop()
        for layer in self.up:
            value, other = functional.interpolate(value, scale_factor=2), kept.pop()
            if value.shape != other.shape:
                value = functional.interpolate(value, other.shape[2:])
            value = layer(torch.cat([value, other], 1))
        return self.out(value.flatten(1))


class StubbornInPlace(nn.Module):
    """Changes the results of its modules in place, and cannot be traced. Takes `[b, 1, 8, 8]`."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])
        self.relu, self.out = nn.ReLU(inplace=True), nn.Linear(64, num_classes)

    def forward(self, value: Tensor) -> Tensor:
        value = value.flatten(1)
        for number, block in enumerate(self.blocks):
            if len(value) > 1_000_000:
                raise ValueError("too many")
            value = block(value)
            if number == 1:
                value += 1
            value = self.relu(value)
        return self.out(value)


class Greedy(nn.Module):
    """Asks for more memory than any machine has."""

    def forward(self, value: Tensor) -> Tensor:
        return value + torch.empty(1 << 48)


class OddConstructor(nn.Module):
    """Creates parameters in all the ways that constructors do."""

    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        self.given = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.scaled = nn.Parameter(torch.ones(4, 1) * 1e-6)
        self.register_buffer("counted", torch.arange(4) * 2)
        self.linear = nn.Linear(4, num_classes)
        nn.init.orthogonal_(self.linear.weight)
        self.linear.bias.data[1:] = 7
        with torch.no_grad():
            self.linear.bias[:1].copy_(torch.tensor([5.0]))
        self.rates = [value.item() for value in torch.linspace(0, 1, 3)]
        self.cut = nn.Parameter(torch.empty(16))
        nn.init.trunc_normal_(self.cut, std=0.02)

    def forward(self, value: Tensor) -> Tensor:
        return self.linear(value.flatten(1)[:, :4] * self.given)


def reads_back(num_classes: int = 10) -> nn.Module:
    """A constructor that the meta device cannot run."""
    model = plain(num_classes)
    if model[0].weight.sum().item() == 0:
        raise AssertionError("unlikely")
    return model


def two_outputs() -> nn.Module:
    """Returns a pair."""

    class Pair(nn.Module):
        def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
            return value, value

    return Pair()


def not_a_model(num_classes: int = 10):  # type: ignore[no-untyped-def]
    """Does not say what it returns, and is wrong."""
    return {}


def broken(num_classes: int = 10) -> nn.Module:
    """Its constructor fails, on any device."""
    raise RuntimeError("no such device\nand more about it")


class Slow(nn.Module):
    """Takes its time; four times as long on the rank that the file $HORIZONML_TEST_SLOW names."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self.pause = pause  # seconds per sample

    def forward(self, value: Tensor) -> Tensor:
        file = Path(os.environ.get("HORIZONML_TEST_SLOW", os.devnull))
        named = file.read_text() if file.exists() else ""
        time.sleep(len(value) * self.pause * (4 if named == os.environ.get("RANK", "-") else 1))
        return value


def slow(num_classes: int = 10, pause: float = 2e-4) -> nn.Sequential:
    """Eight layers that take longer than a test's processes could take each other's time. Takes `[b, 1, 8, 8]`."""
    body = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), Slow(pause)) for _ in range(8)]
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(64, num_classes))


class MovingAverage(nn.Module):
    """Keeps a moving average in a buffer that it replaces, and a count that no checkpoint has."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(features))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        if self.training:
            self.average = 0.9 * self.average + 0.1 * value.detach().mean(0)
            self.seen += 1
        return value - self.average


def averaging(num_classes: int = 10) -> nn.Sequential:
    """With buffers of its own kind, and a layer that hands on what enters it. Takes `[b, 1, 8, 8]`."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), MovingAverage(32), nn.Identity(), nn.Linear(32, num_classes))


def backbone(num_classes: int = 10) -> nn.Sequential:
    """A part with BatchNorm, which tests freeze, and a part without. Takes `[b, 1, 8, 8]`."""
    body: list[nn.Module] = []
    for incoming, outgoing in ((1, 8), (8, 8), (8, 16)):
        body += [nn.Conv2d(incoming, outgoing, 3, padding=1, bias=False), nn.BatchNorm2d(outgoing), nn.Tanh()]
    head = [
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    ]
    return nn.Sequential(*body, *head)


class Loud(nn.Module):
    """Adds a value that is much larger than all others."""

    def forward(self, value: Tensor) -> Tensor:
        return torch.cat([value, torch.full_like(value[:, :1], 1000.0)], 1)


class Quiet(nn.Module):
    """Drops the last value."""

    def forward(self, value: Tensor) -> Tensor:
        return value[:, :-1].contiguous()


def loud(num_classes: int = 10) -> nn.Sequential:
    """What leaves layer 3 suffers in fewer than 16 bits, what leaves layer 6 does not. Takes `[b, 1, 8, 8]`."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 63), nn.Tanh(), Loud(), Quiet(), nn.Linear(63, 64), nn.Tanh(),
        nn.Linear(64, num_classes),
    )  # fmt: skip


class _SeesLater(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3 * 32 * 32, 10)
        self.register_buffer("seen", None)

    def forward(self, value: Tensor) -> Tensor:
        if self.seen is None:
            self.seen = torch.zeros(())
        return super().forward(value.flatten(1)) + self.seen


class MakesABufferLater(nn.Sequential):
    """Has a buffer that its forward makes when it is first called."""

    def __init__(self) -> None:
        super().__init__(_SeesLater())


class MakesAModuleLater(nn.Module):
    """Makes a layer once it knows how wide that must be."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * 32 * 32, 8)
        self.head = None

    def forward(self, value: Tensor) -> Any:
        found = self.first(value.flatten(1))
        if self.head is None:
            self.head = nn.Linear(int(found.shape[-1]), 10)
        return self.head(found)
