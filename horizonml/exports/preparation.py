"""Tells how a picture becomes an input of an exported model: whoever has only the file must do as the training did."""

from __future__ import annotations

import json
from dataclasses import dataclass

from horizonml.data.dataset import DataInfo
from horizonml.data.images import normalisation
from horizonml.job.schema import Job


@dataclass(frozen=True)
class Preparation:
    """Holds what is done to a picture, which is that of `horizonml predict`, too."""

    channels: int
    height: int
    width: int
    mean: float  # of pixels from 0 to 1, the same for all channels
    std: float

    def words(self) -> str:
        """Return the steps as the cell of a table."""
        colours = "average the colours" if self.channels == 1 else "keep the colours red, green, blue"
        return (
            "turn a picture as its EXIF orientation says, scale grey values of 16 bits to 8, lay transparency over "
            f"white, crop the middle and resize it to {self.width} by {self.height} pixels, {colours}, divide by 255, "
            f"subtract {self.mean:g}, divide by {self.std:g}"
        )

    def lines(self, file: str) -> list[str]:
        """Return lines of Python that make the array `input` of a picture's file."""
        arranged = "pixels.mean(2)[None, None]" if self.channels == 1 else "pixels.transpose(2, 0, 1)[None]"
        return [
            f'picture = ImageOps.exif_transpose(Image.open("{file}"))',
            'if picture.mode.startswith("I"):  # grey values of 16 bits',
            '    picture = Image.fromarray((numpy.asarray(picture) / 257).round().astype("uint8"))',
            'picture = picture.convert("RGBA")',
            'white = Image.new("RGBA", picture.size, "white")',
            'picture = Image.alpha_composite(white, picture).convert("RGB")',
            f"picture = ImageOps.fit(picture, ({self.width}, {self.height}))",
            f"pixels = (numpy.asarray(picture, dtype=numpy.float32) / 255 - {self.mean:g}) / {self.std:g}",
            f"input = {arranged}  # [batch, channels, height, width]",
        ]

    def to_json(self) -> str:
        """Return the numbers as JSON, with the mean and the standard deviation of each channel."""
        size = [self.height, self.width]
        return json.dumps({"size": size, "mean": [self.mean] * self.channels, "std": [self.std] * self.channels})


def preparation_of(job: Job, info: DataInfo | None) -> Preparation | None:
    """Return how a picture is prepared for the model of a job; None if its inputs are not pictures, or not known."""
    known = normalisation(job.data)
    if info is None or known is None or len(info.inputs) != 1 or len(info.inputs[0].shape) != 3:
        return None
    channels, height, width = info.inputs[0].shape
    return Preparation(channels, height, width, *known)


def properties(job: Job, info: DataInfo) -> dict[str, str]:
    """Return what a file says of itself to programs, by name: the classes and the preparation of pictures, as JSON."""
    found = {"labels": json.dumps(info.labels, ensure_ascii=False)} if info.labels else {}
    preparation = preparation_of(job, info)
    return found | ({"preparation": preparation.to_json()} if preparation is not None else {})
