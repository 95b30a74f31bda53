"""Operations are claims; here the facts: the matrix products and the tensors kept of real blocks, on CPU.

A rank's blocks depend on the tensor axis, micro-batch and recompute alone, so one process with a group that moves
nothing stands for a rank of any layout.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.plan import operations
from phalanx.plan.comm import Group
from phalanx.plan.cut import Cut, cut_of
from phalanx.plan.layout import Coord, Layout, Recompute
from phalanx.plan.legality import problems
from phalanx.plan.operations import Block, Operation
from phalanx.plan.shards import stage_buffers
from phalanx.plan.stages import Stage, recomputed_layers, split
from phalanx.planner import memory
from phalanx.planner.candidates import RECOMPUTES
from phalanx.planner.engine import engine
from phalanx.spec.model import ModelSpec
from phalanx.trainer import model as blocks
from phalanx.trainer.flat import COMPUTE_DTYPES, FlatBuffer
from phalanx.trainer.loss import Objective
from phalanx.trainer.micro_batch import MicroBatch
from phalanx.trainer.recompute import checkpointed
from phalanx.trainer.tensor_parallel import TensorParallel

CPU = torch.device("cpu")
aten = torch.ops.aten
Product = tuple[str, int, int, int, int]


class Done:
    def wait(self) -> None:
        """Nothing was sent."""


class SilentComm:
    """Member 0 of a group that moves nothing: results hold whatever was in memory."""

    index = 0

    def __init__(self, size: int) -> None:
        self.group, self.size = Group(name="tensor", ranks=tuple(range(size))), size

    def _silent(self, *tensors: Any, **options: Any) -> Done:
        return Done()

    all_reduce = all_gather = reduce_scatter = broadcast = _silent


class Recorder(TorchDispatchMode):
    """Matrix products as (kind, batch, m, n, k), and a weak reference to every storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[Product] = Counter()
        self.vectors: Counter[tuple[int, ...]] = Counter()
        self.storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in (aten.mm, aten.addmm, aten.addmm_):
            left, right = args[-2:]
            self.products["matmul", 1, left.shape[0], right.shape[1], left.shape[1]] += 1
        elif packet is aten.bmm:
            left, right = args
            self.products["matmul", left.shape[0], left.shape[1], right.shape[2], left.shape[2]] += 1
        elif "scaled_dot_product" in str(packet) and "backward" not in str(packet):
            query = args[0]
            positions = query.shape[2]
            self.products["attention", query.shape[0] * query.shape[1], positions, positions, query.shape[3]] += 1
        elif packet in (aten.mv, aten.addmv, aten.addmv_):
            self.vectors[tuple(args[-2].shape)] += 1
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage)
        return result

    def alive(self, *excluded: Tensor) -> list[int]:
        """Bytes of the storages that still exist, in rising order."""
        skip = {tensor.untyped_storage()._cdata for tensor in excluded}
        found = []
        for key, reference in self.storages.items():
            if key not in skip and not reference.expired():
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                found.append(storage.nbytes())
        return sorted(size for size in found if size)


def claimed(parts: tuple[Operation, ...]) -> Counter[Product]:
    """The products of `parts`, as the recorder counts them."""
    found: Counter[Product] = Counter()
    for op in parts:
        if op.kind == "matmul" and op.count:
            found["matmul", op.batch, op.m, op.n, op.k] += op.count
        elif op.kind == "attention" and op.products == 2:
            found["attention", op.batch, op.m, int(2 * op.n), op.k] += 1
    return found


