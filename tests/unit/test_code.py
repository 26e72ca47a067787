"""Which modules are the user's own, and that anything may be in them."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from pathlib import Path

from torch import classes, nn

from horizonml.models.own_state import OwnState

LOADED = classes  # asking it for an attribute that it does not have raises RuntimeError


class Net(nn.Linear):
    """A model of this module's, which is the user's own."""


def test_an_own_module_may_hold_what_cannot_be_looked_at() -> None:
    assert OwnState(Net(2, 2)).changed() == []


def test_packages_of_the_system_are_not_the_users_own_in_an_environment_that_uses_them(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    (inside,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    root = Path(__file__).resolve().parents[2]
    (inside / "system.pth").write_text(f"{sysconfig.get_path('purelib')}\n{root}\n")
    program = "import numpy\nfrom horizonml.machine.code import is_own_file\nprint(is_own_file(numpy.__file__))"
    command = [tmp_path / "venv" / "bin" / "python", "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout == "False\n"
