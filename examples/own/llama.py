"""A Llama of `transformers`, its file untouched, over tensor 2 × pipeline 2 × data 2: phalanx run --ranks 8 llama.py

It learns the text of Python's own `this` module, byte by byte.
"""

import codecs
import contextlib
import io
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import phalanx

SEQ_LEN = 32


def llama(num_layers: int = 4) -> nn.Module:
    """A small one, with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LEN,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def before(module: Any, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Embedded tokens, and cosines and sines of their positions."""
    hidden = module.model.embed_tokens(batch["input_ids"])
    positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
    return hidden, *module.model.rotary_emb(hidden, position_ids=positions)


def block(layer: nn.Module, nest: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One decoder layer; without a mask, sdpa is causal."""
    hidden, cosines, sines = nest
    return layer(hidden, position_embeddings=(cosines, sines)), cosines, sines


def after(module: Any, nest: tuple[Tensor, ...], batch: dict[str, Tensor]) -> Tensor:
    """Logits."""
    return module.lm_head(module.model.norm(nest[0]))


BLOCKS = phalanx.Blocks(path="model.layers", before=before, block=block, after=after)


def next_token(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The cross-entropy of each token but the first, summed, and how many these are."""
    targets = batch["input_ids"][:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum"), targets.numel()


def text() -> dict[str, Tensor]:
    """Overlapping windows of the text: int64 [windows, SEQ_LEN]."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    tokens = torch.tensor(list(codecs.decode(this.s, "rot13").encode("ascii")))
    return {"input_ids": tokens.unfold(0, SEQ_LEN, 8)}


def main() -> None:
    """Train for a while."""
    torch.manual_seed(1)
    plan = phalanx.ModulePlan(
        job=phalanx.JobSpec(
            global_batch=16, seq_len=SEQ_LEN, num_steps=100, precision="fp32", optimizer=phalanx.OptimizerSpec(lr=3e-3)
        ),
        layout=phalanx.Layout(tensor=2, pipeline=2, data=2, zero=1, micro_batch=4, sequence_parallel=True),
    )
    phalanx.Trainer(llama(), next_token, text(), plan, blocks=BLOCKS, cuts="auto").run()


if __name__ == "__main__":
    main()
