"""Compares the layers that a model was cut into with the model itself, before anything is trained.

The model as its author wrote it and the chain of its layers run on the same samples: four times in training mode, with
an update after each, then in evaluation mode with and without gradients, with the same random numbers. Outputs,
gradients, buffers, modes and what the author's code keeps in the modules must be the same. Whatever Python does in a
forward and a cut would lose shows here. What the code keeps outside of the model, stages could not share.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from horizonml.data.sampler import python_seeded, python_state
from horizonml.errors import HorizonError, ModelError, is_out_of_memory
from horizonml.machine.code import where
from horizonml.models.boundary import Boundary, Values, depends_on_rows, tensors_of, values_of
from horizonml.models.cutting import Cutting, WholeModule
from horizonml.models.module_slice import ModuleSlice
from horizonml.models.own_state import OwnState, described, own_state_kept, put_back_buffers
from horizonml.models.structure import Structure
from horizonml.models.tracing import Attributes, tried_out
from horizonml.models.watch import set_and_read
from horizonml.models.zoo import Model
from horizonml.text import some

RELATIVE, ABSOLUTE = 1e-4, 1e-6  # of a tensor's largest value, and of the largest of all tensors of a kind
_RUNS = (*[(True, True)] * 4, (False, True), (False, False))  # training mode, gradients
_RATE = 0.01  # of the updates
_DRAWS = "draws from Python's or numpy's random numbers, which stages cannot draw alike; draw from PyTorch's"
_SEEDS = "seeds PyTorch's random numbers, which stages draw independently; make a torch.Generator where it draws"
_SECONDS = 60.0  # after which no other way to cut than the first one is tried

Run = Callable[[Values], tuple[Any, Callable[[Sequence[Tensor]], None]]]
"""Returns the result for some inputs, and what computes all gradients from those of the result's tensors."""


@dataclass
class _Seen:
    """Holds what one run of a model or of its parts did."""

    form: object  # of the result, which has these tensors
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    modes: dict[str, bool]
    trained: dict[str, bool]
    changed: list[tuple[str, dict[str, object]]]  # what modules hold that their code has set since the beginning


def prove(model: Model, inputs: Values) -> Cutting:
    """Return how to cut a model so that its layers compute what it computes: as it is cut, if they do.

    Where they do not, the model is cut by its modules, between those of them that allow it; if that fails, too, it is
    not cut. Most runs are on the first two samples; more of them show what depends on the order of rows. Raises
    ModelError if the model itself does not run on these inputs.
    """
    if len(model.chain) == 1:
        return model.cutting
    started, few = time.monotonic(), _first(inputs)
    whole = model.stage(0, len(model.chain))
    assert isinstance(whole, WholeModule)
    try:
        with _alone(), tried_out(whole.horizonml_root):
            drawing = _drawing(whole, few)
        with _alone(), own_state_kept(whole.horizonml_root):
            state = OwnState(whole.horizonml_root)
            shared: dict[str, None] = {}  # an ordered set
            truth = _observe(_run_whole(whole), [whole], few, lambda: shared.update(dict.fromkeys(state.changed())))
    except HorizonError:
        raise
    except Exception as error:  # the model's own code runs here, and may fail in any way
        if is_out_of_memory(error):
            raise
        name = type(whole.horizonml_root).__name__
        raise ModelError(f"{name} does not run on samples of the data: {where(error)}") from error
    if drawing is not None:
        return Cutting("nothing", reason=drawing)
    if shared:
        code = f"the forward of {_owner(whole.horizonml_root)}, or of a module in it, changes {some(list(shared))}"
        words = "which stages in several processes do not share; keep it in the model"
        return Cutting("nothing", reason=f"{code}, {words}")
    bound = _read_elsewhere(whole.horizonml_root, truth) or _changed_together(whole.horizonml_root, truth)
    if bound is not None:
        return Cutting("nothing", reason=bound)

    def problem(cutting: Cutting) -> str | None:
        try:
            return _difference(model.recut(cutting), whole.horizonml_root, truth, inputs)
        except ModelError as error:
            return str(error)

    first = problem(model.cutting)
    if first is None:
        return model.cutting
    try:
        structure = Structure(model.recorded, model.input)
    except ModelError:
        return Cutting("nothing", reason=first)
    points = frozenset(structure.points)

    def by_modules(kept: frozenset[int]) -> Cutting:
        return Cutting("modules", points - kept, f"a recorded graph of it computes something else: {first}")

    def is_right(kept: Sequence[int]) -> bool:
        return time.monotonic() - started < _SECONDS and problem(by_modules(frozenset(kept))) is None

    kept = _most(sorted(points), is_right)
    return by_modules(frozenset(kept)) if kept else Cutting("nothing", reason=first)


