"""Each term of what ends a step, by itself and by hand: the data axis, the optimizer, the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planner_cases import GPT, LINK, LLAMA
from planner_terms import BARE, FAR, GPUS, collective, group

from phalanx.planner.engine import Engine


def data_s(engine: Engine = BARE, **chosen: Any) -> tuple[float, float]:
    """Seconds of the data axis, and elements on the rank."""
    found = group(engine, bucket_bytes=2**20, **chosen)
    return float(found.tail.data_s[0, 0]), float(found.footprint.held.elements[0, 0])


def in_buckets(operation: str, payload: float, size: int, stride: int = 1, *, of_bytes: float = 0.0) -> float:
    """As many messages as there are buckets of 1 MiB in `of_bytes`."""
    count = -(-int(of_bytes or payload) // 2**20)
    return count * collective(operation, payload / count, size, stride)


def test_gradients_are_summed_and_parameters_gathered() -> None:
    """Six of 48 sequences on each of 8 ranks: three micro-batches of two, each scattered under ZeRO 2."""
    whole, held = data_s(data=8)
    assert whole == pytest.approx(in_buckets("all_reduce", 4 * held, 8))
    scatter = in_buckets("reduce_scatter", 4 * held, 8)
    gather = in_buckets("all_gather", 2 * held, 8, of_bytes=4 * held)
    assert data_s(data=8, zero=1)[0] == pytest.approx(scatter + gather)
    assert data_s(data=8, zero=2)[0] == pytest.approx(3 * scatter + gather)
    assert data_s(data=8, zero=3)[0] == 0.0


def test_shards_within_a_part_are_summed_across_the_others() -> None:
    took, held = data_s(data=8, zero=1, zero_group=4)
    within = in_buckets("reduce_scatter", 4 * held, 4) + in_buckets("all_gather", 2 * held, 4, of_bytes=4 * held)
    assert took == pytest.approx(within + in_buckets("all_reduce", held, 2, 4, of_bytes=4 * held))


def test_narrow_and_partial_reductions_send_less() -> None:
    _, held = data_s(data=8)
    assert data_s(data=8, reduce="bf16")[0] == pytest.approx(in_buckets("all_reduce", 2 * held, 8))
    largest = data_s(data=8, reduce="top-k", reduce_fraction=0.01)[0]
    assert largest == pytest.approx(in_buckets("all_reduce", 0.08 * 4 * held, 8))


def test_copies_of_experts_add_their_gradients_after_each_micro_batch_of_zero_2_and_give_parameters_once() -> None:
    model = replace(LLAMA, num_experts=2, experts_per_token=1)
    some = {"data": 8, "expert_group": 2}
    for zero, sums in ((0, 1.0), (1, 1.0), (2, 2.0)):
        mixed, plain = (group(model=each, zero=zero, **more) for each, more in ((model, some), (LLAMA, {"data": 8})))
        experts = float(mixed.footprint.held.experts[0, 0])
        dense = mixed.footprint.held.elements[0, 0] - experts
        once = collective("all_reduce", 4 * experts, 4, 2)
        scale = mixed.tail.data_s[0, 0] - sums * once
        others = {0: ("all_reduce",), 1: ("reduce_scatter", "all_gather"), 2: ("reduce_scatter",) * 3 + ("all_gather",)}
        bytes_of = {"all_reduce": 4, "reduce_scatter": 4, "all_gather": 2}
        assert scale == pytest.approx(sum(collective(name, bytes_of[name] * dense, 8) for name in others[zero]))
        assert plain.tail.data_s[0, 0] > 0


def test_both_holders_of_a_tied_embedding_meet_in_the_open() -> None:
    table = 4 * 1008 * 96
    inside = group(model=GPT, pipeline=2).tail.exposed_s[0]
    assert inside == pytest.approx([collective("all_reduce", table, 2)] * 2)
    across = group(model=GPT, cluster=FAR, pipeline=2, tensor=4, data=2).tail
    alone = across.exposed_s[0] - across.data_s[0]
    assert alone == pytest.approx([collective("all_reduce", 4 * 256 * 96, 2, 8, FAR)] * 2)


@pytest.mark.parametrize(("context", "tied_shards", "part"), [(1, False, 1), (1, True, 4), (2, True, 4)])
def test_they_add_the_whole_table_or_the_shards_that_they_update(context: int, tied_shards: bool, part: int) -> None:
    engine = replace(BARE, tied_shards=tied_shards)
    found = group(engine, model=GPT, pipeline=2, context=context, data=4 // context, zero=1).tail
    alone = found.exposed_s[0] - found.data_s[0]
    assert alone == pytest.approx([collective("all_reduce", 4 * 1008 * 96 / part, 2)] * 2)


def test_the_optimizer_updates_a_rank_s_own_shard() -> None:
    for zero, shards in ((0, 1), (1, 8), (2, 8)):
        found = group(data=8, zero=zero)
        own = found.footprint.held.elements[0, 0] / shards
        assert found.tail.optimizer_s[0, 0] == pytest.approx(own * 40 / (1e12 * 0.87))


@pytest.mark.parametrize(("zero", "rounds"), [(0, 1), (1, 1), (2, 3)])
def test_reductions_hide_under_the_last_backward_or_under_each(zero: int, rounds: int) -> None:
    slow = replace(GPUS, intra_node=replace(LINK, bytes_per_s=1e8))
    hides = replace(BARE, data_overlap=0.5, scatter_overlap=0.5, gather_overlap=0.25)
    open_, hidden = (group(engine, slow, data=8, zero=zero) for engine in (BARE, hides))
    backward, forward = (float(s.sum()) for s in (open_.times.backward_s, open_.times.forward_s))
    gained = 0.5 * rounds * backward + (0.25 * forward if zero else 0.0)
    assert open_.tail.exposed_s[0, 0] == pytest.approx(open_.tail.data_s[0, 0])
    assert open_.tail.exposed_s[0, 0] - hidden.tail.exposed_s[0, 0] == pytest.approx(gained)


def test_later_ranks_end_their_backward_earlier_and_the_host_ends_the_step() -> None:
    """Their tail costs nothing for as long as the first rank's last backward and its message take."""
    late = replace(BARE, host_step_s=1.0)
    found = group(late, pipeline=2, stage_layers=(1, 6))
    tails = found.tail.exposed_s[0] + found.tail.optimizer_s[0]
    lead = float(found.times.backward_s[0, 0] + found.times.transfer_s[0])
    assert tails[1] > tails[0]
    assert found.tail_s[0] == pytest.approx(max(tails[0], tails[1] - lead) + 1.0)
