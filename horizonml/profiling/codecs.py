"""Measures what sending in fewer bits costs this device: bytes in each format, and the time to encode and decode."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from horizonml.data.tensors import TensorSpec
from horizonml.engine.codec import BoundaryCodec, Codec
from horizonml.engine.outer import sparse
from horizonml.models.boundary import Boundary
from horizonml.plan.gradients import POWERSGD_RANK
from horizonml.plan.plan import FORMATS

_REPEATS = 3


def codec_seconds(clock: Callable[[], float]) -> dict[str, float]:
    """Return the seconds per byte of float32 for each format: to encode or to decode.

    Of the ways to sum gradients, `fp16` and `topk` count one of both, too, and `powersgd` all of its products together.
    """
    costs = {format: _link_seconds(format, clock) for format in FORMATS if format != "fp32"}
    sums = {"fp16": _sum_seconds(_halves, clock) / 2, "topk": _sum_seconds(_largest, clock) / 2}
    return {**costs, **sums, "powersgd": _sum_seconds(_thin, clock)}


def coded_bytes(boundary: Boundary) -> dict[str, tuple[int, int]]:
    """Return the bytes per sample that a link carries across a boundary in each format, forward and back."""
    ways = [one for one in (boundary, boundary.gradients) if one.tensors]
    found = {format: [BoundaryCodec(one, format).bytes_per_sample for one in ways] for format in FORMATS}
    return {format: (sizes[0], sizes[1] if len(sizes) > 1 else 0) for format, sizes in found.items()}


def _halves(gradients: Tensor) -> Tensor:
    """Return gradients that were converted to 16-bit floats and back."""
    return gradients.half().float()


def _largest(gradients: Tensor) -> Tensor:
    """Return the largest of the gradients, as they are decoded."""
    return sparse.decode(sparse.encode(gradients.flatten()), gradients.numel())


def _thin(gradients: Tensor) -> Tensor:
    """Return what PowerSGD leaves of the gradients of a matrix: it makes two thin products, and subtracts theirs."""
    left: Tensor = torch.linalg.qr(gradients @ torch.ones(gradients.shape[1], POWERSGD_RANK)).Q
    return gradients - left @ (gradients.T @ left).T


def _sum_seconds(code: Callable[[Tensor], Tensor], clock: Callable[[], float]) -> float:
    """Return the seconds of a way of summing per byte of gradients: of both conversions together."""
    gradients, times = torch.randn(512, 1024), []
    for _ in range(1 + _REPEATS):
        start = clock()
        code(gradients)
        times.append(clock() - start)
    return min(times[1:]) / gradients.nbytes


def _link_seconds(format: str, clock: Callable[[], float]) -> float:
    """Return the mean seconds to encode or decode a byte of float32."""
    codec = Codec(TensorSpec((64, 32, 32)), format)
    tensor = torch.randn(8, 64, 32, 32)
    times = []
    for _ in range(1 + _REPEATS):
        start = clock()
        codec.decode(codec.encode(tensor))
        times.append(clock() - start)
    return min(times[1:]) / tensor.nbytes / 2
