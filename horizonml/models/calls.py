"""Finds out how a model's modules hand tensors to one another, by running the model once on zeros.

Some of a model's modules are its *units*: they are run as a whole. What the model's forward does between them is glue:
additions, masks, changes of shape. `record_calls` runs the forward with zeros for all weights, and notes for each call
of a unit what its inputs have been made of: results of units that ran before, inputs of the model, or parameters that
the glue uses itself.

Copies the tree of a model's modules without its tensors, so that parts of it can be run with other forwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from horizonml.data.dataset import TensorSpec
from horizonml.errors import ModelError
from horizonml.models.boundary import arguments, flat, per_sample, run_on_zeros
from horizonml.models.tracing import Attributes, nothing_made, tried_out
from horizonml.models.weights import Watching

_M = TypeVar("_M", bound=nn.Module)


class _Listing:
    """Takes the place of a copy's method that lists tensors, because other stages hold some of them.

    The first one can be had, for many forwards ask it for its device or type; whoever goes on to the end gets an error.
    """

    def __init__(self, module: nn.Module, method: str, name: str, stand_in: Tensor) -> None:
        """Remember the copy, the method, and one tensor that the copy lacks."""
        self._module, self._method, self._name, self._stand_in = module, method, name, stand_in

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield what is here, or one stand-in if nothing is, and raise ModelError at the end."""
        here = getattr(nn.Module, self._method)(self._module, *args, **kwargs)
        yield next(here, (self._name, self._stand_in))
        yield from here
        _refuse(self._name)


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise ModelError(
        f"the model's forward goes through all parameters or buffers, of which {name}, for one, is not in every stage; "
        "do that in a module that holds them all (parallel.strategy: ddp trains the model whole)"
    )


class Skeleton:
    """Copies a model's modules: the same classes and attributes, without the tensors that are not kept.

    `root` is the copy. In it, units (modules that are named in `forwards`) have these forwards, which are objects
    and not functions, so that they are copied together with the module. `placeholders` are zeros, by the names of
    the tensors that they replace: parameters and persistent buffers. Code that looks at a shape or a dtype still
    finds it. `constants` are the buffers outside of units that no checkpoint has; every copy has them, but not
    among its buffers.
    """

    def __init__(self, model: nn.Module, forwards: Mapping[str, Callable[..., Any]], kept: Collection[str]) -> None:
        """Copy the tree; units named in `kept` keep their tensors, and so do modules for tensors named there."""
        self._forwards, self._kept = forwards, frozenset(kept)
        self._copies: dict[int, nn.Module] = {}
        self.placeholders: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        self._lacking: dict[str, dict[str, Tensor]] = {"named_parameters": {}, "named_buffers": {}}
        self.root = self._copy(model, "", unit=False, keep=False)
        if self.placeholders:
            self.root.__dict__["state_dict"] = functools.partial(_refuse, next(iter(self.placeholders)))
        modules, copies = dict(self.root.named_modules()), set(map(id, self._copies.values()))
        for method, lacking in self._lacking.items():  # which `parameters` and `buffers` call, too
            for name, stand_in in lacking.items():
                path = name
                while path:  # the modules around the tensor, from the innermost
                    path = path.rpartition(".")[0]
                    module = modules.get(path)
                    if module is not None and id(module) in copies:
                        module.__dict__.setdefault(method, _Listing(module, method, name, stand_in))

    def _copy(self, module: _M, path: str, unit: bool, keep: bool) -> _M:
        if id(module) in self._copies:
            return self._copies[id(module)]  # type: ignore[return-value]
        copy = object.__new__(type(module))
        self._copies[id(module)] = copy
        attributes = copy.__dict__
        attributes.update(module.__dict__)
        if path in self._forwards:
            unit, keep = True, path in self._kept
            attributes["forward"] = self._forwards[path]
        prefix = f"{path}." if path else ""
        attributes["_modules"] = {
            name: child if child is None or keep else self._copy(child, prefix + name, unit, keep)
            for name, child in module._modules.items()
        }
        parameters: dict[str, nn.Parameter | None] = {}
        buffers: dict[str, Tensor | None] = {}
        attributes["_parameters"], attributes["_buffers"] = parameters, buffers
        for name, parameter in module._parameters.items():
            if parameter is None or keep or prefix + name in self._kept:
                parameters[name] = parameter
            else:
                attributes[name] = self._lack("named_parameters", prefix + name, parameter)
        for name, buffer in module._buffers.items():
            if buffer is None or keep or prefix + name in self._kept:
                buffers[name] = buffer
            elif not unit and name in module._non_persistent_buffers_set:
                attributes[name] = self.constants[prefix + name] = buffer
                self._lacking["named_buffers"][prefix + name] = buffer
            else:
                attributes[name] = self._lack("named_buffers", prefix + name, buffer)
                if not unit:  # the model's own forward may change it
                    attributes[name] = self.placeholders[prefix + name] = attributes[name].clone()
        return copy

    def _lack(self, method: str, name: str, tensor: Tensor) -> Tensor:
        """Return a placeholder for a tensor that the module's `method` should have listed."""
        self.placeholders[name] = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        self._lacking[method][name] = self.placeholders[name]
        return self.placeholders[name]

    def zero_constants(self) -> None:
        """Give the constants zeros for values, where they have no memory."""
        for name in self.constants:
            path, _, last = name.rpartition(".")
            owner, constant = self.root.get_submodule(path), self.constants[name]
            if constant.is_meta:
                owner.__dict__[last] = torch.zeros(constant.shape, dtype=constant.dtype)


