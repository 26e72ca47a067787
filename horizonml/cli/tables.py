"""Lays out tables and paragraphs so that they fit the terminal, with whole headers, and with nothing cut off.

Where a table is too wide, its headers and texts are wrapped between words; where that is not enough, every row becomes
a short list of names and values. Without a terminal lines are as long as they are, so that they can be searched.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence

from horizonml.text import escaped, plain_lines

_GLUE = "\0"  # a space that no line ends at
_UNITS = r"(?<=\d) (?=(?:ms|s|min|B|[KMG]iB|[KMG]bit/s|KB|MB|GB|%|samples/s)\b)"


def terminal_width() -> int | None:
    """Return how many columns there are to write to: $COLUMNS, else the terminal's; None without one."""
    if not os.environ.get("COLUMNS", "").isdigit() and not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], text: Collection[int] = (0,)) -> None:
    """Print a table that fits the terminal, with its title above; see `layout`."""
    width = terminal_width()
    if title:
        print_text(title)
        print()
    print(layout(header, rows, text, width))


def print_text(text: str, bullet: str = "") -> None:
    """Print a paragraph that fits the terminal, and keeps numbers with their units."""
    text, width = plain_lines(text), terminal_width()
    if width is None:
        print(bullet + text)
        return
    print(_wrapped(_glued(text), width, bullet))


def layout(
    header: Sequence[str], rows: Sequence[Sequence[str]], text: Collection[int] = (0,), width: int | None = None
) -> str:
    """Return a table as text of at most `width` columns.

    Columns whose numbers are in `text` hold words, and may be wrapped; the others hold numbers, and are aligned right.
    """
    plain = [[escaped(cell) for cell in row] for row in rows]
    rows = [[_glued(cell) if number in text else cell for number, cell in enumerate(row)] for row in plain]
    natural = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    least = []
    for number, (name, *cells) in enumerate(zip(header, *rows, strict=True)):
        parts = [word for cell in cells for _, word in (_words(cell) if number in text else [("", cell)])]
        least.append(max(map(len, [*(word for _, word in _words(name)), *parts])))
    for gap in ("  ", " "):
        free = sum(natural) if width is None else width - len(gap) * (len(header) - 1)
        if sum(least) <= free:
            break
    else:
        return _listing(header, rows, text, width or 80)
    widths = list(least)
    for _ in range(min(free, sum(natural)) - sum(least)):  # to whoever lacks most
        widths[max(range(len(widths)), key=lambda number: natural[number] - widths[number])] += 1
    lines = [*_lines(header, widths, text, gap), gap.join("-" * wide for wide in widths)]
    for row in rows:
        lines += _lines(row, widths, text, gap)
    return "\n".join(lines).replace(_GLUE, " ")


def _glued(text: str) -> str:
    """Return the text with its numbers kept on the same line as their units."""
    return re.sub(_UNITS, _GLUE, text)


def _lines(row: Sequence[str], widths: Sequence[int], text: Collection[int], gap: str) -> list[str]:
    """Return a row on as many lines as its longest cell takes."""
    cells = [_fill(cell, wide) for cell, wide in zip(row, widths, strict=True)]
    found = []
    for line in range(max(map(len, cells))):
        parts = [
            f"{cell[line] if line < len(cell) else '':{'<' if number in text else '>'}{wide}}"
            for number, (cell, wide) in enumerate(zip(cells, widths, strict=True))
        ]
        found.append(gap.join(parts).rstrip())
    return found


def _words(cell: str) -> list[tuple[str, str]]:
    """Return the words that may stand on lines of their own, each with the space before it; a slash may end one."""
    found = []
    for space, word in re.findall(r"(\s*)(\S+)", cell):
        first, *others = re.split(r"(?<=/)(?=\w{3})", word)
        found += [(space, first), *(("", part) for part in others)]
    return found or [("", "")]


def _fill(cell: str, width: int) -> list[str]:
    """Return a cell as lines of at most so many characters, broken as in `_words`."""
    if len(cell) <= width:
        return [cell]
    lines = [""]
    for space, word in _words(cell):
        joined = f"{lines[-1]}{space if lines[-1] else ''}{word}"
        if len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines


def _listing(header: Sequence[str], rows: Sequence[Sequence[str]], text: Collection[int], width: int) -> str:
    """Return every row as a list of names and values."""
    found = []
    for row in rows:
        items = [f"{name} {cell}".strip() for name, cell in zip(header, row, strict=True)]
        items = [
            item.replace(" ", _GLUE) if number not in text and len(item) < width - 2 else item
            for number, item in enumerate(items)
        ]
        found.append(_wrapped(", ".join(items), width, "- "))
    return "\n".join(found)


def _wrapped(text: str, width: int, bullet: str) -> str:
    wrapper = textwrap.TextWrapper(
        width, initial_indent=bullet, subsequent_indent=" " * len(bullet), break_on_hyphens=False
    )
    return wrapper.fill(text).replace(_GLUE, " ")
