"""Turns pictures into tensors, as models that take photos expect them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from horizonml.errors import DataError, is_out_of_files, is_out_of_memory

PHOTO_MEAN, PHOTO_STD, PHOTO_SIZE = 0.449, 0.226, 224  # of pixels from 0 to 1, and the side of a square photo


# Pillow reads many more, some of them by other programs.
FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TGA", "TIFF", "WEBP")
MOST_PIXELS = 89_478_485  # of a picture: where Pillow begins to warn of bombs, at 256 MiB in RGB


def read_picture(file: Any, decode: Callable[[Any], Tensor]) -> Tensor:
    """Return what `decode` makes of a picture in a file or stream; its size is checked before it is decoded.

    Raises DataError for what is not a picture, is damaged, or would take too much memory.
    """
    import warnings

    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below
            with Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise DataError(
                        f"it has {image.width} x {image.height} pixels, and more than {MOST_PIXELS:,} would take too "
                        "much memory; make it smaller"
                    )
                return decode(image)
    except DataError:
        raise
    except Exception as error:  # Pillow's readers fail on damaged files in any way
        if is_out_of_memory(error) or is_out_of_files(error):
            raise
        known = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise DataError(f"it is damaged, or no {known}: {str(error) or type(error).__name__}") from error


def rgb_of(image: Any) -> Any:
    """Return a Pillow image as RGB, upright as its EXIF orientation says, and with transparency laid over white.

    Grey values of more than 8 bits are scaled: those of 16 bits by 255 / 65535. Raises DataError for numbers of which
    it is unknown which are black and white.
    """
    from PIL import Image, ImageOps

    upright: Any = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I") or upright.mode == "F":  # convert("RGB") would clip these
        upright = _narrowed(upright)
    if upright.mode == "La":  # which converts to nothing else
        upright = upright.convert("LA")
    if upright.has_transparency_data:
        over = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
    return upright.convert("RGB")


def _narrowed(image: Any) -> Any:
    """Return an image of 16-bit or 32-bit grey values with 8 bits. Raises DataError."""
    import numpy
    from PIL import Image

    white = 1.0 if image.mode == "F" else 65535.0
    values = numpy.array(image, dtype=numpy.float64)
    least, most = values.min(), values.max()
    if not (least >= 0 and most <= white):  # which holds for no NaN
        raise DataError(
            f"its grey values are {least:g} to {most:g}, where 0 (black) to {white:g} (white) can be used; convert it "
            "to 8 or 16 bits"
        )
    transparent = image.info.get("transparency")
    if transparent is not None:
        values[values == transparent] = white
    return Image.fromarray((values * (255 / white)).round().astype(numpy.uint8))


def pixels_of(image: Any, size: int) -> Tensor:
    """Return a Pillow image, cropped and resized to a square, as uint8 pixels `[3, size, size]`."""
    from PIL import ImageOps  # only those who read pictures need it

    fitted = ImageOps.fit(rgb_of(image), (size, size))
    pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
    return pixels.reshape(size, size, 3).permute(2, 0, 1)


def photo_of(image: Any, size: int, channels: int) -> Tensor:
    """Return a Pillow image as normalised float32 values `[channels, size, size]`."""
    pixels = pixels_of(image, size).float().div_(255.0).sub_(PHOTO_MEAN).div_(PHOTO_STD)
    return pixels if channels == 3 else pixels.mean(0, keepdim=True)
