"""Lists the formats that a trained model can be exported to, and checks what was exported.

ONNX graphs and archives of torch.export both begin with what torch.export records, with a batch of any size. The older
ONNX exporter records TorchScript, which PyTorch has deprecated.

The ending of the file chooses the format. An exported model is compared with the trained one on samples of the job's
data before anything is said to be done. The description of a picture's way to an input is exported as well, because
users who have only the file must prepare pictures as the training did.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from horizonml.api.exports.trained import Trained, flat_tensors
from horizonml.data.choose import load
from horizonml.data.dataset import DataInfo, TensorSpec
from horizonml.data.images import normalisation
from horizonml.data.sampler import name_seed
from horizonml.data.spec import DataSpec
from horizonml.errors import ExportError, HorizonError, JobError, is_out_of_memory
from horizonml.job.schema import Job
from horizonml.machine.code import require
from horizonml.text import count, nearest

_EXAMPLES = 2  # a batch of one would be taken for a size that never changes
_MOST_IN_ONE_FILE = 1 << 30  # bytes; a message of protobuf must stay below 2 GiB

Run = Callable[[tuple[Tensor, ...]], list[Tensor]]
"""Computes the outputs of an exported file for a batch of inputs."""


def write(format: ExportFormat, trained: Trained, samples: ComparedSamples, draft: Path) -> None:
    """Write the model's computation and its weights. Raises ExportError or OSError."""
    inputs = tuple(torch.cat([tensor] * _EXAMPLES)[:_EXAMPLES] for tensor in samples.inputs)
    args, kwargs = trained.arguments(inputs)
    with quietly(trained, format), torch.no_grad():
        recorded = torch.export.export(trained.module, args, kwargs, dynamic_shapes=_dynamic_shapes(trained))
        if format is ExportFormat.ONNX:
            _write_onnx(trained, samples, recorded, draft)
        else:
            torch.export.save(recorded, draft)


def verify(format: ExportFormat, trained: Trained, samples: ComparedSamples, draft: Path) -> Agreement:
    """Return how the outputs of the file agree with the model's. Raises ExportError if they do not.

    The samples are computed in two batches of different sizes, one of them a single sample: the batch must be free.
    """
    number = len(samples.inputs[0])
    with quietly(trained, format), torch.no_grad():
        run = _onnx(trained, draft) if format is ExportFormat.ONNX else _torch_export(trained, draft)
        found = [run(samples.rows(start, stop)) for start, stop in ((0, 1), (1, number)) if stop > start]
    parts = zip(*found, strict=True)
    joined = [torch.cat(tensors) if tensors[0].dim() else tensors[0] for tensors in parts]
    return compare(draft.name, samples.words, trained.outputs(samples.inputs), joined)


def _dynamic_shapes(trained: Trained) -> Any:
    """Return, for an exporter, that the first dimension of every input is the batch, of any size."""
    batch = torch.export.Dim("batch")
    shapes = [{0: batch} for _ in trained.info.inputs]
    return dict(zip(trained.input.names, shapes, strict=True)) if trained.input.names else tuple(shapes)


