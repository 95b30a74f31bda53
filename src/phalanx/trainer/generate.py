"""Generate: continue a sequence of tokens, with the layers of training and a cache of keys and values.

Each layer's attention is replaced by one that remembers: the first forward reads the prompt, each later one a single
token. Compute is in fp32. A model may be cut over a tensor and a pipeline axis; all ranks then make the same calls, get
the same logits, and choose the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.checkpoint.tensor_file import StatePiece
from phalanx.checkpoint.weights import Weights
from phalanx.errors import InputError
from phalanx.plan.comm import Comm, Group
from phalanx.plan.layout import Coord, Layout
from phalanx.plan.shards import Buffer, padded_vocab, rank_buffers
from phalanx.spec.model import ModelSpec
from phalanx.trainer import kernels
from phalanx.trainer.attention import Attention, rotation_table
from phalanx.trainer.chain import chain
from phalanx.trainer.comm import SoloComm
from phalanx.trainer.flat import FlatBuffer
from phalanx.trainer.micro_batch import MicroBatch
from phalanx.trainer.model import Layer, norm_of
from phalanx.trainer.tensor_parallel import TensorParallel

Choose = Callable[[Tensor], int]
"""The next token, from the logits [vocab] of the last one."""


class CachedAttention:
    """Attention over all tokens seen since `clear`, in the place of a layer's own."""

    def __init__(self, attention: Attention) -> None:
        self.num_heads, self.num_kv_heads = len(attention.heads), attention.num_kv_heads
        self.rotation = attention.rotation
        self.length = 0

    def clear(self, capacity: int, head_dim: int, device: torch.device) -> None:
        """Forget everything, and make room for `capacity` tokens."""
        self.cache = torch.empty(1, 2 * self.num_kv_heads, capacity, head_dim, device=device)
        self.length = 0

    def split(self, batch: MicroBatch) -> kernels.SplitHeads:
        """See `Attention.split`, for new tokens."""
        first, count = self.length, batch.tokens.shape[1]
        turn = None if self.rotation is None else tuple(table[first : first + count] for table in self.rotation)
        return kernels.SplitHeads((1, count), self.num_heads, self.num_kv_heads, turn)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: MicroBatch, layer: int) -> Tensor:
        """[1, heads, new tokens, width]. After the first ones, new tokens come one at a time: then nothing has to be
        masked."""
        first, count = self.length, q.shape[2]
        assert first == 0 or count == 1, "several tokens behind others"
        self.length = last = first + count
        torch.cat([k, v], 1, out=self.cache[:, :, first:last])
        keys, values = self.cache[:, :, :last].chunk(2, 1)
        shared = self.num_kv_heads != self.num_heads
        return F.scaled_dot_product_attention(q, keys, values, is_causal=count > 1, enable_gqa=shared)


def alone(name: str) -> Comm:
    """The Comm of any group of one process."""
    return SoloComm(Group(name=name, ranks=(0,)))


