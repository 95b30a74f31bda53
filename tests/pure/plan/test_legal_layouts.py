"""Legality: a layout that is not refused can be cut, scheduled and split."""

from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tiny import tiny_job, tiny_model, toy_cluster

from phalanx.plan.groups import groups
from phalanx.plan.layout import Layout
from phalanx.plan.legality import SPLIT_BACKWARD, problems
from phalanx.plan.schedule import SCHEDULES, schedule
from phalanx.plan.schedule_check import check
from phalanx.plan.shards import rank_buffers
from phalanx.plan.stages import split

SCHEDULE_AND_CHUNKS = st.sampled_from(list(SCHEDULES)).flatmap(
    lambda name: st.tuples(st.just(name), st.sampled_from(SCHEDULES[name].virtual_stages))
)
LAYOUTS = st.builds(
    lambda chosen, **sizes: Layout(schedule=chosen[0], virtual_stages=min(chosen[1], 3), **sizes),
    SCHEDULE_AND_CHUNKS,
    tensor=st.sampled_from([1, 2, 4, 3]),
    pipeline=st.integers(1, 4),
    data=st.sampled_from([1, 2, 4]),
    micro_batch=st.sampled_from([1, 2, 3]),
    zero=st.integers(0, 3),
    zero_group=st.sampled_from([0, 0, 2, 3]),
    sequence_parallel=st.booleans(),
)
MODELS = st.builds(
    lambda layers, heads, vocab, tied: replace(
        tiny_model(), num_layers=layers, num_heads=heads[0], num_kv_heads=heads[1], vocab=vocab, tied=tied
    ),
    st.integers(3, 12),
    st.sampled_from([(4, 2), (4, 4), (6, 2), (6, 3), (4, 1)]),
    st.integers(1, 300),
    st.booleans(),
)
BIG = replace(toy_cluster(12), num_nodes=64)


@settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(model=MODELS, layout=LAYOUTS, seq_len=st.sampled_from([48, 60]), global_batch=st.sampled_from([4, 8, 12]))
def test_whatever_has_no_problems_can_be_cut(model, layout, seq_len, global_batch):
    job = tiny_job(seq_len=seq_len, global_batch=global_batch)
    assume(not problems(model, job, BIG, layout))
    split(model, seq_len, layout.num_stages, layout.stage_layers, tensor=layout.tensor)
    num_micro_batches = layout.num_micro_batches(global_batch)
    assert num_micro_batches * layout.micro_batch * layout.data == global_batch
    check(schedule(layout.schedule, layout.pipeline, layout.virtual_stages, num_micro_batches))
    groups(model, layout)
    assert _elements_held(model, layout, seq_len) == model.num_parameters


def _elements_held(model, layout, seq_len):
    """Elements over all ranks, copies left out. Every rank must hold something of every parameter that it has."""
    held = 0
    for coord in (coord for coord in layout.coords() if coord.data == 0):
        for buffer in rank_buffers(model, layout, coord, seq_len):
            assert all((part.stop - part.start) % layout.data == 0 for part in buffer.parts)
            assert all(piece.rectangle.num_elements for piece in buffer.pieces)
            for part in buffer.parts:
                inside = [piece for piece in buffer.pieces if part.start <= piece.offset < part.stop]
                held += part.counted * sum(piece.rectangle.num_elements for piece in inside)
    return held


def test_schedules_that_split_backward_are_the_ones_named():
    split = {
        name
        for name, family in SCHEDULES.items()
        if any(
            action.kind == "weight_gradient"
            for actions in schedule(name, 2, family.virtual_stages[0], 4).actions
            for action in actions
        )
    }
    assert split == set(SPLIT_BACKWARD)
