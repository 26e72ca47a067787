"""Defines how the gradients of a stage travel between its members: in which buckets, and how much of each parameter.

Buckets are filled in the order of the backward pass, and a full one is sent while earlier layers are still being
computed (Li et al., VLDB 2020). The engine sums gradients in this way, and the planner predicts it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BUCKET_BYTES = 5 << 20  # larger ones leave more to be sent after the backward pass: 25 MB cost a tenth of a step
POWERSGD_RANK = 4  # columns of the matrices that approximate a gradient
POWERSGD_WORTH = 2  # PowerSGD is used for a parameter only if it sends this many times fewer numbers
# Up to these sizes a tree is faster than a ring: over a network, where its root carries n times the bytes, and on one
# machine, where only the number of messages counts.
TREE_BYTES = 128 << 10
TREE_BYTES_ON_ONE_HOST = 4 << 20
TREE_ARITY = 8


def in_buckets(sizes: Sequence[int], limit: float = BUCKET_BYTES) -> list[list[int]]:
    """Return the indices of `sizes` (in bytes), from the last to the first, grouped into buckets.

    A bucket has at most `limit` bytes, or a single index.
    """
    buckets: list[list[int]] = []
    filled = 0
    for index in reversed(range(len(sizes))):
        if not buckets or filled + sizes[index] > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets


def powersgd_numbers(shape: Sequence[int]) -> int:
    """Return how many numbers PowerSGD (Vogels et al., NeurIPS 2019) sends for a parameter of this shape."""
    if not shape:
        return 1
    rows, columns = shape[0], math.prod(shape[1:])
    thin = (rows + columns) * min(rows, columns, POWERSGD_RANK)
    return thin if thin * POWERSGD_WORTH < rows * columns else rows * columns


def tree_messages(place: int, members: int) -> int:
    """Return how many messages the member at `place` sends in a sum along a tree: to its children and to its parent."""
    first = TREE_ARITY * place + 1
    return max(0, min(first + TREE_ARITY, members) - first) + (place > 0)
