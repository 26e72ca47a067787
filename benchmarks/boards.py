"""Trains on emulated Arm boards, and shows which processors and releases of PyTorch do: `python -m benchmarks.boards`.

`--on` is a command that runs another one on such a board, with this package and a release of PyTorch. It is called with
the name of the processor, as qemu has it, the release, and the command. Emulation shows what runs, and not how fast.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from horizonml.files import write_atomically

BOARDS = {
    "cortex-a53": "Raspberry Pi 3, Zero 2 W",
    "cortex-a57": "Jetson Nano",
    "cortex-a72": "Raspberry Pi 4",
    "cortex-a76": "Raspberry Pi 5",
}
_LITTLE = "--fresh --set epochs=1 --set data.samples=256 --set batch_size=64 --set folder=/tmp/boards"
CASES = {
    "one rank": f"train digits {_LITTLE}/one",
    "pipeline": f"train digits -n 2 --set parallel.strategy=pipeline {_LITTLE}/pipeline",
    "auto": f"train digits -n 2 {_LITTLE}/auto",
    "up and join": (
        f"up digits --workers 2 --port 29500 --no-page {_LITTLE}/up & sleep 20; "
        "python3 -m horizonml join --peer 127.0.0.1:29500; wait $!"
    ),
}
SHORT = ("cortex-a53", "cortex-a72"), ("pipeline", "up and join")


def tried(command: str, seconds: float) -> str:
    """Return "trains", or how a command has ended instead."""
    with subprocess.Popen(
        command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"has not ended within {seconds:.0f} s"
    if process.returncode == 0 and "held-out" in output:
        return "trains"
    print(output[-3000:], file=sys.stderr)
    code = process.returncode
    number = code - 128 if code > 128 else -code
    return signal.Signals(number).name if number in set(signal.Signals) else f"ends with {code}"


def main() -> None:
    """Try all combinations, print them as a table, and fail if one does not train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", required=True, metavar="COMMAND", help="what runs a command on a board")
    parser.add_argument("--releases", nargs="+", default=["2.13.0"], help="of PyTorch")
    parser.add_argument("--short", action="store_true", help="two boards and two cases only")
    parser.add_argument("--seconds", type=float, default=900.0, help="for each case")
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON")
    options = parser.parse_args()
    boards, cases = SHORT if options.short else (tuple(BOARDS), tuple(CASES))
    found: dict[str, dict[str, dict[str, str]]] = {}
    print(f"| board | PyTorch | {' | '.join(cases)} |\n|---|---|{'---|' * len(cases)}", flush=True)
    for board in boards:
        for release in options.releases:
            row = found.setdefault(board, {}).setdefault(release, {})
            for case in cases:
                inside = shlex.quote(f"python3 -m horizonml {CASES[case]}")
                begin = time.monotonic()
                row[case] = tried(f"{options.on} {board} {release} sh -c {inside}", options.seconds)
                print(f"{board} {release} {case}: {row[case]}, {time.monotonic() - begin:.0f} s", file=sys.stderr)
            print(f"| {BOARDS[board]} ({board}) | {release} | {' | '.join(row.values())} |", flush=True)
    if options.out is not None:
        write_atomically(options.out, (json.dumps(found, indent=1) + "\n").encode())
    sys.exit(any(one != "trains" for rows in found.values() for row in rows.values() for one in row.values()))


if __name__ == "__main__":
    main()
