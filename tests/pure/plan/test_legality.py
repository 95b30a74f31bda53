"""Legality: what cannot run is refused, with numbers and what to write instead."""

from dataclasses import replace

import pytest
from tiny import tiny_model

from phalanx.plan.layout import Layout
from phalanx.plan.legality import (
    LIMITS,
    allowed_tensor_sizes,
    engine_problems,
    module_problems,
    problems,
)
from phalanx.spec.cluster import ClusterSpec, Device, Link
from phalanx.spec.job import CheckpointSpec, JobSpec

MODEL = tiny_model(name="tiny")
JOB = JobSpec(global_batch=8, seq_len=64, num_steps=1)
LINK = Link(name="wire", latency_s=1e-6, bytes_per_s=1e9)
DEVICE = Device(name="chip", memory_bytes=2**30, memory_bytes_per_s=1e9, flops_per_s={"fp32": 1e9})
CLUSTER = ClusterSpec(name="toy", num_nodes=2, devices_per_node=8, device=DEVICE, intra_node=LINK, inter_node=LINK)


def found(layout, model=MODEL, job=JOB, cluster=CLUSTER):
    return [(problem.where, problem.what, problem.instead) for problem in problems(model, job, cluster, layout)]


REFUSED = {
    "query heads": (
        Layout(tensor=4),
        {"model": replace(MODEL, num_heads=6)},
        ("layout.tensor", "tensor 4 does not divide 6 query heads", "tensor = 1 or 2"),
    ),
    "kv heads": (
        Layout(tensor=4),
        {"model": replace(MODEL, num_heads=40, num_kv_heads=10, ffn=640, vocab=640)},
        (
            "layout.tensor",
            "tensor 4 neither divides 10 kv heads nor is a multiple of them",
            "tensor = 1, 2, 5, 10, 20 or 40",
        ),
    ),
    "feed-forward": (
        Layout(tensor=4),
        {"model": replace(MODEL, ffn=130)},
        ("layout.tensor", "tensor 4 does not divide the feed-forward width 130", "tensor = 1 or 2"),
    ),
    "vocabulary": (
        Layout(tensor=4),
        {"model": replace(MODEL, vocab=48)},
        (
            "layout.tensor",
            "tensor 4 leaves its last rank none of the 48 vocabulary rows (16 per rank)",
            "tensor = 1 or 2",
        ),
    ),
    "sequence parallelism": (
        Layout(tensor=2, sequence_parallel=True),
        {"job": replace(JOB, seq_len=63)},
        (
            "layout.sequence_parallel",
            "sequence parallelism cuts sequence 63 over tensor 2, which does not divide it",
            "job.seq_len = 62 or 64, or sequence_parallel = false",
        ),
    ),
    "context": (
        Layout(context=4),
        {"job": replace(JOB, seq_len=3)},
        ("layout.context", "context 4 does not divide sequence 3", "job.seq_len = 4"),
    ),
    "positions": (
        Layout(),
        {"model": replace(MODEL, positions="learned"), "job": replace(JOB, seq_len=65)},
        ("job.seq_len", "sequence 65 is longer than the 64 positions that tiny learns", "seq_len = 64 or less"),
    ),
    "stages": (
        Layout(pipeline=4),
        {"model": replace(MODEL, num_layers=3)},
        (
            "layout.pipeline",
            "pipeline 4 for 3 layers",
            "pipeline = 3 or less, or stage_layers with a 0 for each stage that shall hold only embedding or head",
        ),
    ),
    "entries of stage_layers": (
        Layout(pipeline=2, stage_layers=(1, 2, 1)),
        {},
        ("layout.stage_layers", "stage_layers has 3 entries, pipeline 2", "2 entries that sum to 4"),
    ),
    "sum of stage_layers": (
        Layout(pipeline=2, stage_layers=(1, 2)),
        {},
        (
            "layout.stage_layers",
            "stage_layers sum to 3, the model has 4 layers",
            "entries that sum to 4, or leave it out",
        ),
    ),
    "negative stage_layers": (
        Layout(pipeline=2, stage_layers=(5, -1)),
        {},
        ("layout.stage_layers", "a stage with -1 layers", "0 layers or more per stage"),
    ),
    "global batch": (
        Layout(data=2, micro_batch=3),
        {},
        (
            "layout.micro_batch",
            "micro-batch 3 × data 2 = 6 does not divide global batch 8",
            "job.global_batch = 6 or 12, or micro_batch = 2 or 4",
        ),
    ),
    "micro-batch larger than a data rank's share": (
        Layout(data=2, micro_batch=8),
        {},
        (
            "layout.micro_batch",
            "micro-batch 8 × data 2 = 16 does not divide global batch 8",
            "job.global_batch = 16, or micro_batch = 4",
        ),
    ),
    "global batch smaller than data": (
        Layout(data=16),
        {},
        (
            "layout.data",
            "micro-batch 1 × data 16 = 16 does not divide global batch 8",
            "job.global_batch = 16, or data = 8",
        ),
    ),
    "data that micro-batches leave no room for": (
        Layout(data=3, micro_batch=2),
        {},
        (
            "layout.data",
            "micro-batch 2 × data 3 = 6 does not divide global batch 8",
            "job.global_batch = 6 or 12, or data = 2 or 4",
        ),
    ),
    "devices": (
        Layout(data=8, pipeline=4),
        {},
        ("layout.data", "pipeline 4 × data 8 = 32 ranks, toy has 16 devices", "data = 4 or less"),
    ),
    "more model than devices": (
        Layout(tensor=2, pipeline=2),
        {"cluster": replace(CLUSTER, num_nodes=1, devices_per_node=2)},
        (
            "layout.tensor",
            "pipeline 2 × tensor 2 = 4 ranks, toy has 2 devices",
            "axis sizes whose product is 2 or less",
        ),
    ),
    "tensor across nodes": (
        Layout(tensor=4),
        {"cluster": replace(CLUSTER, num_nodes=8, devices_per_node=2)},
        ("layout.tensor", "a tensor group of 4 does not stay inside a node of 2 devices", "tensor = 1 or 2"),
    ),
    "tensor groups that straddle nodes": (
        Layout(tensor=4, data=2),
        {"cluster": replace(CLUSTER, devices_per_node=6)},
        ("layout.tensor", "a tensor group of 4 does not stay inside a node of 6 devices", "tensor = 1, 2, 3 or 6"),
    ),
    "an axis of none": (Layout(tensor=0), {}, ("layout.tensor", "tensor is 0", "tensor = 1 or more")),
    "ZeRO": (Layout(zero=4), {}, ("layout.zero", "there is no ZeRO stage 4", "zero = 0, 1, 2 or 3")),
    "a group without ZeRO": (
        Layout(data=4, zero_group=2),
        {},
        (
            "layout.zero_group",
            "zero_group 2 without ZeRO, which is what it would bound",
            "zero = 1, 2 or 3, or leave zero_group out",
        ),
    ),
    "a group that does not divide": (
        Layout(data=8, zero=1, zero_group=3),
        {},
        ("layout.zero_group", "zero_group 3 does not divide data 8", "zero_group = 2 or 4"),
    ),
    "a group that does not divide, nor does any smaller one": (
        Layout(data=3, zero=1, zero_group=2),
        {},
        ("layout.zero_group", "zero_group 2 does not divide data 3", "zero_group = 3"),
    ),
    "a group of a data axis of one": (
        Layout(zero=1, zero_group=2),
        {},
        ("layout.zero_group", "zero_group 2 does not divide data 1", "leave zero_group out"),
    ),
    "a group of one": (
        Layout(data=4, zero=3, zero_group=1),
        {},
        ("layout.zero_group", "a zero_group of 1 shares nothing", "zero = 0, or zero_group = 2 or more"),
    ),
    "less than a group": (
        Layout(data=4, zero=3, zero_group=-2),
        {},
        ("layout.zero_group", "zero_group is -2", "zero_group = 0 (all of data) or more"),
    ),
    "chunks of all tokens": (
        Layout(tensor=2, tensor_overlap_chunks=3),
        {},
        (
            "layout.tensor_overlap_chunks",
            "tensor_overlap_chunks 3 does not divide the 64 tokens of a micro-batch",
            "tensor_overlap_chunks = 2 or 4",
        ),
    ),
    "chunks of a slice": (
        Layout(tensor=2, sequence_parallel=True, tensor_overlap_chunks=64),
        {},
        (
            "layout.tensor_overlap_chunks",
            "tensor_overlap_chunks 64 does not divide the 32 tokens of a micro-batch that a tensor rank holds",
            "tensor_overlap_chunks = 32",
        ),
    ),
    "no chunk": (
        Layout(tensor_overlap_chunks=0),
        {},
        ("layout.tensor_overlap_chunks", "tensor_overlap_chunks is 0", "tensor_overlap_chunks = 1 or more"),
    ),
    "reduction": (
        Layout(data=2, reduce="topk"),
        {},
        ("layout.reduce", 'there is no reduce "topk"', 'reduce = "top-k" (of fp32, bf16, fp16, powersgd, top-k)'),
    ),
    "a part of shards": (
        Layout(data=2, zero=2, reduce="powersgd"),
        {},
        (
            "layout.reduce",
            "powersgd keeps errors as large as all gradients on every rank, which zero 2 is to save",
            'zero = 0 or 1, or reduce = "bf16"',
        ),
    ),
    "a part of a part": (
        Layout(data=4, zero=1, zero_group=2, reduce="top-k"),
        {},
        (
            "layout.reduce",
            "top-k needs gradients whole, which zero_group 2 cuts before they are reduced",
            'leave zero_group out, or reduce = "bf16"',
        ),
    ),
    "a fraction of more than all": (
        Layout(data=2, reduce="top-k", reduce_fraction=1.5),
        {},
        ("layout.reduce_fraction", "reduce_fraction is 1.5", "reduce_fraction = above 0 and at most 1"),
    ),
    "recompute": (
        Layout(recompute="ful"),
        {},
        ("layout.recompute", 'there is no recompute "ful"', 'recompute = "full" (of none, selective, full)'),
    ),
    "some of nothing": (
        Layout(recompute_every=2),
        {},
        (
            "layout.recompute_every",
            "recompute_every with nothing to compute again: recompute is none",
            'recompute = "selective" or "full", or leave recompute_every out',
        ),
    ),
    "recompute of other stages": (
        Layout(pipeline=2, recompute="full", recompute_layers=(1, 1, 0)),
        {},
        ("layout.recompute_layers", "recompute_layers has 3 entries, the layout 2 stages", "2 entries"),
    ),
    "two ways to say which": (
        Layout(recompute="full", recompute_layers=(1,), recompute_every=2),
        {},
        (
            "layout.recompute_layers",
            "recompute_every = 2 beside recompute_layers: both say which layers",
            "leave one of them out",
        ),
    ),
    "virtual stages": (
        Layout(schedule="gpipe", virtual_stages=99),
        {},
        (
            "layout.virtual_stages",
            "schedule gpipe does not run with 99 virtual stages",
            "virtual_stages = 1",
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_numbers_and_the_nearest_legal_values(case):
    layout, changed, expected = REFUSED[case]
    assert expected in found(layout, **changed)


def test_an_unknown_schedule_gets_the_nearest_name():
    ((where, what, instead),) = found(Layout(schedule="1f1p"))
    assert (where, what) == ("layout.schedule", 'there is no schedule "1f1p"')
    assert instead.startswith('schedule = "1f1b" (of ')


def test_all_problems_come_at_once():
    layout = Layout(tensor=3, pipeline=5, data=3, micro_batch=2)
    where = [problem.where for problem in problems(MODEL, JOB, CLUSTER, layout)]
    assert sorted(set(where)) == ["layout.data", "layout.pipeline", "layout.tensor"]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tensor=4),
        Layout(tensor=2, pipeline=2, data=2, sequence_parallel=True, zero=1),
        Layout(sequence_parallel=True),
        Layout(data=8, zero=2, zero_group=4),
        Layout(tensor=2, sequence_parallel=True, tensor_overlap_chunks=8),
        Layout(tensor_overlap_chunks=3),
        Layout(pipeline=4, stage_layers=(0, 2, 2, 0)),
    ],
)
def test_legal(layout):
    """kv heads fewer than the tensor size are copied, idle devices are the user's choice, empty stages if asked for."""
    assert found(layout) == []
    assert engine_problems(layout) == []


