"""`horizonml init`: a commented job file, and code of your own, to start from."""

from __future__ import annotations

import os
import re
from pathlib import Path

from horizonml.errors import JobError
from horizonml.text import nearest

KINDS = ("digits", "images", "table", "text", "own")  # what to train on; `horizonml init --help` explains them
_ABOUT = {
    "job.yaml": "the job: what to train, on which data, and how the work is divided among the ranks",
    "my_model.py": "the network that the job trains",
    "my_data.py": "the data that the job trains on",
}
_MODEL = re.compile(r"^model:\n(?:  .*\n)+", re.MULTILINE)


def write(folder: Path, kind: str = "digits", model: str = "own") -> dict[Path, str]:
    """Write the starter files for a kind of data to a folder; return what each of them is about, by its path.

    A `model` other than "own" is the name of a known one. Raises JobError rather than overwrite anything.
    """
    files = _files(kind, model)
    for name in files:
        if os.path.lexists(folder / name):
            raise JobError(f"{folder / name} already exists, and is not overwritten; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise JobError(f"{error.filename or folder}: {error.strerror or error}; name a folder to write to") from None
    return {folder / name: _ABOUT[name] for name in files}


def _files(kind: str, model: str) -> dict[str, str]:
    """Return the text of each file. Raises JobError."""
    if kind not in KINDS:
        raise JobError(f"--data: {kind!r} is not one of {', '.join(KINDS)}{nearest(kind, KINDS)}")
    source = Path(__file__).parent / kind
    files = {name: (source / name).read_text(encoding="utf-8") for name in _ABOUT if (source / name).is_file()}
    if model != "own":
        files.pop("my_model.py", None)
        section = f"model:\n  name: {model}\n  # options: {{}}             # keyword arguments for it\n"
        files["job.yaml"] = _MODEL.sub(lambda found: section, files["job.yaml"], count=1)
    return files
