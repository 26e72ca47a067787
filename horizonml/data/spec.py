"""Defines the part of a job that says on which data it trains."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from horizonml.spec.base import Spec
from horizonml.text import nearest

IMAGES = ("digits", "cifar10", "svhn", "mnist", "folder", "synthetic")
FILES = ("table", "huggingface", "stream")
DATASETS = (*IMAGES, *FILES, "text")


class DataSpec(Spec):
    """Configures the data: where samples come from, which are held out, and how they are loaded."""

    name: str = Field(
        "digits",
        description="digits is embedded; cifar10, svhn and mnist are downloaded once per machine; folder reads "
        "one directory of images per class; synthetic makes noise of any shape, to measure speed. table reads columns "
        "of CSV or Parquet files; huggingface reads columns of a data set that was saved with `save_to_disk`, or of a "
        "local one; stream fetches shards (tar files) while training; text is for language models. Or "
        "`module:callable`, code of your own that returns a `torch.utils.data.Dataset`, or a pair of them (training "
        "and held out), and is imported and run; see docs/data.md.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for your own `name`.")
    folder: str | None = Field(None, description="Where the data lies (required for `folder`), or is downloaded to.")
    path: str | None = Field(
        None,
        description="The file or folder of a table or a Hugging Face data set, or the folder or URL of a stream's "
        "index (required for these); or a text file in UTF-8 (default: Shakespeare's sonnets, which are embedded).",
    )
    inputs: list[str] | None = Field(
        None, description="The columns, or in a stream the extensions, that the model gets (default: all others)."
    )
    targets: list[str] | None = Field(None, description="The columns or extensions that are learned.")
    normalize: bool = Field(
        True,
        description="Scale each column of numbers that a table gives to the model by the mean and the standard "
        "deviation of its training part.",
    )
    download: bool = Field(True, description="Whether missing data may be downloaded.")
    samples: int | None = Field(None, ge=1, description="Train on this many samples only (default: all).")
    holdout: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="Share of the samples held out for evaluation, where the data set has no test split of its own.",
    )
    image_size: int | None = Field(None, ge=1, description="Resize images to this many pixels square.")
    channels: Literal[1, 3] | None = Field(
        None,
        description="Repeat one colour channel into three, or average three into one (default: as needed).",
    )
    classes: int | None = Field(
        None,
        ge=2,
        description="Number of classes, where the data does not tell (`synthetic`: 10). With it, whole numbers in the "
        "target column of a table are classes.",
    )
    augment: bool = Field(
        False,
        description="Shift training images by up to an eighth of their size, and mirror them where that keeps "
        "the class (cifar10, folder, synthetic).",
    )
    corrupt: Literal["stop", "skip"] = Field(
        "stop",
        description="What happens to a sample that cannot be read. stop ends all ranks with its name; skip reads every "
        "sample once before the first step, and replaces each one that cannot be read by the next that can, in the "
        "same way on all ranks. Records and metrics count them.",
    )
    workers: Literal["auto"] | Annotated[int, Field(ge=0, le=256)] = Field(
        "auto",
        description="How many threads or processes load the samples of the next steps while a step computes; 0 loads "
        "each step's samples when it needs them. auto takes the cores that computing leaves free, from 1 to 4, for "
        "data that is read from files or by your own code, and 0 for data that lies in memory.",
    )
    worker_kind: Literal["auto", "threads", "processes"] = Field(
        "auto",
        description="Whether workers are threads, which share memory, or processes, which run Python code side by side "
        "and have random numbers of their own. auto takes processes only for a data set that draws random numbers.",
    )
    prefetch: int = Field(2, ge=1, description="For how many steps samples are loaded ahead, at most.")
    memory: int = Field(
        256 << 20, ge=0, description="Most bytes of samples that are loaded ahead of the step that needs them."
    )
    disk: int = Field(
        4 << 30, ge=1, description="Most bytes of a stream's shards that a machine keeps on its disk at a time."
    )

    tokens: str = Field(
        "characters",
        description="What a text consists of (`text` only): characters; bytes; or the path of a tokenizer in the JSON "
        "format of Hugging Face's tokenizers.",
    )
    length: int = Field(64, ge=1, description="Number of tokens in a sample (`text` only).")
    stride: int | None = Field(
        None,
        ge=1,
        description="Distance between the beginnings of training samples, in tokens (`text` only; default: `length`, "
        "so that samples do not overlap).",
    )

    @model_validator(mode="after")
    def _known(self) -> DataSpec:
        if self.name not in DATASETS and not self.is_own:
            known = f"one of {', '.join(DATASETS)}, or module:callable"
            raise ValueError(f"name: {self.name!r} is not {known}{nearest(self.name, DATASETS)}")
        return self

    @model_validator(mode="after")
    def _place_given(self) -> DataSpec:
        if self.name == "folder" and self.folder is None:
            raise ValueError("folder: name the directory that holds one folder of images per class")
        if self.name in FILES and self.path is None:
            raise ValueError(f"path: say where the {self.name} data lies")
        if self.name in FILES and not self.targets:
            raise ValueError("targets: name the columns or extensions that are learned")
        if self.name == "stream" and not self.inputs:
            raise ValueError("inputs: name the extensions that the model gets, such as [jpg]")
        if both := sorted({*(self.inputs or ())} & {*(self.targets or ())}):
            raise ValueError(f"targets: {both[0]!r} is among the inputs, too")
        if self.name == "stream" and self.samples is not None:
            raise ValueError("samples: a stream trains on all of its shards; list fewer of them in its index")
        if self.name == "stream" and self.corrupt == "skip":
            raise ValueError("corrupt: a stream cannot be read before training; leave out damaged samples instead")
        return self

    @property
    def is_own(self) -> bool:
        """Return whether `name` names code of the user's own."""
        return re.fullmatch(r"[\w.]+:[\w.]+", self.name) is not None
