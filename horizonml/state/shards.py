"""Reads and verifies checkpoints as they lie on disk.

    checkpoints/step-00000230/
        checkpoint.json          for people: step, accuracy, job, plan, and for every shard its SHA-256 and who keeps it
        stage-0.safetensors      parameters, buffers and optimizer state of stage 0's layers, by original name
        stage-1.safetensors ...
        inner-2-stage-0.safetensors    after local steps: the inner optimizer's state of stage 0's third member, which
                                       is only on that member's disk

A checkpoint may come from a stranger or a broken disk: everything in it is checked before it is used, and nothing in it
is ever executed.

Exports the LoRA adapters of a checkpoint as a folder in peft's format.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import safetensors
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors.torch import save
from torch import Tensor

from horizonml import __version__
from horizonml.errors import CheckpointError, is_out_of_files
from horizonml.files import inside, write_atomically
from horizonml.job.schema import Job
from horizonml.models.pretrained import is_adapter
from horizonml.models.tuning import adapter_config, exported_name, trained_modules

_log = logging.getLogger(__name__)

FORMAT = 1
METADATA = "checkpoint.json"
_MOST_METADATA = 16 << 20  # bytes


class _Strict(BaseModel):
    """Accepts only values of exactly the declared types; nothing is converted."""

    model_config = ConfigDict(strict=True, frozen=True)


KEPT = "keep_best"  # for the checkpoint that is never deleted
STOPPING = "early_stop"  # for the decision to end a training early


class Best(_Strict):
    """Holds the best value of a metric, and when it was measured."""

    metric: str
    value: float | int
    step: int = Field(ge=0)  # the number of steps that had been done
    waited: int = Field(0, ge=0)  # evaluations since then


class Shard(_Strict):
    """Describes the file of one stage."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    tensors: int | None = Field(None, ge=0)  # how many tensors it holds
    machines: list[str] = []  # those that keep a copy: names, and addresses where known, when it was saved


class LayerRange(_Strict):
    """Describes the layers of a stage, `start` to `stop - 1`."""

    model_config = ConfigDict(extra="allow")
    start: int = Field(ge=0)
    stop: int


class Cuts(_Strict):
    """Holds the part of a plan that says which layers lie in which shard."""

    model_config = ConfigDict(extra="allow")
    stages: list[LayerRange] = Field(min_length=1)


class Metadata(_Strict):
    """Holds the content of `checkpoint.json`; fields that are not declared here are for people."""

    model_config = ConfigDict(extra="allow")
    format: int
    step: int = Field(ge=0)
    generation: int = Field(0, ge=0)  # of the group that saved it
    restarts: int = Field(0, ge=0)  # how often the count of generations had begun again (see `fence`)
    complete: bool = False
    metrics: dict[str, int | float] = {}  # of the last evaluation
    best: dict[str, Best] = {}  # the best evaluation so far, for each purpose
    tried: dict[str, object] | None = None  # what a trial has found about lossy formats, a `Tried`
    job: dict[str, Any] = {}
    compatible: dict[str, object]
    plan: Cuts
    shards: dict[str, Shard]
    inner: dict[str, Shard] = {}  # see `inner_name`

    @model_validator(mode="after")
    def _whole(self) -> Metadata:
        expected = 0
        for number, stage in enumerate(self.plan.stages):
            if stage.start != expected or stage.stop <= stage.start:
                raise ValueError(f"stage {number} of its plan has layers {stage.start} to {stage.stop - 1}")
            expected = stage.stop
        if set(self.shards) != {shard_name(number) for number in range(len(self.plan.stages))}:
            raise ValueError(f"it names the shards {sorted(self.shards)} for {len(self.plan.stages)} stages")
        return self

    def needed(self, start: int, stop: int) -> list[str]:
        """Return the names of the shards that hold any of the layers `start` to `stop - 1`."""
        stages = enumerate(self.plan.stages)
        return [shard_name(number) for number, saved in stages if saved.start < stop and start < saved.stop]


def shard_name(stage: int) -> str:
    """Return the name of a stage's file."""
    return f"stage-{stage}.safetensors"


