"""Runs a model whole, by its author's own code; and represents a model that is not cut at all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from horizonml.data.tensors import TensorSpec
from horizonml.errors import ModelError, is_out_of_memory
from horizonml.machine.code import where
from horizonml.models.boundary import Boundary, flat
from horizonml.models.calls import arguments
from horizonml.models.tracing import MadeLater, tried_out
from horizonml.tasks.task import InputSpec

_REGISTRIES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class WholeModule(nn.Module):
    """Takes a model's inputs one by one and calls the model itself: its forward, its hooks and its `train`.

    `horizonml_root` is the model. It is not a submodule, which would change all names; this module shares its
    registries instead.
    """

    horizonml_root: nn.Module  # a name that no author gives to a module, which it would hide

    def __init__(self, root: nn.Module, names: tuple[str, ...]) -> None:
        """Wrap a model; `names` are those of its inputs, without any if it takes them in their order."""
        super().__init__()
        for registry in _REGISTRIES:
            self.__dict__[registry] = root.__dict__[registry]
        self.__dict__ |= {"horizonml_root": root, "_names": names}
        self.training = root.training

    def train(self, mode: bool = True) -> WholeModule:
        """Switch the model to training or evaluation by its own `train`."""
        self.horizonml_root.train(mode)
        self.training = mode
        return self

    def forward(self, *values: Tensor) -> object:
        """Return what the model returns."""
        args, kwargs = arguments(values, self.__dict__["_names"])
        return self.horizonml_root(*args, **kwargs)


class Uncut:
    """Holds a model as a single layer, as `Chain` holds one with many."""

    def __init__(self, model: nn.Module, input: InputSpec, reason: str) -> None:
        """Run the model once on zeros to learn what it returns; `reason` is why it is not cut. Raises ModelError."""
        self._model, self._input, self._reason = model, input, reason
        self.names = [type(model).__name__]
        self.spare: tuple[str, ...] = ()  # it holds all tensors anyway
        self.boundaries = [Boundary(tuple(input.tensors)), _output(model, input)]

    def __len__(self) -> int:
        return 1

    def slice(self, start: int, stop: int) -> nn.Module:
        """Return the model, as `Chain.slice` does."""
        assert (start, stop) == (0, 1), (start, stop)
        return WholeModule(self._model, self._input.names)

    def bond(self, index: int) -> str | None:
        """Return what keeps the model from being cut, as `Chain.bond` does."""
        return self._reason

    def report(self) -> str:
        """Return a sentence that says that the model is not cut, and why."""
        return f"{type(self._model).__name__} is not cut into layers: {self._reason}"


def _output(model: nn.Module, input: InputSpec) -> Boundary:
    """Return the description of what a model returns for batches of one and of two samples. Raises ModelError."""
    sizes = 1, 2
    try:
        found = [_returned(model, input, rows) for rows in sizes]
    except ModelError:  # some layers cannot do with one sample
        sizes = 2, 3
        found = [_returned(model, input, rows) for rows in sizes]
    specs = []
    for one, two in zip(*found, strict=True):
        if one is None:
            continue
        batch_first = isinstance(one, Tensor) and isinstance(two, Tensor) and one.shape[1:] == two.shape[1:]
        if not batch_first or (*one.shape[:1], *two.shape[:1]) != sizes:
            raise ModelError(f"{type(model).__name__} does not return tensors with the batch in their first dimension")
        specs.append(TensorSpec(tuple(one.shape[1:]), one.dtype))
    if not specs:
        raise ModelError(f"{type(model).__name__} does not return tensors with the batch in their first dimension")
    return Boundary(tuple(specs))


@torch.no_grad()
def _returned(model: nn.Module, input: InputSpec, rows: int) -> tuple[object, ...]:
    """Return the leaves of what a model returns in evaluation mode for zeros, with zeros for its tensors."""
    zeros = {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    values = [torch.zeros(rows, *spec.shape, dtype=spec.dtype) for spec in input.tensors]
    args, kwargs = arguments(values, input.names)
    try:
        with tried_out(model):
            model.eval()
            return flat(torch.func.functional_call(model, zeros, args, kwargs))
    except MadeLater:
        raise
    except Exception as error:  # the model's own code runs here, and may fail in any way
        if is_out_of_memory(error):
            raise
        shapes = " and ".join(str(list(spec.shape)) for spec in input.tensors)
        raise ModelError(
            f"{type(model).__name__} does not accept inputs of shape {shapes}: {where(error)}. {input.advice}".rstrip()
        ) from error
