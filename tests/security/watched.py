"""Feeds every text field of a job from the network to what a device does with one, while an audit hook watches.

It runs in a process of its own, because an audit hook cannot be removed:
`python -m tests.security.watched FOLDER STATED CANARY`.
It prints as JSON what was touched that must not be, and what the hook noticed of a deliberate touch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import aiohttp  # noqa: F401  (what takes long to load is loaded before the hook watches)
import torch
import yaml

from horizonml.data.choose import describe
from horizonml.data.dataset import DataInfo, TensorSpec
from horizonml.errors import HorizonError
from horizonml.files import cache_folder
from horizonml.job.jobfile import TAKEN, FieldKind
from horizonml.job.schema import Job
from horizonml.machine.signals import StopRequest
from horizonml.machine.torchvision import import_torchvision
from horizonml.models.tuning import import_peft
from horizonml.models.zoo import build
from horizonml.runtime.lobby.offer import CalledAway, JoinPreparation, JoinSettings, confinement
from horizonml.tasks.choose import task_for
from horizonml.tasks.task import InputSpec
from horizonml.telemetry.sinks import Feeds, check_packages
from tests.security.test_foreign_jobs import leaves

SECTIONS: dict[str, dict[str, Any]] = {  # what makes the values of a field count
    "data.path": {"data": {"name": "text"}},
    "data.tokens": {"data": {"name": "text"}},
    "data.folder": {"data": {"name": "folder"}},
    "model.weights.base_url": {"model": {"name": "resnet18", "weights": {"source": "IMAGENET1K_V1"}}},
    "model.lora.targets": {"model": {"lora": {"targets": ["*"]}}},
    "model.lora.train": {"model": {"lora": {"targets": ["*"]}}},
    "model.weights.sha256": {"model": {"weights": {"source": "x"}}},
}
STREAM = {"data": {"name": "stream", "inputs": ["jpg"], "targets": ["cls"]}}
HUGGING_FACE = {"data": {"name": "huggingface", "targets": ["y"]}}
TABLE = {"data": {"name": "table", "targets": ["y"]}}
USED: set[str] = set()
WATCHED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.startfile", "pty.spawn")


def payloads(folder: Path, stated: str, canary: int) -> tuple[str, ...]:
    """Return texts of every kind that a library or a shell might understand."""
    private, here = folder / "private", f"127.0.0.1:{canary}"
    return (
        *(f"{private}/{name}" for name in ("words.txt", "table.csv", "w-01234567.pth", "set", "tokens.json")),
        "link/words.txt", "offered/../private/words.txt", "offered/link.txt", "../private/words.txt", "/etc/passwd",
        *(f"http://{host}:{canary}/w-01234567.pth" for host in ("127.0.0.1", "localhost", "2130706433", "[::1]")),
        f"http://{stated}/redirect-01234567.pth", f"http://{stated}/redirected", f"http://{stated}/scheme-01234567.pth",
        "http://169.254.169.254/latest-01234567.pth", f"http://user@{here}/", f"ftp://{here}/x",
        f"file://{private}/words.txt", f"sqlite:///{private}/x.db", f"local-dir:{private}", "databricks",
        f"reference://d::http://{here}/", f"simplecache::file://{private}/w-01234567.pth",
        f"https://{stated}/x::file://{private}/words.txt", f"zip://x::{private}/words.txt", "memory://x", "hub:../x",
        "{{cycler.__init__.__globals__.os.system('touch hacked')}}", "$(touch hacked)", "`touch hacked`", "${HOME}",
        "planted:build", "planted.build", "os:system", "subprocess:getoutput", "timm:hf-hub:a/b", "hf-hub:a/b",
        "~", "..", "../../x", "a\x00b", "a\nb", "a\x1b[2J", "\u202ex", "x" * 5000, "-c", "%s%n", "",
    )  # fmt: skip


def jobs(field: str, text: str) -> Iterator[dict[str, Any]]:
    """Yield jobs whose field has this text."""
    bases = [SECTIONS.get(field, {}), *([STREAM, HUGGING_FACE, TABLE] if field == "data.path" else [])]
    if "/scheme" in text:  # a stream would ask for it again and again
        bases = [base for base in bases if base is not STREAM]
    for base in bases:
        values = json.loads(json.dumps({"name": "x", **base}))
        *sections, last = field.split(".")
        target = values
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = [text] if "list[" in str(leaves()[field].annotation) else text
        if last == "options":
            for options in ({"weights": text}, {"a": [{"b": text}]}, {text: 1}):
                target[last] = options
                yield json.loads(json.dumps(values))
        elif field == "model.weights.source" and text.startswith("http"):
            target["sha256"] = "a" * 64
        yield values


class Offering:
    """Answers with one job, as the device that offers it does."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._reply = {"job": yaml.safe_dump(job), "name": "x", "lineage": "0" * 32, "run": "0" * 32}

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._reply