Result = tuple[int, int]
"""A tensor that a unit returned: the number of the call, and the tensor's place in what it returned.

The inputs of the model are the results of call `INPUTS`.
"""

INPUTS = -1


@dataclass(frozen=True)
class Pin:
    """Something that all stages which need it would have to share: a parameter, or a tensor changed in place."""

    name: str


Source = Result | Pin


@dataclass(frozen=True)
class Leaf:
    """Describes a tensor by its shapes for batches of one sample and of two."""

    one: tuple[int, ...]
    two: tuple[int, ...]
    dtype: torch.dtype

    def filled(self, number: float, batch: int, in_memory: bool = False) -> Tensor:
        """Return a tensor of one number in place of one that nothing depends on; it takes no memory unless asked to."""
        shape = [first + (second - first) * (batch - 1) for first, second in zip(self.one, self.two, strict=True)]
        return torch.full(shape if in_memory else (), number, dtype=self.dtype).expand(shape)

    @property
    def spec(self) -> TensorSpec | None:
        """Return the tensor's description if it has the batch, and only the batch, in its first dimension."""
        return per_sample(TensorSpec(self.one, self.dtype), TensorSpec(self.two, self.dtype))


@dataclass
class Call:
    """Describes one call of a unit."""

    unit: str
    sources: frozenset[Source]  # of everything that it was given, and of what decided that it is called
    leaves: list[Any]  # what it returned: a Leaf, or in a single run a tensor, and other values as they are
    structure: Any
    changes: frozenset[Result] = frozenset()  # results that it changes in place


@dataclass
class Calls:
    """Describes a run of the model's forward."""

    calls: list[Call]
    end: frozenset[Source]  # what the model's result is made of
    outputs: list[Any]  # what the model returns, flat: a Leaf for each tensor, and other values as they are
    inputs: list[Leaf]
    changed: frozenset[Result]  # results that the glue changes in place
    unused: list[str] = field(default_factory=list)  # units that are never called


