"""Writes the generated pages under docs/: `python scripts/docs.py`."""

from __future__ import annotations

from pathlib import Path

from horizonml.telemetry.metrics import document

DOCS = Path(__file__).resolve().parent.parent / "docs"

if __name__ == "__main__":
    (DOCS / "metrics.md").write_text(document())
