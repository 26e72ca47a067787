"""Defines the part of a job that says on which data it trains."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from horizonml.spec.base import Code, Spec, check_url, is_place_elsewhere
from horizonml.text import nearest


@dataclass(frozen=True)
class DataSource:
    """Describes where samples come from, for everything that must know it: a new source is a row of `SOURCES`."""

    module: str  # has `describe` and `load`, as `horizonml.data.choose.Reader` defines them
    kind: Literal["images", "columns", "text", "own"]  # columns: inputs and targets are named
    place: Literal["folder", "path"] | None = None  # the field that names the files to read
    needs_place: bool = False
    decodes: bool = False  # whether reading a sample takes work, so that workers load samples ahead
    package: str | None = None  # which this source cannot do without


SOURCES = {
    "digits": DataSource("horizonml.data.images", "images"),
    "cifar10": DataSource("horizonml.data.images", "images"),
    "svhn": DataSource("horizonml.data.images", "images"),
    "mnist": DataSource("horizonml.data.images", "images"),
    "folder": DataSource("horizonml.data.images", "images", "folder", needs_place=True, decodes=True),
    "synthetic": DataSource("horizonml.data.images", "images"),
    "table": DataSource("horizonml.data.table", "columns", "path", needs_place=True, package="pyarrow"),
    "huggingface": DataSource(
        "horizonml.data.hub", "columns", "path", needs_place=True, decodes=True, package="datasets"
    ),
    "stream": DataSource("horizonml.data.stream", "columns", "path", needs_place=True, decodes=True),
    "text": DataSource("horizonml.data.text", "text", "path"),
}
_OWN = DataSource("horizonml.data.own", "own", decodes=True)


class DataSpec(Spec):
    """Configures the data: where samples come from, which are held out, and how they are loaded."""

    name: Annotated[str, Code()] = Field(
        "digits",
        description="digits is part of the package; cifar10, svhn and mnist are downloaded once per machine; folder "
        "reads one directory of images per class; synthetic generates noise of any shape, to measure speed. table "
        "reads columns of CSV or Parquet files; huggingface reads columns of a Hugging Face data set on disk; stream "
        "fetches shards (tar files) while training; text is for language models. `module:callable` is code of your "
        "own, which is imported and run, and returns a `torch.utils.data.Dataset`, or a pair of them (training and "
        "held-out samples); see docs/data.md.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments for a `name` that is `module:callable`."
    )
    folder: str | None = Field(
        None, description="Directory that holds the data (required for `folder`), or to which it is downloaded."
    )
    path: str | None = Field(
        None,
        description="Where the data of `table`, `huggingface` or `stream` lies (required for these): a file or folder, "
        "or for a stream the folder or the URL (http, https or s3) that holds its shards. For `text`, a text file in "
        "UTF-8 (default: Shakespeare's sonnets, which are part of the package).",
    )
    inputs: list[str] | None = Field(
        None,
        description="Columns that the model takes, or for a stream the extensions of the files (default: all columns "
        "that are not targets).",
    )
    targets: list[str] | None = Field(None, description="Columns or extensions that the model learns to predict.")
    normalize: bool = Field(
        True,
        description="Scale each numeric input column of a table by the mean and the standard deviation of its training "
        "samples.",
    )
    download: bool = Field(True, description="Whether missing data may be downloaded.")
    samples: int | None = Field(None, ge=1, description="Train on this many samples only (default: all).")
    holdout: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="Share of the samples held out for evaluation, if the data set has no test split of its own.",
    )
    image_size: int | None = Field(None, ge=1, description="Resize images to this many pixels square.")
    channels: Literal[1, 3] | None = Field(
        None,
        description="Repeat one colour channel into three, or average three into one (default: as needed).",
    )
    classes: int | None = Field(
        None,
        ge=2,
        description="Number of classes, if the data does not say (`synthetic`: 10). For a table with one target column "
        "of whole numbers, setting this makes them classes.",
    )
    augment: bool = Field(
        False,
        description="Shift training images by up to an eighth of their size, and mirror them if that keeps "
        "the class (cifar10, folder, synthetic).",
    )
    corrupt: Literal["stop", "skip"] = Field(
        "stop",
        description="What happens if a sample cannot be read. stop ends all ranks and names the sample; skip reads "
        "every sample once before the first step, and replaces each one that cannot be read with the next one that "
        "can, in the same way on all ranks. Records and metrics count the replacements.",
    )
    workers: Literal["auto"] | Annotated[int, Field(ge=0, le=256)] = Field(
        "auto",
        description="Number of threads or processes that load the samples of the next steps while a step computes; 0 "
        "loads each step's samples when it needs them. auto uses the cores that computing leaves free, 1 to 4, for "
        "data that is read from files or by your own code, and 0 for data that lies in memory.",
    )
    worker_kind: Literal["auto", "threads", "processes"] = Field(
        "auto",
        description="Whether workers are threads, which share memory, or processes, which run Python code in parallel "
        "and have their own random number generators. auto uses processes only for a data set that draws random "
        "numbers.",
    )
    prefetch: int = Field(2, ge=1, description="Largest number of steps for which samples are loaded ahead.")
    memory: int = Field(256 << 20, ge=0, description="Largest number of bytes of samples that are loaded ahead.")
    disk: int = Field(
        4 << 30, ge=1, description="Largest number of bytes of a stream's shards that a machine keeps on its disk."
    )

    tokens: str = Field(
        "characters",
        description="How a text is divided into tokens (`text` only): characters, bytes, or the path of a Hugging Face "
        "tokenizer in JSON format (tokenizer.json).",
    )
    length: int = Field(64, ge=1, description="Number of tokens in a sample (`text` only).")
    stride: int | None = Field(
        None,
        ge=1,
        description="Number of tokens from the beginning of one training sample to the next (`text` only; default: "
        "`length`, so that samples do not overlap).",
    )

    @model_validator(mode="after")
    def _known(self) -> DataSpec:
        if self.name not in SOURCES and not self.is_own:
            known = f"one of {', '.join(SOURCES)}, or module:callable"
            raise ValueError(f"name: {self.name!r} is not {known}{nearest(self.name, SOURCES)}")
        return self

    @model_validator(mode="after")
    def _place_given(self) -> DataSpec:
        if self.source.needs_place and self.place is None:
            field = self.source.place
            raise ValueError(
                "folder: name the directory that holds one folder of images per class"
                if field == "folder"
                else f"{field}: say where the {self.name} data lies"
            )
        if self.source.kind == "columns" and not self.targets:
            raise ValueError("targets: name the columns or extensions that the model learns to predict")
        if self.name == "stream" and not self.inputs:
            raise ValueError("inputs: name the extensions that the model takes, such as [jpg]")
        if both := sorted({*(self.inputs or ())} & {*(self.targets or ())}):
            raise ValueError(f"targets: {both[0]!r} is one of the inputs, too; remove it from one of the two")
        if self.name == "stream" and self.samples is not None:
            raise ValueError("samples: a stream trains on all of its shards; list fewer of them in its index")
        if self.name == "stream" and self.corrupt == "skip":
            raise ValueError("corrupt: a stream cannot be read before training; leave out damaged samples instead")
        return self

    @model_validator(mode="after")
    def _places_are_plain(self) -> DataSpec:
        if self.path is not None and is_place_elsewhere(self.path):
            if self.name != "stream":
                raise ValueError(f"path: {self.path[:200]!r} is not a path; only data.name: stream reads from a URL")
            try:
                check_url(self.path, ("http", "https", "s3"))
            except ValueError as error:
                raise ValueError(f"path: {error}") from None
        for name, text in (("folder", self.folder), ("tokens", self.tokens)):
            if text is not None and is_place_elsewhere(text):
                raise ValueError(f"{name}: {text[:200]!r} is not a path; name a place on this machine")
        return self

    @property
    def source(self) -> DataSource:
        """Return the row of the source that `name` names."""
        return SOURCES.get(self.name, _OWN)

    @property
    def place(self) -> str | None:
        """Return the file, folder or URL to read from, if the source reads from one and the job names it."""
        return {"folder": self.folder, "path": self.path, None: None}[self.source.place]

    @property
    def is_own(self) -> bool:
        """Return whether `name` names code of the user's own."""
        return re.fullmatch(r"[\w.]+:[\w.]+", self.name) is not None
