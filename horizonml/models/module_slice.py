"""Runs some of a model's units inside the model's own forward, with stubs in the place of all others.

Moves a module's tensors to the device that a rank computes on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from horizonml.errors import ModelError
from horizonml.models.boundary import arguments
from horizonml.models.calls import INPUTS, Calls, Leaf, Result, Skeleton


@dataclass(frozen=True)
class SlicePart:
    """Describes a slice of a model: the calls `first` to `last - 1` of its units."""

    calls: Calls
    names: Sequence[str]  # of the model's inputs
    first: int
    last: int
    entering: Sequence[Result]  # what travels to the slice
    leaving: Sequence[Result] | None  # what travels on; None for the end of the model

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicePart:
        return self  # it never changes


class _StandIn(Tensor):
    """Stands for a tensor that has not travelled to a slice; so does all that is computed from it.

    The model's forward computes such values around the modules that other slices run. Nothing may depend on them: they
    are neither read, nor written into other tensors, nor handed to this slice's modules.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        if func in _READS:
            raise ModelError(f"the model's forward reads a tensor ({getattr(func, '__name__', func)}) {_UNSEEN}")
        kwargs = kwargs or {}
        given = tree_flatten((args, kwargs))[0]
        real = [leaf for leaf in given if isinstance(leaf, Tensor) and not isinstance(leaf, _StandIn)]
        versions = [leaf._version for leaf in real]
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if versions != [leaf._version for leaf in real]:
            raise ModelError(f"the model's forward changes a tensor by another one {_UNSEEN}")
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> _StandIn:
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.as_subclass(Tensor)
            copy = (plain if 0 in plain.stride() else plain.clone()).as_subclass(_StandIn)
        memo[id(self)] = copy
        return copy


_UNSEEN = (
    "that it did not use when the model was cut into parts; the way that a forward takes must not depend on the size "
    "of the batch, on the data, or on how often it was called (parallel.strategy: ddp trains the model whole)"
)
_READS = frozenset(
    getattr(owner, name)
    for owner, names in (
        (Tensor, "__bool__ __int__ __float__ __index__ __complex__ __contains__ __array__ item tolist numpy equal "
         "allclose is_nonzero nonzero is_contiguous stride storage_offset data_ptr dim_order"),
        (torch, "equal allclose is_nonzero nonzero"),
    )
    for name in names.split()
)  # fmt: skip


_PLAIN = (bool, int, float, str, type(None))


def _inside(*values: Any) -> list[int]:
    """Return what is in lists and dicts, by its identity."""
    found: list[int] = []
    for value in values:
        if isinstance(value, tuple | list | dict):
            inside = list(value.values() if isinstance(value, dict) else value)
            found += [len(inside), *map(id, inside), *_inside(*inside)]
    return found


def _plain(leaves: Sequence[Any]) -> list[Any]:
    """Return plain values as they are, and the kinds of all others."""
    kinds = (Tensor if isinstance(leaf, Tensor | Leaf) else type(leaf) for leaf in leaves)
    return [leaf if isinstance(leaf, _PLAIN) else kind for leaf, kind in zip(leaves, kinds, strict=True)]


def _shown(plain: Sequence[Any]) -> str:
    return ", ".join(leaf.__name__ if isinstance(leaf, type) else str(leaf)[:40] for leaf in plain) or "nothing"


class _Left(BaseException):
    """Leaves a forward after the last unit of a slice; no `except Exception` of the model's may stop it."""


