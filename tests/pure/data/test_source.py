"""Batches: packed documents, the same for every layout, token ids held against the model's vocabulary."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.data.source import Source
from phalanx.data.tokens import TokenWriter, mask_path
from phalanx.errors import DataError
from phalanx.spec.job import DataSet, DataSpec


def counting(folder: Path, num_tokens: int, document: int = 7) -> Path:
    """A file of the tokens 0, 1, 2, …, in documents of a few tokens."""
    with TokenWriter(folder / "tokens", np.int32) as writer:
        for start in range(0, num_tokens, document):
            writer.add(np.arange(start, min(start + document, num_tokens)))
            writer.end_document()
    return folder / "tokens"


def source_of(prefix: Path, *, seq_len: int, seed: int, global_batch: int, vocab: int, **data: Any) -> Source:
    spec = DataSpec(**({"path": str(prefix)} | data))
    return Source(spec, seq_len=seq_len, seed=seed, global_batch=global_batch, vocab=vocab)


def test_samples_are_packed_and_labels_are_the_next_tokens(tmp_path: Path):
    source = source_of(counting(tmp_path, 41), seq_len=8, seed=1, global_batch=2, vocab=41)
    assert source.sets[0].num_samples == 5
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
    assert source_of(counting(tmp_path, 40), seq_len=8, seed=1, global_batch=2, vocab=40).sets[0].num_samples == 4


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
    source = source_of(counting(tmp_path, 64 * 8 + 1), seq_len=8, seed=3, global_batch=8, vocab=1000)
    reference = [source.batch(step, range(8)).tokens[:, 0].tolist() for step in range(16)]
    layouts = 5 * [(2, 2)] + 5 * [(4, 1)] + 6 * [(1, 8)]
    resumed = source_of(source.sets[0].file.prefix, seq_len=8, seed=3, global_batch=8, vocab=1000)
    assert [rows(resumed, step, *layout) for step, layout in enumerate(layouts)] == reference
    assert sorted(sum(reference[:8], [])) == sorted(sum(reference[8:], [])) == [8 * sample for sample in range(64)]


def test_no_rank_ends_an_epoch_before_the_others(tmp_path: Path):
    # 5 samples over data 2 with micro-batches of 2: every step is full on every rank, the epoch ends inside one.
    source = source_of(counting(tmp_path, 5 * 4 + 1), seq_len=4, seed=1, global_batch=4, vocab=100)
    run = [rows(source, step, data=2, micro_batch=2) for step in range(5)]
    assert [len(step) for step in run] == 5 * [4]
    for epoch in range(4):
        assert sorted(sum(run, [])[5 * epoch : 5 * epoch + 5]) == [0, 4, 8, 12, 16]


@pytest.mark.parametrize(("num_tokens", "num_samples"), [(0, 0), (8, 0), (24, 2)])
def test_a_file_shorter_than_one_batch_is_refused_with_the_numbers(tmp_path: Path, num_tokens: int, num_samples: int):
    prefix = counting(tmp_path, num_tokens)
    with pytest.raises(DataError) as caught:
        source_of(prefix, seq_len=8, seed=1, global_batch=3, vocab=100)
    for words in [f"{prefix}.bin", f"{num_tokens} tokens are {num_samples} samples of 8", "3 samples, 25 tokens", "→"]:
        assert words in str(caught.value)
    assert source_of(counting(tmp_path, 25), seq_len=8, seed=1, global_batch=3, vocab=100).sets[0].num_samples == 3


@pytest.mark.parametrize("wrong", [-1, 250, 253])
def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path, wrong: int):
    # A tokenizer of 254 entries, a model of 250 whose embedding is padded to 256: 250 to 255 are rows of nothing.
    tokens = np.arange(33) % 250
    tokens[21] = wrong
    with TokenWriter(tmp_path / "tokens", np.int32) as writer:
        writer.add(tokens)
        writer.end_document()
    source = source_of(tmp_path / "tokens", seq_len=8, seed=1, global_batch=4, vocab=250)
    with pytest.raises(DataError) as caught:
        source.batch(0, range(4))
    for words in [str(tmp_path / "tokens.bin"), f"token id {wrong} at position 21", "250", "→"]:
        assert words in str(caught.value)


def test_a_model_larger_than_the_tokenizer_is_allowed(tmp_path: Path):
    batch = source_of(counting(tmp_path, 33), seq_len=8, seed=1, global_batch=4, vocab=50_000).batch(0, [3])
    assert batch.tokens.shape == (1, 8)


def test_a_source_says_how_far_the_data_goes(tmp_path: Path):
    source = source_of(counting(tmp_path, 8001), seq_len=8, seed=1, global_batch=4, vocab=8001)
    assert source.describe(500)[0] == "8,001 tokens, 1,000 samples of 8; 500 steps take 2,000 samples, 2.00 epochs"


def sets_of(folder: Path, *sizes: int) -> list[Path]:
    """One file per size; the tokens of file i begin at 1000 i."""
    prefixes = []
    for index, size in enumerate(sizes):
        with TokenWriter(folder / f"set-{index}", np.int32) as writer:
            for document in np.array_split(np.arange(1000 * index, 1000 * index + size), 10):
                writer.add(document)
                writer.end_document()
        prefixes.append(folder / f"set-{index}")
    return prefixes


def mixed(prefixes: list[Path], weights: list[float], **data: Any) -> Source:
    sets = tuple(DataSet(path=str(path), weight=weight) for path, weight in zip(prefixes, weights, strict=True))
    return Source(DataSpec(sets=sets, **data), seq_len=4, seed=2, global_batch=8, vocab=5000)


def test_sets_are_mixed_by_weight_each_with_its_own_epochs(tmp_path: Path):
    source = mixed(sets_of(tmp_path, 81, 41, 201), [5.0, 2.0, 1.0])
    firsts = np.concatenate([source.batch(step, range(8)).tokens[:, 0] for step in range(25)])
    taken = [firsts[firsts // 1000 == index] - 1000 * index for index in range(3)]
    assert [len(each) for each in taken] == [125, 50, 25]
    for each, num_samples in zip(taken, (20, 10, 50), strict=True):
        for start in range(0, len(each) - num_samples + 1, num_samples):
            assert sorted(each[start : start + num_samples]) == list(range(0, 4 * num_samples, 4))
    assert taken[0][:20].tolist() != taken[0][20:40].tolist()
    assert [line.partition(": ")[2].rpartition("; ")[2] for line in source.describe(25)[:3]] == [
        "25 steps take 125 samples, 6.25 epochs",
        "25 steps take 50 samples, 5.00 epochs",
        "25 steps take 25 samples, 0.50 epochs",
    ]


def test_a_mixture_is_the_same_whatever_the_layout(tmp_path: Path):
    source = mixed(sets_of(tmp_path, 81, 41), [0.9, 0.1])
    for step in (0, 3, 1000):
        whole = source.batch(step, range(8)).tokens.tolist()
        assert [source.batch(step, [position]).tokens[0].tolist() for position in range(8)] == whole
        assert sum(rows(source, step, 4, 1), 0) == sum(rows(source, step, 1, 8), 0)


def test_no_data_at_all_is_said():
    with pytest.raises(DataError, match=r"\[data\]: no data"):
        Source(DataSpec(), seq_len=4, seed=2, global_batch=8, vocab=5000)


def test_a_set_too_small_for_its_part_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"set-1.*8 tokens are 1 samples of 4.*needs 4 samples"):
        mixed(sets_of(tmp_path, 81, 8), [0.5, 0.5])


def masked(prefix: Path, supervised: np.ndarray) -> None:
    mask_path(prefix).write_bytes(supervised.astype(np.uint8).tobytes())


def test_supervised_labels_are_counted_over_the_whole_batch(tmp_path: Path):
    prefix = counting(tmp_path, 41)
    masked(prefix, np.arange(41) % 5 == 0)
    for documents in ("joined", "separate"):
        source = source_of(prefix, seq_len=8, seed=1, global_batch=4, vocab=41, documents=documents)
        for step in range(3):
            whole = source.batch(step, range(4))
            tokens = whole.tokens + 1
            counts = (tokens % 5 == 0) & ((documents == "joined") | (tokens % 7 != 0))
            assert (whole.labels == np.where(counts, tokens, -100)).all()
            assert whole.num_supervised == counts.sum()
            for position in range(4):
                part = source.batch(step, [position])
                assert part.num_supervised == whole.num_supervised
                assert (part.labels == whole.labels[position]).all()


def test_only_one_of_mixed_sets_has_a_mask(tmp_path: Path):
    prefixes = sets_of(tmp_path, 81, 81)
    masked(prefixes[1], np.zeros(81))
    batch = mixed(prefixes, [0.5, 0.5]).batch(0, range(8))
    assert batch.num_supervised == 16
    assert ((batch.labels == -100) == (batch.tokens >= 1000)).all()


def test_data_in_which_nothing_is_supervised_are_refused(tmp_path: Path):
    prefix = counting(tmp_path, 41)
    masked(prefix, np.zeros(41))
    with pytest.raises(DataError, match="no supervised token to train on"):
        source_of(prefix, seq_len=8, seed=1, global_batch=2, vocab=41)


def labels_of_validation(source: Source) -> list[int]:
    batches = [source.validation(number, range(source.global_batch)) for number in range(source.num_rounds)]
    assert [batch.num_supervised for batch in batches] == [(batch.labels >= 0).sum() for batch in batches]
    assert all(batch.tokens.shape == (source.global_batch, source.seq_len) for batch in batches)
    return [label for batch in batches for label in batch.labels[batch.labels >= 0].tolist()]


@pytest.mark.parametrize("documents", ["joined", "separate"])
def test_training_and_validation_share_no_token_and_leave_none_out(tmp_path: Path, documents: str):
    prefixes = sets_of(tmp_path, 403, 201)
    source = mixed(prefixes, [1.0, 3.0], validation_fraction=0.2, documents=documents)
    trained = set()
    for step in range(80):
        batch = source.batch(step, range(8))
        trained |= {*batch.tokens.flatten().tolist(), *batch.labels.flatten().tolist()} - {-100}
    held_out = labels_of_validation(source)
    assert len(held_out) == len(set(held_out))
    assert not trained & set(held_out)
    # The last two of ten documents of each set: 80 of 403 tokens, 40 of 201; the first token is no label.
    expected = {*range(323, 403), *range(1161, 1201)}
    firsts = {323, 363, 1161, 1181} if documents == "separate" else {323, 1161}
    assert set(held_out) == expected - firsts
    assert max(token for token in trained if token < 1000) >= 323 - 4, "training goes on up to there"


@pytest.mark.parametrize("only", [0, 40])
def test_a_token_that_is_nobodys_label_supervises_nothing(tmp_path: Path, only: int):
    """The first token of a set is no label; token 40 of 41 is beyond the last whole sample of 13."""
    prefix = counting(tmp_path, 41)
    masked(prefix, np.arange(41) == only)
    with pytest.raises(DataError, match="no supervised token to train on"):
        source_of(prefix, seq_len=13, seed=1, global_batch=1, vocab=41)


def test_separate_documents_of_one_token_are_refused(tmp_path: Path):
    """To train on them would change nothing, with a loss of 0."""
    prefix = counting(tmp_path, 41, document=1)
    source_of(prefix, seq_len=4, seed=1, global_batch=4, vocab=41)
    with pytest.raises(DataError, match="no supervised token to train on"):
        source_of(prefix, seq_len=4, seed=1, global_batch=4, vocab=41, documents="separate")


@pytest.mark.parametrize("size", [2, 5, 33, 34, 64])
def test_validation_reads_every_label_once_whatever_the_size(tmp_path: Path, size: int):
    path = sets_of(tmp_path, 41, size)[1]
    source = source_of(tmp_path / "set-0", seq_len=4, seed=1, global_batch=8, vocab=5000, validation_path=str(path))
    assert source.num_rounds == -(-(size - 1) // 32)
    assert labels_of_validation(source) == list(range(1001, 1000 + size))
    assert "validation at the end, on" in source.describe(1)[1]


def test_a_validation_set_of_nothing_is_refused(tmp_path: Path):
    prefix, path = counting(tmp_path, 41), sets_of(tmp_path, 10, 1)[1]
    with pytest.raises(DataError, match="no supervised token to validate on"):
        source_of(prefix, seq_len=4, seed=1, global_batch=8, vocab=5000, validation_path=str(path))
