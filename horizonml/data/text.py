"""Provides texts as sequences of tokens, for language models.

A sample is a window of the text; its target is the same window, one token later. The end of the text is held out. The
tokens are bytes, characters, or those of a tokenizer in the format of Hugging Face's tokenizers.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from horizonml.data.dataset import Data, DataInfo, Split, TensorSpec
from horizonml.data.sampler import subset
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError, is_out_of_memory
from horizonml.machine.code import require
from horizonml.machine.host import memory_left
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


def describe(spec: DataSpec, channels: int | None = None, encoding: Mapping[str, Any] | None = None) -> DataInfo | None:
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


def load(spec: DataSpec, info: DataInfo, cache: Path, inputs: bool, targets: bool) -> Data:
    """Read the text that `info` describes, with the numbers that its characters have there. Raises DataError."""
    tokens = _read(spec, info.characters)
    splits = []
    for (part, stride), samples in zip(_strides(tokens, spec), (info.train, info.held_out), strict=True):
        available = _starts(part, spec.length, stride)
        members = subset(available, samples, _SUBSET_SEED)
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


class TextSplit(Split):
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


_SHOWN = 5  # unknown characters that an error names


class Bytes:
    """Takes the bytes of a text in UTF-8 as tokens."""

    size = 256

    def encode(self, text: str) -> Tensor:
        """Return the bytes."""
        return self.numbers(text.encode())

    def numbers(self, raw: bytes) -> Tensor:
        """Return bytes, which need not be a text, as numbers."""
        return torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)[: len(raw)]

    def decode(self, numbers: Iterable[int]) -> str:
        """Return the text, with a mark in place of each byte that is part of no character."""
        return bytes(numbers).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Characters:
    """Takes each character as a token; `known` are the characters in the order of their numbers."""

    known: str

    @classmethod
    def of(cls, text: str) -> Characters:
        """Return the characters of a text, in the order of their code points."""
        return cls("".join(sorted(set(text))))

    @property
    def size(self) -> int:
        """Return the number of different characters."""
        return len(self.known)

    def encode(self, text: str) -> Tensor:
        """Return the numbers of the characters. Raises DataError if any of them has none."""
        number = {character: index for index, character in enumerate(self.known)}
        unknown = sorted(set(text) - number.keys(), key=text.index)
        if unknown:
            shown = ", ".join(map(repr, unknown[:_SHOWN])) + (", ..." if len(unknown) > _SHOWN else "")
            raise DataError(
                f"the text has characters that the model was not trained on: {shown} (the first in line "
                f"{text.count(chr(10), 0, text.index(unknown[0])) + 1}); replace them, or train with data.tokens: bytes"
            )
        return torch.tensor([number[character] for character in text], dtype=torch.int32)

    def decode(self, numbers: Iterable[int]) -> str:
        """Return the text."""
        return "".join(self.known[number] for number in numbers)


class FromFile:
    """Takes the tokens of a tokenizer that is read from a file."""

    def __init__(self, path: str) -> None:
        """Read the tokenizer. Raises DataError."""
        require("tokenizers", "data.tokens")
        from tokenizers import Tokenizer

        self._path = path
        try:
            self._tokenizer: Any = Tokenizer.from_file(path)
        except Exception as error:  # the library raises nothing more special
            raise DataError(
                f"data.tokens: {path} is neither bytes, characters, nor a tokenizer that can be read: {error}"
            ) from error

    @property
    def size(self) -> int:
        """Return the number of tokens in the vocabulary."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> Tensor:
        """Return the numbers of the tokens, without any that the tokenizer adds to a text."""
        try:
            found = self._tokenizer.encode(text, add_special_tokens=False).ids
            return torch.tensor(found, dtype=torch.int32)
        except Exception as error:  # what is wrong with a tokenizer may show only now
            if is_out_of_memory(error):
                raise
            raise DataError(f"data.tokens: {self._path} cannot encode the text: {error}") from error

    def decode(self, numbers: Iterable[int]) -> str:
        """Return the text, as far as the tokenizer can tell how its tokens were separated."""
        return str(self._tokenizer.decode(list(numbers)))


Tokens = Bytes | Characters | FromFile


def tokens_for(kind: str, characters: str) -> Tokens:
    """Return the tokens that a job's `data.tokens` names; `characters` are those that a model knows. Raises DataError.

    Without `characters`, a text's own have to be taken.
    """
    if kind == "bytes":
        return Bytes()
    return Characters(characters) if kind == "characters" else FromFile(kind)