class Case:
    """One block kind of one rank, real and claimed."""

    def __init__(
        self,
        model: ModelSpec,
        layout: Layout,
        precision: str,
        name: str,
        *,
        seq_len: int = 16,
        recompute: Recompute = "none",
    ) -> None:
        self.model, self.layout, self.recompute = model, layout, recompute
        self.dtype = COMPUTE_DTYPES[precision]
        self.kernels = engine().kernels
        self.cut: Cut = cut_of(model, seq_len, layout, self.dtype.itemsize, tensor_index=0)
        (stage,) = split(model, seq_len, 1)
        buffers = stage_buffers(model, layout, Coord(), stage)
        comm = SilentComm(layout.tensor)
        parallel = TensorParallel(comm, layout.sequence_parallel, layout.tensor_overlap_chunks)  # type: ignore[arg-type]
        flats = []
        for buffer in buffers:
            flat = FlatBuffer(buffer, self.dtype, CPU)
            flat.allocate_parameters()
            flat.allocate_gradients()
            torch.nn.init.normal_(flat.parameters, std=0.02)
            flats.append(flat)
        tied = flats[0] if model.tied else None
        objective = Objective(vocab=model.vocab)
        watched = blocks.build(
            flats, model, seq_len, parallel, tied, _Nobody(), recompute, range(model.num_layers), objective
        )
        self.block = next(block for block in watched.blocks if block.buffer.layout.name == name)
        self.lasting = [tensor for flat in flats for tensor in (flat.parameters, flat.gradients)]
        if isinstance(self.block, blocks.Layer) and self.block.attention.rotation is not None:
            self.lasting += self.block.attention.rotation
        tokens = torch.randint(0, model.vocab, (layout.micro_batch, seq_len))
        self.batch = MicroBatch(
            tokens=tokens,
            labels=tokens,
            sequences=torch.arange(layout.micro_batch),
            num_supervised=tokens.numel(),
        )

    def claims(self) -> Block:
        if isinstance(self.block, blocks.Head):
            return operations.head(self.model, self.cut, self.kernels)
        return operations.layer(self.model, self.cut, self.kernels)

    def run(self) -> tuple[Counter[Product], Counter[Product], list[int]]:
        """Products of forward and of backward, and bytes of what is kept between."""
        inputs = torch.randn(self.cut.rows, self.model.hidden, dtype=self.dtype).requires_grad_()
        with Recorder() as forward:
            source = inputs * 1.0  # what the block before hands over: kept by this one, if it needs it
            reference = [source]
            if self.recompute == "full":
                output = checkpointed(lambda x: self.block(x, self.batch), source)
            else:
                output = self.block(source, self.batch)
            del source, reference
        kept = forward.alive(output, inputs, self.batch.tokens, self.batch.sequences, *self.lasting)
        with Recorder() as backward:
            output.backward(torch.ones_like(output))
        return forward.products, backward.products, kept


class _Nobody:
    def _nothing(self, *args: Any, **options: Any) -> None:
        """Not interested."""

    before_forward = after_forward = before_backward = after_backward = _nothing


def check(case: Case) -> None:
    claims = case.claims()
    forward, backward, kept = case.run()
    expected = claimed(claims.input_gradient) + claimed(claims.weight_gradient)
    if case.recompute == "full":
        expected += claimed(claims.forward)
        want_kept = [case.cut.rows * case.cut.hidden * case.cut.element]
    else:
        held = [tensor for tensor in claims.kept if not (tensor.again and case.recompute == "selective")]
        want_kept = sorted(int(tensor.bytes) for tensor in held if tensor.bytes)
    assert forward == claimed(claims.forward)
    assert backward == expected
    assert kept == want_kept, {tensor.name: tensor.bytes for tensor in claims.kept}


LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True), (8, False), (8, True)]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize(("tensor", "cut"), LAYOUTS)
def test_layers_do_what_operations_claim(
    tensor: int, cut: bool, style: str, precision: str, recompute: Recompute
) -> None:
    model = tiny_model(style, num_heads=8, num_kv_heads=2 if style == "llama" else 8, head_dim=8)
    layout = Layout(tensor=tensor, sequence_parallel=cut, micro_batch=2)
    check(Case(model, layout, precision, "layers.0", recompute=recompute))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize(("tensor", "cut"), [(1, False), (2, False), (2, True), (4, True)])
