"""Worked problems with published or hand-worked answers, each with its source. Symbols as in docs/equations.md."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import megatron_gpt

from phalanx.plan import operations
from phalanx.plan.cut import cut_of
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.operations import Kernels
from phalanx.plan.plan import Plan
from phalanx.plan.schedule import schedule
from phalanx.plan.shards import rank_buffers
from phalanx.plan.stage_traffic import COMPUTE_BYTES
from phalanx.plan.traffic import traffic
from phalanx.plan.walk import walk
from phalanx.planner import memory, network
from phalanx.planner.candidates import of
from phalanx.planner.engine import engine
from phalanx.planner.search import predict
from phalanx.spec import clusters, models
from phalanx.spec.job import JobSpec
from phalanx.spec.model import ModelSpec

MIB, GIB = 2**20, 2**30


# ---- messages --------------------------------------------------------------------------------------------------------


def test_an_activation_message_counts_bytes_not_elements() -> None:
    """Batch 32, sequence 2048, hidden 7680 in 16 bits: 960 MiB (the 500 MB often quoted counts elements)."""
    plan = Plan(
        model=megatron_gpt(7680, 2, 48),
        cluster=clusters.named("dgx-a100"),
        job=JobSpec(global_batch=32, seq_len=2048, num_steps=1),
        layout=Layout(tensor=8, micro_batch=32),
    )
    (message,) = [m for m in traffic(plan, Coord()) if m.purpose == "attention output"]
    assert message.payload_bytes / message.count == 960 * MIB


def test_a_square_gradient_is_much_smaller_than_an_activation() -> None:
    """One h × h gradient at h = 7680 in 16 bits: 112.5 MiB, an eighth of the message above."""
    buffers = rank_buffers(megatron_gpt(7680, 1, 48), Layout(), Coord(), 2048)
    (piece,) = [
        piece for b in buffers for piece in b.pieces if piece.parameter.name.endswith("self_attn.o_proj.weight")
    ]
    assert piece.rectangle.num_elements * COMPUTE_BYTES["bf16"] == 112.5 * MIB


@pytest.mark.parametrize(("size", "seconds"), [(2**34, 0.128), (2**20, 1.02e-4)])
def test_all_reduce_in_a_node_takes_what_was_measured(size: int, seconds: float) -> None:
    """8 A100: bus bandwidth 234.89 GB/s at 16 GiB, 18.0 GB/s at 1 MiB (stas00/ml-engineering network tables)."""
    cluster = clusters.named("dgx-a100")
    took = network.collective_s(cluster, "all_reduce", float(size), network.placement(cluster, 8, 1))
    assert float(took) == pytest.approx(seconds, rel=0.01)


def test_a_gather_is_half_an_all_reduce_on_a_ring() -> None:
    """nccl-tests PERFORMANCE.md: n - 1 of 2 (n - 1) steps."""
    cluster = clusters.named("dgx-a100")
    place = network.placement(cluster, 8, 1)
    both = [float(network.collective_s(cluster, name, 2.0**30, place)) for name in ("all_gather", "all_reduce")]
    assert both[1] == pytest.approx(2 * both[0])


def test_the_switch_adds_faster_than_a_ring() -> None:
    """8 H200 with NVLS: all-reduce 480 GB/s of bus bandwidth at 16 GiB, ring 367 (stas00/ml-engineering)."""
    cluster = clusters.named("dgx-h200")
    took = network.collective_s(cluster, "all_reduce", 2.0**34, network.placement(cluster, 8, 1))
    assert 1.75 * 2.0**34 / float(took) == pytest.approx(480e9, rel=0.02)


def test_one_member_per_node_has_one_card() -> None:
    """HDR: a data group of a tensor-8 job gets 24 of 25 GB/s (nccl-tests issue 175), a pure data group all eight."""
    cluster = clusters.named("dgx-a100", num_nodes=4)
    one = network.inter_node_bytes_per_s(cluster, network.placement(cluster, 4, 8))
    eight = network.inter_node_bytes_per_s(cluster, network.placement(cluster, 32, 1))
    assert (float(one), float(eight)) == (pytest.approx(24e9), pytest.approx(8 * 24e9))


def test_shared_cards_are_shared() -> None:
    """Four cards for eight devices: a lone group gets one card of 25 GB/s, eight groups at once 12.5 GB/s each."""
    cluster = clusters.named("dgx-a100", num_nodes=4)
    half = replace(cluster, nics_per_node=4, inter_node=replace(cluster.inter_node, bytes_per_s=12.5e9, efficiency=1.0))
    assert float(network.inter_node_bytes_per_s(half, network.placement(half, 4, 8))) == 12.5e9


# ---- pipelines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stages", "chunks", "micro_batches", "busy"),
    [
        ("1f1b", 4, 1, 8, 8 / 11),  # 73 %: the 85 % often quoted needs 17 micro-batches …
        ("1f1b", 4, 1, 17, 17 / 20),
        ("interleaved-1f1b", 4, 2, 8, 16 / 19),  # … or two chunks: 84 %
        ("gpipe", 4, 1, 8, 8 / 11),
        ("1f1b", 8, 1, 8, 8 / 15),
    ],
)
def test_how_busy_a_pipeline_is(name: str, stages: int, chunks: int, micro_batches: int, busy: float) -> None:
    """SC21, section 2.2: bubble (p - 1) / v against m."""
    assert 1 - walk(schedule(name, stages, chunks, micro_batches)).bubble == pytest.approx(busy)


def test_sixteen_layers_on_four_stages() -> None:
    """16 layers, 4 stages, 8 micro-batches: bubble 3/11 of the step (SC21)."""
    assert walk(schedule("1f1b", 4, 1, 8)).bubble == pytest.approx(3 / 11)


@pytest.mark.parametrize(("stage", "held"), [(0, 4), (1, 3), (2, 2), (3, 1)])
def test_micro_batches_held_under_1f1b(stage: int, held: int) -> None:
    """min(m, p - i) (SC21, section 2.2)."""
    assert memory.in_flight("1f1b", 4, 1, np.array([8]))[0][stage] == held


def test_interleaving_holds_more() -> None:
    """First stage: p + (p - 1) / v stages' worth (Korthikanti et al., section 4.2.3); p 4, v 2: 11 half stages."""
    assert memory.in_flight("interleaved-1f1b", 4, 2, np.array([16]))[0][0] == 11


