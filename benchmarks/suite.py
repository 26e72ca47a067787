"""Everything that is measured, in one go, and a report on it: `python -m benchmarks.suite short`.

- short: under 12 minutes on two cores (`make bench`)
- long: about an hour and a half on two cores, with CIFAR-10 (`make bench-long`); `--data synthetic` needs no network
- smoke: a minute, to see that all of it runs

Interrupted, the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks.chaos import network

ROOT = Path(__file__).resolve().parent.parent
TENSORFLOW = ROOT / "examples" / "horovod_tensorflow"
ALL = ["single", "ddp", "pipeline", "hybrid", "tensor"]


def commands(form: str, out: Path, data: str) -> list[list[str]]:
    """What to run, each part into a folder of its own."""
    bench = [sys.executable, "-m", "horizonml", "bench"]
    peers = [sys.executable, "-m"]
    strategies = [*ALL, *(["horovod"] if find_spec("horovod") else [])]
    compare, strong, weak = str(out / "compare"), str(out / "scaling-strong"), str(out / "scaling-weak")
    sizes, ours = str(out / "batch-size"), str(out / "peers")
    if form == "smoke":
        small = ["--data", "digits", "--set", "batch_size=32", "--steps", "4"]
        return [
            [*bench, "compare", "--data", "digits", "--samples", "200", "--epochs", "1", "--workers", "3",
             "--strategies", *strategies, "--out", compare],
            [*bench, "scaling", "--mode", "weak", "--workers", "1", "2", "--strategies", "ddp", "pipeline",
             *small, "--set", "data.name=synthetic", "--set", "data.image_size=8", "--out", weak],
            [*bench, "batch-size", "16", "32", "--models", "digits_cnn", "--steps", "2", "--out", sizes],
            [*peers, "benchmarks.ddp", "--short", "--rounds", "1", "--steps", "1", "--out", ours],
        ]  # fmt: skip
    if form == "short":
        return [
            [*bench, "compare", "--data", "digits", "--samples", "400", "1400", "--epochs", "3",
             "--strategies", *strategies, "--out", compare],
            [*bench, "scaling", "--mode", "strong", "--workers", "1", "2", "4", "--steps", "6", "--out", strong],
            [*bench, "scaling", "--mode", "weak", "--workers", "1", "2", "4", "--steps", "6",
             "--set", "batch_size=64", "--out", weak],
            [*bench, "batch-size", "64", "128", "256", "512", "1024", "--steps", "2", "--out", sizes],
            [*peers, "benchmarks.ddp", "--short", "--rounds", "4", "--steps", "3", "--out", ours],
            [*peers, "benchmarks.pipeline", "--short", "--rounds", "3", "--steps", "2", "--out", ours],
            *slow_links(out, "--short"),
        ]  # fmt: skip
    return [
        [*bench, "compare", "--data", data, "--samples", "1000", "10000", "50000", "--workers", "5", "--epochs", "5",
         "--strategies", *strategies, "--out", compare],
        [*bench, "scaling", "--mode", "strong", "--workers", "1", "2", "4", "8", "--repeats", "3", "--out", strong],
        [*bench, "scaling", "--mode", "weak", "--workers", "1", "2", "4", "8", "--repeats", "3", "--out", weak],
        [*bench, "batch-size", "64", "128", "256", "512", "1024", "--models", "resnet50", "resnet18",
         "mobilenet_v3_small", "--steps", "6", "--repeats", "3", "--out", sizes],
        [*peers, "benchmarks.ddp", "--out", ours],
        [*peers, "benchmarks.pipeline", "--out", ours],
        *slow_links(out),
    ]  # fmt: skip


def slow_links(out: Path, *options: str) -> list[list[str]]:
    """The study of slow links, where this machine gives ranks networks of their own."""
    problem = network.problem()
    if problem is not None:
        print(f"Slow links are left out: {problem}", flush=True)
        return []
    return [[sys.executable, "-m", "benchmarks.slow_links", *options, "--out", str(out / "slow-links.json")]]


def main() -> None:
    """Run a form, then write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", choices=("smoke", "short", "long"))
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--data", default="cifar10", help="of the long comparison: cifar10, or synthetic")
    options = parser.parse_args()
    if find_spec("horovod") is None:
        print("Horovod is left out: it is not installed (`make horovod` builds it)", flush=True)
    todo = commands(options.form, options.out, options.data)
    if (TENSORFLOW / ".venv" / "bin" / "horovodrun").exists():
        todo.append([str(TENSORFLOW / "run.sh"), "--out", str(options.out / "horovod-tensorflow")])
    started = time.monotonic()
    for number, command in enumerate(todo, start=1):
        shown = " ".join(command).replace(f"{sys.executable} -m ", "")
        print(f"\n=== {number}/{len(todo)}, after {time.monotonic() - started:.0f} s: {shown}", flush=True)
        code = subprocess.run(command, check=False).returncode
        if code:
            sys.exit(f"`{shown}` ended with code {code}; the same command goes on where it stopped")
    print(f"\n=== report, after {time.monotonic() - started:.0f} s", flush=True)
    sys.exit(subprocess.run([sys.executable, "-m", "horizonml", "report", str(options.out)], check=False).returncode)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