def _first(inputs: Values) -> Values:
    return tuple(value[:2] for value in inputs)


def check_shared(model: Model, inputs: Values) -> None:
    """Raise ModelError if parameters that several modules share cannot be held as copies, as every plan here does.

    Copies have the sum of all their gradients. That is not what the author wrote if the code asks whether they are one,
    or changes one of them.
    """
    whole = model.stage(0, len(model.chain))
    assert isinstance(whole, WholeModule)
    root, _ = model.make()
    values = dict(whole.named_parameters()) | dict(whole.named_buffers())
    for name, tensor in [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]:
        tensor.data = values[name].detach().clone()
    results = []
    for module in (WholeModule(root, model.input.names), whole):
        with _alone(), own_state_kept(root):
            torch.default_generator.manual_seed(0)
            result, backward = _run_whole(module.train())(tuple(value.clone() for value in inputs))
            outputs = tensors_of(result)
            backward([torch.randn_like(value) for value in outputs if value.requires_grad])
        results.append(outputs)
    one, other = dict(root.named_parameters()), dict(whole.named_parameters())
    wrong = any(_distance(a, b, 0.0) is not None for a, b in zip(*results, strict=True))
    for names in model.all_ties:
        copies = [other[name] for name in names]
        wrong |= any(not torch.equal(copies[0], copy) for copy in copies[1:])
        own = next(one[name] for name in names if name in one).grad
        gradients = [copy.grad for copy in copies if copy.grad is not None]
        total = torch.stack(gradients).sum(0) if gradients else None
        wrong |= _distance(own, total, _size(own)) is not None
        if wrong:
            raise ModelError(
                f"{' and '.join(names)} are one parameter in {_owner(root)}, and its code does with them what it would "
                "not do with copies that are kept equal: it asks whether they are the same object, or changes one of "
                "them; use the same module twice instead of sharing a parameter"
            )


def _most(points: Sequence[int], is_right: Callable[[Sequence[int]], bool]) -> Sequence[int]:
    """Return points that are right together, found by halving those that are not."""
    if not points or is_right(points):
        return points
    if len(points) == 1:
        return ()
    half = len(points) // 2
    left, right = _most(points[:half], is_right), _most(points[half:], is_right)
    both = [*left, *right]
    if not left or not right or is_right(both):
        return both
    return max(left, right, key=len)


def _difference(model: Model, root: nn.Module, truth: Sequence[_Seen], inputs: Values) -> str | None:
    """Return in words how the chain of a model's layers differs from the model `root`, or None."""
    if len(model.chain) == 1:
        return None  # which is the model itself
    try:
        parts = [model.stage(index, index + 1) for index in range(len(model.chain))]
        with _alone(), own_state_kept(root):
            found = _observe(_run_parts(model, parts), parts, _first(inputs))
            orders = inputs, tuple(value.flip(0) for value in inputs)  # in one of which the rows are not in order
            number = next(filter(None, (depends_on_rows(parts, order) for order in orders)), None)
    except Exception as error:  # the model's own code runs here, and may fail in any way
        if is_out_of_memory(error):
            raise
        return f"its layers do not run one after the other: {where(error)}"
    for one, other in zip(truth, found, strict=True):
        difference = _compare(one, other, parts)
        if difference is not None:
            place, words = difference
            return f"{_place(root, place)}{words}"
    if number is not None:
        layer = model.chain.names[number]
        return f"in {_owner(root)}, {layer} needs rows in the order of the whole batch, of which members have a part"
    return None


