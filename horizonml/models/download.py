"""Finds the file of pretrained weights that a job names, and downloads it once per machine if it is elsewhere."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

from filelock import FileLock, Timeout

from horizonml.errors import ModelError
from horizonml.files import MOST_NAME, cache_folder, checksum, hub_cache, safe_name
from horizonml.machine.network import CONFINED_BYTES, SPARE_BYTES, is_confined, reason, urlopen
from horizonml.machine.torchvision import import_torchvision
from horizonml.models.spec import WeightsSpec
from horizonml.text import human_bytes, nearest

_log = logging.getLogger(__name__)

_LOCK_SECONDS = 3600.0
_ANSWER_SECONDS = 60.0  # for a server to go on sending
_PIECE = 1 << 20


def locate(spec: WeightsSpec, model: str) -> Path:
    """Return the file or folder of the weights for the model of this name. Raises ModelError."""
    source = spec.source
    if re.match("https?://", source):
        return _download(source, spec.sha256)
    if re.fullmatch("[A-Z][A-Z0-9_]*", source) and (is_confined() or not Path(source).exists()):
        url = _torchvision_url(model, source)
        return _download(f"{spec.base_url.rstrip('/')}/{_file_name(url)}" if spec.base_url else url, spec.sha256)
    if source.startswith("hub:"):
        return _in_hub_cache(source.removeprefix("hub:"))
    return Path(source).expanduser()


def _torchvision_url(model: str, name: str) -> str:
    """Return where torchvision's weights of this name lie. Raises ModelError."""
    models = import_torchvision().models
    own = model.rpartition(":")[2]
    try:
        known = models.get_model_weights(own)
    except ValueError:
        raise ModelError(
            f"model.weights: {name} names weights of torchvision's models, and {model} is none of them; give a file or "
            "a URL"
        ) from None
    names = list(known.__members__)
    if name not in names:
        raise ModelError(f"model.weights: {own} has no weights {name}, but {', '.join(names)}{nearest(name, names)}")
    return str(known[name].url)


def _in_hub_cache(name: str) -> Path:
    """Return the newest snapshot of a model in this machine's Hugging Face cache. Raises ModelError."""
    cache = hub_cache()
    folder = cache / f"models--{name.replace('/', '--')}"
    try:
        with (folder / "refs" / "main").open(encoding="utf-8") as file:
            snapshot = folder / "snapshots" / safe_name(file.read(MOST_NAME).strip())
    except (OSError, ValueError):
        raise ModelError(
            f"model.weights: {cache} has no model {name}; download it there on every machine: hf download {name}"
        ) from None
    return snapshot


def _file_name(url: str) -> str:
    return unquote(urlsplit(url).path).rpartition("/")[2]


def _download(url: str, sha256: str | None) -> Path:
    """Return the file of a URL in this machine's cache, after downloading it if it is not there. Raises ModelError."""
    try:
        name = safe_name(_file_name(url))
    except ValueError as error:
        raise ModelError(f"model.weights: {url} does not end in the name of a file: {error}") from None
    in_name = re.search(r"-([0-9a-f]{8,64})\.", name)
    expected = sha256 or (in_name[1] if in_name else "")
    if not expected:
        raise ModelError(f"model.weights.sha256: give the SHA-256 of {url}, since its name does not contain one")
    folder = cache_folder() / ("joined-weights" if is_confined() else "weights")
    is_named = in_name is not None and expected.startswith(in_name[1])  # or it is another file of that name
    target = folder / (name if is_named else f"{Path(name).stem}-{expected[:16]}{Path(name).suffix}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{target.name}.lock", timeout=_LOCK_SECONDS):
            if not target.is_file() or not checksum(target).startswith(expected):
                _fetch(url, target, expected)
                if is_confined():
                    _make_room(folder, target)
    except Timeout as error:
        raise ModelError(
            f"model.weights: another process has been downloading {url} for {_LOCK_SECONDS:.0f} s; if no such process "
            f"is running, delete {error.lock_file}"
        ) from error
    except (OSError, ValueError) as error:  # urllib's errors are OSErrors
        cause = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ModelError(
            f"model.weights: {url} could not be downloaded to {target}: {reason(str(cause))}. Put the file there "
            "yourself, or name its path as model.weights"
        ) from error
    return target


def _make_room(folder: Path, newest: Path) -> None:
    """Delete the files that jobs from the network have fetched first, until all take no more than they may."""
    found = {path: path.stat() for path in folder.iterdir() if path.is_file() and path != newest}
    total = newest.stat().st_size + sum(status.st_size for status in found.values())
    for path in sorted(found, key=lambda one: found[one].st_mtime):
        if total <= CONFINED_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= found[path].st_size


def _fetch(url: str, target: Path, expected: str) -> None:
    """Download a file, verify it, and move it into place. Raises OSError."""
    import http.client  # only downloads need the web client
    import urllib.error

    _log.info("downloading %s", url)
    hidden = target.with_name(f".{target.name}.{os.getpid()}.part")
    content = hashlib.sha256()
    try:
        with urlopen(url, _ANSWER_SECONDS) as answer, hidden.open("wb") as file:
            size = int(answer.headers.get("Content-Length") or -1)
            while piece := answer.read(_PIECE):
                content.update(piece)
                file.write(piece)
                if shutil.disk_usage(target.parent).free < SPARE_BYTES:
                    raise OSError(f"less than {human_bytes(SPARE_BYTES)} are left on that disk")
                if is_confined() and file.tell() > CONFINED_BYTES:
                    raise OSError(f"it has more than {human_bytes(CONFINED_BYTES)}")
            if size >= 0 and file.tell() != size:
                raise OSError(f"the connection ended after {human_bytes(file.tell())} of {human_bytes(size)}")
            file.flush()
            os.fsync(file.fileno())
        if not content.hexdigest().startswith(expected):
            raise OSError(
                f"it has the SHA-256 {content.hexdigest()}, not {expected}; it is not the file that is meant, or it is "
                "damaged"
            )
        os.replace(hidden, target)
    except urllib.error.HTTPError as error:
        error.close()
        raise OSError(f"the server says: {error.code} {error.reason}") from None
    except http.client.HTTPException as error:
        raise OSError(f"the server's answer is not HTTP ({type(error).__name__})") from error
    finally:
        hidden.unlink(missing_ok=True)
