"""A step in each layout beside picotron's: `python benchmarks/picotron_peer.py CHECKOUT`.

CHECKOUT is a checkout of huggingface/picotron from GitHub. Its parallel parts need torch alone; its model, run on CPU
as its own option `use_cpu` runs it, imports flash-attn without calling it, so an empty module stands in for that. What
is measured, and how, says peer.py.

To its credit it gets the fused AdamW, which its own script keeps for GPUs, and no call to CUDA's synchronization, which
fails where there is none.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded

import argparse
import functools
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import peer
import plain_model
import step_time
import torch
import torch.nn.functional as F
from crew import Contender, Steps
from torch import Tensor

from phalanx.plan.layout import Layout

LAYOUTS = {
    "one process": Layout(micro_batch=4),
    "data 2": Layout(data=2, micro_batch=4),
    "pipeline 2": Layout(pipeline=2, micro_batch=4),
    "tensor 2": Layout(tensor=2, micro_batch=4),
    "2 × 2 × 2": Layout(tensor=2, pipeline=2, data=2, micro_batch=2),
}
UNUSED = {
    "flash_attn.flash_attn_interface": "flash_attn_func",
    "flash_attn.layers.rotary": "apply_rotary_emb",
    "flash_attn.ops.triton.layer_norm": "layer_norm_fn",
}


class Batches:
    """The micro-batches of each step, as picotron's training steps take them."""

    def __init__(self, layout: Layout) -> None:
        self.grad_acc_steps = layout.num_micro_batches(step_time.GLOBAL_BATCH)
        samples = torch.randint(0, step_time.MODEL.vocab, (layout.micro_batch, step_time.SEQ_LEN + 1))
        self._batch = {
            "input_ids": samples[:, :-1].contiguous(),
            "target_ids": samples[:, 1:].contiguous(),
            "position_ids": torch.arange(step_time.SEQ_LEN).expand(layout.micro_batch, -1),
        }

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        return self

    def __next__(self) -> Mapping[str, Tensor]:
        return dict(self._batch)


def load(checkout: Path) -> None:
    """Import what its ranks need."""
    plain_model.load()
    os.environ.update(DEVICE="cpu", DTYPE="float32", FLASH_ATTEN="0")
    for name, function in UNUSED.items():
        sys.modules[name] = ModuleType(name)
        setattr(sys.modules[name], function, None)
    torch.cuda.synchronize = lambda: None
    sys.path.insert(0, str(checkout))
    for part in ("data_parallel.data_parallel", "pipeline_parallel.pipeline_parallel", "tensor_parallel"):
        importlib.import_module(f"picotron.{part}")


def config() -> SimpleNamespace:
    """The benchmark's model in Hugging Face's words."""
    model = step_time.MODEL
    return SimpleNamespace(
        hidden_size=model.hidden,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        intermediate_size=model.ffn,
        vocab_size=model.vocab,
        max_position_embeddings=step_time.SEQ_LEN,
        rms_norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
    )


def spread(layout: Layout) -> Any:
    """The rank's part of the model, wrapped in the order in which picotron's script does."""
    from picotron.data_parallel.data_parallel import DataParallelBucket
    from picotron.model import Llama
    from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel
    from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel

    model = Llama(config())
    if layout.tensor > 1:
        model = apply_tensor_parallel(model)
    if layout.pipeline > 1:
        model = PipelineParallel(model, config())
    return DataParallelBucket(model) if layout.data > 1 else model


def accumulate(model: Any, batches: Batches) -> None:
    """Gradients of a step without a pipeline, of which the last micro-batch sums over the data axis."""
    for number in range(batches.grad_acc_steps):
        model.require_backward_grad_sync = number == batches.grad_acc_steps - 1
        batch = next(batches)
        loss = F.cross_entropy(model(input_ids=batch["input_ids"]).flatten(0, 1), batch["target_ids"].flatten())
        (loss / batches.grad_acc_steps).backward()


def theirs(checkout: Path, name: str, layout: Layout) -> Contender:
    """Picotron with the axes of `layout`; its pipelines run 1F1B."""

    def steps(rank: int, folder: Path) -> Steps:
        import picotron.process_group_manager as manager
        from picotron.pipeline_parallel.pipeline_parallel import train_step_pipeline_1f1b

        os.environ["LOCAL_RANK"] = str(rank)
        plain_model.join(rank, layout.num_ranks, folder)
        manager.setup_process_group_manager(
            tp_size=layout.tensor, cp_size=1, pp_size=layout.pipeline, dp_size=layout.data
        )
        model, batches = spread(layout), Batches(layout)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        shape = (layout.micro_batch, step_time.SEQ_LEN, step_time.MODEL.hidden)
        while True:
            optimizer.zero_grad()
            if layout.pipeline > 1:
                train_step_pipeline_1f1b(model, batches, shape, torch.device("cpu"), torch.float32)
            else:
                accumulate(model, batches)
            optimizer.step()
            if layout.data > 1:
                model.reset()
            yield {}

    return Contender(name=name, num_ranks=layout.num_ranks, steps=steps, load=functools.partial(load, checkout))


def main() -> int:
    """Measure, unless there is nothing to measure with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the folder that holds picotron's `picotron` and `train.py`")
    peer.add_arguments(parser)
    given = parser.parse_args()
    if not (given.checkout / "picotron" / "model.py").is_file():
        parser.error(f"{given.checkout} holds no picotron/model.py: give a checkout of huggingface/picotron")
    peer.compare("picotron", LAYOUTS, functools.partial(theirs, given.checkout.absolute()), given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