class Generator:
    """A model ready to continue sequences: all of it, or what the rank at `coord` of `layout` holds."""

    def __init__(
        self,
        weights: Weights,
        layout: Layout = Layout(),  # noqa: B008 (immutable)
        coord: Coord = Coord(),  # noqa: B008 (immutable)
        comm: Callable[[str], Comm] = alone,
        device: torch.device | None = None,
    ) -> None:
        """Reads this rank's weights; `comm(name)` gives its Comm of a group. Raises DamagedCheckpointError."""
        self.device = device or torch.device("cpu")
        self.model = model = replace(weights.model, dropout=0.0, attention_dropout=0.0)
        self._parallel, self._pipeline = TensorParallel(comm("tensor")), comm("pipeline")
        held = rank_buffers(model, layout, coord, model.max_seq_len)
        buffers = {buffer.name: self._filled(buffer, weights) for buffer in held}
        self._embedding, head = buffers.pop("embedding", None), buffers.pop("head", None)
        rotation = rotation_table(model, model.max_seq_len, torch.float32, self.device)
        self._layers = [
            Layer(buffer, i, model, self._parallel, rotation, recomputes=False)
            for i, buffer in enumerate(buffers.values())
        ]
        for layer in self._layers:
            layer.attention = CachedAttention(layer.attention)
        self._norm = norm_of(head, "norm", model) if head else None
        if head:
            own = head.weights.get("head")
            self._head = (own or self._embedding.weights["tokens"]).value

    def _filled(self, layout: Buffer, weights: Weights) -> FlatBuffer:
        buffer = FlatBuffer(layout, torch.float32, self.device)
        buffer.allocate_parameters()
        weights.fill(
            StatePiece(parameter=piece.parameter, rectangle=piece.rectangle, tensor=buffer.values(piece))
            for piece in layout.pieces
        )
        return buffer

    @torch.inference_mode()
    def generate(
        self, prompt: Sequence[int], num_tokens: int, choose: Choose, stop: Collection[int] = ()
    ) -> Iterator[int]:
        """Up to `num_tokens` tokens that follow `prompt`, each as soon as it is chosen. Ends early before a token in
        `stop`, and when prompt and output have the model's longest length.

        Raises InputError for a prompt that is empty, too long, or has an id outside the vocabulary.
        """
        check_prompt(prompt, self.model)
        num_tokens = min(num_tokens, self.model.max_seq_len - len(prompt))
        self.clear(len(prompt) + num_tokens)
        new = list(prompt)
        for _ in range(num_tokens):
            token = choose(self.logits(self.forward(torch.tensor(new, device=self.device))[-1]))
            if token in stop:
                return
            yield token
            new = [token]

    def clear(self, capacity: int) -> None:
        """Forget all tokens, and make room for `capacity` of them."""
        for layer in self._layers:
            layer.attention.clear(capacity, self.model.head_dim, self.device)
        self._length = 0

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> Tensor:
        """The next tokens [positions] (int64), after all since `clear` → activations [positions, hidden]."""
        places = torch.arange(self._length, self._length + len(tokens), device=self.device)
        self._length += len(tokens)
        sequence = tokens.unsqueeze(0)
        batch = MicroBatch(tokens=sequence, labels=sequence, sequences=places[:1], num_supervised=1)
        activations = self._embed(tokens, places)
        for stage in range(self._pipeline.size):
            if stage == self._pipeline.index:
                for layer in self._layers:
                    activations = layer(activations, batch)
            self._pipeline.broadcast(activations, root=stage, purpose="activations")
        return activations

    def _embed(self, tokens: Tensor, places: Tensor) -> Tensor:
        if self._embedding is None:  # what comes from the stages before takes this place
            return torch.empty(len(tokens), self.model.hidden, device=self.device)
        table, positions = self._embedding.weights["tokens"], self._embedding.weights.get("positions")
        first_row = self._parallel.comm.index * table.value.shape[0]
        embedded = self._parallel.embed(tokens, table, first_row, torch.zeros((), device=self.device))
        return embedded if positions is None else embedded + positions.value[places]

    @torch.inference_mode()
    def logits(self, activations: Tensor) -> Tensor:
        """What `forward` returned, or some of its rows → logits [.., vocab]."""
        rows, comm = activations.view(-1, self.model.hidden), self._parallel.comm
        columns = rows.new_empty(padded_vocab(self.model, comm.size), len(rows))
        if self._norm:
            comm.all_gather(self._head @ chain([self._norm], rows).t(), out=columns, purpose="logits")
        self._pipeline.broadcast(columns, root=self._pipeline.size - 1, purpose="logits")
        return columns[: self.model.vocab].t().reshape(*activations.shape[:-1], -1)


def check_prompt(prompt: Sequence[int], model: ModelSpec) -> None:
    """Raises InputError for a prompt that is empty, too long for the model, or has an id outside its vocabulary."""
    longest, vocab = model.max_seq_len, model.vocab
    if not 0 < len(prompt) < longest:
        what = f"a prompt of {len(prompt)} tokens; the model holds {longest} with what it adds"
        raise InputError(what, where="prompt", instead=f"1 to {longest - 1} tokens")
    wrong = [token for token in prompt if not 0 <= token < vocab]
    if wrong:
        what = f"the tokenizer gave id {wrong[0]}; the model's vocabulary is {vocab:,} ids"
        raise InputError(what, where="prompt", instead="the tokenizer that the model was trained with")


def greedy(logits: Tensor) -> int:
    """The likeliest token."""
    return int(logits.argmax())


def sampler(temperature: float, top_k: int, top_p: float, seed: int) -> Choose:
    """Draws a token by its probability after dividing logits by `temperature`: from the `top_k` likeliest (0: all), and
    of these from the fewest that together have the probability `top_p` (Holtzman et al. 2020; 1: all)."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> int:
        values, tokens = logits.cpu().double().topk(min(top_k or len(logits), len(logits)))
        probabilities = torch.softmax(values / temperature, 0)
        likelier = probabilities.cumsum(0) - probabilities
        drawn = torch.multinomial(probabilities * (likelier < top_p), 1, generator=generator)
        return int(tokens[drawn])

    return choose
