"""Provides texts as sequences of tokens, for language models.

A sample is a window of the text; its target is the same window, one token later. The end of the text is held out. The
tokens are bytes, characters, or those of a tokenizer in the format of Hugging Face's tokenizers.
"""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from horizonml.data.dataset import Data, DataInfo, Inputs
from horizonml.data.seeds import name_seed
from horizonml.data.spec import DataSpec
from horizonml.data.tensors import TensorSpec
from horizonml.data.tokens import Bytes, Characters, tokens_for
from horizonml.errors import DataError
from horizonml.machine.resources import memory_left
from horizonml.text import human_bytes

_EMBEDDED = "sonnets.txt.gz"
_TIMES = 2  # how often a text is in memory at least, while it is read
_SUBSET_SEED = 1609  # which samples `data.samples` keeps does not depend on the job's seed


@dataclass(frozen=True)
class _Tokens:
    """Holds a text as numbers."""

    ids: Tensor
    vocabulary: int
    characters: str = ""  # in the order of their numbers, where they are the tokens

    def parts(self, spec: DataSpec) -> tuple[Tensor, Tensor]:
        """Return the tokens to train on, and those that are held out: the end of the text."""
        held_out = max(1, round(len(self.ids) * spec.holdout))
        return self.ids[:-held_out], self.ids[-held_out:]


def describe(spec: DataSpec) -> DataInfo | None:
    """Return a description of the text, or None for a file that this machine does not have. Raises DataError."""
    if spec.path is not None and not Path(spec.path).exists():
        return None
    tokens = _read(spec)
    train, held_out = (_starts(part, spec.length, stride) for part, stride in _strides(tokens, spec))
    if not train or not held_out:
        raise DataError(
            f"data.length: the text has {len(tokens.ids)} tokens, of which {spec.holdout:.0%} are held out; that is "
            f"too short for samples of {spec.length} tokens. Lower data.length, or take a longer text"
        )
    if spec.samples is not None and spec.samples > train:
        raise DataError(f"data.samples: {spec.samples}, but the text has {train} training samples; lower it")
    tensor = TensorSpec((spec.length,), torch.int64)
    return DataInfo(
        spec.samples or train,
        held_out,
        (tensor,),
        outputs=tokens.vocabulary,
        target=tensor,
        task="language_model",
        characters=tokens.characters,
        unigram=_unigram(tokens, spec),
    )


def load(spec: DataSpec, info: DataInfo) -> Data:
    """Read the text that `info` describes, with the numbers that its characters have there. Raises DataError."""
    tokens = _read(spec, info.characters)
    splits = []
    for (part, stride), samples in zip(_strides(tokens, spec), (info.train, info.held_out), strict=True):
        available = _starts(part, spec.length, stride)
        members = torch.arange(available)
        if samples < available:
            generator = torch.Generator().manual_seed(name_seed(_SUBSET_SEED, available))
            members = torch.randperm(available, generator=generator)[:samples]
        splits.append(TextSplit(part.clone(), members * stride, spec.length))
    return Data(info, splits[0], splits[1])


def unigram_perplexity(spec: DataSpec) -> float:
    """Return the perplexity on the held-out part of a model that knows how frequent each token is, and nothing else.

    The frequencies are those of the training part, with one added to each count. A language model that has learned
    anything about the order of tokens is below this. Raises DataError.
    """
    return _unigram(_read(spec), spec)


def _unigram(tokens: _Tokens, spec: DataSpec) -> float:
    train, held_out = (torch.bincount(part.long(), minlength=tokens.vocabulary).double() for part in tokens.parts(spec))
    shares = (train + 1) / (train + 1).sum()
    return math.exp(-float((held_out * shares.log()).sum() / held_out.sum()))


class TextSplit:
    """Provides windows of a text by index."""

    def __init__(self, tokens: Tensor, starts: Tensor, length: int) -> None:
        """Prepare the split; window `i` begins at token `starts[i]`."""
        self._tokens, self._starts, self._length = tokens, starts, length

    def inputs(self, indices: Tensor) -> Tensor:
        """Return tokens, int64 `[len(indices), length]`."""
        return self._windows(indices, 0)

    def targets(self, indices: Tensor) -> Tensor:
        """Return the token that follows each of the inputs, int64 `[len(indices), length]`."""
        return self._windows(indices, 1)

    def augment(self, inputs: Inputs, batch: int, start: int, seed: int) -> Inputs:
        """Return the inputs as they are."""
        return inputs

    def _windows(self, indices: Tensor, shift: int) -> Tensor:
        positions = self._starts[indices][:, None] + torch.arange(shift, shift + self._length)
        return self._tokens[positions].long()


def _strides(tokens: _Tokens, spec: DataSpec) -> list[tuple[Tensor, int]]:
    """Return the training part and the held-out part, each with the distance between the starts of its samples."""
    train, held_out = tokens.parts(spec)
    return [(train, spec.stride or spec.length), (held_out, spec.length)]


def _starts(part: Tensor, length: int, stride: int) -> int:
    """Return the number of windows in a part of a text; each needs one token more, its last target."""
    return max(0, (len(part) - 1 - length) // stride + 1)


def _read(spec: DataSpec, characters: str = "") -> _Tokens:
    """Return the text as tokens; `characters` are those that have numbers already, if any have. Raises DataError."""
    raw = _bytes(spec)
    if not raw:
        raise DataError(f"data.path: {spec.path} is empty; name a text file with content")
    if spec.tokens == "bytes":
        return _Tokens(Bytes().numbers(raw), Bytes.size)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.path: {spec.path} is not a text in UTF-8: {error}; convert it, or set data.tokens: bytes"
        ) from error
    if spec.tokens == "characters":
        characters = characters or Characters.of(text).known
    tokens = tokens_for(spec.tokens, characters)
    try:
        return _Tokens(tokens.encode(text), tokens.size, characters)
    except DataError as error:
        raise DataError(f"data.path: {spec.path or 'the sonnets'}: {error}") from None


def _bytes(spec: DataSpec) -> bytes:
    if spec.path is None:
        with resources.files("horizonml.data").joinpath(_EMBEDDED).open("rb") as file:
            return gzip.decompress(file.read())
    try:
        place = Path(spec.path)
        size = place.stat().st_size
        if not place.is_file():
            raise DataError(f"data.path: {spec.path} cannot be read: it is not a regular file; name a text file")
        if _TIMES * size > memory_left():
            raise DataError(
                f"data.path: {spec.path} has {human_bytes(size)}, and {human_bytes(memory_left())} of memory are left; "
                "take a part of it, or train with more memory"
            )
        return place.read_bytes()
    except OSError as error:
        raise DataError(f"data.path: {spec.path} cannot be read: {error.strerror}; name a text file") from error
