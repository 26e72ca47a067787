"""Builds a model without memory, and then only the parameters that this rank needs.

`record` runs a model's constructor on the meta device and records every operation that gives a parameter its initial
value. `materialise` replays these operations for the parameters of one module only, each with random numbers seeded by
the job's seed and the operation's number. A rank therefore holds the layers of its stage and never the whole model, and
a parameter's initial value does not depend on the plan.

The idea is that of deferred initialisation in pytorch/torchdistx.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from horizonml.data.sampler import name_seed
from horizonml.errors import ModelError
from horizonml.machine.code import is_own_file, own_modules
from horizonml.models.own_state import is_own

_aten = torch.ops.aten
# Constructors like to read back these cheap constants (`tolist`, `item`), so they stay real.
_KEPT_REAL = frozenset((_aten.arange, _aten.linspace, _aten.eye, _aten.tril_indices, _aten.triu_indices))
# These loop over values, so PyTorch makes them do nothing on the meta device; the tape records them as a whole.
_TAKEN_WHOLE = ("trunc_normal_", "orthogonal_", "dirac_", "sparse_")


@dataclass(frozen=True)
class _View:
    """Describes a tensor of the recording as a view of one of its storages."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Drawing:
    """Holds the state in which the author's own generator was before an operation that drew from it."""

    state: Tensor

    def generator(self) -> torch.Generator:
        """Return a generator in this state."""
        made = torch.Generator()
        made.set_state(self.state)
        return made


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    structure: Any
    inputs: frozenset[int]
    outputs: tuple[_View | None, ...]
    writes: frozenset[int]


class Watching(TorchDispatchMode):
    """Sees every operation on tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and torch need not import its compiler (70 MB) to switch it off."""
        return False