class _Tracker(Watching):
    """Notes what the storages of tensors have been computed from."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: dict[int, frozenset[Source]] = {}
        self._alive: list[Any] = []  # keeps addresses from being reused
        self.control: frozenset[Source] = frozenset()  # what has been read back, and may have decided on the way taken
        self.paused = False
        self._drawn = 0

    def note(self, tensor: Tensor, sources: frozenset[Source]) -> None:
        """Note what a tensor has been made of."""
        storage = tensor.untyped_storage()
        self._found[storage._cdata] = sources
        self._alive.append(storage)

    def of(self, values: Any) -> frozenset[Source]:
        """Return what the tensors in a tree have been made of."""
        found = [self._found.get(leaf.untyped_storage()._cdata, frozenset()) for leaf in _tensors(values)]
        return frozenset[Source]().union(*found)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.paused:
            return result
        sources = self.of((args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:  # each stage would draw other numbers
            self._drawn += 1
            sources |= {Pin(f"random numbers that the forward draws ({self._drawn})")}
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, Tensor):
                self.note(leaf, sources)
            elif leaf is not None:  # a number was read back
                self.control |= sources
        return result


class _Recorder:
    """Runs a unit with zeros for weights, and notes its call."""

    def __init__(self, run: _Run, name: str, unit: nn.Module) -> None:
        self._run, self._name, self._unit = run, name, unit

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recorder:
        return self  # a copy that the model's code makes of a unit is another call of the unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.call(self._name, self._unit, args, kwargs)


class _Run:
    """Runs the model's forward once."""

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        self.tracker = _Tracker()
        self.seen: list[Call] = []
        self._results: dict[Result, Tensor] = {}
        forwards = {name: _Recorder(self, name, unit) for name, unit in units.items()}
        skeleton = Skeleton(model, forwards, kept=())
        skeleton.zero_constants()
        self._root = skeleton.root
        for name, tensor in skeleton.placeholders.items():
            self.tracker.note(tensor, frozenset((Pin(name),)))

    def call(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return what a unit returns, with tensors of zeros that are its own."""
        given = (args, kwargs)
        sources = self.tracker.of(given) | self.tracker.control
        self.tracker.paused = True
        try:
            leaves, structure = tree_flatten(given)
            copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in copies]
            own_args, own_kwargs = tree_unflatten(copies, structure)
            attributes = Attributes(unit, name)
            outcome = run_on_zeros(unit, own_args, own_kwargs)
            after = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in copies]
        finally:
            self.tracker.paused = False
        number = len(self.seen)
        changed = [leaf for leaf, old, new in zip(leaves, versions, after, strict=True) if old != new]
        self._changed_by(name, changed)
        self._keep(attributes.changed(), sources)
        made, form = tree_flatten(outcome)
        returned = [torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in made]
        for place, leaf in enumerate(returned):
            if isinstance(leaf, Tensor):
                self.give((number, place), leaf)
        storages = {leaf.untyped_storage()._cdata for leaf in changed}
        results = {key for key, tensor in self._results.items() if tensor.untyped_storage()._cdata in storages}
        self.seen.append(Call(name, sources, returned, form, frozenset(results)))
        return tree_unflatten(returned, form)

    def give(self, result: Result, tensor: Tensor) -> None:
        """Note the tensor that a call returned, or an input of the model."""
        self._results[result] = tensor
        self.tracker.note(tensor, frozenset((result,)))

    def _changed_by(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Note that a unit has changed tensors in place: what uses them later must be in the same stage."""
        for tensor in tensors:
            pin: frozenset[Source] = frozenset((Pin(f"what {name} changes in place"),))
            self.tracker.note(tensor, self.tracker.of(tensor) | pin)

    def _keep(self, attributes: Mapping[str, Mapping[str, Any]], sources: frozenset[Source]) -> None:
        """Let the model's forward find what a unit has set of itself: what reads it must be in the unit's stage."""
        for path, values in attributes.items():
            owner = self._root.get_submodule(path)
            for attribute, value in values.items():
                leaves, structure = tree_flatten(value)
                own = [torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                for leaf in _tensors(own):
                    self.tracker.note(leaf, sources | {Pin(f"{path}.{attribute}")})
                owner.__dict__[attribute] = tree_unflatten(own, structure)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, object]) -> tuple[Any, frozenset[Source], frozenset[Result]]:
        """Return the model's result, what it is made of, and the results that the glue has changed."""
        with torch.no_grad(), self.tracker, nothing_made(self._root):
            result = self._root(*args, **kwargs)
            changed = frozenset(found for found, tensor in self._results.items() if tensor._version)
            return result, self.tracker.of(result) | self.tracker.control, changed


def record_calls(
    model: nn.Module, units: Mapping[str, nn.Module], specs: Sequence[TensorSpec], names: Sequence[str]
) -> Calls:
    """Return how the model's forward calls its units. Raises ValueError, with a reason, if it cannot be told.

    The forward is run for one sample, for two samples, and once in training mode: it must call the same units each
    time. Whatever the model's own code raises is raised.
    """
    runs = []
    for batch, training in ((1, False), (2, False), (2, True)):
        with tried_out(model):
            model.train(training)
            run = _Run(model, units)
            inputs = [torch.zeros(batch, *spec.shape, dtype=spec.dtype) for spec in specs]
            for place, tensor in enumerate(inputs):
                run.give((INPUTS, place), tensor)
            args, kwargs = arguments(inputs, names)
            runs.append((run.seen, *run.run(args, kwargs)))
    (one, first, *_), (two, second, end, changed), (training_calls, _, training_end, also) = runs
    orders = [[seen.unit for seen in calls] for calls in (one, two, training_calls)]
    if orders[0] != orders[1] or orders[0] != orders[2]:
        raise ValueError("its forward does not call the same modules for every batch, in training and in evaluation")
    calls = [_call(*seen) for seen in zip(one, two, training_calls, strict=True)]
    called = set(orders[0])
    return Calls(
        calls,
        end | training_end,
        [_leaf(*pair, "it") for pair in zip(flat(first), flat(second), strict=True)],
        [Leaf((1, *spec.shape), (2, *spec.shape), spec.dtype) for spec in specs],
        changed | also,
        [name for name in units if name not in called],
    )


def _call(one: Call, two: Call, training: Call) -> Call:
    """Return the description of a call that was seen three times. Raises ValueError if the results do not match."""
    if one.structure != two.structure:
        raise ValueError(f"what {one.unit} returns depends on the batch")
    leaves = [_leaf(first, second, one.unit) for first, second in zip(one.leaves, two.leaves, strict=True)]
    return Call(
        one.unit,
        one.sources | two.sources | training.sources,
        leaves,
        one.structure,
        one.changes | two.changes | training.changes,
    )


def _leaf(one: Any, two: Any, unit: str) -> Any:
    if isinstance(one, Tensor) and isinstance(two, Tensor) and one.dim() == two.dim():
        return Leaf(tuple(one.shape), tuple(two.shape), one.dtype)
    if isinstance(one, Tensor) or type(one) is not type(two) or one != two:
        raise ValueError(f"what {unit} returns depends on the batch")
    return one


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]
