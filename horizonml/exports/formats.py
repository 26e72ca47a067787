"""Names the formats that a trained model can be exported to, and chooses one by the ending of the file."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from horizonml.errors import JobError
from horizonml.machine.extras import require
from horizonml.text import nearest


class Format(StrEnum):
    """Names a format of an exported model."""

    STATE_DICT = "state-dict"
    SAFETENSORS = "safetensors"
    ONNX = "onnx"
    TORCH_EXPORT = "torch-export"

    @property
    def words(self) -> str:
        """Return the format's name for people."""
        return {
            Format.STATE_DICT: "PyTorch state dict",
            Format.SAFETENSORS: "safetensors",
            Format.ONNX: "ONNX",
            Format.TORCH_EXPORT: "torch.export archive",
        }[self]

    @property
    def has_graph(self) -> bool:
        """Return whether the file holds the computation, and not only the weights."""
        return self in (Format.ONNX, Format.TORCH_EXPORT)

    def require_packages(self) -> None:
        """Raise MissingPackage unless everything is installed that this format needs."""
        if self is Format.ONNX:
            for package in ("onnx", "onnxscript", "onnxruntime"):
                require(package, "an export to ONNX")


_ENDINGS = {
    ".pt": Format.STATE_DICT,
    ".pth": Format.STATE_DICT,
    ".safetensors": Format.SAFETENSORS,
    ".onnx": Format.ONNX,
    ".pt2": Format.TORCH_EXPORT,
}
AUTO = "auto"


def choose_format(output: Path, wanted: str = AUTO) -> Format:
    """Return the format of a name, or for "auto" the one that the file's ending stands for. Raises JobError."""
    if wanted != AUTO:
        known = [format.value for format in Format]
        if wanted not in known:
            raise JobError(
                f"--format: {wanted!r} is not one of {', '.join([AUTO, *known])}{nearest(wanted, [AUTO, *known])}"
            )
        return Format(wanted)
    format = _ENDINGS.get(output.suffix.lower())
    if format is None:
        endings = ", ".join(f"{ending} ({format.words})" for ending, format in _ENDINGS.items())
        raise JobError(f"{output}: the ending names no format; use one of {endings}, or --format")
    return format
