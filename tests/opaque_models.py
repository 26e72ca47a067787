"""Models whose forwards do what a recorded graph hardly shows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Still(nn.Module):
    """Its parameters get no gradients."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    @torch.no_grad()
    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value).tanh()


class Hidden(nn.Module):
    """Does what its graph hardly shows, with a buffer that no checkpoint has. Takes `[b, 1, 8, 8]`."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.first, self.second, self.third, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.still, self.early, self.head = Still(64), nn.Linear(64, 64), nn.Linear(64, num_classes)
        self.register_buffer("shift", torch.linspace(0, 1, 64), persistent=False)

    def forward(self, value: Tensor) -> dict[str, Tensor | None]:
        value = self.first(value.flatten(1))
        value.tanh_()  # and the result is not used by its new name
        value = value + self.still(value) * self.shift.exp()
        value = value + self.early(value).tanh().detach()
        value = self.second(value)
        functional.relu(value, inplace=True)
        value = value + 0.5
        parts = value.view(-1, 4, 16)
        other = self.third(value.tanh())
        parts.mul_(2)
        return {"logits": self.head(self.out(value + other).tanh()), "attentions": None}


class _Four(nn.Module):
    """Has four layers, which its children connect."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.out = nn.Linear(64, num_classes)


class Unlearned(_Four):
    """Has a part without gradients, and cannot be traced. Takes `[b, 1, 8, 8]`."""

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            value = self.second(self.first(value.flatten(1)).tanh()).tanh()
        return self.out(self.third(value).tanh())


class Detaching(_Four):
    """Lets no gradient through its middle, and cannot be traced. Takes `[b, 1, 8, 8]`."""

    def forward(self, value: Tensor) -> Tensor:
        if not torch.isfinite(value).all():
            raise ValueError("values that are not finite")
        value = self.second(self.first(value.flatten(1)).tanh())
        return self.out(self.third(value.detach().tanh()).tanh())


class Counting(nn.Module):
    """Replaces one buffer in its forward and changes another in place. Takes `[b, 1, 8, 8]`."""

    def __init__(self, num_classes: int = 10, itself: bool = False) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(64, 64), nn.Linear(64, num_classes)
        self.inner = Counter() if not itself else nn.Identity()
        self.register_buffer("steps", torch.zeros(()))
        self.itself = itself

    def forward(self, value: Tensor) -> Tensor:
        if self.itself:
            self.steps = self.steps + 1
        value = self.inner(self.first(value.flatten(1)).tanh())
        return self.out(value * (self.steps + 1))


class Counter(nn.Module):
    """Counts its calls, and returns so many times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        self.calls.add_(1)
        return value * self.calls


class Wayward(nn.Module):
    """Which of its results goes on depends on the data, as zeros do not show. Takes `[b, 1, 8, 8]`."""

    def __init__(self, num_classes: int = 10, direct: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.out, self.direct = nn.Linear(64, num_classes), direct

    def forward(self, value: Tensor) -> Tensor:
        first = self.first(value.flatten(1)).tanh()
        second = self.second(first)
        chosen = second if first.detach().abs().sum() > 0 else first
        return self.out(self.third(chosen if self.direct else chosen.tanh()))


def halved(num_classes: int = 10) -> nn.Sequential:
    """With parameters in half precision between others. Takes `[b, 1, 8, 8]`."""

    class Cast(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.dtype = dtype

        def forward(self, value: Tensor) -> Tensor:
            return value.to(self.dtype)

    half = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(torch.bfloat16)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), Cast(torch.bfloat16), half, Cast(torch.float32), nn.Linear(64, num_classes)
    )
