"""The layouts that every parallel feature is proven on: a sample of all combinations, and the unusual ones."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

from tiny import STYLES, tiny_model

from phalanx.plan.layout import Layout
from phalanx.spec.model import ModelSpec

MICRO_BATCH = 1


def models() -> dict[str, ModelSpec]:
    return {
        f"{style} {'tied' if tied else 'untied'}": tiny_model(style, num_layers=4, tied=tied)
        for style in STYLES
        for tied in (False, True)
    }


def layouts() -> list[tuple[str, Layout]]:
    """All layouts of 2, 4 and 8 ranks, with options drawn so that every pair of options meets."""
    axes = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=3) if math.prod(sizes) in (2, 4, 8)]
    axes = [sizes for sizes in axes if max(sizes[:2]) < 8]  # those need another model: see UNUSUAL
    full = [
        (name, Layout(tensor=t, pipeline=p, data=d, zero=zero, sequence_parallel=sequence, micro_batch=MICRO_BATCH))
        for (t, p, d), zero, sequence, name in itertools.product(axes, (0, 1), (False, True), models())
        if (t > 1 or not sequence) and (d > 1 or not zero)
    ]
    return _covering(full)


def _features(name: str, layout: Layout) -> set[tuple[Any, Any]]:
    values = [
        ("axes", (layout.tensor, layout.pipeline, layout.data)),
        ("tensor", layout.tensor),
        ("pipeline", layout.pipeline),
        ("data", layout.data),
        ("zero", layout.zero),
        ("sequence", layout.sequence_parallel),
        ("model", name),
    ]
    return set(itertools.combinations(values, 2))


def _covering(full: list[tuple[str, Layout]]) -> list[tuple[str, Layout]]:
    """A subset in which every pair of options of `full` meets (greedy, from a fixed shuffle)."""
    random.Random(1).shuffle(full)
    missing = set().union(*(_features(*case) for case in full))
    chosen = []
    while missing:
        best = max(full, key=lambda case: len(_features(*case) & missing))
        missing -= _features(*best)
        chosen.append(best)
    return chosen


UNUSUAL = {
    "tensor 8": (tiny_model(num_heads=8, num_kv_heads=2, head_dim=8), Layout(tensor=8, sequence_parallel=True)),
    "kv copies with biases": (tiny_model(qkv_bias=True, num_kv_heads=1), Layout(tensor=4, data=2, zero=1)),
    "kv copies, one per pair": (tiny_model(num_kv_heads=2), Layout(tensor=4, pipeline=2)),
    "norms of heads": (tiny_model(qk_norm=True), Layout(tensor=2, pipeline=2, data=2, zero=1)),
    "norms of heads, kv copies": (
        tiny_model(qk_norm=True, num_kv_heads=2),
        Layout(tensor=4, data=2, sequence_parallel=True, recompute="selective"),
    ),
    "pipeline 8": (tiny_model("gpt2", num_layers=8), Layout(pipeline=8)),
    "uneven stages": (tiny_model(num_layers=5), Layout(pipeline=4, stage_layers=(2, 0, 2, 1))),
    "ends without layers": (tiny_model("gpt2"), Layout(pipeline=4, data=2, zero=1, stage_layers=(0, 2, 2, 0))),
    "gpipe": (tiny_model(tied=True), Layout(pipeline=2, data=2, schedule="gpipe")),
    "interleaved": (
        tiny_model("gpt2", num_layers=6),
        Layout(pipeline=2, data=2, zero=1, virtual_stages=3, schedule="interleaved-1f1b"),
    ),
    "data outermost": (tiny_model(tied=True), Layout(pipeline=2, tensor=2, data=2, zero=1, outermost="data")),
    "interleaved, tensor": (
        tiny_model(),
        Layout(pipeline=2, tensor=2, sequence_parallel=True, virtual_stages=2, schedule="interleaved-1f1b"),
    ),
    "breadth-first": (tiny_model(), Layout(pipeline=2, data=2, virtual_stages=2, schedule="breadth-first")),
    "zb-h1": (tiny_model("gpt2"), Layout(pipeline=4, data=2, zero=1, schedule="zb-h1")),
    "zb-v": (tiny_model(tied=True), Layout(pipeline=2, tensor=2, virtual_stages=2, schedule="zb-v")),
    "dualpipe-v": (
        tiny_model("gpt2", num_layers=8),
        Layout(pipeline=4, data=2, zero=1, virtual_stages=2, schedule="dualpipe-v"),
    ),
    "zero 2": (tiny_model("gpt2"), Layout(data=2, pipeline=2, zero=2)),
    "zero 2, tensor": (tiny_model(), Layout(data=2, tensor=2, zero=2, sequence_parallel=True, micro_batch=2)),
    "zero 2, a stage of one block": (tiny_model(num_layers=3), Layout(data=2, pipeline=3, zero=2)),
    "zero 3": (tiny_model(), Layout(data=4, zero=3)),
    "zero 3, tied": (tiny_model("gpt2"), Layout(data=2, zero=3)),
    "zero 3, gpipe": (tiny_model(tied=True), Layout(data=2, pipeline=2, zero=3, schedule="gpipe")),
    "zero 3, interleaved": (
        tiny_model("gpt2"),
        Layout(data=2, pipeline=2, tensor=2, zero=3, virtual_stages=2, schedule="interleaved-1f1b"),
    ),
    "zero 1 within 2": (tiny_model(tied=True), Layout(data=4, pipeline=2, zero=1, zero_group=2)),
    "zero 1 within 2, small buckets": (
        tiny_model("gpt2"),
        Layout(data=4, tensor=2, zero=1, zero_group=2, sequence_parallel=True, bucket_bytes=1),
    ),
    "zero 2 within 2, four times": (tiny_model(tied=True), Layout(data=8, zero=2, zero_group=2)),
    "zero 3 within 2, pipeline": (
        tiny_model(),
        Layout(data=4, pipeline=2, zero=3, zero_group=2, virtual_stages=2, schedule="interleaved-1f1b"),
    ),
    "powersgd of full rank": (tiny_model("gpt2"), Layout(data=2, zero=1, reduce="powersgd", reduce_rank=64)),
    "top-k of everything": (tiny_model(tied=True), Layout(data=4, reduce="top-k", reduce_fraction=1.0)),
    "recompute": (tiny_model(), Layout(tensor=2, pipeline=2, sequence_parallel=True, recompute="full")),
    "selective recompute": (tiny_model(), Layout(tensor=2, pipeline=2, data=2, recompute="selective")),
    "selective recompute, sequence": (
        tiny_model("gpt2"),
        Layout(tensor=2, pipeline=2, sequence_parallel=True, recompute="selective", schedule="zb-h1"),
    ),
    "recompute every other layer": (
        tiny_model(num_layers=5),
        Layout(tensor=2, pipeline=2, sequence_parallel=True, recompute="full", recompute_every=2),
    ),
    "recompute by stage": (
        tiny_model("gpt2"),
        Layout(tensor=2, pipeline=2, sequence_parallel=True, recompute="selective", recompute_layers=(1, 0)),
    ),
    "recompute, zero 3": (tiny_model("gpt2"), Layout(data=2, tensor=2, zero=3, recompute="full")),
    "recompute, zero bubble": (tiny_model(), Layout(pipeline=2, tensor=2, schedule="zb-h1", recompute="full")),
    "one micro-batch": (tiny_model(), Layout(pipeline=2, tensor=2, micro_batch=8)),
    "small buckets": (tiny_model(), Layout(data=2, zero=1, bucket_bytes=1)),
    "chunks": (tiny_model(), Layout(tensor=2, data=2, zero=1, tensor_overlap_chunks=4)),
    "no overlap": (
        tiny_model(),
        Layout(
            tensor=2,
            pipeline=2,
            sequence_parallel=True,
            virtual_stages=2,
            schedule="interleaved-1f1b",
            overlap=False,
            tensor_overlap_chunks=2,
        ),
    ),
    "chunks, sequence": (
        tiny_model("gpt2"),
        Layout(tensor=2, pipeline=2, sequence_parallel=True, recompute="selective", tensor_overlap_chunks=2),
    ),
    "chunks, kv copies": (
        tiny_model(num_kv_heads=2),
        Layout(tensor=4, sequence_parallel=True, recompute="full", micro_batch=2, tensor_overlap_chunks=4),
    ),
    "odd sizes": (
        tiny_model(hidden=48, num_heads=6, num_kv_heads=3, head_dim=10, ffn=57, vocab=101),
        Layout(tensor=3, data=2, zero=1, sequence_parallel=False),
    ),
}
