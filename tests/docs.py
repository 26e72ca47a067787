"""The pages of the documentation as tests see them: their code blocks, and the commands in those.

A block that cannot run on a bare machine has a comment before it that says what it needs: `<!-- needs: docker -->`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.commands import COMMAND

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "examples/*/*.md", "horizonml/data/*.md")
    for page in ROOT.glob(pattern)
)
LANGUAGES = {"sh", "console", "python", "yaml", "text"}
_BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>[^\n]+) -->\n)?^```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S
)
# What separates commands, what sends output elsewhere, and what may stand before a command.
_SEPARATORS, _REDIRECTIONS, _ASSIGNMENT = {"&&", "||", ";", "|", "&"}, {">", ">>", "<", "2>"}, re.compile(r"\w+=.*")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    needs: str  # what it needs to run; empty if it runs on a bare machine
    title: str  # the file that it shows, where it shows one

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        title = re.search(r'title="([^"]+)"', match["info"])
        needs = match["needs"] or ""
        found.append(Block(page, line, match["language"], match["text"], needs, title[1] if title else ""))
    return found


def typed(block: Block) -> str:
    """Return what a reader types of a `sh` or `console` block."""
    if block.language == "sh":
        return block.text
    return "".join(line.removeprefix("$ ") for line in block.text.splitlines(keepends=True) if line.startswith("$ "))


def commands(text: str) -> Iterator[list[str]]:
    """Yield the simple commands of a shell script as lists of words, without assignments and redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        skip = False
        for word in [*lexer, ";"]:
            if skip:
                skip = False
            elif word in _REDIRECTIONS:
                skip = True
            elif word in _SEPARATORS:
                if words:
                    yield words
                words = []
            elif words or not _ASSIGNMENT.fullmatch(word):
                words.append(word)


def parse_horizonml(arguments: list[str]) -> None:
    """Parse the arguments of `horizonml` as the command line does, without running anything. Raises on a mistake."""
    command: Any = COMMAND
    name, rest = "horizonml", list(arguments)
    while rest and not rest[0].startswith("-") and hasattr(command, "commands"):
        name = rest.pop(0)
        assert name in command.commands, f"there is no command {name!r}"
        command = command.commands[name]
    command.make_context(name, rest)


def options_of(arguments: list[str]) -> set[str] | None:
    """Return the options of the command that `horizonml` is given, or None if there is no such command."""
    command: Any = COMMAND
    for word in arguments:
        if not hasattr(command, "commands"):
            break
        if word not in command.commands:
            return None
        command = command.commands[word]
    return {name for option in command.params for name in option.opts} | {"--help", "-h"}
