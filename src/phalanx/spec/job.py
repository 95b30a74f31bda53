"""JobSpec: what to train, on what, for how long. All that is neither the model nor the machine nor the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.spec.schema import Below1, Count, Count31, NotNegative, Positive, Range, Whole

Batch = Annotated[int, Range(at_least=1, at_most=2**20)]
TimeLimit = Annotated[float, Range(above=0, at_most=10**6)]  # a socket counts its own in nanoseconds, in 63 bits
Precision = Literal["fp32", "bf16", "fp16", "fp64"]
Documents = Literal["joined", "separate"]

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
class DataSet:
    """One of several sets of tokens that are mixed: `path` is the prefix of its .bin/.idx pair, `weight` its part of
    all samples, relative to the weights of the others."""

    path: str
    weight: Positive = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Where the tokens come from: `path` is the prefix of a .bin/.idx pair; `text` a glob of text files from which
    that pair is built on first use, with a byte-pair tokenizer of the model's vocabulary size trained on it (as `text`,
    `PYTHON_STDLIB` stands for the source files of the Python that runs us: real text that is there on any machine);
    `sets` are several pairs, mixed.

    `documents` "joined": attention and positions run through a sequence whatever documents lie in it; "separate": both
    begin anew with each document. Validation reads `validation_path`, or the last `validation_fraction` of each set,
    which is then not trained on; every `validate_every_steps` steps (0: only at the end).
    """

    path: str | None = None
    text: str | None = None
    sets: tuple[DataSet, ...] = ()
    documents: Documents = "joined"
    validation_path: str | None = None
    validation_fraction: Below1 = 0.0
    validate_every_steps: Whole = 0

    @property
    def mixed(self) -> tuple[DataSet, ...]:
        """The sets to train on, of which `path` is the only one where it is given."""
        return self.sets if self.path is None else (DataSet(path=self.path),)

    @property
    def validates(self) -> bool:
        """Whether there is something to validate on."""
        return self.validation_path is not None or self.validation_fraction > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """A checkpoint every `every_steps` steps (0: only at the end); the newest `keep` are kept (0: all), and for
    good those of every `keep_every`-th step (0: none).

    `resume` "auto" goes on from the newest checkpoint in the run folder if there is one, "never" starts anew; a path
    goes on from that checkpoint. A run that has nothing to go on from starts with the weights of `init_from`, a Hugging
    Face folder or a checkpoint, where it is given. `verify`: whether checksums are compared on the way. Asked to stop,
    a run has `grace_s` seconds to finish its step and save.
    """

    every_steps: Whole = 0
    keep: Whole = 3
    keep_every: Whole = 0
    resume: str = "auto"
    init_from: str | None = None
    verify: bool = True
    grace_s: TimeLimit = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One training job. `global_batch` counts sequences per optimizer step, `seq_len` tokens per sequence.

    `precision` is that of compute; master weights and optimizer state stay fp32 ("fp64" is float64 all through: for
    checking). "fp16" scales the loss, by half as much after each step whose gradients overflow; such a step changes
    nothing. `label_smoothing` is the part of each target that all ids share equally, `z_loss` the weight of log² Z,
    with Z the sum of a token's exponentiated logits: both belong to the loss that is trained and shown.
    A step whose loss or gradient is no finite number ends the run, or with `on_non_finite` "skip" changes nothing.
    With `compile`, torch.compile fuses what a block does between matrix products and messages.
    Every `check_copies_every_steps` steps (0: never) ranks compare what they hold copies of.
    The terminal shows every `log_every_steps`-th step, metrics.jsonl all of them.
    `comm` "auto" moves data between processes of one host through shared memory, "gloo" switches that off.
    `comm_timeout_s` ends a collective that waits longer.
    """

    global_batch: Batch
    seq_len: Count31
    num_steps: Count
    precision: Precision = "bf16"
    seed: Whole = 1
    label_smoothing: Below1 = 0.0
    z_loss: NotNegative = 0.0
    compile: bool = False
    on_non_finite: Literal["stop", "skip"] = "stop"
    check_copies_every_steps: Whole = 100
    log_every_steps: Count = 10
    optimizer: OptimizerSpec = OptimizerSpec()
    data: DataSpec = DataSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    comm: Literal["auto", "gloo"] = "auto"
    comm_timeout_s: TimeLimit = 600.0

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step reads."""
        return self.global_batch * self.seq_len
