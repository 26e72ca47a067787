"""Turns pictures into tensors, as models that take photos expect them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PHOTO_MEAN, PHOTO_STD, PHOTO_SIZE = 0.449, 0.226, 224  # of pixels from 0 to 1, and the side of a square photo


def pixels_of(image: Any, size: int) -> Tensor:
    """Return a Pillow image, cropped and resized to a square, as uint8 pixels `[3, size, size]`."""
    from PIL import ImageOps  # only those who read pictures need it

    fitted = ImageOps.fit(image.convert("RGB"), (size, size))
    pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    return pixels.reshape(size, size, 3).permute(2, 0, 1)


def photo_of(image: Any, size: int, channels: int) -> Tensor:
    """Return a Pillow image as normalised float32 values `[channels, size, size]`."""
    pixels = pixels_of(image, size).float().div_(255.0).sub_(PHOTO_MEAN).div_(PHOTO_STD)
    return pixels if channels == 3 else pixels.mean(0, keepdim=True)
