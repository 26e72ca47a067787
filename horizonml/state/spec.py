"""Defines the parts of a job that say how parameters are updated, and when the state of the training is saved."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from horizonml.spec.base import Spec

_CLIP_NORM = (
    "Clip gradients: if their norm over all layers is larger than this, scale all of them down to it (default: no "
    "clipping). The norm of every step, before clipping, is recorded."
)


class Sgd(Spec):
    """Configures stochastic gradient descent with momentum."""

    name: Literal["sgd"] = "sgd"
    lr: float = Field(0.05, gt=0, description="Peak learning rate.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum.")
    nesterov: bool = Field(False, description="Use Nesterov momentum.")
    weight_decay: float = Field(5e-4, ge=0, description="L2 penalty.")
    clip_norm: float | None = Field(None, gt=0, allow_inf_nan=False, description=_CLIP_NORM)

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Sgd:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: true needs momentum above 0")
        return self


class Adam(Spec):
    """Configures Adam (L2 penalty) or AdamW (decoupled weight decay)."""

    name: Literal["adam", "adamw"]
    lr: float = Field(1e-3, gt=0, description="Peak learning rate.")
    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = Field(
        [0.9, 0.999], description="Decay rates of the two moments, each in [0, 1)."
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay.")
    clip_norm: float | None = Field(None, gt=0, allow_inf_nan=False, description=_CLIP_NORM)

    @model_validator(mode="after")
    def _betas_in_range(self) -> Adam:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: {self.betas} must both lie in [0, 1)")
        return self


class Ema(Spec):
    """Configures an exponential moving average of the parameters, which often generalises better than they do."""

    decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Weight of the old average at each step, for example 0.999 (default: no average is kept).",
    )
    warmup: bool = Field(
        True,
        description="Limit the decay in the first steps to (1 + step) / (10 + step), so that short runs benefit, too.",
    )
    evaluate: bool = Field(True, description="Evaluate the averages on held-out data instead of the parameters.")


class LrSchedule(Spec):
    """Configures how the learning rate changes over the run, which is the same for every plan."""

    name: Literal["constant", "cosine", "linear", "step"] = Field(
        "cosine", description="Shape of the decay after the warm-up."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps over which the rate rises linearly to its peak.")
    final: float = Field(0.0, ge=0, le=1, description="Share of the peak at the end (cosine, linear).")
    every_epochs: int = Field(30, ge=1, description="Epochs between two drops (step).")
    every_steps: int | None = Field(
        None, ge=1, description="Steps between two drops (step), instead of epochs (default: by epochs)."
    )
    factor: float = Field(0.1, gt=0, le=1, description="Factor of each drop (step).")


class CheckpointSpec(Spec):
    """Configures when the state of the training is saved."""

    every_steps: int | None = Field(None, ge=1, description="Steps between two checkpoints (default: once per epoch).")
    keep: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    keep_best: str | None = Field(
        None,
        description="Also keep the best checkpoint by this metric, for example held_out_loss; a checkpoint is saved "
        "after each evaluation that is better than all earlier ones (default: none).",
    )
    best_is: Literal["auto", "lowest", "highest"] = Field(
        "auto", description="Which value of that metric is best; auto knows it for the metrics of the built-in tasks."
    )
    resume: bool = Field(True, description="Go on from the newest intact checkpoint in the run's folder.")
    enabled: bool = Field(True, description="Whether to save checkpoints at all.")
    background: bool = Field(
        True,
        description="Write checkpoints while training goes on, from a copy in memory; with false, training waits, and "
        "no copy is needed.",
    )

    copy_to: str | None = Field(
        None,
        min_length=1,
        description="Folder or URL to which checkpoints are copied in the background, such as /mnt/nas/run or "
        "s3://bucket/run (which needs s3fs); the device with rank 0 copies (default: nowhere).",
    )
    copies: int = Field(3, ge=1, description="Number of newest copies to keep there; the best one is kept, too.")

    @model_validator(mode="after")
    def _best_is_saved(self) -> CheckpointSpec:
        if self.keep_best is not None and not self.enabled:
            raise ValueError("keep_best: no checkpoint is saved with enabled: false; remove one of the two")
        return self


class RecoverySpec(Spec):
    """Configures what ranks keep in memory so that the loss of a rank costs no step."""

    mirrors: int = Field(
        1,
        ge=0,
        le=2,
        description="Number of other ranks in whose memory the state that a rank alone holds is kept, too, with the "
        "messages sent to its stage since; from these, the stages of as many ranks are rebuilt that are lost at once.",
    )
    mirror_budget: float = Field(
        0.03,
        gt=0,
        le=1,
        description="Share of the time of a step that copying the state to another rank's memory may take on the link "
        "between them; less means that more messages are kept.",
    )
    log_bytes: int = Field(
        256 << 20, ge=0, description="Most bytes of messages that a rank keeps in memory for stages that may be lost."
    )
