"""Represents a model that `torch.fx` cannot trace as a chain of layers, found from the structure of its modules.

Models with a forward that branches, as those of Hugging Face's transformers, cannot be recorded as a graph. Their
modules still tell how they are built: the entries of a `ModuleList` or `Sequential`, and the modules beside them, are
the model's units, which run one after the other. The model can be cut between two calls of units.

A slice runs the model's own forward, with other units than its own replaced by stubs. Stubs of earlier units return the
tensors that travelled, or stand-ins that cost nothing where nothing in this slice depends on them; after the last unit
of the slice, the forward is left. What the forward does between the calls is done by every stage whose units need it,
with the real values: inputs of the model that are needed later, such as masks, travel along.
"""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

from horizonml.data.dataset import TensorSpec
from horizonml.errors import ModelError, is_out_of_memory
from horizonml.models.boundary import Boundary, Layers, output_boundary, refused, unique_names
from horizonml.models.calls import INPUTS, Call, Calls, Leaf, Pin, Result, Source, record_calls
from horizonml.models.module_slice import ModuleSlice, SlicePart
from horizonml.tasks.task import InputSpec
from horizonml.text import count, some

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_LARGE = 8  # a piece with more than one in so many of the model's parameters is cut further
_MOST_PIECES = 16  # into which it is cut