# ---- model states ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "zero", "shards", "gigabytes"),
    [
        (7.5e9, 0, 64, 120.0),  # ZeRO paper (arXiv 1910.02054), figure 1: 16 bytes, 64 ranks
        (7.5e9, 1, 64, 31.4),
        (7.5e9, 2, 64, 16.6),
        (7.5e9, 3, 64, 1.875),
        (20e9, 0, 8, 320.0),
        (20e9, 1, 8, 110.0),
        (20e9, 2, 8, 75.0),
        (20e9, 3, 8, 40.0),
        (175e9, 0, 64, 2800.0),
        (175e9, 1, 64, 732.8),
        (175e9, 2, 64, 388.3),
        (175e9, 3, 64, 43.75),
    ],
)
def test_model_states_of_sixteen_bytes(parameters: float, zero: int, shards: int, gigabytes: float) -> None:
    """16-bit parameters and gradients, fp32 master and two moments."""
    states = engine("bigscience").states_for("fp16")
    held = states.parameter / (shards if zero >= 3 else 1)
    held += states.gradient / (shards if zero >= 2 else 1)
    held += states.optimizer / (shards if zero >= 1 else 1)
    assert parameters * held / 1e9 == pytest.approx(gigabytes, rel=0.01)


# ---- activations -----------------------------------------------------------------------------------------------------

PAPER = [  # (hidden, layers, heads, micro-batch): Korthikanti et al. (arXiv 2205.05198), table 3
    ("22B", 6144, 48, 64, 4),
    ("175B", 12288, 96, 96, 1),
    ("530B", 20480, 105, 128, 1),
    ("1T", 25600, 128, 160, 1),
]


