"""Encodes only the largest values of a vector: 8 of every 256, in 8 bits each, with their places in 8 bits.

Every block of 256 values is encoded by itself in 18 bytes: a scale of 16 bits, 8 places and 8 values. That is 57 times
fewer bytes than float32 has. What is left out must be added to the next vector (error feedback; Stich et al., NeurIPS
2018), as SparseLoCo (arXiv 2508.15706) does with the outer gradients of local steps. Everyone decodes the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
KEPT = 8  # values of a block
_BYTES = 2 + 2 * KEPT
_STEPS = 127


def encoded_bytes(values: int) -> int:
    """Return the bytes that so many values take."""
    return _BYTES * -(-values // BLOCK)


@torch.no_grad()
def encode(vector: Tensor) -> Tensor:
    """Return the largest values of a float32 vector as bytes. A block with a value that is not finite stays so."""
    blocks = -(-vector.numel() // BLOCK)
    padded = torch.zeros(blocks * BLOCK)
    padded[: vector.numel()] = vector
    rows = padded.view(blocks, BLOCK)
    places = rows.abs().topk(KEPT, dim=1).indices
    kept = rows.gather(1, places)
    # Rounded up to 16 bits, so that no value lies beyond the last step; a NaN is the largest value of its block.
    scales = (kept.abs().amax(1, keepdim=True) * ((1 + 2**-8) / _STEPS)).to(torch.bfloat16)
    exact = scales.float()
    steps = torch.where(exact > 0, kept / exact, torch.zeros_like(kept)).round_().clamp_(-_STEPS, _STEPS)
    encoded = torch.empty(blocks, _BYTES, dtype=torch.uint8)
    encoded[:, :2] = scales.view(torch.uint8)
    encoded[:, 2 : 2 + KEPT] = places.to(torch.uint8)
    encoded[:, 2 + KEPT :] = steps.nan_to_num_().to(torch.int8).view(torch.uint8)
    return encoded.view(-1)


@torch.no_grad()
def decode(encoded: Tensor, values: int) -> Tensor:
    """Return the vector that was encoded, with zeros in place of what was left out."""
    rows = encoded.view(-1, _BYTES)
    scales = rows[:, :2].contiguous().view(torch.bfloat16).float()
    places = rows[:, 2 : 2 + KEPT].long()
    steps = rows[:, 2 + KEPT :].contiguous().view(torch.int8).float()
    found = torch.zeros(len(rows), BLOCK)
    found.scatter_(1, places, steps * scales)
    return found.view(-1)[:values]
