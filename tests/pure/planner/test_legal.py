"""Rules of legality over arrays, each where no other is broken: layouts that are legal but for one or two fields."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from planner_cases import CLUSTER, GPT, JOB, LLAMA

from phalanx.plan.layout import Layout
from phalanx.plan.legality import problems
from phalanx.planner import legal
from phalanx.planner.candidates import of
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec

BASES = (
    Layout(data=2),
    Layout(tensor=2, data=4, zero=1, sequence_parallel=True),
    Layout(tensor=4, pipeline=2, micro_batch=2, recompute="selective"),
    Layout(pipeline=2, data=2, virtual_stages=2, schedule="interleaved-1f1b", zero=2),
)
VALUES: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2, 3, 4, 6, 8, 12),
    "context": (1, 2, 4, 5),
    "pipeline": (1, 2, 4, 7, 8),
    "data": (1, 2, 3, 5, 8, 16),
    "micro_batch": (1, 2, 5, 7),
    "virtual_stages": (1, 2, 3, 4),
    "schedule": ("1f1b", "gpipe", "zb-h1", "zb-v", "breadth-first"),
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "recompute": ("none", "selective", "full"),
    "zero_group": (0, 1, 2, 3, 4),
    "recompute_every": (1, 2),
}
SHARED: tuple[dict[str, Any], ...] = (
    {},
    {"tensor_overlap_chunks": 7},
    {"tensor_overlap_chunks": 32},
    {"reduce": "top-k"},
    {"reduce": "powersgd"},
    {"recompute_layers": (1, 0)},
    {"stage_layers": (4, 3)},
    {"stage_layers": (4, 4)},
)
"""What all layouts of one array have in common."""


def near_legal(shared: dict[str, Any]) -> list[Layout]:
    """Each base with one field changed or, where nothing else is unusual, with two."""
    singles = [{key: value} for key, values in VALUES.items() for value in values]
    pairs = ((one, {}) for one in singles) if shared else itertools.combinations_with_replacement(singles, 2)
    made = [{**one, **other, **shared} for one, other in pairs]
    return list(dict.fromkeys(replace(base, **changes) for base, changes in itertools.product(BASES, made)))


def broken(model: ModelSpec, many: list[Layout], job: JobSpec = JOB) -> tuple[dict[str, Any], Any]:
    """Which of `many` break each rule of arrays, and how many each layout breaks."""
    rules = legal.illegal(model, job, CLUSTER, of(many))
    return rules, np.sum(list(rules.values()), axis=0)


@pytest.mark.parametrize("shared", SHARED, ids=str)
@pytest.mark.parametrize(
    ("model", "job"), [(LLAMA, JOB), (GPT, JOB), (LLAMA, replace(JOB, precision="fp16"))], ids=["llama", "gpt", "fp16"]
)
def test_each_rule_of_arrays_is_that_of_one(model: ModelSpec, job: JobSpec, shared: dict[str, Any]) -> None:
    many = near_legal(shared)
    _, count = broken(model, many, job)
    assert (count > 0).tolist() == [bool(problems(model, job, CLUSTER, layout)) for layout in many]


def test_each_rule_is_the_only_one_that_some_layout_breaks() -> None:
    alone: set[str] = set()
    for model, shared in itertools.product((LLAMA, GPT), SHARED):
        rules, count = broken(model, near_legal(shared))
        alone |= {name for name, mask in rules.items() if (np.asarray(mask) & (count == 1)).any()}
    assert set(rules) - alone == {"expert_group that experts and data do not share"}  # no model here has any
