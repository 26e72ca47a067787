"""What `pip install` brings: jobs and starter files, and clear words about packages that workers do without."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from horizonml.data.choose import load
from horizonml.data.dataset import DataInfo, TensorSpec
from horizonml.data.spec import DataSpec
from horizonml.errors import MissingPackage
from horizonml.machine import code
from tests.commands import command
from tests.runs import write_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it is installed from a wheel, which is built in a folder whose name has a space."""
    folder = tmp_path_factory.mktemp("a wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "k8s").symlink_to(ROOT / "k8s")
    shutil.copytree(ROOT / "horizonml", folder / "horizonml", symlinks=True)
    build = "from setuptools.build_meta import build_wheel; build_wheel('built')"
    subprocess.run([sys.executable, "-W", "ignore", "-c", build], cwd=folder, check=True, capture_output=True)
    (wheel,) = (folder / "built").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


SCRIPT = """
import os, horizonml
from horizonml.cli.app import app

def command(*arguments):
    app(arguments, standalone_mode=False)

run = horizonml.train('digits', workers=2, epochs=1, name='mine', data={'samples': 64})
assert abs(horizonml.evaluate(run)['loss'] - run.metrics['loss']) < 1e-5
assert len(run.history) == 1
command('validate', 'digits')
command('init', 'my job')
os.chdir('my job')
command('train', 'job.yaml', '--set', 'epochs=1')
command('evaluate', 'runs/first')
print(horizonml.__file__)
"""


@pytest.mark.slow
def test_an_installed_package_trains_ready_jobs_from_python_and_a_job_of_ones_own(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(installed)}
    run = [sys.executable, "script.py"]
    result = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    assert "strategy: ddp" in result.stdout
    assert "next: cd 'my job' && horizonml train job.yaml" in result.stdout
    loss, accuracy = re.findall(r"epoch 1/1: held-out loss ([\d.]+), accuracy ([\d.]+%)", result.stdout)[-1]
    assert result.stdout.splitlines()[-2:] == [
        f"loss {loss}, accuracy {accuracy} (359 samples)",
        str(installed / "horizonml" / "__init__.py"),
    ]
    missing = command(tmp_path, "validate", "jobs/digitz.yaml")
    assert missing.returncode == 2
    assert "(cifar10, digits, explicit-plan, folder, synthetic, text); did you mean 'digits'?" in missing.stderr
    for file in ("kube/base/workers.yaml", "machine/join.service"):
        assert (installed / "horizonml" / file).is_file()
    for there, here in (("jobs", "jobs"), ("report/page/static", "horizonml/report/page/static")):
        assert {path.name for path in (installed / "horizonml" / there).iterdir()} == {
            path.name for path in (ROOT / here).iterdir()
        }


STARTS = {
    (): {"job.yaml", "my_model.py"},
    ("--data", "images"): {"job.yaml", "my_model.py"},
    ("--data", "images", "--model", "resnet18"): {"job.yaml"},
    ("--data", "table"): {"job.yaml", "my_model.py"},
    ("--data", "text"): {"job.yaml"},
    ("--data", "own"): {"job.yaml", "my_data.py", "my_model.py"},
}


def test_every_job_to_start_from_is_valid(tmp_path: Path) -> None:
    for number, (arguments, files) in enumerate(STARTS.items()):
        folder = tmp_path / str(number)
        begun = command(tmp_path, "init", folder.name, *arguments)
        assert begun.returncode == 0, begun.stderr
        assert {path.name for path in folder.iterdir()} == files
        text = (folder / "job.yaml").read_text()
        assert max(map(len, text.splitlines())) <= 120
        valid = command(folder, "validate", "job.yaml")
        assert valid.returncode == 0, valid.stderr


def test_init_says_which_kinds_of_data_and_models_there_are_and_overwrites_nothing(tmp_path: Path) -> None:
    for option, value in (("--data", "image"), ("--model", "resnet19")):
        refused = command(tmp_path, "init", option, value)
        assert refused.returncode == 2
        assert f"error: {option}: '{value}'" in refused.stderr
        assert "did you mean" in refused.stderr
    assert not list(tmp_path.iterdir())
    (tmp_path / "my_model.py").write_text("mine")
    refused = command(tmp_path, "init")
    assert refused.returncode == 2
    assert "my_model.py already exists, and is not overwritten" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["my_model.py"]


def test_the_quickstart_installs_the_versions_that_make_setup_installs() -> None:
    versions = dict(re.findall(r"^(TORCH\w*)_VERSION \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    exact = f"'torch=={versions['TORCH']}+cpu' 'torchvision=={versions['TORCHVISION']}+cpu'"
    command = f"pip install --no-deps --index-url https://download.pytorch.org/whl/cpu {exact}\npip install ."
    assert command in (ROOT / "docs" / "quickstart.md").read_text()


def test_no_package_is_taken_from_whichever_of_two_indexes_has_it() -> None:
    """With --extra-index-url, whoever puts a newer release of a dependency on either index is installed."""
    for name in ("README.md", "docs/quickstart.md", "images/worker/Dockerfile", "scripts/setup.py"):
        assert "--extra-index-url" not in (ROOT / name).read_text(), name


MISSING = [
    (["report", "."], "matplotlib", "`horizonml report` needs matplotlib", "bench"),
    (["bench", "compare", "--data", "digits"], "matplotlib", "`horizonml bench` needs matplotlib", "bench"),
    (["plan", "digits", "--picture", "x.png"], "matplotlib", "--picture needs matplotlib", "bench"),
    (["cluster", "status"], "kubernetes", "`horizonml cluster` needs kubernetes", "cluster"),
    *((["export", "run", "m.onnx"], name, f"an export to ONNX needs {name}", "onnx")
      for name in ("onnx", "onnxruntime", "onnxscript")),
    (["report", "run", "--tensorboard", "there"], "tensorboard", "TensorBoard needs tensorboard", "tensorboard"),
    (["report", "run", "--mlflow", "there"], "mlflow", "MLflow needs mlflow", "mlflow"),
    (["report", "run", "--mlflow", "there"], "alembic", "MLflow needs alembic", "mlflow"),
    (["train", "digits", "--set", "telemetry.tensorboard=true"], "tensorboard",
     "telemetry.tensorboard needs tensorboard", "tensorboard"),
    (["train", "digits", "--set", "telemetry.mlflow=there"], "alembic", "telemetry.mlflow needs alembic", "mlflow"),
]  # fmt: skip


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    for arguments, package, words, extra in MISSING:
        result = command(tmp_path, *arguments, without=package)
        assert result.returncode == 1
        assert result.stderr == f"error: {words}, which is not installed: pip install 'horizonml[{extra}]'\n"
        assert code.EXTRAS[package] == extra
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "scipy", None)
        with pytest.raises(MissingPackage, match=r"^data: svhn needs scipy, .*pip install 'horizonml\[svhn\]'$"):
            load(DataSpec(name="svhn"), DataInfo(10, 2, (TensorSpec((3, 8, 8)),)), tmp_path)


def test_too_little_memory_ends_in_advice(tmp_path: Path) -> None:
    result = command(tmp_path, "plan", "digits", "--set", "model.name=tests.models:Greedy")
    assert result.returncode == 1
    assert "error: out of memory: this machine has not enough left" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_plan_that_no_device_can_carry_out_says_so_first(tmp_path: Path) -> None:
    devices = "devices: [{name: pc, memory: 1GiB}, {name: tiny, memory: 1B}]"
    (tmp_path / "devices.yaml").write_text(devices)
    stages = "parallel.stages=[{ranks: [0], layers: [0, 8]}, {ranks: [1], layers: [9, 16]}]"
    options = ["-n", "2", "--devices", "devices.yaml", "--set", stages, "--out", "plan.yaml"]
    result = command(tmp_path, "plan", "digits", *options)
    assert result.returncode == 2
    assert result.stdout == ""
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: the plan does not fit the devices: tiny (rank 1) lacks ")
    assert not (tmp_path / "plan.yaml").exists()


def test_windows_is_told_to_use_wsl() -> None:
    program = "import os; os.name = 'nt'\nfrom horizonml.cli.main import main\nmain()"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert told.returncode == 1
    assert told.stderr.startswith("error: HorizonML does not run on Windows itself. Install it in WSL2")


def test_a_home_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where a folder would be made")
    result = command(tmp_path, "plan", "digits", "--profile", "--threads", "1", HORIZONML_CACHE=str(tmp_path / "cache"))
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("cannot be written to") == 1


def test_arm_boards_get_no_release_of_pytorch_that_ends_with_an_illegal_instruction() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [one for one in map(Requirement, project["dependencies"]) if one.name == "torch"]
    for machine, release, accepted in (
        ("x86_64", "2.9.1", False),  # its `weights_only` has known ways around it
        ("x86_64", "2.10.0", True),
        ("aarch64", "2.9.1", True),  # which a Jetson may have; it reads no foreign pickles
        ("aarch64", "2.10.0", False),  # it ends with an illegal instruction on a Raspberry Pi 4
        ("aarch64", "2.13.0", True),
        ("arm64", "2.10.0", True),  # as macOS says
    ):
        (here,) = (one for one in wanted if one.marker is None or one.marker.evaluate({"platform_machine": machine}))
        assert here.specifier.contains(release) == accepted
