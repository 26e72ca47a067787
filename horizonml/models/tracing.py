"""Records a model's forward pass as a graph that is the same in training and evaluation.

Each submodule that cannot be traced becomes one node, which runs the module itself.
"""

from __future__ import annotations

from torch import fx, nn

from horizonml.errors import ModelError, is_out_of_memory


class _Tracer(fx.Tracer):
    """Traces down to PyTorch's own layers, and does not trace into the modules named in `leaves`."""

    def __init__(self, leaves: set[str]) -> None:
        super().__init__()
        self._leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves or super().is_leaf_module(m, module_qualified_name)


def trace(model: nn.Module) -> fx.Graph:
    """Return the model's graph, which is the same in training and evaluation. Raises ModelError.

    A submodule whose forward cannot be traced (it branches on its input), or whose graph would depend on the current
    mode (it reads `self.training`), becomes one node that runs the module itself.
    """
    leaves: set[str] = set()
    training = model.training
    try:
        while True:
            graphs = []
            for mode in (True, False):
                model.train(mode)
                graphs.append(_trace_once(model, leaves))
                if graphs[-1] is None:
                    break
            else:
                train, evaluate = graphs
                assert train is not None
                assert evaluate is not None
                culprit = _first_difference(train, evaluate)
                if culprit is None:
                    return train
                if not culprit or culprit in leaves:
                    raise ModelError(
                        f"the forward of {type(model).__name__} itself depends on train/eval mode; move that part "
                        "into a submodule, so that the model can be cut into layers"
                    )
                leaves.add(culprit)
    finally:
        model.train(training)


def _trace_once(model: nn.Module, leaves: set[str]) -> fx.Graph | None:
    """Trace once; return None, and add a leaf, if a submodule prevented the trace."""
    tracer = _Tracer(leaves)
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        return tracer.trace(model)
    except Exception as error:  # the model's own code runs here, on proxies, and may fail in any way
        if is_out_of_memory(error):
            raise
        stack = list(tracer.module_stack.values())
        if not stack or stack[-1][0] in leaves:
            raise ModelError(
                f"{type(model).__name__} cannot be cut into layers: {error}. Its forward must take one tensor and "
                "not branch on its values; parts that do can be moved into a submodule."
            ) from error
        leaves.add(stack[-1][0])
        return None
    finally:
        for module, held in buffers:  # a forward that replaces one has put a proxy there
            module._buffers.update(held)


def _first_difference(left: fx.Graph, right: fx.Graph) -> str | None:
    """Return the innermost module at the first node in which two graphs differ; "" stands for the model itself."""
    pairs = list(zip(left.nodes, right.nodes, strict=False))
    for one, other in pairs:
        if (one.op, str(one.target), str(one.args), str(one.kwargs)) != (
            other.op,
            str(other.target),
            str(other.args),
            str(other.kwargs),
        ):
            stack = list((one.meta.get("nn_module_stack") or {}).values())
            return str(stack[-1][0]) if stack else ""
    return None if len(left.nodes) == len(right.nodes) else ""


def straight_line(model: nn.Module, graph: fx.Graph) -> tuple[fx.Node, list[fx.Node]]:
    """Return the graph's only input and its computing nodes. Raises ModelError unless there is one output, the last."""
    graph.owning_module = model  # type: ignore[assignment]  # lets fx tell which modules may be dropped
    graph.eliminate_dead_code()
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    used = [node for node in placeholders if node.users]
    if len(used) != 1:
        raise ModelError(f"the model's forward must take one tensor; it takes {len(used)}")
    result = graph.output_node().args[0]
    if not isinstance(result, fx.Node):
        raise ModelError("the model's forward must return one tensor; it returns a collection")
    nodes = [n for n in graph.nodes if n.op in ("call_module", "call_function", "call_method")]
    if not nodes or result is not nodes[-1]:
        raise ModelError("the model's last operation must be the one whose result it returns")
    return used[0], nodes
