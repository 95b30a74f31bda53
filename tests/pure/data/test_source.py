"""Batches: packed documents, the same for every layout, token ids held against the model's vocabulary."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from phalanx.data.source import Source
from phalanx.data.tokens import TokenWriter
from phalanx.errors import DataError


def counting(folder: Path, num_tokens: int, document: int = 7) -> Path:
    """A file of the tokens 0, 1, 2, …, in documents of a few tokens."""
    with TokenWriter(folder / "tokens", np.int32) as writer:
        for start in range(0, num_tokens, document):
            writer.add(np.arange(start, min(start + document, num_tokens)))
            writer.end_document()
    return folder / "tokens"


def test_samples_are_packed_and_labels_are_the_next_tokens(tmp_path: Path):
    source = Source(counting(tmp_path, 41), seq_len=8, seed=1, global_batch=2, vocab=41)
    assert source.num_samples == 5
    epoch = [source.batch(step, [0, 1]) for step in range(5)]  # two epochs
    starts = sorted(int(row[0]) for batch in epoch for row in batch.tokens)
    assert starts == sorted(2 * [0, 8, 16, 24, 32])
    for batch in epoch:
        assert batch.tokens.shape == batch.labels.shape == (2, 8)
        assert batch.tokens.dtype == batch.labels.dtype == np.int64
        assert (batch.labels == batch.tokens + 1).all()
        assert (batch.tokens == batch.tokens[:, :1] + np.arange(8)).all()
        assert batch.num_supervised == 16


def test_one_token_less_is_one_sample_less(tmp_path: Path):
    assert Source(counting(tmp_path, 40), seq_len=8, seed=1, global_batch=2, vocab=40).num_samples == 4


def rows(source: Source, step: int, data: int, micro_batch: int) -> list[int]:
    """First tokens of a step, as a data axis of `data` ranks with micro-batches reads them."""
    per_rank = source.global_batch // data
    chosen = []
    for rank, start in itertools.product(range(data), range(0, per_rank, micro_batch)):
        positions = range(rank * per_rank + start, rank * per_rank + start + micro_batch)
        chosen += source.batch(step, positions).tokens[:, 0].tolist()
    return chosen


def test_a_step_has_the_same_samples_whatever_the_layout(tmp_path: Path):
    # Steps 0 to 4 at data 2 with micro-batches of 2, then data 4 with micro-batches of 1, then data 1.
    source = Source(counting(tmp_path, 64 * 8 + 1), seq_len=8, seed=3, global_batch=8, vocab=1000)
    reference = [source.batch(step, range(8)).tokens[:, 0].tolist() for step in range(16)]
    layouts = 5 * [(2, 2)] + 5 * [(4, 1)] + 6 * [(1, 8)]
    resumed = Source(source.file.prefix, seq_len=8, seed=3, global_batch=8, vocab=1000)
    assert [rows(resumed, step, *layout) for step, layout in enumerate(layouts)] == reference
    assert sorted(sum(reference[:8], [])) == sorted(sum(reference[8:], [])) == [8 * sample for sample in range(64)]


def test_no_rank_ends_an_epoch_before_the_others(tmp_path: Path):
    # 5 samples over data 2 with micro-batches of 2: every step is full on every rank, the epoch ends inside one.
    source = Source(counting(tmp_path, 5 * 4 + 1), seq_len=4, seed=1, global_batch=4, vocab=100)
    run = [rows(source, step, data=2, micro_batch=2) for step in range(5)]
    assert [len(step) for step in run] == 5 * [4]
    for epoch in range(4):
        assert sorted(sum(run, [])[5 * epoch : 5 * epoch + 5]) == [0, 4, 8, 12, 16]


@pytest.mark.parametrize(("num_tokens", "num_samples"), [(0, 0), (8, 0), (24, 2)])
def test_a_file_shorter_than_one_batch_is_refused_with_the_numbers(tmp_path: Path, num_tokens: int, num_samples: int):
    prefix = counting(tmp_path, num_tokens)
    with pytest.raises(DataError) as caught:
        Source(prefix, seq_len=8, seed=1, global_batch=3, vocab=100)
    for words in [f"{prefix}.bin", f"{num_tokens} tokens are {num_samples} samples of 8", "3 samples, 25 tokens", "→"]:
        assert words in str(caught.value)
    assert Source(counting(tmp_path, 25), seq_len=8, seed=1, global_batch=3, vocab=100).num_samples == 3


@pytest.mark.parametrize("wrong", [-1, 250, 253])
def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path, wrong: int):
    # A tokenizer of 254 entries, a model of 250 whose embedding is padded to 256: 250 to 255 are rows of nothing.
    tokens = np.arange(33) % 250
    tokens[21] = wrong
    with TokenWriter(tmp_path / "tokens", np.int32) as writer:
        writer.add(tokens)
        writer.end_document()
    source = Source(tmp_path / "tokens", seq_len=8, seed=1, global_batch=4, vocab=250)
    with pytest.raises(DataError) as caught:
        source.batch(0, range(4))
    for words in [str(tmp_path / "tokens.bin"), f"token id {wrong} at position 21", "250", "→"]:
        assert words in str(caught.value)


def test_a_model_larger_than_the_tokenizer_is_allowed(tmp_path: Path):
    batch = Source(counting(tmp_path, 33), seq_len=8, seed=1, global_batch=4, vocab=50_000).batch(0, [3])
    assert batch.tokens.shape == (1, 8)


def test_a_source_says_how_far_the_data_goes(tmp_path: Path):
    source = Source(counting(tmp_path, 8001), seq_len=8, seed=1, global_batch=4, vocab=8001)
    assert source.describe(500) == "8,001 tokens, 1,000 samples of 8; 500 steps take 2,000 samples, 2.00 epochs"