def run(job: dict[str, Any], settings: JoinSettings) -> bool:
    """Do with a job what a device does that joins; return whether it was taken over."""
    preparation = JoinPreparation(settings, StopRequest(), Offering(job), "evil")  # type: ignore[arg-type]
    try:
        taken, _ = preparation.job()
        taken = preparation.with_data(taken)
    except (HorizonError, CalledAway):
        return False
    image = TensorSpec((3, 8, 8))
    info = DataInfo(100, 10, (image,), outputs=10, task="classification")
    for part, use in (
        (taken.data, lambda: describe(taken.data)),
        (taken.task, lambda: task_for(taken, info)),
        (taken.model, lambda: build(taken.model, 0, 10, InputSpec((image,)))),
        (taken.telemetry, lambda: log(taken)),
    ):
        if repr(part) not in USED:  # as most parts are the same in most jobs
            USED.add(repr(part))
            with suppress(HorizonError):
                use()
    return True


def log(job: Job) -> None:
    """Begin what a leader logs."""
    check_packages(job.telemetry)
    feeds = Feeds(job.telemetry, job.run_folder)
    feeds.put({"kind": "run", "job": job.model_dump(), "time": 0})
    feeds.close()


def main() -> None:
    folder, stated, canary = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    os.environ.update(confinement(f"{stated}", False) | {"HORIZONML_FETCH_FROM": stated.partition(":")[0]})
    touched: list[str] = []
    current = ""
    own = [str(path) for path in (folder / "runs", folder / "tmp", cache_folder(), folder / "home" / ".cache")]
    system = "/proc /sys /dev /etc/ssl /etc/hosts /etc/resolv.conf /etc/nsswitch.conf /etc/host.conf /etc/gai.conf"
    places = [sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), *filter(None, sys.path), *system.split()]
    program = [os.path.realpath(place) for place in (*places, "/usr/lib", "/usr/share")]

    def within(path: str, places: list[str]) -> bool:
        return any(path == place or path.startswith(place.rstrip("/") + "/") for place in places)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if isinstance(arguments[2], int) else False
            if not within(path, own if writes else own + program) and path != "/dev/null":
                touched.append(f"{current}: {'wrote' if writes else 'opened'} {path}")
        elif event == "socket.connect" and isinstance(arguments[1], tuple):
            if f"{arguments[1][0]}:{arguments[1][1]}" != stated:
                touched.append(f"{current}: connected to {arguments[1]}")
        elif event == "import" and arguments[0].partition(".")[0] == "planted":
            touched.append(f"{current}: imported {arguments[0]}")
        elif event in WATCHED:
            touched.append(f"{current}: {event} {arguments[0]!r}")

    texts = [name for name, info in leaves().items() if "str" in str(info.annotation) or name.endswith("options")]
    careful = JoinSettings(None, folder / "runs", (folder / "offered",))
    agreeing = JoinSettings(None, folder / "runs", (folder / "offered",), accept_data=True)
    run({"name": "x"}, agreeing)  # what is loaded once
    sys.addaudithook(watch)
    taken, slow = 0, list[str]()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        for field in texts:
            for text in payloads(folder, stated, canary):
                for job in jobs(field, text):
                    for settings in (careful, agreeing) if TAKEN[field].kind is FieldKind.PLACE else (agreeing,):
                        current = f"{field}: {text[:80]!r}"
                        began = time.monotonic()
                        taken += run(job, settings)
                        if time.monotonic() - began > 5:
                            slow.append(current)
    current = "deliberately"
    before = list(touched)
    (folder / "private" / "words.txt").read_text()
    assert set(texts) <= set(TAKEN)
    found = {"touched": sorted(set(before)), "noticed": touched[len(before) :], "taken": taken, "slow": slow}
    print(json.dumps({**found, "fields": len(texts)}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    import_torchvision()
    if find_spec("peft") is not None:
        import_peft()
    main()
