"""benchmarks/gpu_check.py as far as a machine without a GPU can tell: it refuses, and its ranks agree with one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_check

from phalanx.plan.layout import Layout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err


@pytest.mark.parametrize("layout", gpu_check.LAYOUTS, ids=str)
def test_ranks_that_talk_through_the_host_agree_with_one(layout: Layout, tmp_path: Path) -> None:
    """On the CPU here: what is moved, and where to, is the same."""
    alone = gpu_check.losses(0, Layout(), "", "cpu", 2)
    for found in run_ranks(layout.num_ranks, gpu_check.losses, layout, str(tmp_path), "cpu", 2):
        assert found == pytest.approx(alone, rel=gpu_check.TOLERANCE)


def test_the_large_model_is_one_of_a_billion() -> None:
    assert gpu_check.LARGE.num_parameters == 1_235_814_400
