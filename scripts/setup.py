"""Makes the virtual environment: `python3 scripts/setup.py VENV`. Needs only Python 3.11 and its standard library.

torch comes from the CPU wheel index (TORCH_INDEX). If that does not answer, the default index is used, but a build
that would bring several gigabytes of CUDA packages is refused unless ALLOW_CUDA=1.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
TORCH = os.environ.get("TORCH_VERSION", "2.13.0")
TORCHVISION = os.environ.get("TORCHVISION_VERSION", "0.28.0")
ALLOW_CUDA = os.environ.get("ALLOW_CUDA") == "1"
PROBE_SECONDS = 5
# macOS wheels are CPU builds without a suffix.
SUFFIX = "" if sys.platform == "darwin" else "+cpu"
ROOT = Path(__file__).resolve().parent.parent
CHECK = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda]))"


def main() -> None:
    """Create or update the environment, unless it is up to date."""
    if sys.version_info < (3, 11):
        sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.12 ...")
    venv = Path(sys.argv[1])
    python = venv / "bin" / "python"
    wanted = hashlib.sha256(Path(__file__).read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamp = venv / ".horizonml"
    if stamp.exists() and stamp.read_text() == wanted and python.exists():
        return
    if not python.exists():
        say(f"creating {venv}")
        run(sys.executable, "-m", "venv", str(venv))
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    install_torch(python, pip)
    say("installing HorizonML and its tools")
    run(*pip, "--editable", f"{ROOT}[dev]")
    check_build(python)
    stamp.write_text(wanted)
    say("ready")


def install_torch(python: Path, pip: list[str]) -> None:
    """torch and torchvision as CPU builds."""
    if installed(python) is not None:
        return
    exact = [f"torch=={TORCH}{SUFFIX}", f"torchvision=={TORCHVISION}{SUFFIX}"]
    problem = unreachable(TORCH_INDEX)
    if problem is None:
        say(f"installing torch {TORCH} (CPU) from {TORCH_INDEX}")
        if attempt(*pip, "--no-deps", "--index-url", TORCH_INDEX, *exact):  # what they need comes with the rest
            return
        say(f"{TORCH_INDEX} has no {' and '.join(exact)} for this machine; trying the default index")
    else:
        say(f"{TORCH_INDEX} cannot be used ({problem}); trying the default index")
    if not attempt(*pip, exact[0]):
        refuse_cuda(python, f"torch=={TORCH}")
        run(*pip, f"torch=={TORCH}")
    # Without its dependencies: they would pull in another torch. See horizonml/machine/torchvision.py for a CUDA build.
    if not attempt(*pip, "--no-deps", exact[1]):
        run(*pip, "--no-deps", f"torchvision=={TORCHVISION}")


def unreachable(index: str) -> str | None:
    """Why a package index cannot be used, within a few seconds; None if it answers."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=PROBE_SECONDS):
            return None
    except (urllib.error.URLError, OSError, ValueError) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__


def refuse_cuda(python: Path, requirement: str) -> None:
    """Stop before pip downloads CUDA packages."""
    if ALLOW_CUDA:
        return
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    result = subprocess.run(
        [*command, "--dry-run", "--report", "-", requirement], capture_output=True, text=True, check=False
    )
    if result.returncode:
        sys.exit(f"cannot find {requirement} on the default index either:\n{result.stderr.strip()}")
    names = {package["metadata"]["name"].lower() for package in json.loads(result.stdout)["install"]}
    heavy = sorted(name for name in names if name.startswith(("nvidia-", "cuda-", "triton")))
    if heavy:
        sys.exit(
            f"The default index offers a CUDA build of {requirement}: several GB that this project does not use\n"
            f"({', '.join(heavy[:4])} ...). Nothing was installed. Make the CPU wheel index reachable, name a\n"
            "mirror of it (make TORCH_INDEX=https://...), or take the CUDA build with: make ALLOW_CUDA=1 ..."
        )


def check_build(python: Path) -> None:
    """Say so if the installed torch is not what this project wants."""
    found = installed(python)
    if found is None:
        sys.exit("torch does not import; see above, or delete the environment (make clean) and try again")
    version, cuda = found
    if cuda is not None and not ALLOW_CUDA:
        sys.exit(
            f"torch {version} is a build for CUDA {cuda}. Run `make clean` to delete the environment and try again "
            "with the CPU wheel index, or keep it with: make ALLOW_CUDA=1 ..."
        )
    say(f"torch {version}" + (" (CPU)" if cuda is None else f" (CUDA {cuda})"))


def installed(python: Path) -> tuple[str, str | None] | None:
    """Version and CUDA version of the installed torch."""
    result = subprocess.run([str(python), "-c", CHECK], capture_output=True, text=True, check=False)
    if result.returncode:
        return None
    version, cuda = json.loads(result.stdout.splitlines()[-1])
    return version, cuda


def attempt(*command: str) -> bool:
    """Run a command that may fail."""
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def run(*command: str) -> None:
    """Run a command that must not fail."""
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(f"`{' '.join(command)}` failed with code {code}; see above")


def say(text: str) -> None:
    """Tell the user what is going on."""
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    main()
