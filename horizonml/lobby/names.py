"""Checks names of files that another device has sent, so that nothing is written anywhere but where it belongs."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

_MOST_NAME, _MOST_PART, _MOST_DEEP = 1000, 200, 32  # characters, and folders
# Letters and digits of any script; none of the characters that a shell, a file system or a terminal takes for its own.
_PART = re.compile(r"[\w(\[][\w .,+=@()\[\]&%#'-]*")
_RESERVED = {"con", "prn", "aux", "nul"}  # of Windows, with whatever ending


def check_name(name: object) -> PurePosixPath:
    """Return the path, below a folder, that a name from elsewhere stands for. Raises ValueError.

    Refused are absolute paths, "..", hidden files, control characters and other odd ones, and names that are too long.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME:
        raise ValueError(f"the name of a file must be a text of 1 to {_MOST_NAME} characters")
    parts = name.split("/")
    if len(parts) > _MOST_DEEP:
        raise ValueError(f"the file {name[:60]!a} ... lies in more than {_MOST_DEEP} folders")
    for part in parts:
        fits = len(part.encode()) <= _MOST_PART and _PART.fullmatch(part) is not None and part.isprintable()
        if not fits or part.endswith((" ", ".")) or part.partition(".")[0].lower() in _RESERVED:
            raise ValueError(f"{name[:60]!a} cannot be the name of a file from another device")
    return PurePosixPath(*parts)
