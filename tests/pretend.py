"""A pretended accelerator: its tensors say that they are on `cuda:0`, and no operation takes them and the host's.

There need not be a GPU. What fails here would fail on one: an index on the wrong device, a tensor that was made without
saying where, `numpy()` of a device's tensor, a message that is not in the host's memory, 64-bit floats on Apple's GPUs.
Streams, pinned memory and time are not pretended.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

CUDA = torch.device("cuda", 0)
_aten = torch.ops.aten
_MOVES = {_aten._to_copy.default, _aten.copy_.default, _aten._foreach_copy_.default}


class Mismatch(AssertionError):
    """What a real device refuses."""


class Pretended(Tensor):
    """A tensor of the pretended device; `inner` has its values."""

    inner: Tensor
    where: torch.device
    no_doubles: ClassVar[bool] = False
    device = property(lambda self: self.where)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]
    data = property(  # type: ignore[assignment]
        lambda self: self.detach(), lambda self, value: self._replace(value.inner)
    )

    @staticmethod
    def __new__(cls, inner: Tensor, where: torch.device) -> Pretended:
        made: Pretended = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device="meta",  # for autograd, which would look for the streams of a GPU
            requires_grad=inner.requires_grad,
        )
        made.inner, made.where = inner.detach(), where
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Pretended({self.where}, {list(self.shape)}, {self.dtype})"

    def numpy(self, **_: Any) -> Any:
        raise Mismatch("numpy() of a tensor that is on a device")

    def _replace(self, inner: Tensor) -> None:
        assert inner.stride() == self.inner.stride(), "a pretended tensor cannot change how it lies in memory"
        self.inner = inner

    def tolist(self) -> Any:
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {}, None)


class PretendDevice(TorchDispatchMode):
    """While this is entered, tensors can be brought to the device, and be made there."""

    def __init__(self, narrow: bool = False) -> None:
        """Pretend a GPU; a `narrow` one has no 64-bit floats."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = CUDA
        Pretended.no_doubles = narrow

    def __enter__(self) -> PretendDevice:
        # PyTorch would load CUDA's libraries before it asks a mode what to do.
        self._lazy_init, torch.cuda._lazy_init = torch.cuda._lazy_init, lambda: None
        super().__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)
        torch.cuda._lazy_init = self._lazy_init

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {}, self.where)


def run(func: Any, args: Any, kwargs: dict[str, Any], mode: torch.device | None) -> Any:
    """Run an operation as the device would, or raise Mismatch."""
    leaves, structure = tree_flatten((args, kwargs))
    theirs = [leaf for leaf in leaves if isinstance(leaf, Pretended)]
    where = theirs[0].where if theirs else None
    if "pin_memory" in kwargs:
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        leaves, structure = tree_flatten((args, kwargs))
    wanted = kwargs.get("device")
    target = where
    if wanted is not None:
        # PyTorch itself takes the device for "meta", see `Pretended`, where it makes zeros for a gradient that is
        # missing, or a tensor of a number.
        made_by_torch = torch._C._current_autograd_node() is not None or func is _aten.scalar_tensor.default
        by_autograd = wanted.type == "meta" and made_by_torch
        target = mode or where if wanted.type == "cuda" or by_autograd else None
        if target is not None:
            assert by_autograd or (wanted.index or 0) == target.index, f"{func} on {wanted}, not on {target}"
            kwargs = {**kwargs, "device": torch.device("cpu")}
            leaves, structure = tree_flatten((args, kwargs))
    hosts = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Pretended)]
    if theirs and func not in _MOVES and any(leaf.dim() for leaf in hosts):
        shapes = [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        raise Mismatch(f"{func} takes tensors of the device and of the host, of shapes {shapes}")
    if theirs and func is _aten.equal.default and hosts:
        raise Mismatch("a tensor of the device is compared with one of the host")
    plain = [leaf.inner if isinstance(leaf, Pretended) else leaf for leaf in leaves]
    own_args, own_kwargs = tree_unflatten(plain, structure)
    result = func(*own_args, **own_kwargs)
    if func is _aten.copy_.default:
        return args[0]
    if target is None or result is None:
        return result

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if Pretended.no_doubles and leaf.dtype == torch.float64:
            raise Mismatch(f"{func} makes 64-bit floats, which these GPUs do not have")
        return Pretended(leaf, target)

    made = tree_map(wrap, result)
    return return_and_correct_aliasing(func, args, kwargs, made) if theirs else made
