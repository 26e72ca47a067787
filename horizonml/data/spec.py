"""Defines the part of a job that says on which data it trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from horizonml.spec.base import Spec

DatasetName = Literal["digits", "cifar10", "svhn", "mnist", "folder", "synthetic", "text"]


class DataSpec(Spec):
    """Configures the samples to learn from, and those to judge by."""

    name: DatasetName = Field(
        "digits",
        description="digits is embedded; cifar10, svhn and mnist are downloaded once per machine; folder reads "
        "one directory of images per class; synthetic makes noise of any shape, to measure speed; text is for language "
        "models.",
    )
    folder: str | None = Field(None, description="Where the data lies (required for `folder`), or is downloaded to.")
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
    classes: int = Field(10, ge=2, description="Number of classes (`synthetic` only).")
    augment: bool = Field(
        False,
        description="Shift training images by up to an eighth of their size, and mirror them where that keeps "
        "the class (cifar10, folder, synthetic).",
    )

    path: str | None = Field(
        None, description="A text file in UTF-8 (`text` only; default: Shakespeare's sonnets, which are embedded)."
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
    def _folder_given(self) -> DataSpec:
        if self.name == "folder" and self.folder is None:
            raise ValueError("folder: name the directory that holds one folder of images per class")
        return self
