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
from torch.nn.parameter import is_lazy

from horizonml.data.sampler import python_seeded
from horizonml.errors import ModelError, is_out_of_memory
from horizonml.models.boundary import Boundary, Layers, arguments
from horizonml.models.cutting import AUTOMATIC, Cutting, WholeModule, cut
from horizonml.models.libraries import LIBRARIES, check_options, gpt_model, vision_model
from horizonml.models.own_state import OwnState
from horizonml.models.pretrained import Pretrained
from horizonml.models.source import find
from horizonml.models.spec import VISION_MODELS, ModelSpec
from horizonml.models.tracing import tried_out
from horizonml.models.tuning import (
    Modes,
    begin_from,
    carry_modes,
    frozen_tensors,
    is_still,
    keep_still,
    modes_of,
    trained_note,
    with_adapters,
)
from horizonml.models.weights import Tape, aliases, materialise, record, seeded, sharing, untie, without_value
from horizonml.tasks.task import InputSpec, OutputSpec
from horizonml.text import some

_log = logging.getLogger(__name__)
_NAMED = nn.Module.named_parameters
_OUTPUTS = ("num_outputs", "num_classes")  # constructors' names for the number of outputs; the second is torchvision's


@dataclass(frozen=True)
class Model:
    """Holds a model as a chain of layers, with what is needed to give its parameters their initial values."""

    chain: Layers
    tape: Tape
    seed: int
    recorded: nn.Module  # the whole model, without memory for its tensors where that is possible
    make: Callable[[], tuple[nn.Module, bool]]  # returns the whole model anew, and whether it has its initial values
    input: InputSpec
    cutting: Cutting = AUTOMATIC  # how the chain was cut
    proven: bool = False  # whether its layers were compared with the model
    ties: tuple[tuple[str, ...], ...] = ()  # the names of the parameters that are one, in all layers that use them
    all_ties: tuple[tuple[str, ...], ...] = ()  # the same, with the names that no layer uses
    note: str = ""  # a sentence about how the model was cut, if there is anything to say
    pretrained: Pretrained | None = None
    frozen: frozenset[str] = frozenset()  # the parameters and buffers that training does not change

    @property
    def constant(self) -> frozenset[str]:
        """Return the frozen tensors that every rank can read from its file, so they need not travel."""
        return self.frozen.intersection(self.pretrained.keys) if self.pretrained is not None else frozenset()

    def stage(
        self, start: int, stop: int, held: Mapping[str, Tensor] = MappingProxyType({}), as_graph: bool = False
    ) -> nn.Module:
        """Return layers `start` to `stop - 1` as a module in memory, with their initial values.

        Each call makes a new module, so changes to one (in measurements, for example) do not affect the others.
        Parameters and buffers in `held`, by name, become part of the module as they are. All layers together are the
        model itself, as its author wrote it, unless they are wanted `as_graph` so that their operations can be changed.
        """
        if (start, stop) == (0, len(self.chain)) and not as_graph:
            return self._whole(held)
        module = self.chain.slice(start, stop)
        read = self.pretrained.read if self.pretrained is not None else None
        made = materialise(module, self.tape, self.seed, held, read)
        if self.modes is not None:
            carry_modes(made, self.modes)
        return made

    @functools.cached_property
    def modes(self) -> Modes | None:
        """Return which modules are in training mode in either mode of the model; None unless its author decides."""
        return modes_of(self.recorded)

    def recut(self, cutting: Cutting) -> Model:
        """Return the same model, cut in this way. Raises ModelError."""
        if cutting == self.cutting:
            return self
        return replace(self, proven=False, **_cut(self.recorded, self.input, self.all_ties, cutting))

    def _whole(self, held: Mapping[str, Tensor]) -> WholeModule:
        """Return the model itself with its initial values, or those in `held`, whose memory it shares.

        It is constructed anew, so that what its author's code refers to are its own modules and parameters, not those
        of a copy. Raises ModelError if the constructor does not make the same model each time.
        """
        root, is_initial = self.make()
        links = _links(root)
        untie(root)
        _require_same(self.recorded, root)
        modules = dict(root.named_modules())
        for path, module in self.recorded.named_modules():
            if is_still(module):
                keep_still(modules[path])
        recorded, others = _tensors(self.recorded), aliases(root)
        for name, tensor in _tensors(root).items():
            if name in others:
                continue
            if name in held:
                value: Tensor | None = held[name].detach()
            else:
                value = self.pretrained.read(tensor, name) if self.pretrained is not None else None
                if value is None and recorded[name].is_meta and not is_initial:
                    value = self.tape.initial(name, recorded[name], self.seed)
            if tensor.is_meta:
                raise without_value(name)
            if value is not None:
                tensor.data = value
                for plain in links.get(name, ()):  # goes on being a view of it
                    plain.data = value.as_strided(plain.size(), plain.stride(), plain.storage_offset())
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(recorded[name].requires_grad)
        return WholeModule(root, self.input.names)

    @functools.cached_property
    def parameter_names(self) -> dict[str, int]:
        """Return the layer that holds each parameter and buffer, by the tensor's name in the original model."""
        return _layers_of(self.chain)

    @functools.cached_property
    def parameter_shapes(self) -> list[list[torch.Size]]:
        """Return the shapes of the parameters of every layer that are trained."""
        layers = [self.chain.slice(n, n + 1).parameters() for n in range(len(self.chain))]
        return [[parameter.shape for parameter in own if parameter.requires_grad] for own in layers]


