"""The planner's arrays against the one-at-a-time truth of plan: legality, Shards, Schedule, Walk."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import CLUSTER, GPT, JOB, LLAMA

from phalanx.plan import operations
from phalanx.plan.cut import cut_of
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.legality import problems
from phalanx.plan.plan import Prediction
from phalanx.plan.schedule import SCHEDULES, schedule
from phalanx.plan.shards import rank_buffers, rank_stages
from phalanx.plan.stages import Stage, recomputed_layers
from phalanx.planner import legal, memory, timeline
from phalanx.planner.candidates import MOST_KEYS, RECOMPUTES, Candidates, distinct, of
from phalanx.planner.engine import engine
from phalanx.planner.estimate import estimate, repeated_layers, stage_layers
from phalanx.planner.search import predict
from phalanx.spec.model import ModelSpec

sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 12])
layouts = st.builds(
    Layout,
    tensor=sizes,
    context=st.sampled_from([1, 2, 5]),
    pipeline=sizes,
    data=sizes,
    micro_batch=st.sampled_from([1, 2, 3, 5]),
    virtual_stages=st.sampled_from([1, 2]),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    zero=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    recompute=st.sampled_from(["none", "selective", "full"]),
    outermost=st.sampled_from(["pipeline", "data"]),
)


@given(
    many=st.lists(layouts, min_size=1, max_size=20),
    size=st.sampled_from([0, 1, 2, 3]),
    chunks=st.sampled_from([1, 1, 2, 3, 7]),
    every=st.sampled_from([1, 1, 2]),
    per_stage=st.sampled_from([None, None, (1,), (1, 0)]),
    model=st.sampled_from([LLAMA, GPT]),
)
@settings(max_examples=200, deadline=None)
def test_legality_of_arrays_is_that_of_one(
    many: list[Layout], size: int, chunks: int, every: int, per_stage: tuple[int, ...] | None, model: ModelSpec
) -> None:
    shared = {"zero_group": size, "tensor_overlap_chunks": chunks}
    shared |= {"recompute_every": every, "recompute_layers": per_stage}
    many = [replace(layout, **shared) for layout in many]
    broken = np.any(list(legal.illegal(model, JOB, CLUSTER, of(many)).values()), axis=0)
    assert broken.tolist() == [bool(problems(model, JOB, CLUSTER, layout)) for layout in many]


@given(layout=layouts, model=st.sampled_from([LLAMA, GPT, replace(LLAMA, qk_norm=True)]))
@settings(max_examples=200, deadline=None)
def test_elements_are_those_of_shards(layout: Layout, model: ModelSpec) -> None:
    layout = replace(layout, context=1, virtual_stages=1)
    if problems(model, JOB, replace(CLUSTER, num_nodes=200), layout):
        return
    many = of([layout])
    count = memory.elements(model, many)
    for pipeline in (0, layout.pipeline - 1):
        for buffer in rank_buffers(model, layout, Coord(pipeline=pipeline), JOB.seq_len):
            kind = buffer.name.split(".")[0]
            claimed = {"layers": count.layer, "embedding": count.embedding, "head": count.head}[kind]
            assert int(np.asarray(claimed).reshape(-1)[0]) == buffer.num_elements, buffer.name


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_micro_batches_in_flight_bound_those_of_the_schedule(name: str) -> None:
    fewest, most = SCHEDULES[name].virtual_stages
    for pipeline in (1, 2, 3, 4, 8):
        for chunks in range(fewest, min(most, 3) + 1):
            counts = np.array([pipeline, 2 * pipeline, 4 * pipeline])
            claimed = memory.in_flight(name, pipeline, chunks, counts)
            for i, micro_batches in enumerate(counts.tolist()):
                plan = schedule(name, pipeline, chunks, micro_batches)
                peaks = [plan.peak_live(at) for at in range(pipeline)]
                assert (claimed[i] >= peaks).all()
                if name in ("1f1b", "gpipe", "interleaved-1f1b"):
                    assert claimed[i].tolist() == peaks


def times_of(forward: list[float], backward: list[float], transfer: float) -> timeline.StageTimes:
    return timeline.StageTimes(
        forward_s=np.array([forward]),
        backward_s=np.array([backward]),
        weight_s=np.array([backward]) * 0.4,
        transfer_s=np.array([transfer]),
    )


@given(data=st.data(), name=st.sampled_from(sorted(SCHEDULES)), transfer=st.floats(0, 0.5))
@settings(max_examples=200, deadline=None)
def test_no_schedule_beats_the_bound(data: st.DataObject, name: str, transfer: float) -> None:
    pipeline, micro_batches = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 12))
    chunks = max(SCHEDULES[name].virtual_stages[0], data.draw(st.integers(1, 2)))
    chunks = min(chunks, SCHEDULES[name].virtual_stages[1])
    costs = st.lists(st.floats(0.1, 2.0), min_size=pipeline * chunks, max_size=pipeline * chunks)
    times = times_of(data.draw(costs), data.draw(costs), transfer)
    places = timeline.stage_places(name, pipeline, chunks)
    least = timeline.bound(name, times, places, np.array([micro_batches]))[0]
    played = timeline.replay_s(name, times, 0, pipeline, chunks, micro_batches)
    assert least <= played * (1 + 1e-12)


def test_the_bound_is_reached_by_equal_stages_without_transfers() -> None:
    times = times_of([1.0] * 4, [2.0] * 4, 0.0)
    least = timeline.bound("1f1b", times, timeline.stage_places("1f1b", 4, 1), np.array([8]))[0]
    assert least == pytest.approx((8 + 3) * 3.0)
    assert timeline.replay_s("1f1b", times, 0, 4, 1, 8) == pytest.approx(least)


@given(
    layout=layouts,
    model=st.sampled_from([LLAMA, GPT, replace(LLAMA, num_experts=6, experts_per_token=2)]),
    size=st.sampled_from([0, 0, 2, 3]),
)
@settings(max_examples=200, deadline=None)
def test_no_layout_needs_less_than_the_least(layout: Layout, model: ModelSpec, size: int) -> None:
    layout = replace(
        layout, virtual_stages=1, zero_group=size if layout.zero and layout.data % max(1, size) == 0 else 0
    )
    if problems(model, JOB, replace(CLUSTER, num_nodes=200), layout):
        return
    many, runner = of([layout]), engine("megatron-core-2024")
    (group,) = estimate(model, JOB, CLUSTER, runner, many)
    assert memory.least(model, runner, "bf16", many)[0] <= group.memory_bytes[0].max() * (1 + 1e-12)


def test_a_layout_survives_the_arrays() -> None:
    layout = Layout(
        tensor=2, data=4, pipeline=3, zero=1, sequence_parallel=True, recompute="selective", schedule="gpipe"
    )
    layout = replace(layout, outermost="data", zero_group=2, recompute_every=2)
    many = of([Layout(), layout])
    assert isinstance(many, Candidates) and many.layout(1) == layout


@pytest.mark.parametrize("largest", [6, MOST_KEYS], ids=["table", "sorted"])
def test_distinct_combinations_are_those_there_are(largest: int) -> None:
    columns = np.array([3, 0, 3, largest, 0]), np.array([1, 2, 1, 0, 1])
    first, inverse = distinct(*columns)
    assert sorted(first.tolist()) == [0, 1, 3, 4]
    for column in columns:
        assert column[first][inverse].tolist() == column.tolist()


def predicted(**chosen: Any) -> Prediction:
    layout = Layout(pipeline=2, stage_layers=(4, 4), micro_batch=1, **chosen)
    prediction = predict(replace(LLAMA, num_layers=8), JOB, CLUSTER, layout).prediction
    assert prediction is not None
    return prediction


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_memory_and_time_of_some_recomputed_layers_lie_between(recompute: str) -> None:
    """Each layer saves the same memory and costs the same seconds; a stage without any keeps everything. Only one that
    has none behind it needs room to be made again, which others have left by then."""
    none, one = predicted(), predicted(recompute=recompute, recompute_layers=(1, 0))
    half, whole = predicted(recompute=recompute, recompute_every=2), predicted(recompute=recompute)
    bare, first, some, full = (found.memory_bytes[0]["activations"] for found in (none, one, half, whole))
    assert full < some < first < bare
    saved = bare - first
    assert first - some == saved
    model, layout = replace(LLAMA, num_layers=8), Layout(micro_batch=1)
    cut = cut_of(model, JOB.seq_len, layout, 2)
    block = operations.layer(model, cut, engine().kernels)
    _, room = memory.kept_bytes(block, cut, np.array(RECOMPUTES.index(recompute)))
    assert full == bare - 4 * saved + room
    assert one.memory_bytes[1] == none.memory_bytes[1]
    seconds = [found.step_s_by_kind["recompute"] for found in (none, half, whole)]
    assert seconds[0] == 0
    assert seconds[1] == pytest.approx(seconds[2] / 2)


def test_the_planner_splits_layers_as_the_trainer_does() -> None:
    """Also where copied kv heads make layers dearer beside the head."""
    model = replace(LLAMA, num_layers=12, num_heads=4, num_kv_heads=1, head_dim=64, vocab=5000)
    splits = set()
    for tensor in (1, 2, 4):
        layout = Layout(tensor=tensor, pipeline=2)
        ours = [
            len(stage.layers)
            for place in range(2)
            for stage in rank_stages(model, layout, Coord(pipeline=place), JOB.seq_len)
        ]
        assert stage_layers(model, JOB.seq_len, engine(), of([layout])).tolist() == ours
        splits.add(tuple(ours))
    assert len(splits) > 1


@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=8),
    every=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    firsts=st.none() | st.integers(0, 6),
)
@settings(max_examples=200, deadline=None)
def test_recomputed_layers_are_counted_as_they_are(counts: list[int], every: list[int], firsts: int | None) -> None:
    per_stage = None if firsts is None else (firsts,) * len(counts)
    same: dict[str, Any] = {"pipeline": len(counts), "recompute": "full", "recompute_layers": per_stage}
    many = [Layout(recompute_every=1 if per_stage else each, **same) for each in every]
    repeated, closing, case = repeated_layers(of(many), np.array(counts))
    stops = list(itertools.accumulate(counts))
    stages = [
        Stage(index=place, layers=range(stop - count, stop), embedding=place == 0, head=place == len(counts) - 1)
        for place, (stop, count) in enumerate(zip(stops, counts, strict=True))
    ]
    for layout, number in zip(many, case.tolist(), strict=True):
        again = [recomputed_layers(layout, stage) for stage in stages]
        assert repeated[number].tolist() == [len(numbers) for numbers in again]
        ends = [bool(numbers) and numbers[-1] == stage.layers[-1] for numbers, stage in zip(again, stages, strict=True)]
        assert closing[number].tolist() == ends
