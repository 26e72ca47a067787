"""Holds what a rank trains, for as long as the process lives, through all the groups that train it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from horizonml.comm.group import Group
from horizonml.models.cutting import WholeModule
from horizonml.models.module_slice import HOST, bring
from horizonml.models.weights import aliases
from horizonml.models.zoo import Model
from horizonml.plan.lossy import Tried
from horizonml.state.optim import AVERAGE, MOMENTUM, Optimizer, OwnSteps, PreparedOuter, Scales, swapped
from horizonml.state.parts import TensorSplit, name_of, named
from horizonml.state.shards import Best
from horizonml.state.spec import Adam, Ema, Sgd

_HEADER, _ENTRY = 1 << 16, 512  # the most bytes of a file's header, and of a tensor's entry in it besides its name


@dataclass(frozen=True)
class Prepared:
    """Holds the gradients of a step on which this rank cannot know whether the others have agreed.

    All work of the step was done when the group was lost: if another rank has updated its parameters, so must this one.
    """

    gradients: dict[str, Tensor]
    before: dict[str, Tensor]  # copies of buffers as they were before the step
    learning_rate: float


class TrainState:
    """Holds the state of the layers that this rank has, and how far training has come.

    The state consists of parameters, buffers and optimizer state. Its tensors have names for checkpoints and for moves
    between ranks: `model/NAME` with the name in the original model, and `optimizer/NAME/KEY`.

    Modules, and the optimizer state of what they hold, are on the `device` that this rank computes on. Everybody else
    deals with tensors in the host's memory: `tensors` returns such, and `put`, `load` and `take_over` take them.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Sgd | Adam,
        ema: Ema | None = None,
        local: bool = False,
        device: torch.device = HOST,
    ) -> None:
        """`local` says that members may take local steps, so that there may be the momentum of an outer optimizer."""
        self.model, self.optimizer, self.device = model, Optimizer(optimizer, ema), device
        self.step = 0  # the number of steps done
        self.given_up = 0  # steps that this rank has done after this one, which are no part of the state: local ones
        self.own_steps: OwnSteps | None = None  # what it has of them, when a group has ended
        self.metrics: dict[str, Any] = {}  # results of the last evaluation on held-out data
        self.best: dict[str, Best] = {}  # the best evaluation for each purpose
        self.tried: Tried | None = None  # what a trial has found about lossy formats
        self.prepared: Prepared | PreparedOuter | None = None
        self.local = local
        self.scales = Scales()
        self.valid = (
            True  # false while layers have initial values, or some of a checkpoint's, and the step says otherwise
        )
        self.parts: dict[str, TensorSplit] = {}  # the parameters and buffers of which this rank holds only a part
        self._modules: list[nn.Module] = []  # which hold the tensors
        self._received: dict[str, Tensor] = {}  # those that no module holds yet
        self._optimizer: dict[str, dict[str, Tensor]] = {}
        self._layers, self._constant = model.parameter_names, model.constant
        self._expected: dict[int, dict[str, Tensor]] = {}  # see `expected`

    def take(self, spans: Sequence[tuple[int, int]], as_graphs: bool = False) -> list[nn.Module]:
        """Hold layers `start` to `stop - 1` for each of the `spans`, and no others; return a module for each.

        Layers that are held already keep the same tensors; others get their initial values. Parts of tensors are valid
        for one plan only, so nothing is kept of them. A model that is held whole stays the same module, with all that
        its author's code keeps in it. See `Model.stage` for `as_graphs`.
        """
        whole = len(self._modules) == 1 and isinstance(self._modules[0], WholeModule)
        if (
            whole
            and not as_graphs
            and list(spans) == [(0, len(self.model.chain))]
            and not (self.parts or self._received)
        ):
            return list(self._modules)
        held = {} if self.parts else self._held
        if self.parts:
            self._optimizer, self.parts = {}, {}
        before = self._modules
        self._modules = [self.model.stage(start, stop, held, as_graphs) for start, stop in spans]
        self._received = {}
        for module in before:
            _let_go(module)
        kept = self._held
        self._optimizer = {name: entries for name, entries in self._optimizer.items() if name in kept}
        if self.device != HOST:
            for module in self._modules:
                bring(module, self.device)
            for entries in self._optimizer.values():
                entries |= {key: value.to(self.device) for key, value in entries.items()}
        return list(self._modules)

    def recut(self, model: Model) -> None:
        """Go on with the same model, cut into other layers; what is held stays."""
        self.model, self._layers, self._constant, self._expected = model, model.parameter_names, model.constant, {}

    def split(self, parts: Mapping[str, TensorSplit]) -> None:
        """Hold only these parts of the optimizer state, because the modules now hold only these of their tensors."""
        self.parts = dict(parts)
        for name, entries in self._optimizer.items():
            self._optimizer[name] = {key: self._own(name, value) for key, value in entries.items()}

    def join(self, group: Group) -> None:
        """Hold all layers whole, where this rank holds parts; the stage's members call this, without a session.

        Raises PeerLost.
        """
        if self.parts:
            self.become(self.whole(group, 0, len(self.model.chain)))

    def become(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold these tensors, by name, and nothing else."""
        self.keep([])
        self.put(tensors)

    @property
    def _held(self) -> dict[str, Tensor]:
        """The parameters and buffers by name, as the modules have them now: a module may replace a buffer."""
        found = dict(self._received)
        for module in self._modules:
            found |= dict(module.named_parameters(remove_duplicate=False))
            found |= dict(module.named_buffers(remove_duplicate=False))
        return {name: tensor for name, tensor in found.items() if name in self._layers}

    @property
    def _saved(self) -> dict[str, Tensor]:
        """Those of the held tensors that belong in a checkpoint."""
        found = dict(self._received)
        for module in self._modules:
            found |= module.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in found.items() if name in self._layers}

    def layers(self) -> list[int]:
        """Return the layers of which this rank holds the whole state, in memory that outlives its groups."""
        if self.parts or not self.valid:
            return []
        held = self._held
        return sorted({self._layers[name] for name in held})

    def keep(self, layers: Iterable[int]) -> None:
        """Hold the state of these layers only, of those that are held; `take` makes them into modules again."""
        wanted = set(layers)
        kept = {name: tensor for name, tensor in self._held.items() if self._layers[name] in wanted}
        for module in self._modules:
            _let_go(module)
        self._modules, self._received, self.parts, self.prepared = [], kept, {}, None
        self._optimizer = {name: entries for name, entries in self._optimizer.items() if name in kept}

    def drop(self) -> None:
        """Hold nothing, until a checkpoint has been resumed wholly, or the state has been restarted or received."""
        self.keep([])
        self.valid = False

    def settle(self, apply: bool, scale: float | None = None) -> None:
        """Apply the gradients that are prepared, because another rank has, or undo the step; see `Prepared`.

        `scale` is the factor by which that rank has multiplied its gradients, where gradients are clipped.
        """
        prepared, self.prepared = self.prepared, None
        if prepared is None:
            return
        if isinstance(prepared, PreparedOuter):
            if apply:
                self.take_over(prepared.tensors)
                self.step = prepared.step
            return
        if apply:
            gradients = prepared.gradients
            if scale is not None:
                gradients = {name: gradient * scale for name, gradient in gradients.items()}
                self.scales.note(self.step, scale)
            self.apply(gradients, prepared.learning_rate, self.step)
            self.step += 1
            return
        held = self._held
        for name, value in prepared.before.items():
            held[name].detach().copy_(value)

    @property
    def next(self) -> int | None:
        """Return the step after which the state is what is prepared, or None if nothing is."""
        if isinstance(self.prepared, PreparedOuter):
            return self.prepared.step
        return self.step + 1 if self.prepared is not None else None

    def take_over(self, tensors: Mapping[str, Tensor]) -> None:
        """Give parameters, buffers and optimizer state new values, by their names in the state."""
        held = self._held
        for key, value in tensors.items():
            name, entry = named(key)
            if entry is None:
                held[name].detach().copy_(value)
                continue
            if name not in self._optimizer:
                self._optimizer[name] = self.optimizer.initial(held[name].detach())
            kept = self._optimizer[name]
            if entry in kept and entry != MOMENTUM:
                kept[entry].copy_(value)
            else:
                kept[entry] = value.to(self.device)

    def entries(self, entry: str) -> dict[str, Tensor]:
        """Return what the optimizer keeps under a key, such as `average`, for each parameter that has it."""
        return {name: kept[entry] for name, kept in self._optimizer.items() if entry in kept}

    def forget_outer(self) -> None:
        """Drop the momentum of an outer optimizer, for a plan that has none, and so would not keep it up to date."""
        for kept in self._optimizer.values():
            kept.pop(MOMENTUM, None)

    def apply(self, gradients: Mapping[str, Tensor], learning_rate: float, step: int) -> None:
        """Update parameters with gradients that were kept of a step, by name; then no parameter has a gradient."""
        held = self._held
        parameters = {name: cast(nn.Parameter, held[name]) for name in gradients}
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        self.update(parameters, learning_rate, step)
        for parameter in parameters.values():
            parameter.grad = None

    def remember(self) -> Callable[[], None]:
        """Copy all that is trained, and how far it has come; return what restores it, as often as it is called.

        Until then, the same layers stay in the same tensors. What every rank has from a file does not change.
        """
        assert self.valid
        assert not self.parts
        held = {name: tensor.detach().clone() for name, tensor in self._held.items() if name not in self._constant}
        others = copy.deepcopy((self._optimizer, self.step, self.metrics, self.best, self.scales))

        @torch.no_grad()
        def restore() -> None:
            now = self._held
            for name, value in held.items():
                now[name].copy_(value)
            self._optimizer, self.step, self.metrics, self.best, self.scales = copy.deepcopy(others)
            self.prepared, self.valid = None, True

        return restore

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are held, by name, also those that checkpoints leave out."""
        return {name: tensor for name, tensor in self._held.items() if not isinstance(tensor, nn.Parameter)}

    def restart(self) -> None:
        """Go back to step 0 and the initial values."""
        self.prepared, self.valid = None, True
        self.step, self.metrics, self.best, self._optimizer = 0, {}, {}, {}
        self._set_to_initial(self._held)

    def _set_to_initial(self, tensors: Mapping[str, Tensor]) -> None:
        """Give tensors, by name, the values that training begins with."""
        for layer in sorted({self._layers[name] for name in tensors}):
            first = self.model.stage(layer, layer + 1)
            for name, value in chain(first.named_parameters(), first.named_buffers()):
                if name in tensors:
                    tensors[name].detach().copy_(self._own(name, value.detach()))

    def update(self, parameters: Mapping[str, nn.Parameter], learning_rate: float, step: int) -> None:
        """Update some parameters with their gradients of a step, counted from 0."""
        self.optimizer.step(parameters, self._optimizer, learning_rate, step)

    def judged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the parameters that are judged on held-out data.

        These are the averages, if there are any and the job does not want them to be left out.
        """
        if self.optimizer.ema is None or not self.optimizer.ema.evaluate:
            return nullcontext()
        held = self._held
        return swapped({held[name]: found[AVERAGE] for name, found in self._optimizer.items() if AVERAGE in found})

    def tensors(self, start: int = 0, stop: int | None = None) -> dict[str, Tensor]:
        """Return the tensors of layers `start` to `stop - 1` that are held, in the host's memory.

        They are the state's own, not copies, unless the state is on another device (`copies`).
        """
        found = self._own_tensors(start, stop)
        return {key: tensor.to(HOST) for key, tensor in found.items()} if self.copies else found

    @property
    def copies(self) -> bool:
        """Return whether `tensors` returns copies."""
        return self.device != HOST

    def _own_tensors(self, start: int = 0, stop: int | None = None) -> dict[str, Tensor]:
        """Return the tensors of layers `start` to `stop - 1` that are held, on this rank's device."""
        last = len(self.model.chain) if stop is None else stop
        here = {name: tensor for name, tensor in self._saved.items() if start <= self._layers[name] < last}
        tensors = {f"model/{name}": tensor.detach() for name, tensor in here.items()}
        for name, kept in self._optimizer.items():
            if name in here:
                tensors |= {f"optimizer/{name}/{key}": value for key, value in kept.items()}
        return tensors

    def is_constant(self, key: str) -> bool:
        """Return whether a tensor is frozen, and every rank has it from the file of pretrained weights."""
        return name_of(key) in self._constant

    def stateful(self) -> set[int]:
        """Return the layers of which only those ranks have the state that hold it."""
        return {layer for name, layer in self._layers.items() if name not in self._constant}

    def replicated(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return those of the `tensors` that are replicated on every member of a stage."""
        return {key: value for key, value in self.tensors(start, stop).items() if self._part(key) is None}

    def whole(self, group: Group, start: int, stop: int) -> dict[str, Tensor]:
        """Return `tensors` assembled from the members' parts.

        All members of the stage must call this where they hold parts. Raises PeerLost.
        """
        found = {}
        for key, value in sorted(self.tensors(start, stop).items()):  # in the same order on all members
            part = self._part(key)
            found[key] = value if part is None or value.dim() == 0 else part.whole(value, group)
        return found

    def _part(self, key: str) -> TensorSplit | None:
        return self.parts.get(name_of(key))

    def layer_of(self, key: str) -> int:
        """Return the layer that a tensor belongs to."""
        return self._layers[name_of(key)]

    def expected(self, layer: int) -> dict[str, Tensor]:
        """Return tensors without memory, with the shapes and dtypes of all those that can be held of a layer."""
        if layer not in self._expected:
            module = self.model.chain.slice(layer, layer + 1)
            tensors = module.state_dict(keep_vars=True)
            found = {f"model/{name}": tensor.detach().to("meta") for name, tensor in tensors.items()}
            for name, parameter in module.named_parameters():
                found |= {f"optimizer/{name}/{key}": value for key, value in self.optimizer.expected(parameter).items()}
                if self.local and parameter.requires_grad:
                    found[f"optimizer/{name}/{MOMENTUM}"] = parameter.detach().to("meta")
            self._expected[layer] = found
        return self._expected[layer]

    def most_bytes(self, layers: Iterable[int]) -> int:
        """Return the most bytes of a file with the whole state of these layers, as the job's optimizer keeps it.

        What a rank or a checkpoint announces is compared with this before memory or disk is taken for it.
        """
        held = (self.expected(layer) for layer in layers)
        return _HEADER + sum(tensor.nbytes + len(key) + _ENTRY for tensors in held for key, tensor in tensors.items())

    def bytes(self) -> int:
        """Return the bytes of what a copy holds of all layers, with optimizer state that is still to come."""
        layers = {self._layers[name] for name in self._held}
        expected = [entry for layer in layers for entry in self.expected(layer).items()]
        kept = ((key, tensor) for key, tensor in expected if not self.is_constant(key) and not key.endswith(MOMENTUM))
        return sum(self._own(name_of(key), tensor).nbytes for key, tensor in kept)

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold tensors received from another rank, by name; `take` makes their layers."""
        chain = self.model.chain
        layers = {n: chain.slice(n, n + 1).state_dict(keep_vars=True) for n in {self.layer_of(key) for key in tensors}}
        for key, tensor in tensors.items():
            name, entry = named(key)
            if entry is not None:
                self._optimizer.setdefault(name, {})[entry] = tensor
                continue
            like = layers[self._layers[name]][name]
            is_parameter = isinstance(like, nn.Parameter)
            self._received[name] = nn.Parameter(tensor, like.requires_grad) if is_parameter else tensor

    def load(self, read: Callable[[str], Tensor], names: Iterable[str]) -> None:
        """Read the values of all that is held from `read(name)`, in place; `names` are the names that can be read.

        Raises KeyError if a parameter or buffer is missing that may have changed, and ValueError if one has another
        shape or dtype.
        """
        self.prepared, self.valid = None, False  # until all ranks have loaded the same step
        available = set(names)
        saved, held = self._saved, self._held
        others = aliases(self.model.recorded)  # whose values in older checkpoints may not be those of the first name
        for name in sorted(saved, key=lambda name: (name not in others, name)):
            if f"model/{name}" not in available:
                if name in self._constant or name in self.model.chain.spare:  # it has that value already
                    continue
                raise KeyError(name)
            tensor = saved[name].detach()
            tensor.copy_(_like(tensor, self._own(name, read(f"model/{name}")), name))
        # What checkpoints leave out begins anew, as it does on a rank that was not there before.
        self._set_to_initial({name: tensor for name, tensor in held.items() if name not in saved})
        self._optimizer = {}
        for name, tensor in held.items():
            if isinstance(tensor, nn.Parameter):
                self._load_all_entries(name, tensor, read, available)

    def load_inner(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold the optimizer state of these that belongs to parameters held, where it is complete; see `load`.

        Raises ValueError if one has another shape or dtype.
        """
        for name, parameter in self._held.items():
            inner = self.optimizer.expected(parameter) if isinstance(parameter, nn.Parameter) else {}
            inner.pop(AVERAGE, None)
            if inner and all(f"optimizer/{name}/{key}" in tensors for key in inner):
                self._load_entries(name, parameter, inner, tensors.__getitem__)

    def _load_all_entries(
        self, name: str, parameter: nn.Parameter, read: Callable[[str], Tensor], available: set[str]
    ) -> None:
        expected = self.optimizer.expected(parameter)
        if self.local and parameter.requires_grad:
            expected[MOMENTUM] = parameter.detach()
        there = {key for key in expected if f"optimizer/{name}/{key}" in available}
        inner = expected.keys() - {AVERAGE, MOMENTUM}
        if there & inner:
            there |= inner  # all of it, or the state would be a mixture
        # Without it, as after local steps, the inner optimizer begins anew, and so does an average.
        if there:
            self._load_entries(name, parameter, {key: expected[key] for key in there}, read)

    def _load_entries(
        self, name: str, parameter: Tensor, expected: Mapping[str, Tensor], read: Callable[[str], Tensor]
    ) -> None:
        """Hold these entries of a parameter's optimizer state; others stay as they are, or begin anew."""
        own = {
            key: _like(like, self._own(name, read(f"optimizer/{name}/{key}")), f"{key} of {name}")
            for key, like in expected.items()
        }
        own = {key: value.to(parameter.device) for key, value in own.items()}
        self._optimizer[name] = self._optimizer.get(name, self.optimizer.initial(parameter.detach())) | own

    def _own(self, name: str, whole: Tensor) -> Tensor:
        part = self.parts.get(name)
        return whole if part is None or whole.dim() == 0 else part.of(whole)


def _let_go(module: nn.Module) -> None:
    """Take the tensors out of a module that is not used any more: as it refers to itself, it may stay for a while."""
    for part in list(module.modules()):
        part._parameters.clear()
        part._buffers.clear()


def _like(expected: Tensor, value: Tensor, name: str) -> Tensor:
    """Return the value if it has the expected shape and dtype. Raises ValueError if it does not."""
    if value.shape != expected.shape or value.dtype != expected.dtype:
        raise ValueError(
            f"{name} is {value.dtype} of shape {list(value.shape)}, but the model wants {expected.dtype} of shape "
            f"{list(expected.shape)}"
        )
    return value