def build(
    spec: ModelSpec, seed: int, outputs: int | OutputSpec, input: InputSpec, cutting: Cutting = AUTOMATIC
) -> Model:
    """Build the model of a job for inputs and outputs of these kinds; a number stands for a vector of as many values.

    `cutting` says how it is cut into layers. Raises ModelError.
    """
    wanted = OutputSpec.vector(outputs) if isinstance(outputs, int) else outputs
    constructor = _constructor(spec, wanted.count, input)
    before = OwnState(module=spec.name.partition(":")[0])  # constructors may count, and are called again
    try:
        with python_seeded(seed):
            model, tape = record(constructor)
    except RuntimeError as reason:  # includes NotImplementedError
        # Either the constructor reads values back, which the meta device does not have, and the model can be built in
        # memory; or the constructor itself is at fault, and building it in memory fails in the same way with a useful
        # error.
        _log.warning("every rank builds the whole of %s first, because %s", spec.name, _first_line(reason))
        before.restore()
        model, tape = _in_memory(spec, constructor, seed, input), Tape()
    before.keep_changes()
    _require_module(spec, model)
    if _is_lazy(model):  # the shapes of its parameters are found out by a batch
        before.restore()
        model, tape = _in_memory(spec, constructor, seed, input), Tape()
    recorded = tape

    def make() -> tuple[nn.Module, bool]:
        before.restore()
        if not recorded.length:
            return _in_memory(spec, constructor, seed, input), True
        with torch.random.fork_rng(devices=[]), python_seeded(seed):
            torch.default_generator.manual_seed(seed)
            return seeded(lambda: _call(spec, constructor), seed, recorded)

    if _has_plain(model) or _reads_in_train(model):  # which parts of a chain take as they are
        (model, _), tape = make(), Tape()
    _refuse_unusual(spec, model)
    if (shared := sharing(model)) is not None and cutting.by != "nothing":
        words = "are different tensors in the same memory, which stages do not share; assign the parameter itself"
        cutting = Cutting("nothing", reason=f"{' and '.join(shared)} {words}")
    ties = untie(model)
    pretrained = begin_from(spec, model, ties)
    frozen = frozen_tensors(spec, model, ties, pretrained)
    if pretrained is not None and frozen:
        pretrained.notes += (trained_note(model, ties),)

    try:
        found = _cut(model, input, ties, cutting)
    except ModelError:
        if not any(tensor.is_meta for tensor in _tensors(model).values()):
            raise
        # Perhaps it holds tensors of which PyTorch does not know, and they have no values on the meta device.
        (model, _), tape = make(), Tape()
        untie(model)
        if pretrained is not None:
            pretrained = begin_from(spec, model, ties)
        frozen = frozen_tensors(spec, model, ties, pretrained)
        found = _cut(model, input, ties, cutting)
    made = Model(
        tape=tape, seed=seed, recorded=model, make=make, input=input, pretrained=pretrained, frozen=frozen, **found
    )
    returned = [tensor.shape for tensor in made.chain.boundaries[-1].tensors]
    if wanted.shape is not None and returned != [wanted.shape]:
        needed = wanted.count if wanted.shape == (wanted.count,) else f"{list(wanted.shape)}"
        raise ModelError(
            f"{spec.name} returns {' and '.join(str(list(shape)) for shape in returned)} values per sample, but the "
            f"data needs {needed}; set the number of outputs in model.options"
        )
    return made


def _cut(model: nn.Module, input: InputSpec, ties: tuple[tuple[str, ...], ...], cutting: Cutting) -> dict[str, Any]:
    """Return the fields of a `Model` that depend on how it is cut; `ties` are the names of all parameters that are one.

    Raises ModelError.
    """
    chain, note = cut(model, input, cutting)
    held = _layers_of(chain)
    # A copy that the forward never uses is in no layer, and needs no gradients.
    used = [tuple(name for name in names if name in held) for names in ties]
    copies = {name for names, kept in zip(ties, used, strict=True) if kept for name in names}
    chain.spare = tuple(name for name in _tensors(model) if name not in held and name not in copies)
    kept = tuple(names for names in used if len(names) > 1)
    return {"chain": chain, "cutting": cutting, "ties": kept, "all_ties": ties, "note": note}