def inner_name(member: int, stage: int) -> str:
    """Return the name of the file with the state of the optimizer of one of a stage's members that take local steps."""
    return f"inner-{member}-stage-{stage}.safetensors"


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def is_folder_name(name: object) -> bool:
    """Return whether this is the name of a checkpoint's folder, and nothing else that a path could be made of."""
    return isinstance(name, str) and re.fullmatch(r"step-\d{8,18}", name, re.ASCII) is not None


def step_of(path: Path) -> int:
    """Return the step after which the checkpoint in this folder was saved."""
    return int(path.name.partition("-")[2])


def steps(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    found = (path for path in folder.glob("step-*") if is_folder_name(path.name) and path.is_dir())
    return sorted(found, key=step_of, reverse=True)


def find(path: Path) -> tuple[Path, Metadata]:
    """Return the newest intact checkpoint at `path`, which is either a checkpoint or a run's folder, and its metadata.

    Newer checkpoints that are damaged are skipped, and a message names them. Raises CheckpointError.
    """
    if (path / METADATA).exists():
        metadata = read_metadata(path)
        verify(path, metadata)
        return path, metadata
    problems = []
    for folder in (path, path / "checkpoints"):
        for step in steps(folder):
            try:
                metadata = read_metadata(step)
                verify(step, metadata)
            except CheckpointError as error:
                problems.append(str(error))
            else:
                for problem in problems:
                    _log.warning("%s; an older checkpoint is taken instead: %s", problem, step.name)
                return step, metadata
    raise CheckpointError("; ".join(problems) or f"no checkpoint in {path}; give a run's folder or a step-* folder")


def read_metadata(path: Path) -> Metadata:
    """Return the metadata of a checkpoint. Raises CheckpointError."""
    try:
        with _regular_file(path / METADATA) as file:
            content = file.read(_MOST_METADATA + 1)
        if len(content) > _MOST_METADATA:
            raise ValueError(f"it is larger than {_MOST_METADATA >> 20} MiB")
        return check(json.loads(content, object_pairs_hook=_each_once), path)
    except (OSError, ValueError, RecursionError) as error:
        if is_out_of_files(error):  # of which the checkpoint is innocent
            raise
        raise _damaged(path, error) from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, object]:
    """Return an object's fields; two of one name would be read in one way here, and in another way elsewhere."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field is given twice")
    return found


def check(metadata: Any, path: Path) -> Metadata:
    """Return the metadata if it is well-formed. Raises CheckpointError."""
    if isinstance(metadata, dict) and isinstance(metadata.get("format"), int) and metadata["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {metadata['format']} is not known to HorizonML {__version__}")
    try:
        return Metadata.model_validate(metadata)
    except (ValidationError, RecursionError) as error:
        raise _damaged(path, error) from error


def write_metadata(folder: Path, metadata: dict[str, object]) -> None:
    """Write the metadata of a checkpoint. Raises OSError."""
    write_atomically(folder / METADATA, (json.dumps(metadata, indent=2) + "\n").encode())


def _damaged(path: Path, error: Exception) -> CheckpointError:
    if isinstance(error, ValidationError):
        details = error.errors()[0]
        field = ".".join(map(str, details["loc"]))
        reason = f"{field + ': ' if field else ''}{details['msg']}"
    else:
        reason = getattr(error, "strerror", None) or str(error)
    return CheckpointError(f"{path}: {METADATA} is missing or damaged ({reason})")


def completed(folder: Path, job: Job) -> bool:
    """Return whether the newest checkpoint in `folder` is the end of exactly this job."""
    newest = next(iter(steps(folder)), None)
    if newest is None:
        return False
    try:
        metadata = read_metadata(newest)
        return metadata.complete and Job.model_validate(metadata.job).digest() == job.digest()
    except (CheckpointError, ValueError):
        return False


def describe(file: Path, tensors: int) -> Shard:
    """Return the metadata of a shard that was just written. Raises OSError."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        return Shard(bytes=os.fstat(content.fileno()).st_size, sha256=digest, tensors=tensors)


def verify_shard(file: Path, shard: Shard, content: bool = True) -> None:
    """Raise CheckpointError unless the file is the shard that the metadata describes.

    Unless `content` is true, only the size is compared.
    """
    try:
        with _regular_file(_shard_file(file.parent, file.name)) as opened_file:
            size = os.fstat(opened_file.fileno()).st_size
            if size != shard.bytes:
                raise CheckpointError(f"{file} is damaged: it has {size} bytes instead of {shard.bytes}")
            if content and hashlib.file_digest(opened_file, "sha256").hexdigest() != shard.sha256:
                raise CheckpointError(f"{file} is damaged: its content does not match its SHA-256")
    except OSError as error:
        if is_out_of_files(error):
            raise
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error


