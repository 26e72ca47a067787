"""The example scripts with the real launchers: torchrun, Open MPI, MPICH, horovodrun, Slurm. See CONTRIBUTING.md."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest

from horizonml.report.records import load_run
from horizonml.security.token import TOKEN_FILE, make_token, save_token

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "launchers"
JOB = """
name: launched
epochs: 1
batch_size: 60
data: {name: digits, samples: 600}
checkpoint: {enabled: false}
parallel: {micro_batches: 2}
"""
LAUNCHERS = {
    "torchrun.sh": "torchrun",
    "openmpi.sh": "mpirun.openmpi",
    "mpich.sh": "mpirun.mpich",
    "horovodrun.sh": "horovodrun",
    "slurm.sbatch": "sbatch",
}


@lru_cache
def token_file() -> str:
    """A file with a token, as users have it; scripts for several machines take it from there."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return str(save_token(make_token(), folder / "token"))


def environment() -> dict[str, str]:
    """This one, without what an outer launcher left, and with the commands of this Python."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD", "HORIZONML"))}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    # CI runs as root, in a container or a virtual machine of its own.
    return env | {
        TOKEN_FILE: token_file(),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "RANKS": "4",
    }


def launch(folder: Path, command: list[str]) -> list[float]:
    """The losses of a run, which must be the same on all of its ranks."""
    (folder / "job.yaml").write_text(JOB)
    result = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=170, check=False
    )
    logs = "\n".join(path.read_text() for path in folder.glob("horizonml-*.log"))
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{logs}"
    run = load_run("launched", folder / "runs" / "launched")
    losses = [[step.loss for step in rank.steps] for rank in run.ranks]
    assert all(other == losses[0] for other in losses)
    return losses[0]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What the job learns when HorizonML launches it."""
    command = ["horizonml", "train", "job.yaml", "--set", "parallel.strategy=pipeline", "--workers", "4"]
    return launch(tmp_path_factory.mktemp("here"), command)


@pytest.mark.parametrize("script", LAUNCHERS)
def test_the_same_job_under_another_launcher(tmp_path: Path, expected: list[float], script: str) -> None:
    assert shutil.which(LAUNCHERS[script], path=environment()["PATH"]), f"{LAUNCHERS[script]} is not installed"
    command = [str(EXAMPLES / script), "job.yaml", "--set", "parallel.strategy=pipeline"]
    if script.endswith("sbatch"):
        command = ["sbatch", "--wait", *command]
    losses = launch(tmp_path, command)
    assert losses == expected


@pytest.mark.parametrize("script", [name for name in LAUNCHERS if "torchrun" not in name])
def test_horovod_under_its_launchers(tmp_path: Path, script: str) -> None:
    command = [str(EXAMPLES / script), "job.yaml", "--set", "parallel.micro_batches=1"]
    command += ["--set", "parallel.strategy=horovod"]
    if script.endswith("sbatch"):
        command = ["sbatch", "--wait", *command]
    (tmp_path / "horovod").mkdir()
    (tmp_path / "ddp").mkdir()
    losses = launch(tmp_path / "horovod", command)
    here = ["horizonml", "train", "job.yaml", "--workers", "4", "--set", "parallel.micro_batches=1"]
    assert losses == pytest.approx(launch(tmp_path / "ddp", [*here, "--set", "parallel.strategy=ddp"]), rel=1e-3)


def test_a_failing_rank_fails_the_command(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    command = [str(EXAMPLES / "openmpi.sh"), "job.yaml", "--set", "parallel.strategy=pipeline", "--set", "batch_size=0"]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 2
    assert "batch_size: 0 must be greater than or equal to 1" in result.stderr
