"""Turns texts into numbers and back: bytes, characters, or the tokens of a tokenizer in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from horizonml.errors import DataError, is_out_of_memory
from horizonml.machine.extras import require

_SHOWN = 5  # unknown characters that an error names


class Tokens(Protocol):
    """Numbers the tokens of a text."""

    @property
    def size(self) -> int:
        """Return the number of tokens in the vocabulary."""

    def encode(self, text: str) -> Tensor:
        """Return the numbers of a text's tokens, one after the other. Raises DataError for what has no number."""

    def decode(self, numbers: Iterable[int]) -> str:
        """Return the text that consists of these tokens."""


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


def tokens_for(kind: str, characters: str) -> Tokens:
    """Return the tokens that a job's `data.tokens` names; `characters` are those that a model knows. Raises DataError.

    Without `characters`, a text's own have to be taken.
    """
    if kind == "bytes":
        return Bytes()
    return Characters(characters) if kind == "characters" else FromFile(kind)
