"""Runs everything that needs a GPU, and writes down what it measures: `make test-gpu`.

The environment that runs this needs a build of PyTorch for its GPU, and `pip install '.[dev]'`. First come the tests
with the marker `gpu`; then a few numbers, which go to runs/gpu/numbers.json and to the screen.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "gpu"
ROUNDS, STEPS = 5, 20


def main() -> int:
    """Run the tests and the measurements, and return the exit code."""
    sys.path.insert(0, str(ROOT))
    from horizonml.errors import JobError
    from horizonml.machine.accelerator import choose_device

    try:
        gpu = choose_device("cuda", 0)
    except JobError as error:
        print(f"nothing can be tested here: {error}", file=sys.stderr)
        return 2
    OUT.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/distributed/test_gpu.py"]
    command.append(f"--junitxml={OUT / 'tests.xml'}")
    began = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    numbers = {"device": gpu.name, **about(), "tests": {"exit_code": code, "seconds": time.monotonic() - began}}
    numbers |= {"copies": copies(gpu.device), "steps": steps(gpu.device)}
    (OUT / "numbers.json").write_text(json.dumps(numbers, indent=1))
    print(json.dumps(numbers, indent=1))
    print(f"these numbers are in {OUT / 'numbers.json'}")
    return code


def about() -> dict[str, Any]:
    """Return the versions that the numbers are of."""
    import torch

    from horizonml.machine.host import machine_info, versions

    return {"cuda": torch.version.cuda, "versions": versions(), "machine": machine_info().to_json()}


def copies(device: Any) -> dict[str, float]:
    """Return the speed of copies between the device and the host's memory, in GB/s."""
    import torch

    from horizonml.engine.staging import CudaStaging

    staging, found = CudaStaging(device), {}
    for name, size in (("256 KiB", 1 << 16), ("4 MiB", 1 << 20), ("64 MiB", 1 << 24)):
        tensor = torch.randn(size, device=device)

        def back_and_forth(tensor: Any = tensor) -> None:
            staging.to_device(staging.to_host(tensor))
            torch.cuda.synchronize()

        found[name] = 2 * tensor.nbytes / median(back_and_forth) / 1e9
    return found


def steps(device: Any) -> dict[str, dict[str, float]]:
    """Return the median seconds of a step of ResNet-18, in plain PyTorch and here, measured in turn."""
    import torch

    from horizonml.comm.group import Group
    from horizonml.engine.session import Session
    from horizonml.models.spec import ModelSpec
    from horizonml.models.zoo import build
    from horizonml.plan.plan import Plan, Stage
    from horizonml.state.spec import Sgd
    from horizonml.state.train_state import TrainState
    from horizonml.tasks.classification import Classification
    from horizonml.tasks.task import InputSpec

    found = {}
    for rows, size in ((128, 32), (32, 224)):
        images, labels = torch.randn(rows, 3, size, size), torch.randint(0, 10, (rows,))
        model = build(ModelSpec(name="resnet18"), 0, 10, InputSpec.of((3, size, size)))
        plan = Plan((Stage(0, len(model.chain), (0,), (1.0,)),))
        session = Session(
            plan, TrainState(model, Sgd(), device=device), Group(None, 0, 1, 60.0), Classification(), rows
        )
        module = model.stage(0, len(model.chain)).to(device).train()
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, fused=True)
        batch = _Batch(images, labels)

        def plain(module: Any = module, optimizer: Any = optimizer, batch: Any = batch) -> None:
            optimizer.zero_grad()
            logits = module(batch.inputs(0, batch.size).to(device))
            torch.nn.functional.cross_entropy(logits, batch.targets(0, batch.size).to(device)).backward()
            optimizer.step()
            torch.cuda.synchronize()

        def ours(session: Any = session, batch: Any = batch) -> None:
            session.step(batch, 1e-3)
            torch.cuda.synchronize()

        pairs = [(median(plain), median(ours)) for _ in range(ROUNDS)]
        theirs, own = (statistics.median(part) for part in zip(*pairs, strict=True))
        found[f"resnet18, {rows} of {size} px"] = {"plain": theirs, "horizonml": own, "ratio": theirs / own}
        session.close()
    return found


class _Batch:
    """A global batch in memory."""

    def __init__(self, images: Any, labels: Any) -> None:
        self._images, self._labels, self.size = images, labels, len(images)

    def inputs(self, start: int, stop: int) -> Any:
        """Return the rows' inputs."""
        return self._images[start:stop]

    def targets(self, start: int, stop: int) -> Any:
        """Return the rows' targets."""
        return self._labels[start:stop]


def median(action: Callable[[], None]) -> float:
    """Return the median seconds of some runs, after a few that warm up."""
    times = []
    for number in range(STEPS + 3):
        began = time.perf_counter()
        action()
        if number >= 3:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
