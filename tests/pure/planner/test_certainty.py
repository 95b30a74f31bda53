"""The range of a predicted time: from published runs of its kind, wider where there are none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_cases import CLUSTER, DEVICE, JOB, LLAMA

from phalanx.plan.layout import Layout
from phalanx.planner.certainty import kind, likely, words
from phalanx.planner.engine import profiles
from phalanx.planner.search import search
from phalanx.planner.summary import cells, summary
from phalanx.spec.clusters import named

A100 = replace(CLUSTER, device=replace(DEVICE, name="A100-SXM4-80GB"))


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(data=8), "one node"),
        (Layout(data=9), "several nodes"),
        (Layout(tensor=8, pipeline=2), "pipeline"),
        (Layout(data=16, pipeline=2, zero=3), "ZeRO 3"),
    ],
    ids=str,
)
def test_each_layout_has_a_kind_with_a_range(layout: Layout, name: str) -> None:
    assert kind(layout, CLUSTER) == name
    for engine in profiles():
        found = likely(layout, A100, engine)
        assert 0.7 < found.low < 1 < found.high < 1.3 and name in found.because


def test_the_range_is_in_the_unit_of_its_time() -> None:
    """A minute and 54 seconds would not fit into the column."""
    line = replace(summary(search(LLAMA, JOB, A100, top=1).plans[0]), step_s=62.4, low_s=54.3, high_s=68.0)
    assert cells(line)[1:3] == ("1.04 min", "0.905–1.13")


def test_an_engine_is_judged_by_its_own_runs_where_there_are_enough() -> None:
    own, other = (likely(Layout(pipeline=2), A100, engine) for engine in ("nanotron", "phalanx"))
    assert "nanotron" in own.because and "all engines" in other.because
    assert (own.low, own.high) != (other.low, other.high)


def test_a_device_without_published_runs_has_a_wider_range_and_says_why() -> None:
    known, unknown = (likely(Layout(data=32), cluster, "phalanx") for cluster in (A100, CLUSTER))
    assert unknown.low < known.low and unknown.high > known.high
    assert "no run on toy is published" in unknown.because and "published; " not in known.because
    found = search(LLAMA, replace(JOB, global_batch=32), CLUSTER, {"data": 32, "tensor": 1, "zero": 0})
    assert words(Layout(data=32), CLUSTER, "phalanx") in found.reasons


def test_speeds_of_this_machine_are_not_taken_for_measured_ones() -> None:
    assert "until phalanx measure" in likely(Layout(data=2), named("local"), "phalanx").because
    assert "phalanx measure" not in likely(Layout(data=2), CLUSTER, "phalanx").because