def construct(spec: ModelSpec, seed: int, outputs: int | OutputSpec, input: InputSpec) -> nn.Module:
    """Return the model of a job as an ordinary module, whole and in memory, with initial values. Raises ModelError."""
    constructor = _constructor(spec, outputs if isinstance(outputs, int) else outputs.count, input)
    model = _in_memory(spec, constructor, seed, input)
    _require_module(spec, model)
    return model


def _in_memory(spec: ModelSpec, constructor: Callable[[], nn.Module], seed: int, input: InputSpec) -> nn.Module:
    """Return what a constructor makes, with tensors in memory; a batch initialises lazy modules. Raises ModelError."""
    with torch.random.fork_rng(devices=[]), python_seeded(seed):
        torch.default_generator.manual_seed(seed)
        try:
            model = _call(spec, constructor)
            if isinstance(model, nn.Module) and _is_lazy(model):
                with tried_out(model), torch.no_grad():
                    args, kwargs = arguments(Boundary(input.tensors).zeros(2), input.names)
                    model(*args, **kwargs)
            return model
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(f"model {spec.name} cannot be built: {_first_line(error)}") from error


def _is_lazy(model: nn.Module) -> bool:
    return any(map(is_lazy, itertools.chain(model.parameters(), model.buffers())))


def _refuse_unusual(spec: ModelSpec, model: nn.Module) -> None:
    """Raise ModelError if a parameter is complex or a tensor or gradient sparse: sums and optimizers are of neither."""
    sparse = next((name for name, one in _tensors(model).items() if one.layout != torch.strided), None)
    if sparse is not None:
        raise ModelError(
            f"model {spec.name}: {sparse} is a sparse tensor; hold its indices and its values as buffers, and make it "
            "in the forward"
        )
    for path, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ModelError(f"model {spec.name}: {path} has sparse gradients; construct it without sparse=True")
    name = next((name for name, parameter in model.named_parameters() if parameter.is_complex()), None)
    if name is not None:
        raise ModelError(
            f"model {spec.name}: parameter {name} is complex; hold it as a real parameter with a last dimension of 2, "
            "and use torch.view_as_complex in the forward"
        )


def _layers_of(chain: Layers) -> dict[str, int]:
    """Return the layer that holds each parameter and buffer."""
    return {name: index for index in range(len(chain)) for name in _tensors(chain.slice(index, index + 1))}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name."""
    return dict(
        itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    )


def _links(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return the tensors beside parameters and buffers that are views of these, by the names of these."""
    plain = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    found: dict[str, list[Tensor]] = {}
    for name, tensor in _tensors(model).items() if plain else ():
        same = [one for one in plain if one.untyped_storage()._cdata == tensor.untyped_storage()._cdata]
        if same:
            found[name] = same
    return found


def _has_plain(model: nn.Module) -> bool:
    """Return whether modules hold tensors without values beside their parameters and buffers."""
    known = {id(tensor) for tensor in _tensors(model).values()}
    held = (value for module in model.modules() for value in vars(module).values())
    return any(isinstance(value, Tensor) and value.is_meta and id(value) not in known for value in held)


def _reads_in_train(model: nn.Module) -> bool:
    """Return whether a `train` of the author's own needs the value of a tensor, such as a counter of steps."""
    if all(type(module).train is nn.Module.train for module in model.modules()):
        return False
    try:
        with tried_out(model):
            model.train()
    except RuntimeError:
        # On the meta device, reading a value raises this. If the method itself is at fault, it raises the same again
        # once the model is in memory, where it is reported.
        return True
    return False


def _require_same(recorded: nn.Module, made: nn.Module) -> None:
    """Raise ModelError if two calls of a model's constructor have made different models."""
    one, other = (
        {name: tuple(tensor.shape) for name, tensor in _tensors(model).items()}
        | {
            f"{path}.{name}".lstrip("."): value
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, bool | int | str) and name != "training" and not name.startswith("_torchdynamo")
        }
        for model in (recorded, made)
    )
    different = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    if different:
        raise ModelError(
            f"{type(made).__name__} is not the same each time it is constructed: {some(different)} differ; its "
            "constructor must depend on nothing but its options, and its forward must create no modules or buffers"
        )


def _require_module(spec: ModelSpec, made: object) -> None:
    """Raise ModelError if a user's function returned something else than a module."""
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"model.name: {spec.name} returned an object of type {type(made).__name__}, not a torch.nn.Module"
        )
    for path, inner in made.named_modules():
        if isinstance(inner, torch.jit.ScriptModule):
            raise ModelError(
                f"model.name: {path or 'the model'} of {spec.name} is compiled by TorchScript, whose code cannot be "
                "looked at; use the module that it was compiled from"
            )
    if type(made).parameters is not nn.Module.parameters or type(made).named_parameters is not _NAMED:
        raise ModelError(
            f"model.name: {spec.name} has a method parameters() or named_parameters() of its own, but all parameters "
            "that require gradients are trained; set requires_grad to False, or model.freeze, for those that are not"
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