def _shard_file(folder: Path, name: str) -> Path:
    """Return the file of a shard. Raises CheckpointError for a link to somewhere else."""
    try:
        return inside(folder, name)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def verify(path: Path, metadata: Metadata) -> None:
    """Raise CheckpointError unless all shards are here and intact."""
    for name, shard in metadata.shards.items():
        if not os.path.lexists(path / name):
            where = f"; copies are on {', '.join(shard.machines)}" if shard.machines else ""
            raise CheckpointError(f"{path}: {name} is missing{where}")
        verify_shard(path / name, shard)


def intact(path: Path, metadata: Metadata) -> tuple[list[str], list[str]]:
    """Return the names of the shards that are here and intact, and what is wrong with the others that are here."""
    names, problems = [], []
    for name, shard in metadata.shards.items():
        if (path / name).exists():
            try:
                verify_shard(path / name, shard)
                names.append(name)
            except CheckpointError as error:
                problems.append(str(error))
    return names, problems


def read_inner(path: Path, metadata: Metadata, name: str) -> dict[str, Tensor] | None:
    """Return what a member's optimizer had saved, or None if it is not on this disk, or damaged."""
    shard = metadata.inner.get(name)
    if shard is None or not os.path.lexists(path / name):
        return None
    try:
        verify_shard(path / name, shard)
        with opened(path, {name: shard}) as (keys, read):
            return {key: read(key) for key in keys}
    except CheckpointError as error:
        _log.warning("%s; the optimizer begins anew", error)
        return None


def _regular_file(path: Path) -> BufferedReader:
    """Open a file for reading. Raises OSError for a pipe or a device, on which a read could block forever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return os.fdopen(descriptor, "rb")


@contextmanager
def opened(path: Path, shards: dict[str, Shard]) -> Iterator[tuple[list[str], Callable[[str], Tensor]]]:
    """Yield the names of all tensors in some shards of a checkpoint, and a function that reads one by name.

    Raises CheckpointError for a shard that cannot be read or does not hold as many tensors as it should.
    """
    where: dict[str, Any] = {}
    try:
        for name, shard in shards.items():
            file = _shard_file(path, name)
            _regular_file(file).close()  # safetensors says of any file that it cannot open that there is none
            handle = safetensors.safe_open(file, framework="pt")
            keys = list(handle.keys())
            if shard.tensors is not None and len(keys) != shard.tensors:
                raise CheckpointError(f"{path / name} has {len(keys)} tensors instead of {shard.tensors}")
            if twice := sorted(where.keys() & set(keys)):
                raise CheckpointError(f"{path / name} has {twice[0]!a}, which another shard has, too")
            where |= dict.fromkeys(keys, handle)
        yield list(where), lambda name: where[name].get_tensor(name)
    except (OSError, safetensors.SafetensorError) as error:
        if is_out_of_files(error):
            raise
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def export_adapters(source: Path, target: Path) -> Metadata:
    """Write a checkpoint's adapters, and the modules trained in full beside them; return the checkpoint's metadata.

    `peft.PeftModel.from_pretrained(model, target)` adds them to the original model. Raises CheckpointError.
    """
    path, metadata = find(source)
    try:
        spec = Job.model_validate(metadata.job).model.lora
    except ValueError as error:
        raise CheckpointError(f"{path}: its job cannot be read by this version of HorizonML") from error
    if spec is None:
        raise CheckpointError(f"{path} has no adapters: its job has no model.lora")
    with opened(path, metadata.shards) as (keys, read):
        names = [key.removeprefix("model/") for key in keys if key.startswith("model/")]
        whole = trained_modules(spec, names)
        wanted = [name for name in names if is_adapter(name) or name.rpartition(".")[0] in whole]
        tensors: dict[str, Tensor] = {exported_name(name): read(f"model/{name}").contiguous() for name in wanted}
        content = save(tensors, {"format": "pt"})
    try:
        adapter_config(spec, names).save_pretrained(str(target))
        write_atomically(target / "adapter_model.safetensors", content)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error
    return metadata
