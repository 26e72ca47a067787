"""Exports the LoRA adapters of a checkpoint as a folder in peft's format."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from horizonml.errors import CheckpointError
from horizonml.files import write_atomically
from horizonml.job.schema import Job
from horizonml.models.lora import adapter_config, exported_name, trained_modules
from horizonml.models.pretrained import is_adapter
from horizonml.state.shards import Metadata, find, opened


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
