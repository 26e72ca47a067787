"""Implements tensor parallelism: every member of the stage holds a part of each layer's channels.

The split follows Megatron-LM (Shoeybi et al., 2019). Where one convolution or linear layer is followed by another with
only channel-wise operations between them, the first is split by its outputs and the second by its inputs, so the pair
needs one sum in the forward pass and one in the backward pass. A layer without such a partner is split by its outputs,
which are gathered at once. Everything else (normalisation outside pairs, additions) is replicated on all members.

torch's own `parallelize_module` splits linear and embedding layers only, and a DTensor convolution whose weight is
split by outputs returns one member's channels as if they were all of them (torch 2.13, gloo). This module therefore
splits both kinds of layer itself and uses the job's own group, where the clock sees what is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from horizonml.comm.group import TreeSum
from horizonml.engine.sync.allreduce import AllReduce
from horizonml.engine.sync.base import Members
from horizonml.errors import ModelError
from horizonml.models.tuning import is_still, keep_still
from horizonml.state.parts import TensorSplit, gather

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


class Exchange:
    """Sums and gathers tensors among the members in the middle of a layer.

    A small sum along a tree comes first: until it is complete, a member waits for the others; after that, bytes move.
    """

    def __init__(self, members: Members) -> None:
        self._group, self._ranks, self._clock = members.group, members.ranks, members.clock
        self._staging = members.staging
        tag = members.group.channel("members").tag(members.number)
        self._here = TreeSum(members.group, members.ranks, tag, torch.zeros(1))
        self.bytes = 0  # bytes sent by this member, which receives as many

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all members' tensors as a new tensor."""
        total = self._staging.to_host(tensor.detach().clone(memory_format=torch.contiguous_format))
        before = self._begin()
        self._group.wait(self._group.all_reduce(total, self._ranks))
        self._clock.switch(*before)
        self.bytes += 2 * (len(self._ranks) - 1) * total.nbytes // len(self._ranks)
        return self._staging.to_device(total)

    def gather(self, own: Tensor, dim: int, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """Return all members' tensors joined along `dim`; member i's lies at `bounds[i]`."""
        own = self._staging.to_host(own.detach())
        before = self._begin()
        whole = gather(own, dim, bounds, self._group, self._ranks)
        self._clock.switch(*before)
        longest = max(stop - start for start, stop in bounds)
        self.bytes += (len(self._ranks) - 1) * longest * (own.nbytes // max(1, own.shape[dim]))
        return self._staging.to_device(whole)

    def _begin(self) -> tuple[Any, str, int]:
        self._staging.drain()
        before = self._clock.current
        self._clock.switch("wait", "members")
        self._here.sum(torch.zeros(1, device="cpu"))  # also while a model creates tensors on the device
        self._clock.switch("transfer", "channels")
        return before


class _Copy(torch.autograd.Function):
    """Passes on a value that all members hold; its gradient is the sum of the members' gradients."""

    @staticmethod
    def forward(context: Any, value: Tensor, exchange: Exchange) -> Tensor:
        context.exchange = exchange
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return context.exchange.sum(gradients[0]), None


class _Sum(torch.autograd.Function):
    """Sums what the members computed from their channels."""

    @staticmethod
    def forward(context: Any, value: Tensor, exchange: Exchange) -> Tensor:
        return exchange.sum(value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    """Joins the members' channels."""

    @staticmethod
    def forward(
        context: Any, value: Tensor, exchange: Exchange, dim: int, bounds: Sequence[tuple[int, int]], member: int
    ) -> Tensor:
        context.place = (dim, *bounds[member])
        return exchange.gather(value, dim, bounds)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        dim, start, stop = context.place
        return gradients[0].narrow(dim, start, stop - start), None, None, None, None


class _Layer(nn.Module):
    """Holds a part of a convolution or linear layer under the layer's own name.

    By itself it is a depthwise convolution within a pair, which uses only this member's channels.
    """

    def __init__(self, whole: nn.Conv2d | nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, whole.weight.requires_grad)
        self.bias = None if bias is None else nn.Parameter(bias, whole.bias is not None and whole.bias.requires_grad)
        self._convolution: Any = None
        if isinstance(whole, nn.Conv2d):
            self._convolution = (whole.stride, whole.padding, whole.dilation)
            self._depthwise = is_depthwise(whole)
        self.dim = 1 if isinstance(whole, nn.Conv2d) else -1

    def apply_to(self, value: Tensor, bias: Tensor | None) -> Tensor:
        if self._convolution is None:
            return functional.linear(value, self.weight, bias)
        stride, padding, dilation = self._convolution
        groups = value.shape[1] if self._depthwise else 1
        return functional.conv2d(value, self.weight, bias, stride, padding, dilation, groups)

    def forward(self, value: Tensor) -> Tensor:
        return self.apply_to(value, self.bias)


class _ColwiseParallel(_Layer):
    """Computes this member's output channels, and gathers those of all members if `gathered` has their bounds."""

    exchange: Exchange
    gathered: TensorSplit | None = None

    def forward(self, value: Tensor) -> Tensor:
        value = _Copy.apply(value, self.exchange)  # type: ignore[no-untyped-call]
        if self.gathered is None:
            return self.apply_to(value, self.bias)
        if self._convolution is not None and self._depthwise:
            start, stop = self.gathered.bounds[self.gathered.member]
            value = value[:, start:stop]
        result = self.apply_to(value, self.bias)
        bounds, member = self.gathered.bounds, self.gathered.member
        whole: Tensor = _Gather.apply(result, self.exchange, self.dim, bounds, member)  # type: ignore[no-untyped-call]
        return whole


class _RowwiseParallel(_Layer):
    """Computes from this member's input channels; the sum over the members is the layer's output."""

    exchange: Exchange

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = _Sum.apply(self.apply_to(value, None), self.exchange)  # type: ignore[no-untyped-call]
        if self.bias is None:
            return result
        return result + (self.bias if self.dim == -1 else self.bias[:, None, None])


class Channels(AllReduce):
    """Keeps this member's part of a stage's module, and averages the replicated gradients over the members."""

    def __init__(self, module: nn.Module, members: Members) -> None:
        """Change `module`, which holds the stage's layers in full, in place.

        `parts[name]` tells which part of a parameter or buffer this member holds; those without an entry are held in
        full. Raises ModelError, naming the layer, if a layer cannot be split.
        """
        if not isinstance(module, fx.GraphModule):
            raise ModelError(
                "parallel.strategy: tensor cannot split a model that cannot be traced; choose ddp, pipeline or hybrid"
            )
        self._module, self._stage_members = module, members
        self._exchange = Exchange(members)
        self._split: dict[str, TensorSplit] = {}
        pairs = find_pairs(module)
        firsts = {pair.first for pair in pairs}
        seconds = {pair.second: pair for pair in pairs}
        between = {name for pair in pairs for name in pair.between}
        for name in dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "call_module"):
            layer = module.get_submodule(name)
            if isinstance(layer, nn.BatchNorm2d) and name in between:
                self._split_norm(name, layer)
            elif isinstance(layer, (nn.Conv2d, nn.Linear)):
                if name in seconds:
                    self._split_inputs(name, layer, self._split[f"{seconds[name].first}.weight"])
                else:
                    self._split_outputs(name, layer, alone=name not in firsts, between=name in between)
        super().__init__(module, members, self._split)

    def begin(self, measure_divergence: bool) -> None:
        """See `GradientSync`."""
        super().begin(measure_divergence)
        self._exchange.bytes = 0

    def finish(self, weight: float) -> float | None:
        """See `GradientSync`."""
        divergence = super().finish(weight)
        self.bytes_sent += self._exchange.bytes
        return divergence

    def _part(self, name: str, channels: int) -> TensorSplit:
        bounds = self._stage_members.stage.parts(channels)
        if any(start == stop for start, stop in bounds):
            raise ModelError(
                f"layer {name} has {channels} channels, which cannot be split over {len(bounds)} ranks; use at most "
                f"{channels} workers, or another parallel.strategy"
            )
        return TensorSplit(0, tuple(bounds), self._stage_members.place, self._stage_members.ranks)

    def _split_outputs(self, name: str, layer: nn.Conv2d | nn.Linear, alone: bool, between: bool) -> None:
        part = self._part(name, layer.weight.shape[0])
        bias = None if layer.bias is None else part.of(layer.bias)
        new: _Layer = (_Layer if between else _ColwiseParallel)(layer, part.of(layer.weight), bias)
        if isinstance(new, _ColwiseParallel):
            new.exchange, new.gathered = self._exchange, part if alone else None
        self._replace(name, layer, new, {"weight": part} | ({} if bias is None else {"bias": part}))

    def _split_inputs(self, name: str, layer: nn.Conv2d | nn.Linear, entering: TensorSplit) -> None:
        each = layer.weight.shape[1] // entering.size  # values per channel, where feature maps were flattened
        bounds = tuple((start * each, stop * each) for start, stop in entering.bounds)
        part = replace(entering, dim=1, bounds=bounds)
        new = _RowwiseParallel(
            layer, part.of(layer.weight), None if layer.bias is None else layer.bias.detach().clone()
        )
        new.exchange = self._exchange
        self._replace(name, layer, new, {"weight": part})

    def _split_norm(self, name: str, layer: nn.BatchNorm2d) -> None:
        part = self._part(name, layer.num_features)
        own = {key: part.of(value) if value.dim() else value.clone() for key, value in layer.state_dict().items()}
        start, stop = part.bounds[part.member]
        new = nn.BatchNorm2d(
            stop - start, layer.eps, layer.momentum, layer.affine, track_running_stats=layer.track_running_stats
        ).to(self._stage_members.staging.device)
        new.load_state_dict(own)
        for key, parameter in new.named_parameters():
            parameter.requires_grad_(layer.get_parameter(key).requires_grad)
        if is_still(layer):
            keep_still(new)
        self._replace(name, layer, new, {key: part for key, value in own.items() if value.dim()})

    def _replace(self, name: str, old: nn.Module, new: nn.Module, parts: dict[str, TensorSplit]) -> None:
        self._module.set_submodule(name, new)
        self._split |= {f"{name}.{key}": part for key, part in parts.items()}
        old.to("meta")  # frees the full layer
