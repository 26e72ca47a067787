"""Builds the models that a job can name, without memory and cut into layers."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from horizonml.errors import ModelError, is_out_of_memory
from horizonml.models.cutting import Layers, cut
from horizonml.models.language import gpt_model
from horizonml.models.libraries import LIBRARIES, check_options
from horizonml.models.lora import with_adapters
from horizonml.models.pretrained import Pretrained
from horizonml.models.source import find
from horizonml.models.spec import VISION_MODELS, ModelSpec
from horizonml.models.tuning import begin_from, frozen_tensors, trained_note
from horizonml.models.vision import vision_model
from horizonml.models.weights import Tape, materialise, record, untie
from horizonml.tasks.task import InputSpec, OutputSpec

_log = logging.getLogger(__name__)
_OUTPUTS = ("num_outputs", "num_classes")  # constructors' names for the number of outputs; the second is torchvision's


@dataclass(frozen=True)
class Model:
    """Holds a model as a chain of layers, with what is needed to give its parameters their initial values."""

    chain: Layers
    tape: Tape
    seed: int
    ties: tuple[tuple[str, ...], ...] = ()  # the names of the parameters that are one and the same
    note: str = ""  # a sentence about how the model was cut, if there is anything to say
    pretrained: Pretrained | None = None
    frozen: frozenset[str] = frozenset()  # the parameters and buffers that training does not change

    @property
    def constant(self) -> frozenset[str]:
        """Return the frozen tensors that every rank can read from its file, so they need not travel."""
        return self.frozen.intersection(self.pretrained.keys) if self.pretrained is not None else frozenset()

    def stage(self, start: int, stop: int, held: Mapping[str, Tensor] = MappingProxyType({})) -> nn.Module:
        """Return layers `start` to `stop - 1` as a module in memory, with their initial values.

        Each call makes a new module, so changes to one (in measurements, for example) do not affect the others.
        Parameters and buffers in `held`, by name, become part of the module as they are.
        """
        same = {name: names[0] for names in self.ties for name in names}
        module = self.chain.slice(start, stop)
        if self.pretrained is None:
            return materialise(module, self.tape, self.seed, held, same)
        return materialise(module, self.tape, self.seed, held, same, self.pretrained.read)

    def parameter_names(self) -> dict[str, int]:
        """Return the layer that holds each parameter and buffer, by the tensor's name in the original model."""
        return self._names

    @functools.cached_property
    def _names(self) -> dict[str, int]:
        return {
            name: index
            for index in range(len(self.chain))
            for layer in [self.chain.slice(index, index + 1)]
            for name, _ in itertools.chain(
                layer.named_parameters(remove_duplicate=False), layer.named_buffers(remove_duplicate=False)
            )
        }

    def parameter_shapes(self) -> list[list[torch.Size]]:
        """Return the shapes of the parameters of every layer that are trained."""
        return self._shapes

    @functools.cached_property
    def _shapes(self) -> list[list[torch.Size]]:
        layers = [self.chain.slice(n, n + 1).parameters() for n in range(len(self.chain))]
        return [[parameter.shape for parameter in own if parameter.requires_grad] for own in layers]


def build(spec: ModelSpec, seed: int, outputs: int | OutputSpec, input: InputSpec) -> Model:
    """Build the model of a job for inputs and outputs of these kinds; a number stands for a vector of as many values.

    Raises ModelError.
    """
    wanted = OutputSpec.vector(outputs) if isinstance(outputs, int) else outputs
    constructor = _constructor(spec, wanted.count, input)
    try:
        model, tape = record(constructor)
    except RuntimeError as reason:  # includes NotImplementedError
        # Either the constructor reads values back, which the meta device does not have, and the model can be built in
        # memory; or the constructor itself is at fault, and building it in memory fails in the same way with a useful
        # error.
        _log.warning("every rank builds the whole of %s first, because %s", spec.name, _first_line(reason))
        model, tape = _in_memory(spec, constructor, seed), Tape()
    _require_module(spec, model)
    ties = untie(model)
    pretrained = begin_from(spec, model, ties)
    frozen = frozen_tensors(spec, model, ties, pretrained)
    if pretrained is not None and frozen:
        pretrained.notes += (trained_note(model, ties),)
    chain, note = cut(model, input)
    returned = [tensor.shape for tensor in chain.boundaries[-1].tensors]
    if wanted.shape is not None and returned != [wanted.shape]:
        needed = wanted.count if wanted.shape == (wanted.count,) else f"{list(wanted.shape)}"
        raise ModelError(
            f"{spec.name} returns {' and '.join(str(list(shape)) for shape in returned)} values per sample, but the "
            f"data needs {needed}; set the number of outputs in model.options"
        )
    made = Model(chain, tape, seed, (), note, pretrained, frozen)
    # A copy that the forward never uses is in no layer, and needs no gradients.
    used = [tuple(name for name in names if name in made.parameter_names()) for names in ties]
    return replace(made, ties=tuple(names for names in used if len(names) > 1))


def construct(spec: ModelSpec, seed: int, outputs: int | OutputSpec, input: InputSpec) -> nn.Module:
    """Return the model of a job as an ordinary module, whole and in memory, with initial values. Raises ModelError."""
    constructor = _constructor(spec, outputs if isinstance(outputs, int) else outputs.count, input)
    model = _in_memory(spec, constructor, seed)
    _require_module(spec, model)
    return model


def _in_memory(spec: ModelSpec, constructor: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return what a constructor makes, with tensors in memory. Raises ModelError."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return _call(spec, constructor)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(f"model {spec.name} cannot be built: {_first_line(error)}") from error


def _require_module(spec: ModelSpec, made: object) -> None:
    """Raise ModelError if a user's function returned something else than a module."""
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"model.name: {spec.name} returned an object of type {type(made).__name__}, not a torch.nn.Module"
        )


def _constructor(spec: ModelSpec, outputs: int, input: InputSpec) -> Callable[[], nn.Module]:
    """Return what makes the model of a job, with its adapters if it has any. Raises ModelError."""
    make = _maker(spec, outputs, input)
    return make if spec.lora is None else with_adapters(make, spec.lora)


def _maker(spec: ModelSpec, outputs: int, input: InputSpec) -> Callable[[], nn.Module]:
    """Return a function that constructs the model with the job's options, and with defaults for what they leave out."""
    function: Callable[..., nn.Module]
    library, _, name = spec.name.partition(":")
    if spec.name in VISION_MODELS:
        check_options(spec.name, spec.options)
        function, defaults = vision_model(spec.name, outputs, input)
    elif spec.name == "gpt":
        function, defaults = gpt_model(outputs, input)
    elif library in LIBRARIES:
        check_options(spec.name, spec.options)
        function, defaults = LIBRARIES[library](name, outputs, input)
    else:
        function = find(spec.name)
        defaults = {name: outputs for name in _OUTPUTS if _accepts(function, name)}
    options = defaults | spec.options
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
