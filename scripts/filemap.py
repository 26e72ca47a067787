"""The list of modules in docs/architecture.md, from the first line of each module's docstring."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- files: begin -->\n", "<!-- files: end -->\n"


def document() -> str:
    """Return docs/architecture.md with its list of files as the package is now."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{PAGE} lacks {BEGIN}"
    assert end, f"{PAGE} lacks {END}"
    return before + begin + "\n" + _lists() + "\n" + end + after


def _lists() -> str:
    """Return a table for each room of the package; modules without a docstring have nothing in them."""
    parts = []
    files = sorted((ROOT / "horizonml").rglob("*.py"), key=lambda path: (path.parent.parts, path.name))
    for folder, modules in itertools.groupby(files, key=lambda path: path.parent):
        rows = [(path.name, about) for path in modules if (about := _about(path))]
        if rows:
            parts.append(f"### `{folder.relative_to(ROOT).as_posix()}/`\n\n| file | what it is |\n|---|---|")
            parts += [f"| `{name}` | {about} |" for name, about in rows]
            parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _about(path: Path) -> str:
    """Return the first sentence or two of a module's docstring: its first line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0].strip().replace("|", "\\|")
