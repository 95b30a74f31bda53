"""A GPT in plain PyTorch, trained on token files over pipeline 2 × data 2:

phalanx data build python-stdlib --vocab 1024 -o data/stdlib
phalanx run --ranks 4 examples/own/gpt.py data/stdlib/tokens
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx

VOCAB, SEQ_LEN = 1024, 64


class Block(nn.Module):
    """Attention and a feed-forward, each with a norm before it and the input carried around it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, tokens, width] → the same."""
        batch, tokens, _ = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.norm2(hidden))


class Embedding(nn.Module):
    """Tokens and their positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(SEQ_LEN, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, tokens] → [batch, tokens, width]."""
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class GPT(nn.Module):
    """Nothing in here knows of Phalanx."""

    def __init__(self, width: int = 64, num_heads: int = 4, num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding = Embedding(width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token: [batch, tokens] → [batch, tokens, VOCAB]."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def next_token(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """The summed cross-entropy of the labels that count, and how many these are."""
    labels = batch[1].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"), int((labels >= 0).sum())


def main() -> None:
    """Train, and keep the weights for plain PyTorch."""
    torch.manual_seed(1)
    data = phalanx.TokenDataset(sys.argv[1], SEQ_LEN, vocab=VOCAB)
    optimizer = phalanx.OptimizerSpec(lr=3e-3, warmup_steps=10)
    job = phalanx.JobSpec(global_batch=16, seq_len=SEQ_LEN, num_steps=100, precision="fp32", optimizer=optimizer)
    layout = phalanx.Layout(pipeline=2, data=2, zero=1, micro_batch=4)
    plan = phalanx.ModulePlan(job=job, layout=layout)
    trainer = phalanx.Trainer(GPT(), next_token, data, plan, blocks="blocks")
    trainer.run()
    weights = trainer.step.state_dict()
    if weights:  # on rank 0
        torch.save(weights, "gpt.pt")


if __name__ == "__main__":
    main()