class Tape(Watching):
    """Records what a constructor does to tensors on the meta device; use `record`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []
        self._storages: dict[int, int] = {}
        self._alive: list[Tensor] = []  # keeps the address of a storage from being reused during the recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors and "device" in {a.name for a in func._schema.arguments}:
            if func.overloadpacket in _KEPT_REAL:
                return func(*args, **_on_cpu(kwargs))
            result = func(*args, **{**kwargs, "device": torch.device("meta")})
            kwargs = {**kwargs, "device": torch.device("cpu")}
            leaves, structure = tree_flatten((args, kwargs))
        elif all(tensor.device.type != "meta" for tensor in tensors):
            return func(*args, **_on_cpu(kwargs))
        else:
            on_meta = tree_map(_to_meta, (args, kwargs))
            result = func(*on_meta[0], **on_meta[1])
            result = _keep_identity(func, result, args, on_meta[0])
        self.write_down(func, leaves, structure, result, bool(func._schema.is_mutable))
        return result

    def write_down(self, func: Any, leaves: list[Any], structure: Any, result: Any, mutates: bool) -> None:
        """Add one call to the tape; `mutates` says that it changes its arguments."""
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            # The author's own generator draws what it draws in one process; nothing is drawn on the meta device.
            real = [torch.zeros_like(leaf, device="cpu") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            leaves = [_Drawing(leaf.get_state()) if isinstance(leaf, torch.Generator) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(real, structure)
            with _disable_current_modes(), torch.no_grad():
                func(*args, **kwargs)
        views = tuple(self._view(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        inputs = frozenset(leaf.storage for leaf in views if isinstance(leaf, _View))
        outputs = tuple(self._view(leaf) if isinstance(leaf, Tensor) else None for leaf in tree_flatten(result)[0])
        made = frozenset(view.storage for view in outputs if view is not None)
        if made - inputs or mutates:  # a plain view computes nothing
            writes = made if not mutates else made | inputs
            self._calls.append(_Call(func, views, structure, inputs, outputs, writes))

    def take_whole(self, function: Callable[..., Tensor], tensor: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Record an initialiser as a whole."""
        if not tensor.is_meta:
            return function(tensor, *args, **kwargs)
        leaves, structure = tree_flatten(((tensor, *args), kwargs))
        self.write_down(function, leaves, structure, tensor, mutates=True)
        return tensor

    @property
    def length(self) -> int:
        """Return the number of operations that were recorded."""
        return len(self._calls)

    def _view(self, tensor: Tensor) -> Any:
        if tensor.device.type != "meta":
            return tensor.detach().clone()
        address = tensor.untyped_storage()._cdata
        if address not in self._storages:
            self._storages[address] = len(self._storages)
            self._alive.append(tensor.detach())
        return _View(self._storages[address], tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def initial(self, name: str, target: Tensor, seed: int) -> Tensor:
        """Return the initial value of a parameter or buffer. Raises ModelError if it never gets one."""
        try:
            return self.replay(target, seed)
        except KeyError as error:
            raise without_value(name) from error

    def replay(self, target: Tensor, seed: int) -> Tensor:
        """Return a real tensor with the initial value of `target`, a meta tensor of the recording.

        Each operation draws from a seed of its own, whichever tensor it is repeated for. So tensors that are made of
        one another, such as copies or the parts of a normed weight, belong together here, too.
        """
        view = self._view(target)
        needed, calls = {view.storage}, list[tuple[int, _Call]]()
        for number in range(len(self._calls) - 1, -1, -1):
            call = self._calls[number]
            if call.writes & needed:
                calls.append((number, call))
                needed |= call.inputs
        real: dict[int, Tensor] = {}

        def window(leaf: Any) -> Any:
            if isinstance(leaf, _View):
                return real[leaf.storage].as_strided(leaf.size, leaf.stride, leaf.offset)
            return leaf.generator() if isinstance(leaf, _Drawing) else leaf

        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for number, call in reversed(calls):
                torch.default_generator.manual_seed(name_seed(seed, number))
                args, kwargs = tree_unflatten([window(leaf) for leaf in call.leaves], call.structure)
                for output, made in zip(call.outputs, tree_flatten(call.function(*args, **kwargs))[0], strict=True):
                    if output is not None:
                        real.setdefault(output.storage, made)
            result = window(view)
        assert isinstance(result, Tensor)
        return result.clone() if result.untyped_storage().nbytes() > result.nbytes else result


class Seeded(Watching):
    """Runs a constructor in memory, with the random numbers that `Tape.replay` draws: each operation has its own seed.

    So every tensor of the model has the value that it has in any plan: also those that are neither parameters nor
    buffers, and copies and views that a constructor makes of others.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0  # of the next operation that a tape would record
        self._seed = seed
        self._recorded: dict[int, Any] = {}  # the storages that a tape would have on the meta device, kept alive

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        inputs = {leaf.untyped_storage()._cdata for leaf in tensors} & self._recorded.keys()
        is_factory = not tensors and "device" in {a.name for a in func._schema.arguments}
        if not inputs and (not is_factory or func.overloadpacket in _KEPT_REAL):
            return func(*args, **kwargs)
        torch.default_generator.manual_seed(name_seed(self._seed, self.number))
        result = func(*args, **kwargs)
        storages = [leaf.untyped_storage() for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        made = {storage._cdata: storage for storage in storages}
        self.number += bool(made.keys() - inputs or func._schema.is_mutable)
        self._recorded |= made
        return result

    def take_whole(self, function: Callable[..., Tensor], tensor: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Run an initialiser that a tape records as a whole."""
        if tensor.untyped_storage()._cdata not in self._recorded:
            return function(tensor, *args, **kwargs)
        torch.default_generator.manual_seed(name_seed(self._seed, self.number))
        self.number += 1
        with _disable_current_modes():
            return function(tensor, *args, **kwargs)


def seeded(build: Callable[[], nn.Module], seed: int, tape: Tape) -> tuple[nn.Module, bool]:
    """Run a constructor in memory; return the model, and whether its values are those that `tape` replays."""
    mode = Seeded(seed)
    with _initialisers_on(mode), mode:
        model = build()
    return model, mode.number == tape.length


def without_value(name: str) -> ModelError:
    """Return the error for a tensor that a constructor has put on the meta device."""
    return ModelError(f"{name} is constructed without a value; leave out device='meta' in the model's constructor")


def record(build: Callable[[], nn.Module]) -> tuple[nn.Module, Tape]:
    """Run a constructor without allocating its tensors; return the model on the meta device, and the tape."""
    tape = Tape()
    with _initialisers_on(tape), tape:
        model = build()
    return model, tape


@contextmanager
def _initialisers_on(mode: Tape | Seeded) -> Iterator[None]:
    """Let `mode` take the initialisers of `_TAKEN_WHOLE`, in whichever modules they have been imported."""

    def recorder(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def record_call(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return mode.take_whole(original, tensor, args, kwargs)

        return record_call

    originals = {name: getattr(nn.init, name) for name in _TAKEN_WHOLE}
    stand_ins = {name: recorder(original) for name, original in originals.items()}
    own, others = own_modules()
    for module, name in [*_users(own.values(), originals), *_users_installed(others, originals)]:
        setattr(module, name, stand_ins[name])
    try:
        yield
    finally:
        own, now = own_modules()
        imported = () if now is others else now  # and what has been imported meanwhile
        for module, name in [
            *_users(own.values(), stand_ins),
            *_users_installed(others, stand_ins),
            *_users(imported, stand_ins),
        ]:
            setattr(module, name, originals[name])


def _users(modules: Iterable[ModuleType], functions: Mapping[str, Any]) -> Iterator[tuple[ModuleType, str]]:
    """Yield the modules that have one of these functions by its name, with that name."""
    for module in list(modules):
        space = getattr(module, "__dict__", {})
        for name, function in functions.items():
            if space.get(name) is function:
                yield module, name


_installed: tuple[list[ModuleType], list[ModuleType]] = ([], [])


def _users_installed(others: list[ModuleType], functions: Mapping[str, Any]) -> Iterator[tuple[ModuleType, str]]:
    """Yield the same for installed modules, which are looked through once for each list of them."""
    global _installed
    if others is not _installed[0]:
        _installed = others, list(dict.fromkeys(module for module, _ in _users(others, functions)))
    return _users(_installed[1], functions)


def untie(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Give every module that uses the same parameter as another a copy of its own; return the names that were one.

    The copies begin with the same values. Modules that are used twice keep their parameters. Raises ModelError if such
    a parameter has a hook, which would see the gradient of each use instead of their sum.
    """
    found: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for prefix, owner in model.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                full = f"{prefix}.{name}" if prefix else name
                found.setdefault(id(parameter), []).append((full, owner, name))
    for (name_of_first, first, key), *others in found.values():
        shared = first._parameters[key]
        assert shared is not None
        if others and shared._backward_hooks:
            names = " and ".join((name_of_first, *(full for full, _, _ in others)))
            raise ModelError(
                f"the parameter that is called {names} is used by several modules and has a hook; register the hook "
                "with a parameter that one module uses"
            )
        for _, owner, name in others:
            value = shared.detach()  # which the tape knows by its storage
            owner._parameters[name] = nn.Parameter(value if value.is_meta else value.clone(), shared.requires_grad)
    return tuple(tuple(full for full, _, _ in uses) for uses in found.values() if len(uses) > 1)


def aliases(model: nn.Module) -> dict[str, str]:
    """Return the further names of tensors whose module is registered in several places, each with its first name."""
    first = {module: path for path, module in model.named_modules()}
    return {
        f"{path}.{name}": f"{first[module]}.{name}"
        for path, module in model.named_modules(remove_duplicate=False)
        if path != first[module]
        for name in (*module._parameters, *module._buffers)
    }


def sharing(model: nn.Module) -> tuple[str, str] | None:
    """Return the names of a trained parameter and of another parameter or buffer in the same memory, if there are."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor) or not tensor.numel():
            continue
        other, one = found.setdefault(tensor.untyped_storage()._cdata, (name, tensor))
        if one is not tensor and (one.requires_grad or tensor.requires_grad):
            return other, name
    return None


def materialise(
    module: nn.Module,
    tape: Tape,
    seed: int,
    held: Mapping[str, Tensor],
    read: Callable[[Tensor, str], Tensor | None] | None = None,
) -> nn.Module:
    """Return a copy of `module` in which every parameter and buffer of the recording has its initial value.

    Those in `held`, by name, become part of the copy as the very same tensors. `read(like, name)` returns a pretrained
    value, or None. The `constants` of a `ModuleSlice` get their values, too.
    """
    values: dict[int, Any] = {}
    for prefix, owner in module.named_modules():
        for registry in (owner._parameters, owner._buffers):
            for name, tensor in registry.items():
                full = f"{prefix}.{name}" if prefix else name
                if tensor is not None and full in held:
                    values[id(tensor)] = held[full]
                if tensor is None or id(tensor) in values:
                    continue
                value = read(tensor, full) if read is not None else None
                if value is None:
                    if tensor.device.type != "meta":
                        continue
                    value = tape.initial(full, tensor, seed)
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                values[id(tensor)] = value
    for constant in getattr(module, "horizonml_constants", {}).values():
        if constant.is_meta:
            values[id(constant)] = tape.replay(constant, seed)
    for inner in module.modules():
        for value in vars(inner).values():  # what a hook has computed of parameters, such as a normalised weight
            if isinstance(value, Tensor) and not value.is_leaf:
                values[id(value)] = value.detach().clone()
    fill = _prepare_functions(module, values)
    made = copy.deepcopy(module, values)
    fill()
    copy_persistence(module, made)
    for name, tensor in module.named_parameters():
        if name not in held:
            carry_hooks(tensor, values.get(id(tensor), tensor), values)
    return made


def _prepare_functions(module: nn.Module, copies: dict[int, Any]) -> Callable[[], None]:
    """Add copies of the functions that a model's modules hold and that remember something, which `deepcopy` shares.

    Returns what copies all that they remember, once there are copies of the modules.
    """
    cells: dict[int, tuple[CellType, CellType]] = {}
    functions: list[tuple[FunctionType, FunctionType]] = []
    waiting, seen = deque[Any](value for inner in module.modules() for value in vars(inner).values()), set[int]()
    while waiting:
        value = waiting.popleft()
        if id(value) in seen or isinstance(value, Tensor | nn.Module):
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType) and is_own_file(value.__code__.co_filename):
            closure = value.__closure__ or ()
            if not closure and not value.__defaults__ and not value.__kwdefaults__:
                continue
            own = tuple(cells.setdefault(id(cell), (cell, CellType()))[1] for cell in closure)
            copied = FunctionType(value.__code__, value.__globals__, value.__name__, None, own)
            copied.__qualname__ = value.__qualname__
            copies[id(value)] = copied
            functions.append((value, copied))
            waiting.extend(value.__defaults__ or ())
            for cell in closure:
                with suppress(ValueError):
                    waiting.append(cell.cell_contents)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple | set | deque):
            waiting.extend(value)
        elif isinstance(value, functools.partial):
            waiting.extend((value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, MethodType):
            waiting.append(value.__self__)
        elif is_own(value.__class__):
            waiting.extend(vars(value).values() if hasattr(value, "__dict__") else ())

    def fill() -> None:
        for cell, own in cells.values():
            with suppress(ValueError):  # it is empty
                own.cell_contents = copy.deepcopy(cell.cell_contents, copies)
        for function, copied in functions:
            copied.__defaults__ = copy.deepcopy(function.__defaults__, copies)
            copied.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, copies)
            copied.__dict__.update(copy.deepcopy(function.__dict__, copies))

    return fill


def carry_hooks(tensor: Tensor, copied: Tensor, copies: dict[int, Any]) -> None:
    """Register the hooks of a tensor with another; `copies` are those of the modules that they belong to."""
    if copied is tensor:
        return
    for hook in (tensor._backward_hooks or {}).values():
        copied.register_hook(copy.deepcopy(hook, copies))
    for hook in (tensor._post_accumulate_grad_hooks or {}).values():
        copied.register_post_accumulate_grad_hook(copy.deepcopy(hook, copies))


def copy_persistence(module: nn.Module, made: nn.Module) -> None:
    """Keep those buffers out of the checkpoints of a copy that the original keeps out; fx's copies do not say so."""
    originals = dict(module.named_modules())
    for path, part in made.named_modules():
        if path in originals:
            part._non_persistent_buffers_set |= originals[path]._non_persistent_buffers_set & part._buffers.keys()


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, object]:
    """Return the arguments of an operation on real tensors, which may ask for the device of a parameter."""
    device = kwargs.get("device")
    return kwargs | {"device": torch.device("cpu")} if device is not None and device.type == "meta" else kwargs


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) and leaf.device.type != "meta" else leaf


def _keep_identity(func: Any, result: Any, args: tuple[Any, ...], on_meta: tuple[Any, ...]) -> Any:
    """Return the very tensor that an in-place operation was given, or else `result`."""
    if isinstance(result, Tensor) and args and result is on_meta[0]:
        return args[0]
    return result