class _Run:
    """Holds what one run of a slice's forward has found so far; it is part of a slice and copied with it."""

    def __init__(self, part: SlicePart) -> None:
        self._part = part
        self._values: dict[Result, Tensor] = {}
        self._stand_ins: dict[int, tuple[str, Tensor]] = {}  # by their memory, for results that have not travelled
        self._position = 0
        self._batch = 0
        self._changes: dict[tuple[int, bool], bool] = {}  # whether units change what they are given, by their mode
        self._draws = torch.empty(0)  # the state of PyTorch's generator when the run began

    def __deepcopy__(self, memo: dict[int, Any]) -> _Run:
        memo[id(self)] = copy = _Run(self._part)
        return copy

    def begin(self, values: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, object]]:
        """Take the tensors that have travelled here, and return the arguments of the model's forward."""
        part = self._part
        self._values = dict(zip(part.entering, values, strict=True))
        self._position, self._batch, self._draws = 0, len(values[0]), torch.get_rng_state()
        inputs = [self._value((INPUTS, place), leaf) for place, leaf in enumerate(part.calls.inputs)]
        return arguments(inputs, part.names)

    def call(self, module: nn.Module, unit: str, args: Any, kwargs: Any) -> Any:
        """Return what a unit returns: by running it, or by looking up what has travelled."""
        part, number = self._part, self._position
        expected = part.calls.calls[number].unit if number < len(part.calls.calls) else "nothing more"
        if unit != expected:
            raise ModelError(
                f"the model's forward calls {unit} where it called {expected} when it was cut; it must call its "
                "modules in the same order each time"
            )
        self._position += 1
        if number < part.first:
            found = self._stub(number)
            if self._position == part.first:  # what was drawn before is drawn by earlier stages, too
                torch.set_rng_state(self._draws)
            return found
        self._check(unit, (args, kwargs))
        before = _inside(args, kwargs)
        result = type(module).forward(module, *args, **kwargs)
        leaves, structure = tree_flatten(result)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._values[number, place] = leaf
        call, changes = part.calls.calls[number], before != _inside(args, kwargs)
        plain, known = _plain(leaves), _plain(call.leaves)
        if (plain, structure) != (known, call.structure) or changes != self._changes.setdefault(
            (number, module.training), changes
        ):
            raise ModelError(
                f"{unit} returns other values beside its tensors than when the model was cut ({_shown(plain)}, and not "
                f"{_shown(known)}), or changes a list or dict that it is given, and stages without it do not see that; "
                "return tensors only (parallel.strategy: ddp trains the model whole)"
            )
        if self._position == part.last and part.leaving is not None:
            raise _Left
        return result

    def _stub(self, number: int) -> Any:
        """Return what an earlier unit returned, with zeros for the tensors on which nothing depends here."""
        call = self._part.calls.calls[number]
        leaves = [self._value((number, place), leaf) for place, leaf in enumerate(call.leaves)]
        return tree_unflatten(leaves, call.structure)

    def _value(self, result: Result, leaf: Any) -> Any:
        """Return what has travelled, a value that is always the same, or not-a-number where nothing depends on it."""
        if result in self._values or not isinstance(leaf, Leaf):
            return self._values.get(result, leaf)
        # If the forward goes another way than it went when it was cut, the loss shows that. Only what is changed in
        # place has its own memory.
        number = math.nan if leaf.dtype.is_floating_point else 0
        made = leaf.filled(number, self._batch, in_memory=result in self._part.calls.changed)
        if type(made) is Tensor:  # and not that of a device with a class of its own
            made = made.as_subclass(_StandIn)
        of = (
            "an input of the model" if result[0] == INPUTS else f"what {self._part.calls.calls[result[0]].unit} returns"
        )
        self._stand_ins[made.untyped_storage()._cdata] = of, made
        return made

    def _check(self, unit: str, given: Any) -> None:
        """Raise ModelError if a unit is given something that has not travelled here."""
        for leaf in tree_flatten(given)[0]:
            known = self._stand_ins.get(leaf.untyped_storage()._cdata) if isinstance(leaf, Tensor) else None
            if known is not None or isinstance(leaf, _StandIn):
                of, _ = known or ("a tensor", leaf)
                raise ModelError(f"the model's forward hands {of} to {unit} {_UNSEEN}")

    def leave(self) -> tuple[Tensor, ...]:
        """Return the tensors that travel on."""
        assert self._part.leaving is not None
        return tuple(self._values[result] for result in self._part.leaving)

    def end(self) -> None:
        """Forget the tensors of this run."""
        self._values, self._stand_ins = {}, {}


