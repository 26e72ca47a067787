"""Before any test: how the processes that run tests use their threads."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import hypothesis  # noqa: F401  (before garbage is frozen: its plug-ins look for what refers to their objects)
import pytest

import horizonml  # noqa: F401  (first: it says how OpenMP's threads wait, before torch loads them)

_LEFT_OUT = pytest.StashKey[str]()
_SHARED_OUT = ("distributed/test_docs.py", "distributed/test_any_losses.py", "unit/test_better_clusters.py")

if "PYTEST_XDIST_WORKER" in os.environ:  # others run tests on the other cores
    import torch

    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that need more GPUs than there are, and say why; `gpu(2)` needs two."""
    marks = [(item, item.get_closest_marker("gpu")) for item in items]
    wanted = {item: mark.args[0] if mark.args else 1 for item, mark in marks if mark is not None}
    if not wanted:
        return
    there, reason = gpus()
    left_out = [item for item, count in wanted.items() if count > there]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
        config.stash[_LEFT_OUT] = f"{len(left_out)} tests that need a GPU were left out: {reason}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process a file at a time, but a single test of those files that would take longest."""
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrTest(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if "[" in nodeid and file.endswith(_SHARED_OUT) else file

    return ByFileOrTest(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of all collections of garbage, each of which would take half a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect the garbage of a file of tests, which may hold open files and sockets."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()  # with what was loaded meanwhile, the next collection would take a second


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that has started this one, if any, what was left out here."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(_LEFT_OUT, "")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take note of what was left out in a process of pytest-xdist."""
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", "")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out."""
    if config.stash.get(_LEFT_OUT, ""):
        terminalreporter.write_line(config.stash[_LEFT_OUT])


def gpus() -> tuple[int, str]:
    """The number of GPUs that tests can use here, and why there are no more."""
    from horizonml.errors import JobError
    from horizonml.machine.accelerator import choose_device

    try:
        choose_device("cuda", 0)
    except JobError as error:
        return 0, str(error)
    import torch

    return torch.cuda.device_count(), f"this machine has {torch.cuda.device_count()}"


@pytest.fixture(autouse=True)
def _choices_of_its_own() -> Iterator[None]:
    """Undo the choices of network interface and device that a test makes for its process and all it starts."""
    before = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "HORIZONML_DEVICE")}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
