"""A module that says how its layers are cut over the tensor axis trains as it does alone in torch; a wrong table is
refused, or found by the first step."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import RankFailed
from own_modules import gradients_of, load_kernels_without_data, on_ranks, relative, step_in
from torch import Tensor, nn

from phalanx.errors import InputError
from phalanx.own.alone import Compared, compare_step
from phalanx.own.blocks import Blocks
from phalanx.own.cuts import check
from phalanx.own.families import table_of
from phalanx.own.stage import call
from phalanx.own.whole import module_weights
from phalanx.plan.layout import Layout
from phalanx.plan.module import ModulePlan
from phalanx.rundir import RunDir
from phalanx.spec.job import JobSpec, OptimizerSpec
from phalanx.trainer.world import World

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "own"))
import digits
import llama
import vision_transformer

load_kernels_without_data()
F.rms_norm(torch.empty(4, 8, device="meta"), (8,))

SIZES = {
    "vocab_size": 62,  # no even number of rows for 4 ranks
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "attn_implementation": "sdpa",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def made(config: Any, kind: Any) -> nn.Module:
    torch.manual_seed(1)
    model = kind(config)
    for part in list(model.modules()):
        for name, norm in part.named_children():
            if type(norm).__name__.endswith("RMSNorm"):  # of transformers, which computes in fp32 whatever it gets
                setattr(part, name, nn.RMSNorm(norm.weight.shape, config.rms_norm_eps))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # ones and zeros would hide what is mixed up
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.double()


def make_llama() -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False)
    return made(config, transformers.LlamaForCausalLM)


def make_qwen3() -> nn.Module:
    config = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, use_cache=False)
    return made(config, transformers.Qwen3ForCausalLM)


def make_gpt2() -> nn.Module:
    settings = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "use_cache": False}
    return made(transformers.GPT2Config(**SIZES, **settings), transformers.GPT2LMHeadModel)


def make_neox() -> nn.Module:
    config = transformers.GPTNeoXConfig(**SIZES, use_cache=False)
    return made(config, transformers.GPTNeoXForCausalLM)


def make_bert() -> nn.Module:
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return made(config, transformers.BertForMaskedLM)


def make_vit_of_transformers() -> nn.Module:
    config = transformers.ViTConfig(**SIZES, image_size=8, patch_size=2, num_channels=1, num_labels=10)
    return made(config, transformers.ViTForImageClassification)


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(62, (8, 16), generator=torch.Generator().manual_seed(2))}


def next_token(output: Any, batch: Any) -> Any:
    return llama.next_token(output if isinstance(output, Tensor) else output.logits, batch)


def plan_of(layout: Layout) -> ModulePlan:
    job = JobSpec(
        global_batch=8, seq_len=1, num_steps=4, precision="fp64", optimizer=OptimizerSpec(lr=1e-2, clip_norm=0.0)
    )
    return ModulePlan(job=job, layout=layout)


def train(world: World, plan: ModulePlan, make: Any, batch: Any, loss: Any, options: Any) -> tuple[Any, ...]:
    """Losses of two steps and of an evaluation, the first gradients, and weights after the second step."""
    module = make()
    table = check(module, options["cuts"], plan.layout.tensor)
    step = step_in(world, module, plan, **{**options, "cuts": table})
    losses = [step.forward_backward(step.share(batch), loss)]
    gradients = gradients_of(step)
    step.update()
    losses.append(step.forward_backward(step.share(batch), loss))
    step.update()
    return [*losses, step.evaluate(step.share(batch), loss)], gradients, step.state_dict()


def hold(layout: Layout, make: Any, batch: Any = None, loss: Any = next_token, **options: Any) -> None:
    batch = tokens() if batch is None else batch
    options = {"cuts": "auto", **options}
    module = make()
    output = module(**batch) if isinstance(batch, dict) else module(batch[0])
    value = loss(output, batch)
    expected = value[0] / value[1] if isinstance(value, tuple) else value
    expected.backward()
    losses, gradients, weights = on_ranks(layout, train, plan_of(layout), make, batch, loss, options)[0]
    assert losses[0] == pytest.approx(expected.item(), rel=1e-10)
    named = dict(module.named_parameters())
    assert gradients.keys() == named.keys()
    total = torch.cat([parameter.grad.flatten() for parameter in named.values()]).norm()
    for name, parameter in named.items():
        distance = float((gradients[name] - parameter.grad).norm())
        assert distance < 1e-10 * float(parameter.grad.norm()) or distance < 1e-14 * total, name
    alone = on_ranks(Layout(micro_batch=8), train, plan_of(Layout(micro_batch=8)), make, batch, loss, options)[0]
    assert losses == pytest.approx(alone[0], rel=1e-8)
    for name in named:
        assert relative(weights[name], alone[2][name]) < 1e-6, name


LAYOUTS = {
    "tensor 4": (Layout(tensor=4, micro_batch=2), make_gpt2, None),
    "llama": (Layout(tensor=2, pipeline=2, data=2, micro_batch=2), make_llama, llama.BLOCKS),
    "sequence parallel": (
        Layout(tensor=2, pipeline=2, data=2, zero=1, micro_batch=2, sequence_parallel=True, recompute="full"),
        make_llama,
        llama.BLOCKS,
    ),
    "zero 3": (Layout(tensor=2, data=2, zero=3, micro_batch=2, sequence_parallel=True), make_gpt2, None),
    "norms of heads": (Layout(tensor=2, data=2, zero=2, micro_batch=2, sequence_parallel=True), make_qwen3, None),
    "heads of three": (Layout(tensor=2, micro_batch=4, sequence_parallel=True), make_neox, None),
    "bert": (Layout(tensor=2, data=2, micro_batch=4), make_bert, None),
    "weight gradients put off": (
        Layout(tensor=2, pipeline=2, schedule="zb-h1", micro_batch=2),
        make_qwen3,
        llama.BLOCKS,
    ),
}


@pytest.mark.parametrize(("layout", "make", "blocks"), LAYOUTS.values(), ids=LAYOUTS)
def test_models_of_transformers_train_as_alone(layout: Layout, make: Any, blocks: Blocks | None) -> None:
    hold(layout, make, blocks=blocks)


def make_vit() -> nn.Module:
    torch.manual_seed(1)
    return vision_transformer.VisionTransformer().double()


def test_a_vision_transformer_over_tensor_pipeline_and_data() -> None:
    """Its blocks are torch's own, whose attention is one function and stays whole; validation has a shorter way through
    them, which must not be taken past layers that are cut."""
    images, labels = digits.training()
    layout = Layout(tensor=2, pipeline=2, data=2, zero=1, micro_batch=2)
    batch = images[:8].double(), labels[:8]
    hold(
        layout,
        make_vit,
        batch,
        vision_transformer.cross_entropy,
        cuts=vision_transformer.CUTS,
        blocks=Blocks(path="blocks"),
    )


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": digits.training()[0][:8].double(), "labels": digits.training()[1][:8]}


def test_a_vision_transformer_of_transformers() -> None:
    hold(Layout(tensor=2, data=2, micro_batch=2), make_vit_of_transformers, pixels(), lambda output, batch: output.loss)


def first_step(world: World, plan: ModulePlan, make: Any, cuts: Any) -> Compared:
    step = step_in(world, make(), plan, cuts=cuts)
    return compare_step(step, make, next_token, tokens(), call)


@pytest.mark.parametrize(
    ("make", "changes", "text"),
    [
        (make_gpt2, {"*.mlp.c_proj": None}, r"h.0.mlp.c_proj.weight takes 128 features here, and gets 64"),
        (make_qwen3, {"*.mlp.up_proj": None}, "must match the size of tensor"),
        (
            make_qwen3,
            {"*.self_attn.[qk]_norm": None},
            "ranks have different gradients.*layers.0.self_attn.q_norm.weight",
        ),
        (make_gpt2, {"*lm_head": None}, "transformer.wte.weight and lm_head.weight are one parameter, of which one is"),
    ],
)
def test_a_wrong_table_is_refused_at_the_first_step(make: Any, changes: dict[str, Any], text: str) -> None:
    table = {name: kind for name, kind in {**table_of(make()), **changes}.items() if kind}
    layout = Layout(tensor=2, micro_batch=8)
    with pytest.raises(RankFailed, match=text):
        on_ranks(layout, first_step, plan_of(layout), make, table)


@pytest.mark.parametrize("family", [transformers.MistralConfig, transformers.Qwen2Config, transformers.LlamaConfig])
def test_tables_fit_their_families(family: Any) -> None:
    """With a head and without."""
    config = family(**{**SIZES, "num_key_value_heads": 2})
    with torch.device("meta"):
        for kind in (transformers.AutoModelForCausalLM, transformers.AutoModel):
            model = kind.from_config(config)
            assert check(model, "auto", 2) == table_of(model)


def narrow(world: World, plan: ModulePlan) -> dict[str, Tensor]:
    return step_in(world, make_gpt2().float(), plan, cuts=check(make_gpt2(), "auto", 2)).state_dict()


def test_master_weights_keep_what_the_module_had() -> None:
    layout = Layout(tensor=2, data=2, zero=3, micro_batch=2)
    plan = plan_of(layout)
    plan = replace(plan, job=replace(plan.job, precision="bf16"))
    weights = on_ranks(layout, narrow, plan)[0]
    for name, parameter in make_gpt2().float().named_parameters():
        assert weights[name].equal(parameter), name


def rounded(world: World, plan: ModulePlan) -> float:
    model = make_llama().float()
    step = step_in(world, model, plan, blocks=llama.BLOCKS, cuts=check(model, "auto", plan.layout.tensor))
    return step.forward_backward(step.share(tokens()), next_token)


def test_stages_agree_about_what_passes_in_bf16() -> None:
    """Each finds it by itself, and holds other weights than the next one."""
    layout = Layout(tensor=2, pipeline=2, micro_batch=2, sequence_parallel=True)
    plan = plan_of(layout)
    plan = replace(plan, job=replace(plan.job, precision="bf16"))
    found = on_ranks(layout, rounded, plan)
    total, count = next_token(make_llama()(**tokens()), tokens())
    assert found == pytest.approx([total.item() / count] * 4, rel=1e-2)


def test_what_shapes_do_not_show_verification_does() -> None:
    """Cut as one layer, q, k and v of GPT-2 fit wherever they should not be."""
    layout = Layout(tensor=2, micro_batch=8)
    for kind, right in (("column of 3", True), ("column", False)):
        table = {**table_of(make_gpt2()), "*.attn.c_attn": kind}
        found = on_ranks(layout, first_step, plan_of(layout), make_gpt2, table)[0]
        distance, own = found.gradients["transformer.h.0.attn.c_attn.weight"]
        assert (distance < 1e-10 * own) == right
        assert (abs(found.loss[0] - found.loss[1]) < 1e-10) == right


@pytest.mark.parametrize(
    ("cuts", "tensor", "text"),
    [
        ("auto", 4, r"layers.0.self_attn.k_proj.weight, heads of 8 features, of 2 does not divide among tensor 4"),
        ({"*.gate": "column"}, 2, r"has nothing that ..gate fits\n .* ...gate_proj"),
        ({"*.gate_proj": "columns"}, 2, 'gate_proj: there is no "columns"'),
        ({"*.norm": "row"}, 2, "model.norm is a RMSNorm, which cannot be cut as"),
        ({"*.up_proj": "column of 5"}, 2, "up_proj.weight of 48 does not consist of 5 parts"),
        ({"*.self_attn.layer_idx": "divided"}, 2, "layers.1.self_attn.layer_idx of 1 does not divide"),
    ],
)
def test_a_table_that_cannot_be_is_refused_before_anything_starts(cuts: Any, tensor: int, text: str) -> None:
    with pytest.raises(InputError, match=text):
        check(make_llama(), cuts, tensor)


def test_models_without_a_table_are_told_which_have_one() -> None:
    with pytest.raises(InputError, match=r"(?s)no table for Linear.*a table of your own, as for llama"):
        check(nn.Linear(2, 2), "auto", 2)


def half_frozen() -> nn.Module:
    module = make_gpt2()
    module.transformer.h[0].attn.c_attn.weight.requires_grad_(False)
    module.transformer.wpe.requires_grad_(False)
    return module


def go_on(world: World, plan: ModulePlan, folder: Path, num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    module = half_frozen()
    step = step_in(world, module, plan, cuts=check(module, "auto", plan.layout.tensor), run_dir=RunDir(folder))
    losses = []
    while step.number < num_steps:
        losses.append(step.forward_backward(step.share(tokens()), next_token))
        step.update()
    step.finish()
    return losses, step.state_dict()


def test_checkpoints_go_on_with_another_cut(tmp_path: Path) -> None:
    """Tensors are stored whole under the module's own names: one step on each layout is four steps on one process."""
    layouts = [
        Layout(tensor=2, data=2, zero=1, micro_batch=2, sequence_parallel=True),
        Layout(tensor=4, micro_batch=4),
        Layout(micro_batch=8),
        Layout(tensor=2, data=2, zero=3, micro_batch=4),
    ]
    losses = []
    for number, layout in enumerate(layouts):
        found, weights = on_ranks(layout, go_on, plan_of(layout), tmp_path / "cut", number + 1)[0]
        losses += found
    expected, alone = on_ranks(layouts[2], go_on, plan_of(layouts[2]), tmp_path / "whole", 4)[0]
    assert losses == pytest.approx(expected, rel=1e-9)
    assert weights.keys() == alone.keys()
    for name, weight in alone.items():
        assert relative(weights[name], weight) < 1e-6, name
    stored = module_weights(tmp_path / "cut" / "checkpoints" / "step-000004")
    assert all(stored[name].equal(weight) for name, weight in weights.items())