class Structure(Layers):
    """Holds the layers of a model that is cut between calls of units; a layer consists of one call or several."""

    def __init__(self, model: nn.Module, input: InputSpec, without: frozenset[int] = frozenset()) -> None:
        """Find the units of `model` (usually on the meta device) and how they are called.

        The model is not cut before the calls `without`. Raises ModelError if the units cannot be told, or the model
        does not fit inputs of this shape.
        """
        self._model, self._input = model, input
        self._units = _units(model)
        self._calls = self._record()
        self._number = len(self._calls.calls)
        if not self._number:
            raise ModelError(f"{type(model).__name__} does not call any modules of its own")
        self._needed = self._find_needed()
        self._pins = self._find_pins()
        self._learned = self._find_learned()
        self.points = [
            point for point in self._cut_points() if point not in without
        ]  # the calls before which it is cut
        self._stops = [*self.points, self._number]
        self.boundaries = [Boundary(tuple(input.tensors)), *map(self._boundary, self._stops[:-1]), self._output()]
        calls = [[call.unit for call in self._calls.calls[slice(*self._span(n, n + 1))]] for n in range(len(self))]
        self.names = unique_names(
            (units, max(units, key=lambda unit: _size(self._units[unit])), str(index))
            for index, units in enumerate(calls)
        )

    def slice(self, start: int, stop: int) -> nn.Module:
        """Return layers, as `Layers.slice` says."""
        first, last = self._span(start, stop)
        entering = self._crossing(first) if first else [(INPUTS, place) for place in range(len(self._input.tensors))]
        leaving = self._crossing(last) if last < self._number else None
        kept = {pin for pin, (_, end) in self._pins.items() if first <= min(end, self._number - 1) < last}
        if stop == len(self):
            kept.update(self.spare)
            kept.update(unit for name in self.spare if (unit := self._owner(name)) is not None)
        part = SlicePart(self._calls, self._input.names, first, last, tuple(entering), leaving)
        return ModuleSlice(self._model, part, self._units, kept)

    def bond(self, index: int) -> str | None:
        first, last = self._span(index, index + 1)
        calls = self._calls.calls
        spans = [
            (user - source[0] - 1, calls[source[0]].unit, calls[user].unit)
            for user in range(first, last)
            for source in calls[user].sources
            if isinstance(source, tuple) and source[0] >= first
        ]
        skipped, start, end = max(spans, default=(0, "", ""))
        return f"the connection from {start} to {end} skips {count(skipped, 'module')}" if skipped else None

    def report(self) -> str:
        parts = []
        pins = sorted(name for name, (first, last) in self._pins.items() if first < last)
        if pins:
            parts.append(f"it is not cut where both sides would need {some(pins)}")
        unused = [name for name in self._calls.unused if _holds_tensors(self._units[name])]
        if unused:
            parts.append(f"its forward never calls {some(unused)}, which training does not change")
        return "; ".join(parts)

    def _record(self) -> Calls:
        """Return how the forward calls the units; those that return anything but a batch, and learn nothing, are glue.

        Every stage does what they do itself. Raises ModelError.
        """
        try:
            while True:
                calls = record_calls(self._model, self._units, self._input.tensors, self._input.names)
                glue = {call.unit for call in calls.calls if not (_size(self._units[call.unit]) or _travels(call))}
                if not glue:
                    return calls
                self._units = {name: unit for name, unit in self._units.items() if name not in glue}
        except ModelError:
            raise
        except Exception as error:  # the model's own code runs here, and may fail in any way
            if is_out_of_memory(error):
                raise
            raise refused(self._model, self._input, error, "cannot be cut by its modules for inputs") from error

    def _find_needed(self) -> list[set[Result]]:
        """Return for each call, and for the model's end, the results that it or a later one needs."""
        sources = [*(call.sources for call in self._calls.calls), self._calls.end]
        needed: list[set[Result]] = []
        later: set[Result] = set()
        for own in reversed(sources):
            later = later | {source for source in own if isinstance(source, tuple)}
            needed.append(later)
        return needed[::-1]

    def _crossing(self, index: int) -> list[Result]:
        """Return the results that are made before call `index` and needed by it or a later one; inputs come first."""
        return sorted(result for result in self._needed[index] if result[0] < index)

    def _find_pins(self) -> dict[str, tuple[int, int]]:
        """Return the first and the last call that need something which only one stage can have."""
        found: dict[str, tuple[int, int]] = {}

        def note(name: str, index: int) -> None:
            first, last = found.get(name, (index, index))
            found[name] = min(first, index), max(last, index)

        for index, sources in enumerate([*(call.sources for call in self._calls.calls), self._calls.end]):
            for name in (source.name for source in sources if isinstance(source, Pin)):
                note(name, index)
                owner = self._owner(name)  # the unit, too, uses what the glue uses of it
                for other, call in enumerate(self._calls.calls):
                    if call.unit == owner:
                        note(name, other)
        for index, call in enumerate(self._calls.calls):
            if _holds_tensors(self._units[call.unit]):
                note(call.unit, index)
        return found

    def _owner(self, tensor: str) -> str | None:
        """Return the unit that holds a tensor."""
        parts = tensor.split(".")
        return next((path for end in range(len(parts)) if (path := ".".join(parts[:end])) in self._units), None)

    def _find_learned(self) -> list[bool]:
        """Return for each call whether its results depend on parameters that are trained."""
        learned: list[bool] = []
        for call in self._calls.calls:
            own = any(parameter.requires_grad for parameter in self._units[call.unit].parameters())
            learned.append(own or any(self._is_learned(source, learned) for source in call.sources))
        return learned

    def _is_learned(self, source: Source, learned: list[bool]) -> bool:
        if isinstance(source, Pin):
            parameter = dict(self._model.named_parameters()).get(source.name)
            return parameter is not None and parameter.requires_grad
        return source[0] != INPUTS and learned[source[0]]

    def _cut_points(self) -> list[int]:
        """Return the calls before which the model may be cut.

        A cut that a single result crosses, beside inputs of the model, is always allowed. Pieces that are still large
        are cut further, before units with parameters.
        """
        possible = [index for index in range(1, self._number) if self._can_cut(index)]
        points = [index for index in possible if sum(call != INPUTS for call, _ in self._crossing(index)) == 1]
        sizes = [_size(self._units[call.unit]) for call in self._calls.calls]
        for start, stop in zip([0, *points], [*points, self._number], strict=True):
            inside = [index for index in possible if start < index < stop and sizes[index]]
            if sum(sizes[start:stop]) * _LARGE > sum(sizes):
                points += inside[:: -(-len(inside) // _MOST_PIECES) or 1]
        return sorted(set(points))

    def _can_cut(self, index: int) -> bool:
        """Return whether all that crosses a cut can travel, and nothing would be changed on one side only."""
        if any(first < index <= last for first, last in self._pins.values()):
            return False
        crossing = self._crossing(index)
        later = self._calls.changed.union(*(call.changes for call in self._calls.calls[index:]))
        specs = [self._leaf(result).spec for result in crossing]
        found = [spec for spec in specs if spec is not None]
        travels = len(found) == len(specs) and any(spec.dtype.is_floating_point for spec in found)
        return travels and not later.intersection(crossing)

    def _leaf(self, result: Result) -> Leaf:
        call, place = result
        leaf = self._calls.inputs[place] if call == INPUTS else self._calls.calls[call].leaves[place]
        assert isinstance(leaf, Leaf)
        return leaf

    def _boundary(self, index: int) -> Boundary:
        """Return the boundary before a call; gradients travel back for what depends on trained parameters."""
        tensors = []
        for result in self._crossing(index):
            spec = self._leaf(result).spec
            assert spec is not None
            learned = result[0] != INPUTS and self._learned[result[0]]
            tensors.append(TensorSpec(spec.shape, spec.dtype, learned and spec.dtype.is_floating_point))
        return Boundary(tuple(tensors))

    def _output(self) -> Boundary:
        """Return the description of what the model returns. Raises ModelError."""
        leaves = [leaf for leaf in self._calls.outputs if leaf is not None]
        return output_boundary(self._model, [leaf.spec if isinstance(leaf, Leaf) else None for leaf in leaves])


def _units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that are run as a whole: the largest that have no lists of modules inside."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def look(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            listed = any(isinstance(part, LISTS) for part in child.modules())
            if listed and not parametrize.is_parametrized(child):
                look(child, f"{prefix}{name}.")
            else:
                found[f"{prefix}{name}"] = child

    look(model, "")
    return found


def _size(module: nn.Module) -> int:
    """Return the number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _travels(call: Call) -> bool:
    """Return whether all tensors that a unit returns have the batch in their first dimension."""
    return all(leaf.spec is not None for leaf in call.leaves if isinstance(leaf, Leaf))
