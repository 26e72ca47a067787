"""What a job may name as `module:callable`: code is found where the user is, and judged before it is called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from horizonml.errors import ModelError
from horizonml.models.source import find
from tests.commands import command

OWN = """
import functools
from subprocess import getoutput
from typing import TypeVar
from torch import nn

Some = TypeVar("Some", bound=nn.Module)

class Net(nn.Sequential):
    @classmethod
    def small(cls):
        return cls()

class Factory:
    def __call__(self) -> nn.Module:
        return Net()

def bare(): return Net()
def exact() -> Net: return Net()
def quoted() -> "nn.Module": return Net()
def unknown() -> "NoSuchName": return Net()
def bound(some: Some) -> Some: return some
def text() -> str: return ""
def nothing() -> None: pass
@functools.lru_cache
def cached() -> Net: return Net()
partial = functools.partial(exact)
partial_of_theirs = functools.partial(getoutput, "touch called")
factory = Factory()
number = 3
model = Net()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])  # as in an installed `horizonml`
    (tmp_path / "my_net.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "my_net", raising=False)
    return tmp_path


def test_models_of_ones_own_are_found_in_the_working_directory(own: Path) -> None:
    for name in ("Net", "Net.small", "bare", "exact", "quoted", "unknown", "bound", "cached", "partial", "factory"):
        assert callable(find(f"my_net:{name}"))


def test_models_of_packages_are_found() -> None:
    assert find("torch.nn:Sequential") is nn.Sequential
    assert find("torchvision.models:resnet18").__name__ == "resnet18"
    assert find("horizonml.models.small:digits_cnn").__name__ == "digits_cnn"


REFUSED = {
    "subprocess:getoutput": "comes from subprocess, which is not your own code",
    "my_net:getoutput": "comes from subprocess, which is not your own code",
    "my_net:partial_of_theirs": "comes from subprocess, which is not your own code",
    "os:system": "is not written in Python",
    "os:makedirs": "comes from os, which is not your own code",
    "builtins:exec": "is not written in Python",
    "builtins:dict": "is a class, but not a torch.nn.Module",
    "torch.hub:load": "comes from torch.hub, which is not your own code",
    "torch:load": "returns Any|comes from torch",
    "horizonml.cli.main:main": "returns NoReturn|returns typing.NoReturn",
    "my_net:text": "returns str, not a torch.nn.Module",
    "my_net:model": "is a model already, and every rank builds its own part",
    "my_net:number": "is of type int, not a function",
    "my_net:Net.smal": r"Net.*has no 'smal'; did you mean 'small'\?",
    "my_net:exakt": r"my_net\.py has no 'exakt'; did you mean 'exact'\?",
    "my_nett:exact": r"there is no module my_nett in .*, or among the installed packages; did you mean 'my_net'\?",
    "qqqqzzzz:exact": r"there is no module qqqqzzzz in .* packages; start in the folder that has qqqqzzzz\.py$",
    "my_net.py:exact": "no module my_net.py in .*; name it without its ending: my_net$",
    "my_net.inner:exact": "failed|there is no module my_net.inner",
}


def test_what_does_not_return_a_model_is_refused_before_it_is_called(own: Path) -> None:
    for name, words in REFUSED.items():
        with pytest.raises(ModelError, match=words):
            find(name)
    assert not (own / "called").exists()


def test_a_module_that_fails_is_told_with_its_line(own: Path) -> None:
    (own / "fails.py").write_text("\n\nx = 1 / 0\n")
    with pytest.raises(ModelError, match=r"importing fails failed: .*fails\.py:3: ZeroDivisionError: division by zero"):
        find("fails:x")
    (own / "needs.py").write_text("import no_such_package\n")
    with pytest.raises(ModelError, match="needs needs the module no_such_package, which is not installed"):
        find("needs:x")
    (own / "wrong.py").write_text("def f(:\n")
    with pytest.raises(ModelError, match=r"importing wrong failed: .*SyntaxError"):
        find("wrong:f")


def test_commands_find_models_in_the_working_directory_and_refuse_others(own: Path) -> None:
    """With the installed command's path, which lacks the working directory."""
    (own / "job.yaml").write_text("data: {name: digits}\nmodel: {name: 'my_model:build'}")
    (own / "my_model.py").write_text(
        "from torch import nn\ndef build(num_classes: int) -> nn.Module:\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    found = command(own, "plan", "job.yaml", HORIZONML_CACHE=str(own / "cache"))
    assert found.returncode == 0, found.stderr
    job = ["job.yaml", "--set", "model.name=subprocess:getoutput", "--set", "model.options={cmd: touch called}"]
    for name in ("validate", "plan"):
        refused = command(own, name, *job)
        assert refused.returncode == 1
        assert "subprocess, which is not your own code" in refused.stderr
    assert not (own / "called").exists()