def test_allowed_tensor_sizes():
    """Case 16, with kv heads copied where each gets equally many copies."""
    wide = replace(MODEL, ffn=2**5 * 3 * 5)
    assert allowed_tensor_sizes(MODEL) == (1, 2, 4)
    assert allowed_tensor_sizes(replace(wide, num_heads=6, num_kv_heads=6)) == (1, 2, 3, 6)
    assert allowed_tensor_sizes(replace(wide, num_heads=6, num_kv_heads=2)) == (1, 2, 6)
    assert allowed_tensor_sizes(replace(wide, num_heads=40, num_kv_heads=10, vocab=64_000)) == (1, 2, 5, 10, 20, 40)


def test_the_trainers_limits_say_what_to_write_instead():
    beyond = Layout(context=2, zero=2, schedule="zb-h1")
    assert [problem.where for problem in engine_problems(beyond)] == [f"layout.{limit.key}" for limit in LIMITS]
    assert all(problem.instead for problem in engine_problems(beyond))


@pytest.mark.parametrize("some", [{"recompute_every": 2}, {"recompute_layers": (1,)}])
def test_of_a_module_all_blocks_are_recomputed_and_nothing_is_compiled(some):
    found = module_problems(replace(JOB, compile=True), Layout(recompute="full", **some), num_blocks=4)
    assert [problem.where for problem in found] == [f"layout.{next(iter(some))}", "job.compile"]
    assert not module_problems(JOB, Layout(recompute="full"), num_blocks=4)


def test_a_module_starts_with_the_weights_that_it_has():
    (problem,) = module_problems(replace(JOB, checkpoint=CheckpointSpec(init_from="elsewhere")), Layout(), num_blocks=4)
    assert (problem.where, "elsewhere" in problem.what) == ("job.checkpoint.init_from", True)
