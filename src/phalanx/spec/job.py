"""JobSpec: what to train, on what, for how long. All that is neither the model nor the machine nor the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.spec.schema import Below1, Count, NotNegative, Positive, Whole

Precision = Literal["fp32", "bf16", "fp64"]

PYTHON_STDLIB = "python-stdlib"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """AdamW with decoupled decay on matrices only, clipping by the global norm, warm-up, then a curve.

    `schedule`: "cosine" falls from `lr` to `min_lr` over the run, "linear" likewise in a line, "constant" stays.
    `clip_norm` 0 switches clipping off.
    """

    name: Literal["adamw"] = "adamw"
    lr: Positive = 3e-4
    min_lr: NotNegative = 0.0
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    clip_norm: NotNegative = 1.0
    warmup_steps: Whole = 0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Where the tokens come from: `path` is the prefix of a .bin/.idx pair; `text` a glob of text files from which
    that pair is built on first use, with a byte-pair tokenizer of the model's vocabulary size trained on it. As `text`,
    `PYTHON_STDLIB` stands for the source files of the Python that runs us: real text that is there on any machine.
    """

    path: str | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """A checkpoint every `every_steps` steps (0: only at the end); the newest `keep` are kept (0: all).

    `resume` "auto" goes on from the newest checkpoint in the run folder if there is one, "never" starts anew; a path
    goes on from that checkpoint. A run that has nothing to go on from starts with the weights of `init_from`, a Hugging
    Face folder or a checkpoint, where it is given. `verify`: whether checksums are compared on the way. Asked to stop,
    a run has `grace_s` seconds to finish its step and save.
    """

    every_steps: Whole = 0
    keep: Whole = 3
    resume: str = "auto"
    init_from: str | None = None
    verify: bool = True
    grace_s: Positive = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One training job. `global_batch` counts sequences per optimizer step, `seq_len` tokens per sequence.

    `precision` is that of compute; master weights and optimizer state stay fp32 ("fp64" is float64 all through: for
    checking). `label_smoothing` is the part of each target that all ids share equally, `z_loss` the weight of log² Z,
    with Z the sum of a token's exponentiated logits: both belong to the loss that is trained and shown.
    A step whose loss or gradient is no finite number ends the run, or with `on_non_finite` "skip" changes nothing.
    Every `check_copies_every_steps` steps (0: never) ranks compare what they hold copies of.
    `comm` "auto" moves data between processes of one host through shared memory, "gloo" switches that off.
    `comm_timeout_s` ends a collective that waits longer.
    """

    global_batch: Count
    seq_len: Count
    num_steps: Count
    precision: Precision = "bf16"
    seed: Whole = 1
    label_smoothing: Below1 = 0.0
    z_loss: NotNegative = 0.0
    on_non_finite: Literal["stop", "skip"] = "stop"
    check_copies_every_steps: Whole = 100
    optimizer: OptimizerSpec = OptimizerSpec()
    data: DataSpec = DataSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    comm: Literal["auto", "gloo"] = "auto"
    comm_timeout_s: Positive = 600.0

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step reads."""
        return self.global_batch * self.seq_len