def kept(model: ModelSpec, layout: Layout, attention: str = "math") -> float:
    """Bytes that one layer keeps with the paper's kernels: byte masks; statistics of norms are not counted."""
    cut = cut_of(model, 2048, layout, 2)
    kernels = Kernels(attention=attention, masks="byte")  # type: ignore[arg-type]
    small = ("mean", "scale", "log-sum-exp")
    return float(sum(k.bytes for k in operations.layer(model, cut, kernels).kept if not k.name.endswith(small)))


@pytest.mark.parametrize(("name", "hidden", "layers", "heads", "micro_batch"), PAPER)
def test_activation_bytes_of_the_recomputation_paper(
    name: str, hidden: int, layers: int, heads: int, micro_batch: int
) -> None:
    """Equations 2 to 4 of arXiv 2205.05198 at s = 2048, t = 8."""
    model, b, s, t = megatron_gpt(hidden, layers, heads), micro_batch, 2048, 8
    sbh, scores = s * b * hidden, 5 * heads * s / hidden
    tensor = Layout(tensor=t, micro_batch=b)
    both = replace(tensor, sequence_parallel=True)
    assert kept(model, Layout(micro_batch=b)) == pytest.approx(sbh * (34 + scores), rel=1e-12)
    assert kept(model, tensor) == pytest.approx(sbh * (10 + 24 / t + scores / t), rel=1e-12)
    assert kept(model, both) == pytest.approx(sbh / t * (34 + scores), rel=1e-12)


def test_selective_recompute_keeps_34_sbh() -> None:
    """Equation 6 of arXiv 2205.05198: attention scores dropped, 34 sbh / t left."""
    model, layout = megatron_gpt(12288, 96, 96), Layout(tensor=8, sequence_parallel=True, recompute="selective")
    cut = cut_of(model, 2048, layout, 2)
    layer = operations.layer(model, cut, Kernels(attention="math", masks="byte"))
    left, _ = memory.kept_bytes(layer, cut, of([layout]).recompute)
    statistics = sum(k.bytes for k in layer.kept if k.name.endswith(("mean", "scale")))
    assert float(left[0]) - statistics == 34 * 2048 * 12288 / 8


def test_full_recompute_keeps_2_sbh() -> None:
    """Table 2 of arXiv 2205.05198: a layer's input."""
    model, layout = megatron_gpt(12288, 96, 96), Layout(tensor=8, recompute="full")
    cut = cut_of(model, 2048, layout, 2)
    left, working = memory.kept_bytes(operations.layer(model, cut, Kernels()), cut, of([layout]).recompute)
    assert float(left[0]) == 2 * 2048 * 12288 and float(working[0]) > float(left[0])


# ---- parameters and FLOPs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2", 0.124),
        ("gpt2-xl", 1.558),
        ("gpt-3-175b", 174.6),
        ("megatron-1.7b", 1.652),
        ("megatron-18b", 18.4),
        ("megatron-145b", 145.6),
        ("megatron-1t", 1008.0),
        ("mt-nlg-530b", 529.6),
        ("llama-2-7b", 6.738),
        ("llama-2-70b", 68.98),
        ("llama-3-8b", 8.030),
        ("llama-3-70b", 70.55),
        ("llama-3-405b", 405.9),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-72b", 72.7),
        ("mistral-7b", 7.242),
    ],
)
def test_parameters_of_named_models(name: str, billions: float) -> None:
    """Model cards and SC21 table 1."""
    assert models.named(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.012)


def test_flops_of_the_recomputation_paper() -> None:
    """72 B s L h² (1 + s / 6h + V / 12 L h) (arXiv 2205.05198, appendix A)."""
    h, layers, s, vocab = 12288, 96, 2048, 51200
    formula = 72 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert megatron_gpt(h, layers, 96).flops_per_token(s) * s == pytest.approx(formula, rel=1e-12)