def test_chunks_cut_products_as_operations_claim(tensor: int, cut: bool, kv_heads: int, recompute: Recompute) -> None:
    model = tiny_model(num_heads=8, num_kv_heads=kv_heads, head_dim=8)
    layout = Layout(tensor=tensor, sequence_parallel=cut, micro_batch=2, tensor_overlap_chunks=4)
    check(Case(model, layout, "fp32", "layers.0", recompute=recompute))


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize(("tensor", "cut"), LAYOUTS)
def test_heads_do_what_operations_claim(tensor: int, cut: bool, style: str) -> None:
    model = tiny_model(style, num_heads=8, num_kv_heads=8, head_dim=8)
    layout = Layout(tensor=tensor, sequence_parallel=cut, micro_batch=70)  # 1,120 tokens: a full chunk and a short one
    check(Case(model, layout, "fp32", "head"))


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_operations_hold_for_any_sizes(data: st.DataObject) -> None:
    style = data.draw(st.sampled_from(["llama", "gpt2"]))
    kv_heads = data.draw(st.sampled_from([1, 2, 3, 4, 5]))
    heads = kv_heads * (data.draw(st.integers(1, 3)) if style == "llama" else 1)
    tensor = data.draw(st.sampled_from([t for t in (1, 2, 3, 4, 5, 6) if heads % t == 0]))
    model = tiny_model(
        style,
        num_layers=1,
        hidden=data.draw(st.integers(2, 60)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=2 * data.draw(st.integers(1, 9)),
        ffn=tensor * data.draw(st.integers(1, 40)),
        vocab=data.draw(st.integers(100, 300)),
        qk_norm=data.draw(st.booleans()),
    )
    seq_len = tensor * data.draw(st.integers(2, 6))
    layout = Layout(
        tensor=tensor,
        sequence_parallel=data.draw(st.booleans()) and tensor > 1,
        micro_batch=data.draw(st.integers(1, 3)),
    )
    indivisible = (tensor % kv_heads and kv_heads % tensor) or model.head_dim % 2
    if indivisible:
        return
    check(Case(model, layout, "fp32", data.draw(st.sampled_from(["layers.0", "head"])), seq_len=seq_len))


def test_dropout_keeps_a_factor_per_site() -> None:
    model = tiny_model("gpt2", dropout=0.1)
    check(Case(model, Layout(micro_batch=2), "fp32", "layers.0"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("style", "kv_heads"), [("gpt2", 8), ("llama", 2)])
@pytest.mark.parametrize(("tensor", "cut"), [(1, False), (2, True), (4, False)])
def test_dropout_in_attention_stores_scores(tensor: int, cut: bool, style: str, kv_heads: int, precision: str) -> None:
    model = tiny_model(style, num_heads=8, num_kv_heads=kv_heads, head_dim=8, attention_dropout=0.1)
    layout = Layout(tensor=tensor, sequence_parallel=cut, micro_batch=3)
    check(Case(model, layout, precision, "layers.0", seq_len=24))


@pytest.mark.parametrize(("tensor", "cut"), [(1, False), (2, True)])
def test_norms_are_passes_over_memory(tensor: int, cut: bool) -> None:
    """Products with a vector are no matrix products: the two of a norm read no more than the pass that is claimed."""
    case = Case(tiny_model("llama"), Layout(tensor=tensor, sequence_parallel=cut, micro_batch=2), "fp32", "layers.0")
    inputs = torch.randn(case.cut.rows, case.model.hidden).requires_grad_()
    output = case.block(inputs * 1.0, case.batch)
    with Recorder() as backward:
        output.backward(torch.ones_like(output))
    rows, hidden = case.cut.rows, case.model.hidden
    assert backward.vectors == {(hidden, rows): 2, (rows, hidden): 2}
    (norm,) = (op for op in case.claims().input_gradient if op.name == "norm1 gradient")
    assert 2 * rows * hidden * 4 <= norm.bytes


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_embedding_keeps_a_mask_at_most(tensor: int, style: str, dropout: float) -> None:
    """No products; of what it makes, backward reads the mask, and which rows of the tables each token took."""
    model = tiny_model(style, dropout=dropout)
    case = Case(model, Layout(tensor=tensor, micro_batch=2), "fp32", "embedding")
    with Recorder() as forward:
        output = case.block(None, case.batch)  # type: ignore[arg-type]
    kept = forward.alive(output, case.batch.tokens, case.batch.sequences, *case.lasting)
    claims = operations.embedding(model, case.cut, case.kernels)
    assert not forward.products
    beyond = Counter(kept) - Counter(int(tensor.bytes) for tensor in claims.kept)
    assert max(beyond) <= 8 * case.cut.tokens and sum(beyond.values()) <= 4, beyond
    assert all(tensor.bytes in kept for tensor in claims.kept)


def test_a_tensor_hidden_on_a_context_is_found() -> None:
    case = Case(tiny_model("llama"), Layout(micro_batch=2), "fp32", "layers.0")
    real = case.block
    hidden: list[Tensor] = []

    def leaky(inputs: Tensor, batch: Any) -> Tensor:
        output = real(inputs, batch)
        hidden.append(output * 2.0)
        return output

    case.block = leaky  # type: ignore[assignment]
    with pytest.raises(AssertionError):
        check(case)


def test_legal_layouts_only() -> None:
    """The layouts above are ones that a run may have."""
    from planner_cases import CLUSTER, JOB

    model = tiny_model("llama", num_heads=8, num_kv_heads=2, head_dim=8)
    for tensor, cut in LAYOUTS:
        layout = Layout(tensor=tensor, sequence_parallel=cut, micro_batch=2)
        assert not problems(model, replace(JOB, seq_len=16, global_batch=2), CLUSTER, layout)


@pytest.mark.parametrize("some", [{"recompute_every": 2}, {"recompute_layers": (3,)}], ids=["every other", "first 3"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_stage_keeps_what_its_layers_do(recompute: Recompute, some: dict[str, Any]) -> None:
    """Of 5 layers, 3 in part: between forward and backward, to the last byte."""
    model = tiny_model("llama", num_layers=5)
    layout = Layout(micro_batch=2, recompute=recompute, **some)
    stage = Stage(index=0, embedding=False, layers=range(5), head=False)
    flats = [FlatBuffer(buffer, torch.float32, CPU) for buffer in stage_buffers(model, layout, Coord(), stage)]
    for flat in flats:
        flat.allocate_parameters()
        flat.allocate_gradients()
        torch.nn.init.normal_(flat.parameters, std=0.02)
    chosen, objective = recomputed_layers(layout, stage), Objective(vocab=model.vocab)
    parallel = TensorParallel(SilentComm(1))  # type: ignore[arg-type]
    built = blocks.build(flats, model, 16, parallel, None, _Nobody(), recompute, chosen, objective)
    lasting = [tensor for flat in flats for tensor in (flat.parameters, flat.gradients)]
    lasting += [table for block in built.blocks for table in block.attention.rotation]  # type: ignore[attr-defined]
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    batch = blocks.MicroBatch(tokens=tokens, labels=tokens, sequences=torch.arange(2), num_supervised=32)
    inputs = torch.randn(32, model.hidden).requires_grad_()
    with Recorder() as forward:
        output = built.forward(inputs * 1.0, batch, last=True)
    assert output is not None
    cut = cut_of(model, 16, layout, 4, tensor_index=0)
    claims = operations.layer(model, cut, engine().kernels)
    kept, _ = memory.kept_bytes(claims, cut, np.array(RECOMPUTES.index(recompute)))
    assert sum(forward.alive(output, inputs, tokens, *lasting)) == 3 * kept + 2 * claims.kept_bytes
    assert kept < claims.kept_bytes
