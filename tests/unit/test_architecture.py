"""Holds the architecture still: which room may import which, few loose modules, and no file that is too long."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "horizonml"
MOST_LINES = 500
MOST_LOOSE = 5

# Every room may import these. `spec` is the layer of what a job file says: the room `spec`, and each room's `spec.py`,
# which stands beside what it configures but imports nothing of its room.
FOUNDATION = {"__init__", "errors", "text", "files"}

# Room -> the rooms that it may import, from the bottom up; a circle among them fails a test below.
TABLE: dict[str, set[str]] = {
    "plan": set(),
    "machine": set(),
    "security": set(),
    "comm": {"machine", "security"},
    "spec": {"plan"},  # whose schedules a job may name
    "job": {"plan", "spec"},
    "data": {"machine", "spec"},
    "tasks": {"data", "job", "machine", "spec"},
    "models": {"data", "machine", "spec", "tasks"},
    "planner": {"job", "plan", "spec"},
    "state": {"comm", "data", "job", "machine", "models", "plan", "spec", "tasks"},
    "engine": {"comm", "data", "machine", "models", "plan", "planner", "state", "tasks"},
    "profiling": {"comm", "data", "engine", "job", "machine", "models", "plan", "planner", "spec", "state"},
    "telemetry": {"engine", "job", "machine", "plan", "spec"},
    "rendezvous": {"machine", "security"},
    "runtime": {
        "comm", "data", "engine", "job", "machine", "models", "plan", "planner", "profiling", "rendezvous", "security",
        "spec", "state", "tasks", "telemetry",
    },
    "kube": {"job", "machine", "security", "telemetry"},
    "report": {"engine", "job", "machine", "plan", "planner", "runtime", "security", "telemetry"},
    "api": {
        "data", "job", "machine", "models", "plan", "planner", "rendezvous", "report", "runtime", "spec", "state",
        "tasks", "telemetry",
    },
    "cli": {
        "api", "comm", "job", "kube", "machine", "models", "plan", "planner", "profiling", "rendezvous",
        "report", "runtime", "security", "spec", "state", "telemetry",
    },
    "__main__": {"cli"},
}  # fmt: skip


def modules() -> dict[str, Path]:
    """All modules by name, without the starter files, which are a user's own."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["horizonml", *path.relative_to(ROOT).with_suffix("").parts]
        if parts[1:3] != ["job", "starter"] or len(parts) == 4:
            found[".".join(parts)] = path
    return found


def room(module: str) -> str:
    parts = module.split(".")
    if len(parts) == 1:
        return "__init__"
    return "spec" if parts[1:-1] and parts[-1] == "spec" else parts[1]


def for_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """The modules of this package that a module imports, in functions too, but not for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if for_typing(node):
            assert isinstance(node, ast.If)
            for other in node.orelse:
                yield from imported(other, known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name their module in full"
            if node.module is not None and node.module.split(".")[0] == "horizonml":
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    yield name if name in known or f"{name}.__init__" in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "horizonml")
        else:
            yield from imported(node, known)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def arrows() -> set[tuple[str, str]]:
    known = modules()
    return {(module, target) for module, path in known.items() for target in imported(tree(path), known)}


def test_the_top_of_the_package_has_few_loose_modules() -> None:
    loose = sorted(path.stem for path in ROOT.glob("*.py"))
    assert len(loose) <= MOST_LOOSE, loose
    assert {"__init__", "__main__"} <= set(loose)


def test_no_room_imports_one_that_it_may_not() -> None:
    wrong = {
        (module, target)
        for module, target in arrows()
        if room(target) not in {room(module), *FOUNDATION} | TABLE.get(room(module), set())
        and room(module) not in FOUNDATION
    }
    assert not wrong, f"these imports run against the table of rooms: {sorted(wrong)}"
    assert {room(target) for module, target in arrows() if room(module) in FOUNDATION} <= FOUNDATION


def test_the_table_of_rooms_has_no_circle_and_names_every_room() -> None:
    TopologicalSorter(TABLE).prepare()  # raises CycleError
    rooms = {room(module) for module in modules()} - FOUNDATION
    assert rooms <= set(TABLE), f"say what these rooms may import: {sorted(rooms - set(TABLE))}"


def test_no_modules_import_one_another() -> None:
    graph: dict[str, set[str]] = {}
    for module, target in arrows():
        graph.setdefault(module.removesuffix(".__init__"), set()).add(target)
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_file_is_too_long() -> None:
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in modules().items()}
    assert not {module: lines for module, lines in lengths.items() if lines > MOST_LINES}


def test_the_name_of_a_class_means_one_thing() -> None:
    """Names that begin with an underscore are seen in one module only, so they may recur."""
    found: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
