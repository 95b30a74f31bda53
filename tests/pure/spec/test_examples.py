"""Every example is a run file that loads, and says what its comments claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.plan.layout import Layout
from phalanx.plan.legality import problems
from phalanx.spec.load import load

EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples").glob("*.toml"))


def test_there_are_examples():
    assert {"demo.toml", "tiny.toml", "gpt-20b-256-a100.toml"} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_it_loads_and_what_it_asks_for_is_legal(path):
    run = load(path)
    given = dict(run.layout)
    rest = Layout(**{**given, "data": 1}).num_ranks
    layout = Layout(**{"data": run.cluster.num_devices // rest, **given})
    assert problems(run.model, run.job, run.cluster, layout) == []


def test_the_large_one_is_as_large_as_it_says():
    run = load(next(path for path in EXAMPLES if path.name == "gpt-20b-256-a100.toml"))
    assert run.model.num_parameters == pytest.approx(20e9, rel=0.02)
    assert run.cluster.num_devices == 256
    assert run.job.tokens_per_step == pytest.approx(3.1e6, rel=0.02)
