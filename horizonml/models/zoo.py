"""The models a job can name, built without memory and cut into layers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from horizonml.errors import ModelError, is_out_of_memory
from horizonml.job.schema import TORCHVISION_MODELS, ModelSpec
from horizonml.models.chain import Chain
from horizonml.models.small import digits_cnn
from horizonml.models.source import find
from horizonml.models.vision import import_torchvision
from horizonml.models.weights import Tape, materialise, record

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A model as a chain of layers, with what is needed to give its parameters their first values."""

    chain: Chain
    tape: Tape
    seed: int

    def stage(self, start: int, stop: int) -> nn.Module:
        """Return layers `start` to `stop - 1` as a module in memory, with the values that training begins with.

        Each call makes a module of its own: what happens to one, in measuring say, changes no other.
        """
        return materialise(self.chain.slice(start, stop), self.tape, self.seed)

    def parameter_names(self) -> dict[str, int]:
        """The layer that holds each parameter and buffer, by the tensor's name in the original model."""
        return {
            name: index
            for index in range(len(self.chain))
            for name in self.chain.slice(index, index + 1).state_dict(keep_vars=True)
        }

    def parameter_shapes(self) -> list[list[torch.Size]]:
        """Return the shapes of the parameters of every layer."""
        layers = range(len(self.chain))
        return [[parameter.shape for parameter in self.chain.slice(n, n + 1).parameters()] for n in layers]


def build(spec: ModelSpec, seed: int, classes: int, sample_shape: tuple[int, ...]) -> Model:
    """The model of a job for images of shape `[channels, height, width]`. Raises ModelError."""
    constructor = _constructor(spec, classes, sample_shape)
    try:
        model, tape = record(constructor)
    except RuntimeError as reason:  # NotImplementedError is one
        # Either the constructor reads values back, which the meta device does not have, and then it can be built for
        # real; or it is at fault itself, and then that fails the same way, and is told.
        _log.warning("every rank builds the whole of %s first, because %s", spec.name, _first_line(reason))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                model, tape = _call(spec, constructor), Tape()
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                raise ModelError(f"model {spec.name} cannot be built: {_first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model.name: {spec.name} returned an object of type {type(model).__name__}, not a torch.nn.Module"
        )
    chain = Chain(model, sample_shape)
    outputs = chain.boundaries[-1].shape
    if outputs != (classes,):
        raise ModelError(
            f"{spec.name} returns {list(outputs)} values per sample, but the data has {classes} classes; "
            "set the number of outputs in model.options"
        )
    return Model(chain, tape, seed)


def channels_of(spec: ModelSpec, data_channels: int) -> int:
    """The number of colour channels that the model wants for data that has `data_channels`."""
    return 3 if spec.name in TORCHVISION_MODELS else data_channels


def _constructor(spec: ModelSpec, classes: int, sample_shape: tuple[int, ...]) -> Callable[[], nn.Module]:
    function: Callable[..., nn.Module]
    options = dict(spec.options)
    if spec.name == "digits_cnn":
        function = digits_cnn
        options = {"num_classes": classes, "channels": sample_shape[0], "image_size": sample_shape[1], **options}
    elif spec.name in TORCHVISION_MODELS:
        function = getattr(import_torchvision().models, spec.name)
        options.setdefault("num_classes", classes)
        if spec.name.startswith("vit"):
            options.setdefault("image_size", sample_shape[1])
    else:
        function = find(spec.name)
        if _accepts(function, "num_classes"):
            options.setdefault("num_classes", classes)
    return lambda: _call(spec, lambda: function(**options))


def _call(spec: ModelSpec, constructor: Callable[[], nn.Module]) -> nn.Module:
    try:
        return constructor()
    except (TypeError, ValueError, AssertionError) as error:
        raise ModelError(
            f"model {spec.name} cannot be built with options {spec.options}: {_first_line(error)}"
        ) from error


def _accepts(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # a builtin without a signature
        return False


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
