"""Runs the backward pass of a stage, whole or split in two.

A split pass computes first the gradient of the stage's input, for which the previous stage waits, and later the
gradients of the stage's weights, which can fill time in which this stage would be idle (Zero Bubble Pipeline
Parallelism; Qi et al., ICLR 2024).

Autograd's graph is cut where a weight joins the path from the output to the input. The operation there (a convolution
or a matrix product) receives the gradient of its result in the first part; this gradient is kept, and the second part
computes the gradient of the weight from it. The gradients of vectors (biases, the parameters of normalisations) cost
next to nothing and are computed in the first part.

When `torch.autograd.backward` in torch 2.13 is given a gradient, it imports sympy, which costs every rank outside the
last stage 34 MB and a quarter of a second. It does not import sympy when it starts from a scalar, so that is how a pass
starts here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import (
    GradientEdge,
    Node,
    _engine_run_backward,  # torch.autograd.backward would import sympy, see `backward`
    get_gradient_edge,
)

from horizonml.models.boundary import Values


@dataclass
class _Join:
    """Describes an operation at which weights join the path, and the gradients of its results."""

    node: Node
    weights: list[Tensor]
    gradients: tuple[Tensor | None, ...] = ()

    def keep(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.gradients = gradients


@dataclass
class SplitBackward:
    """Runs the backward pass of one micro-batch: `input_part` first, and `weight_part` at any later time."""

    outputs: Values
    gradients: Values | None  # of the outputs; None if the only one is a loss
    entered: Values | None  # the stage's inputs that want gradients; None for a first stage, which sends none
    _joins: list[_Join] = field(default_factory=list)

    def input_part(self) -> None:
        """Compute the gradients of the inputs, and those of the parameters that cost next to nothing."""
        if self.entered is None or not self.outputs:
            return
        start = seeded(self.outputs, self.gradients)
        assert start.grad_fn is not None
        self._joins, others = _find_joins(start.grad_fn, self.entered)
        handles = [join.node.register_prehook(join.keep) for join in self._joins]
        try:
            torch.autograd.backward(start, inputs=[*self.entered, *others], retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()

    @property
    def pending(self) -> list[Tensor] | None:
        """The weights whose gradients `weight_part` computes; None if it computes those of all parameters."""
        return None if self.entered is None else [weight for join in self._joins for weight in join.weights]

    def weight_part(self) -> None:
        """Compute the gradients that are still missing."""
        if self.entered is None:
            if self.outputs:
                backward(self.outputs, self.gradients)
            return
        for join in self._joins:
            given = [(place, gradient) for place, gradient in enumerate(join.gradients) if gradient is not None]
            if given:
                edges = tuple(GradientEdge(join.node, place) for place, _ in given)
                gradients = tuple(gradient for _, gradient in given)
                # The path from here to the input is not run, because none of these weights lies on it.
                _engine_run_backward(
                    edges, gradients, False, False, tuple(join.weights), allow_unreachable=True, accumulate_grad=True
                )
        self._joins = []


def _find_joins(root: Node, entered: Values) -> tuple[list[_Join], list[Tensor]]:
    """Return the joins between `root` and the inputs, and the parameters whose gradients the first part computes.

    A weight that joins at several places is among these parameters, because the path from one place leads to the other.
    All parameters are if nothing leads from `root` to the inputs, as where a stage detaches what it has received.
    """
    order = _topological(root)
    targets = {get_gradient_edge(one).node for one in entered}
    on_path = set(targets)
    for node in order:  # starting at the inputs
        if any(child in on_path for child, _ in node.next_functions):
            on_path.add(node)
    if root not in on_path:
        return [], _leaves(root)
    reached: dict[Node, list[Tensor]] = {}
    for node in order:
        if node in on_path and node not in targets:
            branches = [child for child, _ in node.next_functions if child is not None and child not in on_path]
            reached[node] = [leaf for branch in branches for leaf in _leaves(branch)]
    places: dict[int, int] = {}
    for leaves in reached.values():
        for leaf in leaves:
            places[id(leaf)] = places.get(id(leaf), 0) + 1
    joins: list[_Join] = []
    others: dict[int, Tensor] = {}
    for node, leaves in reached.items():
        weights = [leaf for leaf in leaves if leaf.dim() > 1 and places[id(leaf)] == 1]
        others |= {id(leaf): leaf for leaf in leaves if leaf.dim() <= 1 or places[id(leaf)] > 1}
        if weights:
            joins.append(_Join(node, weights))
    return joins, list(others.values())


def _topological(root: Node) -> list[Node]:
    """Return the nodes that can be reached from `root`, each after all the nodes that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order


def _leaves(branch: Node) -> list[Tensor]:
    """Return the parameters at the ends of a branch."""
    return [node.variable for node in _topological(branch) if hasattr(node, "variable")]


class _Seed(torch.autograd.Function):
    """Makes a scalar whose gradients with respect to the `outputs` are the `gradients`."""

    @staticmethod
    def forward(ctx: Any, gradients: Values, *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *ones: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gradients)


def seeded(outputs: Values, gradients: Values | None) -> Tensor:
    """Return a scalar from which to start a backward pass.

    Each gradient has the shape of its output; there are none if the only output is a loss.
    """
    if gradients is None:
        (loss,) = outputs
        return loss
    number: Tensor = _Seed.apply(gradients, *outputs)  # type: ignore[no-untyped-call]
    return number


def backward(outputs: Values, gradients: Values | None) -> None:
    """Compute the gradients of all leaves from those of the `outputs`; there are none if the only output is a loss."""
    torch.autograd.backward(seeded(outputs, gradients))
