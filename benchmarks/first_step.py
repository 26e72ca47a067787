"""Measures the time from `horizonml up` to the first step: python -m benchmarks.first_step [--joiners 4] [--repeats 5].

Devices are network namespaces of this machine, each with a cable to a switch, so that they find each other by mDNS and
meet over TLS as real ones do. They share the processor: five processes load PyTorch on it at once, which devices of
their own would not have to. `up` and all `join` are started at the same moment. The profile of the model and the plan
are made anew each time.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

from benchmarks.chaos.network import Networks
from horizonml.security.token import TOKEN_FILE, make_token, save_token

_FOUND = re.compile(r"^found .* \(after ([\d.]+) s\)", re.MULTILINE)
_STEP = re.compile(r"first step was done ([\d.]+) s after the start, ([\d.]+) s after `horizonml up`")
_DEADLINE_SECONDS = 300.0


def measure(joiners: int, options: list[str]) -> tuple[list[float], float, float]:
    """Return the seconds in which each device found the run, from the start to the first step, and from `up` to it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        networks = stack.enter_context(Networks(joiners + 1))
        token = save_token(make_token(), folder / "token")
        env = {
            **os.environ,
            "PYTHONPATH": os.getcwd(),
            TOKEN_FILE: str(token),
            "HORIZONML_CACHE": str(folder / "cache"),
        }
        outputs: list[list[str]] = []

        def start(device: int, *words: str) -> subprocess.Popen[str]:
            home = folder / f"device-{device}"
            home.mkdir()
            command = networks.at_rank(device, [sys.executable, "-m", "horizonml", *words, "--name", home.name])
            process = subprocess.Popen(
                command, cwd=home, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            stack.callback(process.wait, 10.0)
            stack.callback(process.kill)
            assert process.stdout is not None
            stack.callback(process.stdout.close)
            lines: list[str] = []
            outputs.append(lines)
            threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True).start()
            return process

        host = start(0, "up", *options, "--workers", str(joiners + 1))
        others = [start(device, "join") for device in range(1, joiners + 1)]
        for process in (host, *others):
            process.wait(_DEADLINE_SECONDS)
        said = ["".join(lines) for lines in outputs]
    step = _STEP.search(said[0])
    if step is None:
        raise SystemExit(f"there was no first step:\n{said[0]}")
    found = [float(match.group(1)) for match in map(_FOUND.search, said[1:]) if match is not None]
    return found, float(step.group(1)), float(step.group(2))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--joiners", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--strategy", default="auto")
    arguments = parser.parse_args()
    options = ["digits", "--set", "epochs=2", "--set", f"parallel.strategy={arguments.strategy}"]
    discovery, after_start, after_up = list[float](), list[float](), list[float]()
    for _ in range(arguments.repeats):
        found, start, up = measure(arguments.joiners, options)
        discovery += found
        after_start.append(start)
        after_up.append(up)
    for name, values in (
        ("run found", discovery),
        ("start to first step", after_start),
        ("up to first step", after_up),
    ):
        median, longest = statistics.median(values), max(values)
        print(f"{name:20} median {median:5.1f} s, longest {longest:5.1f} s, of {len(values)}")


if __name__ == "__main__":
    main()
