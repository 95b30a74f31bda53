"""scikit-learn's 1,797 handwritten digits, 8 × 8 pixels each, and a small residual network for them."""

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

NUM_HELD_OUT = 360


def samples() -> tuple[Tensor, Tensor]:
    """All images [n, 1, 8, 8], in [-1, 1], and labels [n], shuffled."""
    digits = load_digits()
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 8 - 1
    return images, torch.tensor(digits.target)[order]


def training() -> tuple[Tensor, Tensor]:
    """What is trained on."""
    images, labels = samples()
    return images[NUM_HELD_OUT:], labels[NUM_HELD_OUT:]


def held_out() -> tuple[Tensor, Tensor]:
    """What accuracy is measured on."""
    images, labels = samples()
    return images[:NUM_HELD_OUT], labels[:NUM_HELD_OUT]


def batches(num_steps: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`num_steps` batches drawn at random, the same ones each time."""
    images, labels = training()
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        chosen = torch.randint(len(images), (size,), generator=generator)
        yield images[chosen], labels[chosen]


class Residual(nn.Module):
    """Two convolutions around which the input is carried."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.convolution2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, inputs: Tensor) -> Tensor:
        """[n, channels, height, width] → the same."""
        middle = torch.relu(self.norm1(self.convolution1(inputs)))
        return torch.relu(inputs + self.norm2(self.convolution2(middle)))


class ResNet(nn.Module):
    """A stem, residual blocks, and a linear head over the mean of all positions."""

    def __init__(self, channels: int = 16, num_blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(num_blocks)))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        """[n, 1, 8, 8] → logits [n, 10]."""
        return self.head(self.blocks(torch.relu(self.stem(images))).mean((2, 3)))
