"""Small devices, as containers: `python -m benchmarks.containers` (needs Docker, and the image of `make images`).

Five workers with 0.4 CPU each, as data parallelism and as a pipeline, against one worker with 0.4 and one with 2.0 CPU:
how much of five devices' speed arrives. All configurations take turns, round by round; medians are compared.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import uuid

from benchmarks.harness import machine
from horizonml.security.token import TOKEN, make_token

IMAGE = "horizonml/worker:dev"
ROUNDS = 3
WORKERS = 5
JOB = """
name: bench
epochs: 2
batch_size: 320
model: {name: resnet18}
data: {name: synthetic, samples: 2560, image_size: 32, channels: 3}
optimizer: {name: sgd, lr: 0.01}
checkpoint: {enabled: false}
"""
CONFIGURATIONS = {
    "one worker, 0.4 CPU": ("single", 1, 0.4),
    "one worker, 2.0 CPU": ("single", 1, 2.0),
    "five workers, 0.4 CPU each, ddp": ("ddp", WORKERS, 0.4),
    "five workers, 0.4 CPU each, pipeline": ("pipeline", WORKERS, 0.4),
}


def docker(*arguments: str, stdin: str | None = None) -> str:
    """The output of a docker command."""
    result = subprocess.run(["docker", *arguments], input=stdin, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"docker {' '.join(arguments)}: {result.stderr}")
    return result.stdout + result.stderr


def speed(strategy: str, workers: int, cpus: float) -> float:
    """Samples per second at the end of a short training."""
    name = f"horizonml-bench-{uuid.uuid4().hex[:8]}"
    docker("network", "create", name)
    docker("volume", "create", name)
    started = []
    try:
        write = [
            "--entrypoint",
            "sh",
            "--volume",
            f"{name}:/data",
            "--interactive",
            IMAGE,
            "-c",
            "cat > /data/job.yaml",
        ]
        docker("run", "--rm", *write, stdin=JOB)
        docker(
            "run",
            "--detach",
            "--name",
            f"{name}-rendezvous",
            "--network",
            name,
            "--env",
            TOKEN,
            IMAGE,
            "rendezvous",
            "--host",
            "0.0.0.0",
        )
        started.append(f"{name}-rendezvous")
        for rank in range(workers):
            docker(
                "run", "--detach", "--name", f"{name}-{rank}", "--network", name, "--volume", f"{name}:/data",
                "--cpus", str(cpus), "--env", f"RANK={rank}", "--env", f"WORLD_SIZE={workers}",
                "--env", f"HORIZONML_RENDEZVOUS={name}-rendezvous:29400", "--env", TOKEN, IMAGE, "train",
                "/data/job.yaml", "--set", f"parallel.strategy={strategy}",
            )  # fmt: skip
            started.append(f"{name}-{rank}")
        docker("wait", *started[1:])
        log = docker("logs", f"{name}-0")
        return float(re.findall(r"([\d,]+) samples/s", log)[-1].replace(",", ""))
    finally:
        for container in started:
            docker("rm", "--force", container)
        docker("volume", "rm", name)
        docker("network", "rm", name)


def main() -> None:
    """Print everything."""
    print(machine())
    os.environ[TOKEN] = make_token().text  # docker takes it from there, so that it is on no command line
    found: dict[str, list[float]] = {name: [] for name in CONFIGURATIONS}
    for _ in range(ROUNDS):
        for name, configuration in CONFIGURATIONS.items():
            found[name].append(speed(*configuration))
            print(f"  {name}: {found[name][-1]:.0f} samples/s", flush=True)
    small = statistics.median(found["one worker, 0.4 CPU"])
    large = statistics.median(found["one worker, 2.0 CPU"])
    print()
    for name, speeds in found.items():
        median = statistics.median(speeds)
        ratios = f"{median / small:.2f}x one of 0.4 CPU, {median / large:.2f}x one of 2.0 CPU"
        print(f"{name}: {median:.0f} samples/s, {ratios}")


if __name__ == "__main__":
    main()
