"""`horizonml init`: a commented job file and a model of your own, to start from."""

from __future__ import annotations

import os
from pathlib import Path

from horizonml.errors import JobError

FILES = {
    "job.yaml": "what to train, on which data, and how the work is spread over the ranks",
    "my_model.py": "the network that it trains",
}


def write(folder: Path) -> list[Path]:
    """Write the starter files to a folder, and return their paths. Raises JobError rather than overwrite anything."""
    for name in FILES:
        if os.path.lexists(folder / name):
            raise JobError(f"{folder / name} is there already, and is not overwritten; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write((Path(__file__).parent / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"{error.filename or folder}: {error.strerror or error}; name a folder to write to") from None
    return [folder / name for name in FILES]