def _compare(one: _Seen, other: _Seen, parts: Sequence[nn.Module]) -> tuple[str, str] | None:
    """Return the module or tensor in which two runs differ, and how, or None."""
    if one.form != other.form:
        return "", "it does not return the same tensors"
    for place, mode in one.modes.items():
        if other.modes.get(place, mode) != mode:
            return place, f"it is {'not ' if mode else ''}in training mode"
    for place, is_trained in one.trained.items():
        if other.trained.get(place, is_trained) != is_trained:
            return place, "it is trained, or not, by its own code"
    kinds = (
        ("its outputs", {str(place): value for place, value in enumerate(one.outputs)},
         {str(place): value for place, value in enumerate(other.outputs)}),
        ("the gradient", one.gradients, other.gradients),
        ("the value", one.buffers, other.buffers),
    )  # fmt: skip
    for words, wanted, found in kinds:
        largest = max((_size(value) for value in wanted.values()), default=0.0)
        for place, value in wanted.items():
            if words != "its outputs" and place not in found:
                continue  # what no layer holds, the forward never uses
            distance = _distance(value, found.get(place), largest)
            if distance is not None:
                at = "" if words == "its outputs" else place
                verb = "differ" if words == "its outputs" else "differs"
                return at, f"{words} {verb} {distance}"
    for path, values in one.changed:
        own = [found for place, found in other.changed if place == path]
        for name, changed in values.items():
            same = [_is_same(changed, found[name]) for found in own if name in found]
            # Every slice runs the code around the units, and must see the counters and flags that it sets.
            slices = [part for part in parts if isinstance(part, ModuleSlice) and not part.has_in_unit(path)]
            everywhere = bool(slices) and not any(isinstance(one, Tensor) for one in tree_flatten(changed)[0])
            if not any(same) or (everywhere and not (all(same) and len(same) == len(slices))):
                return path, f"{name}, which its code sets, is not the same"
    return None


def _read_elsewhere(root: nn.Module, runs: Sequence[_Seen]) -> str | None:
    """Return which attribute a module's code sets and that of another class may read, or None.

    A stage that does not run the module would not see it. Tensors are looked after by the way they are computed.
    """
    changed = {(path, name) for seen in runs for path, values in seen.changed for name, value in values.items()
               if not any(isinstance(one, Tensor) for one in tree_flatten(value)[0])}  # fmt: skip
    read = set_and_read(root) if changed else {}
    for path, name in sorted(changed & read.keys()):
        owner = _owner(root.get_submodule(path))
        return (
            f"{path or 'the model'} = {owner} sets {name}, which {read[path, name]} reads, and which a stage without "
            f"{path or 'it'} does not see"
        )
    return None


def _changed_together(root: nn.Module, runs: Sequence[_Seen]) -> str | None:
    """Return which buffer of several modules their code changes, or None. Stages would have copies of it."""
    names: dict[int, list[str]] = {}
    for name, buffer in root.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    for first, *others in names.values():
        values = [seen.buffers[first] for seen in runs if first in seen.buffers]
        if others and any(_distance(values[0], value, 0.0) is not None for value in values[1:]):
            return f"{' and '.join([first, *others])} are one buffer that changes, which stages would have copies of"
    return None


def _size(value: Tensor | None) -> float:
    return 0.0 if value is None or not value.numel() else float(value.detach().double().abs().max())


def _distance(wanted: Tensor | None, found: Tensor | None, largest: float) -> str | None:
    """Return in words how far two tensors are apart, or None if they are the same within the bound."""
    if wanted is None or found is None:
        return None if wanted is found else "in whether there is one"
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return f"in shape or type: {list(found.shape)} {found.dtype}, not {list(wanted.shape)} {wanted.dtype}"
    if torch.equal(wanted, found) or not wanted.numel():
        return None
    one, other = wanted.detach().double(), found.detach().double()
    bound = RELATIVE * float(one.abs().max()) + ABSOLUTE * largest
    same_gaps = bool((one.isnan() == other.isnan()).all())
    apart = float((one - other).abs().nan_to_num(nan=0.0 if same_gaps else float("inf")).max())
    return None if apart <= bound else f"by {apart:.2g}, of {float(one.abs().max()):.2g}"


