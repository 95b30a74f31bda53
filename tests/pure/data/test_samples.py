"""Samples: document boundaries and masks, against a reading of the whole file into plain lists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.documents import Documents
from phalanx.data.samples import Samples, split
from phalanx.data.tokens import PROBE_BYTES, PROBES, TokenFile, TokenWriter, mask_path
from phalanx.errors import DataError

VOCAB = 1000


def write(folder: Path, lengths: list[int], *, sequences: int = 2) -> TokenFile:
    """Documents of these lengths, each of up to `sequences` sequences; tokens count up."""
    first = 0
    with TokenWriter(folder / "tokens", np.int32) as writer:
        for length in lengths:
            for piece in np.array_split(np.arange(first, first + length), sequences):
                if len(piece):
                    writer.add(piece)
            writer.end_document()
            first += length
    return TokenFile(folder / "tokens")


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 5),
    seq_len=st.integers(1, 8),
    data=st.data(),
)
def test_positions_and_labels_of_separate_documents(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, data: st.DataObject
):
    file = write(tmp_path_factory.mktemp("data"), lengths)
    first = data.draw(st.integers(0, 3))
    last = data.draw(st.integers(first + 2, file.num_tokens))
    samples = Samples(file, seq_len=seq_len, vocab=VOCAB, separate=True, first=first, last=last)
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    ids = np.arange(samples.num_with_short + 1)  # and one beyond the end
    tokens, supervised, positions = samples.tokens(ids), samples.supervised(ids), samples.positions(ids)
    whole = np.arange(samples.num_samples)
    assert samples.num_supervised(whole) == supervised[: len(whole)].sum()
    labels = 0
    for row in ids.tolist():
        since = 0
        for column in range(seq_len):
            at = first + row * seq_len + column
            if at >= last:
                assert (tokens[row, column], supervised[row, column]) == (0, False)
                continue
            assert tokens[row, column] == at
            since = 0 if column == 0 or document[at] != document[at - 1] else since + 1
            assert positions[row, column] == since
            follows = at + 1 < last and document[at + 1] == document[at]
            assert supervised[row, column] == follows
            labels += follows
    inside = document[first:last]
    assert labels == len(inside) - len(set(inside))
    assert samples.num_samples * seq_len <= last - first - 1 <= samples.num_with_short * seq_len


def test_where_documents_are_joined_every_label_counts(tmp_path: Path):
    samples = Samples(write(tmp_path, [5, 6]), seq_len=4, vocab=VOCAB)
    assert samples.num_supervised(np.array([0, 1])) == 8
    assert samples.supervised(np.array([0, 1, 2])).tolist() == [[True] * 4, [True] * 4, [True, True, False, False]]


def test_a_mask_says_which_tokens_are_labels_that_count(tmp_path: Path):
    file = write(tmp_path, [9, 8])
    mask = np.arange(17) % 3 == 0  # tokens 0, 3, 6, 9, 12, 15
    mask_path(file.prefix).write_bytes(mask.astype(np.uint8).tobytes())
    samples = Samples(file, seq_len=8, vocab=VOCAB)
    expected = [[1 + column in (3, 6) for column in range(8)], [9 + column in (9, 12, 15) for column in range(8)]]
    assert samples.supervised(np.array([0, 1])).tolist() == expected
    expected[1][0] = False  # token 9 begins a document
    separate = Samples(file, seq_len=8, vocab=VOCAB, separate=True)
    assert separate.supervised(np.array([0, 1])).tolist() == expected
    assert (samples.num_supervised(np.array([0, 1])), separate.num_supervised(np.array([1, 0]))) == (5, 4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (bytes(16), ["has 16 bytes for 17 tokens", "one byte per token"]),
        (bytes([0] * 10 + [7] * 7), ["byte 7 at", "10"]),
    ],
    ids=["short", "not a flag"],
)
def test_a_damaged_mask_is_refused(tmp_path: Path, content: bytes, words: list[str]):
    file = write(tmp_path, [9, 8])
    mask_path(file.prefix).write_bytes(content)
    with pytest.raises(DataError) as caught:
        Samples(file, seq_len=8, vocab=VOCAB).supervised(np.array([0, 1]))
    for word in ["tokens.mask.bin", *words]:
        assert word in str(caught.value)


def test_a_mask_of_other_bytes_is_refused_when_it_is_opened_and_a_single_one_when_it_is_read(tmp_path: Path):
    size = 2 * PROBES * PROBE_BYTES
    file, mask, place = write(tmp_path, [size]), np.ones(size, np.uint8), PROBE_BYTES + 7  # behind the first stretch
    mask[place] = 255
    mask_path(file.prefix).write_bytes(mask.tobytes())
    samples = Samples(file, seq_len=PROBE_BYTES, vocab=VOCAB)
    assert samples.supervised(np.array([0])).all()
    with pytest.raises(DataError, match=f"byte 255 at position {place:,}"):
        samples.supervised(np.array([1]))
    mask_path(file.prefix).write_bytes(bytes([255]) * size)
    with pytest.raises(DataError, match="byte 255 at position 0"):
        Samples(file, seq_len=PROBE_BYTES, vocab=VOCAB)


def test_bisection_finds_documents_without_a_table(tmp_path: Path):
    lengths = np.random.default_rng(1).integers(0, 50, 2000).tolist()
    documents = Documents(write(tmp_path, lengths, sequences=1))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    assert documents.start(np.arange(2001)).tolist() == starts.tolist()
    tokens = np.arange(-1, sum(lengths) + 2)
    assert documents.begun(tokens).tolist() == np.searchsorted(starts[:-1], tokens, side="right").tolist()


@pytest.mark.parametrize(("fraction", "at"), [(0.1, 90), (0.3, 70), (0.99, 20), (0.001, 90), (0.5, 70)])
def test_a_split_leaves_no_document_on_both_sides(tmp_path: Path, fraction: float, at: int):
    assert split(write(tmp_path, [20, 50, 20, 10]), fraction) == at


def test_one_document_cannot_be_split(tmp_path: Path):
    with pytest.raises(DataError) as caught:
        split(write(tmp_path, [100]), 0.1)
    for words in ["1 documents cannot be split at 0.9", "data.validation_path"]:
        assert words in str(caught.value)