def _write_onnx(
    trained: Trained, samples: ComparedSamples, recorded: torch.export.ExportedProgram, draft: Path
) -> None:
    """Write the graph with its weights; weights of more than a gigabyte go into a second file, FILE.data.

    The names of classes, and how pictures are prepared, are properties of the file.
    """
    weights = sum(tensor.nbytes for tensor in trained.module.state_dict().values())
    args, kwargs = trained.arguments(samples.rows(0, 1))
    program = torch.onnx.export(
        recorded,
        dynamo=True,
        dynamic_shapes=_dynamic_shapes(trained),  # for the names of dimensions
        input_names=trained.input_names,
        output_names=_output_names(trained.module(*args, **kwargs)),
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props.update(properties(trained.job, trained.info))
    program.save(draft, external_data=weights > _MOST_IN_ONE_FILE)


def _onnx(trained: Trained, draft: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(draft, options, providers=["CPUExecutionProvider"])
    names = {entry.name for entry in session.get_inputs()}

    def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        feed = dict(zip(trained.input_names, (tensor.numpy() for tensor in inputs), strict=True))
        outputs = session.run(None, {name: value for name, value in feed.items() if name in names})
        return [torch.from_numpy(output) for output in outputs]

    return run


def _torch_export(trained: Trained, draft: Path) -> Run:
    module = torch.export.load(draft).module()

    def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        args, kwargs = trained.arguments(inputs)
        return flat_tensors(module(*args, **kwargs))

    return run


def _output_names(output: Any, name: str = "") -> list[str]:
    """Return a name for each tensor of the model's output: its keys in mappings, and its numbers in sequences."""
    if isinstance(output, Tensor):
        return [name or "output"]
    if isinstance(output, Mapping):
        inner = [(f"{name}_{key}" if name else str(key), value) for key, value in output.items()]
    elif isinstance(output, list | tuple):
        inner = [(f"{name or 'output'}_{number}", value) for number, value in enumerate(output)]
    else:
        inner = []
    return [found for key, value in inner for found in _output_names(value, key)]


@contextmanager
def quietly(trained: Trained, format: ExportFormat) -> Iterator[None]:
    """Silence an exporter's own messages, and turn what it raises into an ExportError."""
    levels = {name: logging.getLogger(name).level for name in ("torch.onnx", "torch.export", "onnxscript")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ExportError:
        raise
    except Exception as error:  # exporters run the model's own code, and have errors of many kinds
        if isinstance(error, OSError) or is_out_of_memory(error):
            raise
        raise ExportError(f"{trained.job.model.name} cannot be exported to {format.words}: {_reason(error)}") from error
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _reason(error: BaseException) -> str:
    """Return what an exporter has to say, and what can be done about it."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    text = str(causes[-1]).strip() or type(causes[-1]).__name__
    if "batch" in text and ("specialized" in text or "Constraints violated" in text):
        return "its forward pass fixes the batch size; compute with x.shape[0] in the place of a number"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{lines[0][:300]} (a state dict or safetensors file needs no graph)"


class ExportFormat(StrEnum):
    """Names a format of an exported model."""

    STATE_DICT = "state-dict"
    SAFETENSORS = "safetensors"
    ONNX = "onnx"
    TORCH_EXPORT = "torch-export"

    @property
    def words(self) -> str:
        """Return the format's name for people."""
        return {
            ExportFormat.STATE_DICT: "PyTorch state dict",
            ExportFormat.SAFETENSORS: "safetensors",
            ExportFormat.ONNX: "ONNX",
            ExportFormat.TORCH_EXPORT: "torch.export archive",
        }[self]

    @property
    def has_graph(self) -> bool:
        """Return whether the file holds the computation, and not only the weights."""
        return self in (ExportFormat.ONNX, ExportFormat.TORCH_EXPORT)

    def require_packages(self) -> None:
        """Raise MissingPackage unless everything is installed that this format needs."""
        if self is ExportFormat.ONNX:
            for package in ("onnx", "onnxscript", "onnxruntime"):
                require(package, "an export to ONNX")


_ENDINGS = {
    ".pt": ExportFormat.STATE_DICT,
    ".pth": ExportFormat.STATE_DICT,
    ".safetensors": ExportFormat.SAFETENSORS,
    ".onnx": ExportFormat.ONNX,
    ".pt2": ExportFormat.TORCH_EXPORT,
}
AUTO = "auto"


def choose_format(output: Path, wanted: str = AUTO) -> ExportFormat:
    """Return the format of a name, or for "auto" the one that the file's ending stands for. Raises JobError."""
    if wanted != AUTO:
        known = [format.value for format in ExportFormat]
        if wanted not in known:
            raise JobError(
                f"--format: {wanted!r} is not one of {', '.join([AUTO, *known])}{nearest(wanted, [AUTO, *known])}"
            )
        return ExportFormat(wanted)
    format = _ENDINGS.get(output.suffix.lower())
    if format is None:
        endings = ", ".join(f"{ending} ({format.words})" for ending, format in _ENDINGS.items())
        raise JobError(f"{output}: the ending names no format; use one of {endings}, or --format")
    return format


@dataclass(frozen=True)
class PicturePreparation:
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


def preparation_of(job: Job, info: DataInfo | None) -> PicturePreparation | None:
    """Return how a picture is prepared for the model of a job; None if its inputs are not pictures, or not known."""
    known = normalisation(job.data)
    if info is None or known is None or len(info.inputs) != 1 or len(info.inputs[0].shape) != 3:
        return None
    channels, height, width = info.inputs[0].shape
    return PicturePreparation(channels, height, width, *known)


def properties(job: Job, info: DataInfo) -> dict[str, str]:
    """Return what a file says of itself to programs, by name: the classes and the preparation of pictures, as JSON."""
    found = {"labels": json.dumps(info.labels, ensure_ascii=False)} if info.labels else {}
    preparation = preparation_of(job, info)
    return found | ({"preparation": preparation.to_json()} if preparation is not None else {})


@dataclass(frozen=True)
class ComparedSamples:
    """Holds a model's inputs, and says what they are."""

    inputs: tuple[Tensor, ...]  # in the order of `DataInfo.inputs`
    words: str

    def rows(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return some of the samples."""
        return tuple(tensor[start:stop] for tensor in self.inputs)


def find_samples(spec: DataSpec, info: DataInfo, number: int, cache: Path) -> ComparedSamples:
    """Return up to `number` held-out samples, or noise where this machine does not have the data.

    Nothing is downloaded. The words of noise say why it is noise.
    """
    try:
        if spec.name == "synthetic":
            return noise(info, number, "the data is synthetic")
        data = load(spec.model_copy(update={"download": False}), info, cache, inputs=True, targets=False)
        rows = min(number, info.held_out)
        found = data.batch(False, torch.arange(rows)).inputs(0, rows)
    except (HorizonError, OSError) as error:
        return noise(info, number, f"the held-out data cannot be read: {error}")
    inputs = (found,) if isinstance(found, Tensor) else tuple(found)
    title = spec.folder if spec.name == "folder" else spec.name
    return ComparedSamples(inputs, f"{count(len(inputs[0]), 'held-out sample')} of {title}")


def noise(info: DataInfo, number: int, why: str) -> ComparedSamples:
    """Return samples of noise, the same ones every time."""
    generator = torch.Generator().manual_seed(name_seed(0, "export"))
    names = info.names or [""] * len(info.inputs)
    inputs = tuple(_noise(spec, name, info, number, generator) for spec, name in zip(info.inputs, names, strict=True))
    return ComparedSamples(inputs, f"{count(number, 'sample')} of noise ({why})")


def _noise(spec: TensorSpec, name: str, info: DataInfo, number: int, generator: torch.Generator) -> Tensor:
    shape = (number, *spec.shape)
    if spec.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(spec.dtype)
    if "mask" in name:  # what is masked altogether may have no defined result
        return torch.ones(shape, dtype=spec.dtype)
    # Numbers stand for words or categories. Only of a language model are they known to be as many as its outputs.
    most = info.outputs if info.task == "language_model" and spec.dtype != torch.bool else 2
    return torch.randint(0, max(1, most), shape, generator=generator).to(spec.dtype)


# Runtimes add up in another order and merge operations, which changes the last digits. A wrong graph changes the first.
RELATIVE_TOLERANCE = 1e-4
_ABSOLUTE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Agreement:
    """Tells how far the outputs of an exported model are from those of the model itself."""

    difference: float  # the largest one of any output
    tolerance: float  # for that output
    largest: float  # absolute value in that output

    def words(self) -> str:
        """Return the numbers for people."""
        return (
            f"largest difference {self.difference:.1e} in outputs of up to {self.largest:.3g} "
            f"(tolerance {self.tolerance:.1e})"
        )


def compare(file: str, samples: str, expected: Sequence[Tensor], found: Sequence[Tensor]) -> Agreement:
    """Return how the outputs for some samples agree. Raises ExportError if they do not."""
    if len(expected) != len(found):
        raise _differs(file, samples, f"it returns {count(len(found), 'tensor')} instead of {len(expected)}")
    agreements = []
    for number, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        output = f"output {number}" if len(expected) > 1 else "the output"
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise _differs(file, samples, f"{output} is {_kind(theirs)}, but the model returns {_kind(ours)}")
        agreements.append(_agreement(file, samples, output, ours, theirs))
    return max(agreements, key=lambda one: one.difference / one.tolerance)


def check_weights(file: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Return, in words, that a file's weights are bit for bit those of the checkpoint. Raises ExportError."""
    if missing := sorted(expected.keys() ^ found.keys()):
        has = "lacks" if missing[0] in expected else "also has"
        raise ExportError(f"{file} is not written: read back, it {has} {missing[0]}")
    for name, tensor in expected.items():
        other = found[name]
        same = tensor.shape == other.shape and tensor.dtype == other.dtype
        if not same or not torch.equal(_bits(tensor), _bits(other)):
            raise ExportError(f"{file} is not written: read back, its {name} differs from the checkpoint")
    return f"{count(len(expected), 'tensor')} read back, bit for bit those of the checkpoint"


def _agreement(file: str, samples: str, output: str, ours: Tensor, theirs: Tensor) -> Agreement:
    first, second = ours.double(), theirs.double()
    finite = first.isfinite()
    if not torch.equal(finite, second.isfinite()) or not torch.equal(
        first[~finite].nan_to_num(), second[~finite].nan_to_num()
    ):
        raise _differs(file, samples, f"{output} has infinite values or NaN in other places")
    first, second = first[finite], second[finite]
    difference = float((first - second).abs().max()) if len(first) else 0.0
    largest = float(first.abs().max()) if len(first) else 0.0
    precision = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0
    tolerance = max(RELATIVE_TOLERANCE, 4 * precision) * largest + _ABSOLUTE_TOLERANCE
    agreement = Agreement(difference, tolerance, largest)
    if difference > tolerance:
        raise _differs(file, samples, f"{output} differs from the model's, {agreement.words()}")
    return agreement


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, in which NaN equals itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


def _differs(file: str, samples: str, problem: str) -> ExportError:
    return ExportError(f"{file} is not written: on {samples}, {problem}")
