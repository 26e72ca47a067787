"""Checks for the optional packages, and names the command that installs each of them."""

from __future__ import annotations

from importlib.util import find_spec

from horizonml.errors import MissingPackage

EXTRAS = {
    "matplotlib": "bench",
    "kubernetes": "cluster",
    "peft": "lora",
    "scipy": "svhn",
    "pyarrow": "table",
    "datasets": "huggingface",
    "aiohttp": "stream",
    "s3fs": "stream-s3",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "sqlalchemy": "mlflow",
    "alembic": "mlflow",
    "transformers": "hf",
    "tokenizers": "hf",
    "timm": "timm",
}


def require(package: str, what: str) -> None:
    """Raise MissingPackage unless the optional package that `what` needs is installed."""
    if find_spec(package) is None:
        raise MissingPackage(
            f"{what} needs {package}, which is not installed: pip install 'horizonml[{EXTRAS[package]}]'"
        )
