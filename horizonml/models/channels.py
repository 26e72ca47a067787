"""Finds the layers of a model that can be split by channels, and the pairs among them (see `engine/sync/channels`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx, nn
from torch.nn.utils import parametrize

from horizonml.errors import ModelError

_SPLIT = (nn.Conv2d, nn.Linear)
_ALIKE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)  # replicated on all members, unless within a pair
_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh,
    nn.ELU, nn.Softplus, nn.Identity, nn.Dropout,
)  # fmt: skip
_CHANNELWISE = (nn.Dropout2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.BatchNorm2d)
_ELEMENTWISE_NAMES = {"relu", "relu_", "relu6", "leaky_relu", "tanh", "sigmoid", "gelu", "silu", "hardswish"}
_CHANNELWISE_NAMES = {"max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"}


@dataclass(frozen=True)
class Pair:
    """Describes two layers with only channel-wise operations between them; `between` names those with parameters."""

    first: str
    between: tuple[str, ...]
    second: str


def find_pairs(module: fx.GraphModule) -> list[Pair]:
    """Return the pairs of a module, in order; no layer is in two. Raises ModelError if a layer cannot be split."""
    calls = [node for node in module.graph.nodes if node.op == "call_module"]
    used = {str(node.target).rpartition(".")[0] for node in module.graph.nodes if node.op == "get_attr"}
    for node in calls:
        _check(str(node.target), module.get_submodule(str(node.target)), str(node.target) in used)
    times = Counter(str(node.target) for node in calls)
    pairs: list[Pair] = []
    taken: set[str] = set()
    for node in calls:
        name, layer = str(node.target), module.get_submodule(str(node.target))
        if name in taken or times[name] > 1 or not isinstance(layer, _SPLIT) or getattr(layer, "groups", 1) > 1:
            continue
        pair = _follow(module, node, isinstance(layer, nn.Conv2d), times)
        if pair is not None:
            pairs.append(pair)
            taken |= {pair.first, *pair.between, pair.second}
    return pairs


def is_depthwise(layer: nn.Module) -> bool:
    """Return whether every channel of a convolution has its own filter."""
    return isinstance(layer, nn.Conv2d) and 1 < layer.groups == layer.in_channels == layer.out_channels


def _check(name: str, layer: nn.Module, used: bool) -> None:
    """Raise ModelError unless a layer can be split, needs no splitting, or has nothing to split.

    `used` says that the model's forward uses the layer's tensors itself, beside calling it.
    """
    if isinstance(layer, _SPLIT) and used:
        problem = "whose weight the forward also uses itself"
    elif isinstance(layer, _SPLIT) and not _is_plain(layer):
        problem = "whose weight is computed from other parameters, or which computes something of its own"
    elif isinstance(layer, nn.Conv2d):
        if layer.groups > 1 and not is_depthwise(layer):
            problem = f"a convolution in {layer.groups} groups"
        elif layer.padding_mode != "zeros":
            problem = f"a convolution with padding_mode {layer.padding_mode}"
        else:
            return
    elif isinstance(layer, (nn.Linear, *_ALIKE)) or not any(True for _ in layer.parameters()):
        return
    else:
        problem = f"a {type(layer).__name__}"
    raise ModelError(
        f"parallel.strategy: tensor cannot split layer {name}, {problem}; it splits Linear and Conv2d (depthwise or "
        "without groups). Choose ddp, pipeline or hybrid for this model"
    )


def _is_plain(layer: nn.Module) -> bool:
    """Return whether a layer computes what PyTorch's layer of its kind does from the weight that it holds."""
    own = type(layer).forward in (nn.Conv2d.forward, nn.Linear.forward)
    return own and not parametrize.is_parametrized(layer) and not layer._forward_pre_hooks and not layer._forward_hooks


def _follow(module: fx.GraphModule, node: fx.Node, picture: bool, times: Counter[str]) -> Pair | None:
    """Return the pair that begins at `node`, or None.

    There is no pair if the result of `node` is used elsewhere, or if its channels are mixed before the next layer.
    """
    first = str(node.target)
    between: list[str] = []
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.op == "call_module":
            name, layer = str(node.target), module.get_submodule(str(node.target))
            if times[name] > 1 and any(True for _ in layer.parameters()):
                return None
            if isinstance(layer, _SPLIT) and getattr(layer, "groups", 1) == 1:
                return Pair(first, tuple(between), name) if picture or isinstance(layer, nn.Linear) else None
            if not isinstance(layer, _ELEMENTWISE):
                flattens = isinstance(layer, nn.Flatten) and layer.start_dim == 1
                if not picture or not (isinstance(layer, _CHANNELWISE) or is_depthwise(layer) or flattens):
                    return None
                if isinstance(layer, nn.BatchNorm2d) or is_depthwise(layer):
                    between.append(name)
        elif not _is_channelwise(node, picture):
            return None
    return None


def _is_channelwise(node: fx.Node, picture: bool) -> bool:
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name == "flatten":
        start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
        return picture and bool(start == 1)
    return name in _ELEMENTWISE_NAMES or (picture and name in _CHANNELWISE_NAMES)
