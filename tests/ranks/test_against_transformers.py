"""The engine on one process against `transformers`: the same weights give the same loss and the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from single import batch, collect, solo_engine
from tiny import tiny_model, tiny_plan
from torch import Tensor

from phalanx.plan.layout import Layout
from phalanx.spec.model import ModelSpec, RopeScaling

COMMON = {"attn_implementation": "eager", "use_cache": False}


def llama(model: ModelSpec) -> Any:
    scaling = model.rope_scaling and {
        "rope_type": "llama3",
        "factor": model.rope_scaling.factor,
        "low_freq_factor": model.rope_scaling.low_freq_factor,
        "high_freq_factor": model.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": model.rope_scaling.original_max_seq_len,
    }
    family = "Qwen3" if model.qk_norm else "Qwen2" if model.qkv_bias else "Llama"
    return getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(
            vocab_size=model.vocab,
            hidden_size=model.hidden,
            intermediate_size=model.ffn,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            max_position_embeddings=model.max_seq_len,
            rms_norm_eps=model.norm_eps,
            rope_theta=model.rope_theta,
            rope_scaling=scaling,
            tie_word_embeddings=model.tied,
            **COMMON,
        )
    )


def gpt2(model: ModelSpec) -> Any:
    config = transformers.GPT2Config(
        vocab_size=model.vocab,
        n_positions=model.max_seq_len,
        n_embd=model.hidden,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        n_inner=model.ffn,
        layer_norm_epsilon=model.norm_eps,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **COMMON,
    )
    return transformers.GPT2LMHeadModel(config)


GPT2_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.embed_positions": "transformer.wpe",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "model.layers": "transformer.h",
}


def gpt2_slice(tensors: dict[str, Tensor], name: str) -> Tensor:
    """The view of a GPT-2 tensor that our parameter `name` is: linear layers lie transposed, q, k and v as one."""
    for which, part in (("q_proj", 0), ("k_proj", 1), ("v_proj", 2)):
        if which in name:
            joined = tensors[name.replace("model.layers", "transformer.h").replace(f"self_attn.{which}", "attn.c_attn")]
            return joined.chunk(3, -1)[part].t() if joined.dim() == 2 else joined.chunk(3, -1)[part]
    theirs = name
    for ours, other in GPT2_NAMES.items():
        theirs = theirs.replace(ours, other)
    tensor = tensors[theirs]
    return tensor.t() if tensor.dim() == 2 and ("attn." in theirs or "mlp." in theirs) else tensor


def their_tensor(tensors: dict[str, Tensor], name: str, model: ModelSpec) -> Tensor:
    return gpt2_slice(tensors, name) if model.positions == "learned" else tensors[name]


MODELS = {
    "llama": tiny_model(),
    "llama tied": tiny_model(tied=True),
    "llama, one kv head": tiny_model(num_kv_heads=1),
    "llama 3.1": tiny_model(
        rope_theta=5e5,
        rope_scaling=RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, original_max_seq_len=64),
    ),
    "qwen2": tiny_model(qkv_bias=True, norm_eps=1e-6),
    "qwen3": tiny_model(qk_norm=True, head_dim=24, norm_eps=1e-6),
    "gpt2": tiny_model("gpt2"),
}


@pytest.mark.parametrize("micro_batch", [2, 8])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_transformers(name: str, micro_batch: int) -> None:
    model = MODELS[name]
    plan = tiny_plan(Layout(micro_batch=micro_batch), model)
    engine = solo_engine(plan)
    reference = (gpt2 if model.positions == "learned" else llama)(model).double()
    weights = collect(engine.data.slices, "parameters")
    with torch.no_grad():
        own = dict(reference.named_parameters())
        for ours, value in weights.items():
            their_tensor(own, ours, model).copy_(value)

    tokens, labels = batch(plan)
    logits = reference(tokens).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    loss = engine.forward_backward(engine.micro_batches(tokens, labels, tokens.numel(), 0))
    engine.synchronize()
    # transformers builds its rotary table in fp32 and takes RMS norms in fp32; ours are float64 all through.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10 if model.positions == "learned" else 1e-8)

    gradients = collect(engine.data.slices, "gradients")
    theirs = {their: parameter.grad for their, parameter in reference.named_parameters()}
    norm = sum(gradient.square().sum().item() for gradient in theirs.values()) ** 0.5
    assert engine.totals(loss)[1] == pytest.approx(norm, rel=1e-6)
    for ours, gradient in gradients.items():
        other = their_tensor(theirs, ours, model)
        # A bias of keys shifts all scores of a row alike: its gradient is zero but for rounding.
        error = (gradient - other).norm() / (other.norm() + 1e-6 * norm)
        assert error < (1e-5 if model.positions == "rope" else 1e-10), (ours, error)