def _is_same(one: object, other: object) -> bool:
    """Return whether two values that modules hold are the same; of what is no number or tensor, the type counts."""
    first, form = tree_flatten(one)
    second, other_form = tree_flatten(other)
    if form != other_form:
        return False
    for a, b in zip(first, second, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if _distance(a, b, 0.0) is not None:
                return False
        elif type(a) is not type(b) or (isinstance(a, bool | int | float | str) and a != b):
            return False
    return True


def _place(root: nn.Module, name: str) -> str:
    """Return where a module is defined, for a sentence about it or about a tensor of it."""
    module, path = root, ""
    for part in name.split(".") if name else ():
        inner = module._modules.get(part)
        if inner is None:
            break
        module, path = inner, f"{path}.{part}".lstrip(".")
    owner = _owner(module)
    return f"of {name} in {owner}, " if name and name != path else f"in {path} = {owner}, " if path else f"in {owner}, "


@contextmanager
def _alone() -> Iterator[None]:
    """Leave the process's generators and the question whether gradients are computed as they are."""
    with torch.random.fork_rng(devices=[]), python_seeded(0), torch.enable_grad():
        yield


def _observe(
    run: Run, parts: Sequence[nn.Module], inputs: Values, after: Callable[[], object] = lambda: None
) -> list[_Seen]:
    """Return what all runs do; the parts are the whole model or its layers. `after` is called after each run."""
    modules = [vars(part).get("horizonml_root", part) for part in parts]  # with all that code has set
    before = [Attributes(module) for module in modules]
    found = []
    for number, (training, gradients) in enumerate(_RUNS):
        for part in parts:
            part.train(training)
            part.zero_grad(set_to_none=True)
        torch.default_generator.manual_seed(number)
        with nullcontext() if gradients else torch.no_grad(), python_seeded(number):
            result, backward = run(tuple(value.clone() for value in inputs))
            outputs = tensors_of(result)
            if gradients:
                backward([torch.randn_like(value) for value in outputs if value.requires_grad])
        after()
        named = [pair for module in modules for pair in nn.Module.named_parameters(module)]
        found.append(
            _Seen(
                _form(result),
                [value.detach().clone() for value in outputs],
                {name: None if p.grad is None else p.grad.clone() for name, p in named},
                {name: buffer.clone() for module in modules for name, buffer in nn.Module.named_buffers(module)},
                _flags(modules),
                {name: p.requires_grad for name, p in named},
                [(path, described(values, 7)) for one in before for path, values in one.changed().items()],
            )
        )
        with torch.no_grad():  # so that a copy of a parameter shows, which no update reaches
            for parameter in {p for _, p in named if p.grad is not None} if training else ():
                parameter.sub_(cast(Tensor, parameter.grad), alpha=_RATE)
    return found


def _flags(modules: Sequence[nn.Module]) -> dict[str, bool]:
    """Return which modules are in training mode; the part of a graph around them is none of the model's."""
    return {
        path: inner.training
        for module in modules
        for path, inner in module.named_modules()
        if path or not isinstance(module, fx.GraphModule)
    }


def _run_whole(whole: WholeModule) -> Run:
    def run(inputs: Values) -> tuple[Any, Callable[[Sequence[Tensor]], None]]:
        result = whole(*inputs)
        outputs = tensors_of(result)
        return result, lambda gradients: _backward([value for value in outputs if value.requires_grad], gradients)

    return run


def _run_parts(model: Model, parts: Sequence[nn.Module]) -> Run:
    """Return what runs layers as stages do: each receives tensors, not the history of those before it."""

    def run(inputs: Values) -> tuple[Any, Callable[[Sequence[Tensor]], None]]:
        result: Any = inputs
        values, crossed = inputs, list[tuple[Values, Values]]()
        for index, part in enumerate(parts):
            boundary = model.chain.boundaries[index]
            entered = values
            if index:
                sent = (value.detach().clone(memory_format=torch.contiguous_format) for value in values)
                entered = boundary.leaves(tuple(sent), torch.is_grad_enabled())
            result = part(*entered)
            last = index + 1 == len(parts)
            values = tensors_of(result) if last else values_of(result)
            if not last:
                _check_kinds(values, model.chain.boundaries[index + 1])
            crossed.append((entered, values))

        def backward(gradients: Sequence[Tensor]) -> None:
            _backward([value for value in values if value.requires_grad], gradients)
            for index in range(len(parts) - 1, 0, -1):
                boundary = model.chain.boundaries[index]
                arrived = [value.grad for value in boundary.differentiable(crossed[index][0])]
                pairs = zip(boundary.differentiable(crossed[index - 1][1]), arrived, strict=True)
                wanted = [(left, one) for left, one in pairs if one is not None and left.requires_grad]
                _backward([left for left, _ in wanted], [one for _, one in wanted])

        return result, backward

    return run


def _form(result: Any) -> object:
    """Return how a result is made of tensors."""
    if isinstance(result, Mapping):
        return {key: _form(value) for key, value in result.items()}
    return [*map(_form, result)] if isinstance(result, tuple | list) else isinstance(result, Tensor)


def _check_kinds(values: Values, boundary: Boundary) -> None:
    """Raise ModelError unless these are what the next stage expects, in evaluation, too."""
    for value, wanted in zip(values, boundary.tensors, strict=True):
        if (value.dtype, tuple(value.shape[1:])) != (wanted.dtype, wanted.shape):
            raise ModelError(
                f"a stage would send {list(value.shape[1:])} {value.dtype} for each sample where the next one expects "
                f"{list(wanted.shape)} {wanted.dtype}; what a module returns must be of one kind, in evaluation, too"
            )


def _backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Compute all gradients from those of the outputs; from a number, for which PyTorch need not import sympy."""
    if outputs:
        torch.stack([(one * other).sum() for one, other in zip(outputs, gradients, strict=True)]).sum().backward()


def _drawing(whole: WholeModule, inputs: Values) -> str | None:
    """Return which module draws from Python's own random numbers, or seeds PyTorch's, if one does.

    Stages would not draw what one process draws: a forward that runs in parts calls some of the modules only.
    """
    found: list[tuple[str, str]] = []
    states: list[tuple[object, int]] = []

    def enter(module: nn.Module, given: object) -> None:
        states.append((python_state(), torch.initial_seed()))

    def leave(module: nn.Module, given: object, result: object) -> None:
        drawn, seed = states.pop()
        if drawn != python_state():
            found.append((names[module], _DRAWS))
        elif seed != torch.initial_seed():
            found.append((names[module], _SEEDS))

    names = {module: path for path, module in whole.horizonml_root.named_modules()}
    handles = [
        handle
        for module in names
        for handle in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave))
    ]
    kept = {name: buffer.clone() for name, buffer in whole.named_buffers()}
    try:
        attributes = Attributes(whole.horizonml_root)
        whole.train()
        with torch.no_grad():
            whole(*(value.clone() for value in inputs))
        own = attributes.drawn()
    finally:
        for handle in handles:
            handle.remove()
        put_back_buffers(whole, kept)
    if own and not found:
        path, name = own[0]
        owner = _owner(whole.horizonml_root.get_submodule(path))
        return (
            f"{path or 'the forward'} of {owner} draws from a generator of its own ({name}), which stages cannot share"
        )
    if not found:
        return None
    path, what = found[0]
    return f"{path or 'the forward'} of {_owner(whole.horizonml_root.get_submodule(path))} {what}"


def _owner(module: nn.Module) -> str:
    """Return a module's class, and the file and line of its forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    line = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""
    return f"{type(module).__name__}{line}"
