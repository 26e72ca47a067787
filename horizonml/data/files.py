"""Reads labelled images, torchvision's data sets and folders of images, and turns pictures into tensors.

torchvision's data sets are downloaded once per machine, whatever the number of ranks.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from horizonml.errors import DataError, is_out_of_files, is_out_of_memory
from horizonml.machine.code import require
from horizonml.machine.torchvision import import_torchvision
from horizonml.text import count

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


_LOCK_SECONDS = 1800.0
_IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_TEST_FOLDERS = ("test", "val", "valid")


def load_torchvision(name: str, folder: Path, *, train: bool, download: bool) -> ArraySource:
    """Read CIFAR-10, SVHN or MNIST from `folder`, after downloading it there if allowed and needed.

    torchvision verifies the archives' checksums. A lock in the folder lets one process of the machine download while
    the others wait. Raises DataError.
    """
    if name == "svhn":
        require("scipy", "data: svhn")
    datasets = import_torchvision().datasets
    try:
        with _one_at_a_time(folder, name):
            if name == "svhn":
                data: Any = datasets.SVHN(str(folder), split="train" if train else "test", download=download)
                return ArraySource(torch.from_numpy(data.data), torch.from_numpy(data.labels).long())
            if name == "mnist":
                data = datasets.MNIST(str(folder), train=train, download=download)
                return ArraySource(data.data[:, None], data.targets.long())
            data = datasets.CIFAR10(str(folder), train=train, download=download)
            images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
            return ArraySource(images, torch.tensor(data.targets))
    except Timeout as error:
        raise DataError(
            f"data: another process has been downloading {name} into {folder} for {_LOCK_SECONDS:.0f} s; "
            f"if no such process is running, delete {error.lock_file}"
        ) from error
    except Exception as error:  # torchvision fails on damaged files in any way, including asserts
        if is_out_of_memory(error):
            raise
        problem = "could not be downloaded" if download else "is missing or corrupt"
        raise DataError(
            f"data: {name} {problem} in {folder}: {str(error) or type(error).__name__}. Delete what is damaged there, "
            "or put the archive there yourself and set data.folder and data.download: false"
        ) from error


def _one_at_a_time(folder: Path, name: str) -> AbstractContextManager[object]:
    """Return a lock that prevents two downloads at once, or a null context if the folder cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return FileLock(folder / f".{name}.lock", timeout=_LOCK_SECONDS)
    except OSError:
        return nullcontext()


class FolderSplits:
    """Lists a folder's images: `train/CLASS/*` and `test/CLASS/*` (or `val`), or `CLASS/*` without test images."""

    def __init__(self, root: Path) -> None:
        """List the files. Raises DataError."""
        inner = root / "train"
        base = inner if inner.is_dir() else root
        self.classes = sorted(path.name for path in base.iterdir() if path.is_dir())
        if len(self.classes) < 2:
            has = count(len(self.classes), "folder")
            raise DataError(f"data.folder: {base} must hold one folder of images per class; it has {has}")
        self.train = self._files(base)
        self.test: list[tuple[Path, int]] = []
        if base is inner:
            held_out = next((root / name for name in _TEST_FOLDERS if (root / name).is_dir()), None)
            if held_out is not None:
                extra = sorted({path.name for path in held_out.iterdir() if path.is_dir()} - set(self.classes))
                if extra:
                    raise DataError(f"data.folder: {held_out} has classes that {base} lacks: {', '.join(extra)}")
                self.test = self._files(held_out)

    def _files(self, base: Path) -> list[tuple[Path, int]]:
        files = []
        for label, name in enumerate(self.classes):
            folder = base / name
            found = (
                sorted(p for p in folder.rglob("*") if p.suffix.lower() in _IMAGE_SUFFIXES) if folder.is_dir() else []
            )
            if not found and base.name not in _TEST_FOLDERS:
                raise DataError(f"data.folder: no images in {folder}; remove the folder or fill it")
            files += [(path, label) for path in found]
        return files


class FolderSource:
    """Decodes image files when they are needed, and crops and resizes them to `size` pixels square."""

    def __init__(self, files: list[tuple[Path, int]], classes: list[str], size: int) -> None:
        self._files, self.classes, self._size = files, classes, size

    def __len__(self) -> int:
        return len(self._files)

    @property
    def identity(self) -> str:
        """Return what changes whenever a file is added, removed or written."""
        found = hashlib.sha256()
        for path, label in self._files:
            status = path.stat()
            found.update(f"{path} {label} {status.st_size} {status.st_mtime_ns} {self._size}\n".encode())
        return found.hexdigest()

    def images(self, indices: Tensor) -> Tensor:
        """Return uint8 pixels `[n, 3, size, size]`. Raises DataError for a file that is not an image."""
        if not len(indices):
            return torch.empty(0, 3, self._size, self._size, dtype=torch.uint8)
        return torch.stack([self._decode(self._files[index][0]) for index in indices.tolist()])

    def labels(self, indices: Tensor) -> Tensor:
        """Return the classes, int64 `[n]`."""
        return torch.tensor([self._files[index][1] for index in indices.tolist()], dtype=torch.int64)

    def _decode(self, path: Path) -> Tensor:
        try:
            return read_picture(path, lambda image: pixels_of(image, self._size))
        except DataError as error:
            raise DataError(f"data.folder: {path} is not a readable image: {error}; repair or remove it") from error


class ImageSource(Protocol):
    """Provides images and labels by index, counted from 0."""

    def __len__(self) -> int: ...

    def images(self, indices: Tensor) -> Tensor:
        """Return uint8 pixels, or float32 values that are already normalised, `[n, channels, height, width]`."""

    def labels(self, indices: Tensor) -> Tensor:
        """Return the classes, int64 `[n]`."""


class ArraySource:
    """Holds a data set in memory; with `wrap`, indices beyond its end start over."""

    def __init__(self, images: Tensor | None, labels: Tensor | None, wrap: bool = False) -> None:
        assert images is None or labels is None or len(images) == len(labels)
        self._images, self._labels, self._wrap = images, labels, wrap
        self._length = len(images) if images is not None else 0

    def keep(self, images: bool, labels: bool) -> None:
        """Free the images or the labels that are not wanted."""
        self._images = self._images if images else None
        self._labels = self._labels if labels else None

    def __len__(self) -> int:
        return self._length

    def images(self, indices: Tensor) -> Tensor:
        """Return the pixels or values as they were given, `[n, channels, height, width]`."""
        assert self._images is not None, "this rank has no images"
        return self._images[indices % len(self) if self._wrap else indices]

    def labels(self, indices: Tensor) -> Tensor:
        """Return the classes, int64 `[n]`."""
        assert self._labels is not None, "this rank has no labels"
        return self._labels[indices % len(self) if self._wrap else indices]
