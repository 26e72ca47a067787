"""What `make docs` needs beside mkdocs.yml: pages that lie outside docs/, and a check that no page needs the internet.

mkdocs calls the functions below by their names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# Pages of the site that lie beside what they describe.
ELSEWHERE = {
    "benchmarks/README.md": "benchmarks.md",
    "examples/hetero/README.md": "hetero.md",
    "examples/horovod_tensorflow/README.md": "horovod-tensorflow.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\s\">]+")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages of ELSEWHERE, and the files outside docs/ that pages link to."""
    for path, name in ELSEWHERE.items():
        files.append(File.generated(config, name, content=_translated((ROOT / path).read_text(), ROOT / path)))
    sources = [*DOCS.glob("*.md"), *(ROOT / path for path in ELSEWHERE)]
    for path in sorted({path for source in sources for path in _linked(source)}):
        files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page of docs/ lead to the site's copies of what lies outside docs/."""
    source = DOCS / page.file.src_uri
    return _translated(markdown, source) if source.is_file() else markdown


def on_post_build(config: Any, **_: Any) -> None:
    """Refuse a site that loads scripts, styles or pictures from elsewhere. Raises PluginError."""
    for path in sorted(Path(config["site_dir"]).rglob("*.html")):
        found = [match for match in LOADED.findall(path.read_text()) if 'rel="canonical"' not in match]
        if found:
            raise PluginError(f"{path} loads from the internet: {found[0]}")


def _linked(source: Path) -> Iterator[str]:
    """Yield the files outside docs/ that a page links to and that are no pages, relative to ROOT."""
    for target in LINK.findall(source.read_text()):
        path = _path(target, source)
        if path is not None and path not in ELSEWHERE and not path.startswith("docs/"):
            if not (ROOT / path).is_file():
                raise PluginError(f"{source}: {target} is not a file; link to one that the site can show")
            yield path


def _translated(text: str, source: Path) -> str:
    """Return a page with its links as the site has them."""

    def link(match: re.Match[str]) -> str:
        path = _path(match[1], source)
        if path is None:
            return match[1]
        return ELSEWHERE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}")

    return LINK.sub(link, text)


def _path(target: str, source: Path) -> str | None:
    """Return where a link leads, relative to ROOT; None for one that leads out of the repository."""
    if "://" in target or target.startswith("mailto:"):
        return None
    return os.path.relpath(source.parent / target, ROOT)