class _UnitForward:
    """Runs a unit, or its stub."""

    def __init__(self, run: _Run, name: str) -> None:
        self._run, self._name = run, name
        self.module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.call(self.module, self._name, args, kwargs)


class ModuleSlice(nn.Module):
    """Runs a part of a model; its modules, parameters and buffers have the names that they have in the model.

    `horizonml_constants` are buffers that no checkpoint has and that every slice has for itself, by name.
    """

    horizonml_constants: Mapping[str, Tensor]
    horizonml_root: nn.Module  # these names are unlike those that a model's author gives to modules
    _run: _Run
    _part: SlicePart
    _units: tuple[str, ...]

    def __init__(
        self, model: nn.Module, part: SlicePart, units: Mapping[str, nn.Module], kept: Collection[str]
    ) -> None:
        """Prepare the slice, which shares the model's tensors; `kept` are the units and tensors that are its own."""
        super().__init__()
        run = _Run(part)
        forwards = {name: _UnitForward(run, name) for name in units}
        skeleton = Skeleton(model, forwards, kept)
        root = skeleton.root
        for name, placeholder in skeleton.placeholders.items():
            path, _, last = name.rpartition(".")
            owner = root.get_submodule(path)
            if owner.__dict__.get(last) is placeholder:
                owner.__dict__[last] = placeholder.as_subclass(_StandIn)
        for name, forward in forwards.items():
            forward.module = root.get_submodule(name)
        # The root is not a submodule, which would change all names; it shares its registries instead.
        for registry in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[registry] = root.__dict__[registry]
        self.__dict__ |= {"horizonml_root": root, "horizonml_constants": skeleton.constants}
        self.__dict__ |= {"_run": run, "_part": part, "_units": tuple(units)}
        self.train(model.training)

    def has_in_unit(self, path: str) -> bool:
        """Return whether a module is one of the units, or within one."""
        return any(path == unit or path.startswith(f"{unit}.") for unit in self._units)

    def bring_constants(self, device: torch.device) -> None:
        """Move the constants to a device; parameters and buffers are moved as those of any module."""
        moved = {}
        for name, constant in self.horizonml_constants.items():
            path, _, last = name.rpartition(".")
            moved[name] = self.horizonml_root.get_submodule(path).__dict__[last] = constant.to(device)
        self.horizonml_constants = moved

    def train(self, mode: bool = True) -> ModuleSlice:
        """Switch to training or evaluation."""
        super().train(mode)
        self.horizonml_root.training = mode
        return self

    def forward(self, *values: Tensor) -> Any:
        """Take the tensors of the slice's boundary one by one; return those of the next one, or the model's result."""
        args, kwargs = self._run.begin(values)
        try:
            result = self.horizonml_root(*args, **kwargs)
        except _Left:
            left = self._run.leave()
            return left[0] if len(left) == 1 else left
        finally:
            self._run.end()
        if self._part.leaving is not None:
            raise ModelError("the model's forward ended before it had called all modules that it called before")
        if any(isinstance(leaf, _StandIn) for leaf in tree_flatten(result)[0]):
            raise ModelError(f"the model's forward returns a tensor {_UNSEEN}")
        return result


HOST = torch.device("cpu")


def bring(module: nn.Module, device: torch.device) -> None:
    """Bring a module's parameters, buffers and constants to a device; those that are there stay the same tensors."""
    moved: dict[int, Tensor] = {}  # what several modules hold stays one tensor
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.device != device:
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
                part._parameters[name] = moved[id(parameter)]  # type: ignore[assignment]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device != device:
                part._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))
    if isinstance(module, ModuleSlice):
        module.bring_constants(device)