def test_mt_nlg_uses_replicas_of_280_devices() -> None:
    """Tensor 8 × pipeline 35 (arXiv 2201.11990, section 2.2): 105 layers, 3 per stage; 8 replicas on 2,240 A100."""
    layout = Layout(tensor=8, pipeline=35, data=8)
    assert (layout.num_ranks // layout.data, models.named("mt-nlg-530b").num_layers / 35) == (280, 3)
    assert layout.num_ranks == 2240


def test_mt_nlg_needs_more_than_one_node_for_its_states() -> None:
    """530B × 20 bytes are 10 TB: 'over 10 terabytes of aggregate memory' (arXiv 2201.11990, section 2.2)."""
    assert 10e12 < 20 * models.named("mt-nlg-530b").num_parameters < 11e12


# ---- mixtures of experts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39.1)])
def test_parameters_that_a_token_meets(name: str, billions: float) -> None:
    """13B of 47B (arXiv 2401.04088, section 1), 39B of 141B (mistral.ai, 2024-04-17); a token's FLOPs follow them."""
    model = models.named(name)
    idle = model.num_layers * 3 * model.hidden * model.ffn * (model.num_experts - model.experts_per_token)
    active = model.num_parameters - idle
    assert active / 1e9 == pytest.approx(billions, rel=0.003)
    attention = 3 * model.num_layers * 4 * 2048 * model.q_rows
    table = model.vocab * model.hidden  # looked up, not multiplied
    assert model.flops_per_token(2048) == pytest.approx(6 * (active - table) + attention, rel=1e-3)


def test_eight_ranks_of_mixtral_each_hold_a_mistral() -> None:
    """One expert on each of 8 data ranks: a dense model of the same sizes, and routers of 8 × h per layer."""
    mixture = models.named("mixtral-8x7b")
    dense = replace(mixture, num_experts=0, experts_per_token=0)
    layouts, layers = of([Layout(data=8)]), np.array([[32]])
    one, other = (memory.held_elements(model, layouts, layers, (0, 0)).elements[0, 0] for model in (mixture, dense))
    assert one - other == 32 * 8 * 4096
    assert other == pytest.approx(models.named("mistral-7b").num_parameters, rel=0.002)


def test_tokens_on_their_way_to_experts() -> None:
    """T k h × 2 bytes: 4,096 tokens to 2 of 8 experts of Mixtral are 64 MiB, of which 7/8 leave their
    rank: 56 MiB over 234 GB/s of NVLink 3 are 251 us; over one 24 GB/s card per device, where 7/8 leave the node too,
    2.4 ms."""
    cut = cut_of(models.named("mixtral-8x7b"), 4096, Layout(data=8), 2)
    payload = cut.routed_tokens * cut.hidden * cut.element
    assert payload == 64 * MIB
    near = clusters.named("dgx-a100")
    inside = network.all_to_all_s(near, payload, network.placement(near, 8, 1))
    assert float(inside) == pytest.approx(56 * MIB / 234e9 + 1.9e-6, rel=1e-3)
    far = clusters.named("dgx-a100", num_nodes=8)
    across = network.all_to_all_s(far, payload, network.placement(far, 8, 8))
    assert float(across) == pytest.approx(56 * MIB / 24e9, rel=0.01)


def test_experts_stay_in_a_node_where_the_network_is_slow() -> None:
    """Mixtral 8x7B on 4 nodes of 8 A100, two experts' copies apart: with 1 GB/s between nodes, experts over the 8 ranks
    of a node beat tokens that travel."""
    cluster = clusters.named("dgx-a100", num_nodes=4)
    slow = replace(cluster, inter_node=replace(cluster.inter_node, bytes_per_s=1e9))
    model = replace(models.named("mixtral-8x7b"), num_experts=32)
    job = JobSpec(global_batch=64, seq_len=4096, num_steps=1)
    seconds = []
    for group in (0, 8):
        layout = Layout(data=32, zero=1, expert_group=group, recompute="full")
        plan = predict(model, job, slow, layout, engine_name="megatron-core-2024")
        assert plan.prediction is not None
        seconds.append(plan.prediction.step_s_by_kind["tensor"])
    assert seconds[1] < 0.1 * seconds[0]
