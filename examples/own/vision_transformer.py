"""A vision transformer learns the digits over tensor 2 × pipeline 2 × data 2:

phalanx run --ranks 8 vision_transformer.py
"""

import torch
import torch.nn.functional as F
from digits import held_out, training
from torch import Tensor, nn

import phalanx

WIDTH = 48
CUTS = {"blocks.*.linear1": "column", "blocks.*.linear2": "row"}
"""Of torch's own encoder layers; their attention, which is one function, stays whole."""


class Patches(nn.Module):
    """Cuts images into patches of 2 × 2 pixels, and says where each one was."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, WIDTH, 2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, WIDTH))

    def forward(self, images: Tensor) -> Tensor:
        """[n, 1, 8, 8] → [n, 16, width]."""
        return self.project(images).flatten(2).transpose(1, 2) + self.positions


class Head(nn.Module):
    """Logits of the mean over all patches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, 16, width] → [n, 10]."""
        return self.project(self.norm(tokens).mean(1))


class VisionTransformer(nn.Module):
    """Patches, torch's own encoder layers, a head."""

    def __init__(self, num_blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.patches = Patches()
        settings = {"dropout": dropout, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, **settings) for _ in range(num_blocks)
        )
        self.head = Head()

    def forward(self, images: Tensor) -> Tensor:
        """[n, 1, 8, 8] → logits [n, 10]."""
        tokens = self.patches(images)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens)


def cross_entropy(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean over the samples of a micro-batch."""
    return F.cross_entropy(output, batch[1])


def wrong(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The share of samples that are taken for another digit."""
    return (output.argmax(1) != batch[1]).double().mean()


def main() -> None:
    """Train, and say how many of the digits held out are known."""
    torch.manual_seed(1)
    plan = phalanx.ModulePlan(
        job=phalanx.JobSpec(
            global_batch=64, seq_len=1, num_steps=400, precision="fp32", optimizer=phalanx.OptimizerSpec(lr=3e-3)
        ),
        layout=phalanx.Layout(tensor=2, pipeline=2, data=2, zero=2, micro_batch=16),
    )
    trainer = phalanx.Trainer(VisionTransformer(), cross_entropy, training(), plan, blocks="blocks", cuts=CUTS)
    trainer.run()
    step = trainer.step
    step.say(f"accuracy {1 - step.evaluate(step.share(held_out()), wrong):.4f}")


if __name__ == "__main__":
    main()
