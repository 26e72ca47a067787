"""Writes the systemd unit by which a device joins every training on its network: `horizonml join --print-unit`."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template

from horizonml.errors import JobError

_HOMES = ("home", "root")  # folders at the top that ProtectHome= of systemd hides
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


def unit(options: Sequence[str], program: Sequence[str] = (), source: str = "~/.config/horizonml/token") -> str:
    """Return the unit that runs `horizonml join` with these options, without --print-unit.

    `program` is the command that runs horizonml, by default the one that runs now. `source` is where the file with the
    token is, for the comment that says how to install it. Where the program is in somebody's home, the service runs as
    that user, who alone may be able to read it; elsewhere, as a user of its own. Raises JobError for an option that
    cannot stand in a unit, or makes no sense there.
    """
    if "--insecure" in options:
        raise JobError("--print-unit: a device that always joins needs a token; leave --insecure out")
    command = [*(program or this_program()), "join", *options]
    home = _home(command[0])
    user = "DynamicUser=yes" if home is None else f"User={_owner(home)}"
    template = resources.files("horizonml.machine").joinpath("join.service").read_text(encoding="utf-8")
    return Template(template).substitute(
        command=" ".join(_quoted(word) for word in command),
        options=shlex.join(options),
        token=source,
        user=user,
        home="yes" if home is None else "read-only",
    )


def this_program() -> list[str]:
    """Return the command by which this program was started, with the whole path."""
    beside = Path(sys.executable).with_name("horizonml")
    found = str(beside) if beside.exists() else shutil.which("horizonml")
    return [found] if found is not None else [sys.executable, "-m", "horizonml"]


def _home(program: str) -> Path | None:
    """Return the home that a program lies in, or None."""
    parts = Path(program).parts
    if len(parts) < 3 or parts[0] != "/" or parts[1] not in _HOMES:
        return None
    return Path(*parts[: 2 if parts[1] == "root" else 3])


def _owner(home: Path) -> str:
    """Return the user to whom a home belongs."""
    try:
        return home.owner()
    except (KeyError, OSError):
        return home.name


def _quoted(word: str) -> str:
    """Return a word of a command as systemd reads it. Raises JobError."""
    if not word.isprintable():
        raise JobError(f"--print-unit: {word!a} cannot stand in a unit")
    escaped = word.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(word):
        return escaped
    escaped = escaped.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
