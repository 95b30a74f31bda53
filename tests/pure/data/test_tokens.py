"""Token files: read as Megatron-LM writes them, refused with numbers when damaged, whole or absent when written."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.tokens import TokenFile, TokenWriter, dtype_for
from phalanx.errors import DataError

DOCUMENTS = [[[1, 2, 3, 4, 5]], [[10, 11, 12], [20, 21, 22, 23]], [[65499]]]


def write(prefix: Path, documents: list[list[list[int]]], dtype: object = np.uint16) -> Path:
    with TokenWriter(prefix, dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add(sequence)
            writer.end_document()
    return prefix


def test_a_pair_of_files_has_the_documented_bytes_golden(tmp_path: Path):
    # Source: a pair written by megatron-core's IndexedDatasetBuilder, taken down in hexadecimal.
    expected = bytes.fromhex(
        "4d4d4944494458000001000000000000000804000000000000000400000000000000"
        "05000000030000000400000001000000"
        "00000000000000000a0000000000000010000000000000001800000000000000"
        "0000000000000000010000000000000003000000000000000400000000000000"
    )
    write(tmp_path / "tokens", DOCUMENTS)
    assert (tmp_path / "tokens.idx").read_bytes() == expected
    assert (tmp_path / "tokens.bin").read_bytes() == struct.pack("<13H", *sum(sum(DOCUMENTS, []), []))


def test_reading_returns_what_was_written(tmp_path: Path):
    file = TokenFile(write(tmp_path / "tokens", DOCUMENTS))
    file.check()
    assert (file.num_tokens, file.num_sequences, file.num_documents) == (13, 4, 3)
    assert [file.document(index).tolist() for index in range(3)] == [sum(document, []) for document in DOCUMENTS]
    assert [file.sequence(index).tolist() for index in range(4)] == sum(DOCUMENTS, [])
    assert file.read(4, 3).tolist() == [5, 10, 11]
    assert file.modes is None and file.dtype == np.uint16


@given(
    documents=st.lists(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), max_size=4), max_size=6),
)
def test_any_documents_survive_the_way_through_a_file(tmp_path_factory: pytest.TempPathFactory, documents):
    file = TokenFile(write(tmp_path_factory.mktemp("data") / "tokens", documents, np.int32))
    file.check()
    assert file.num_documents == len(documents)
    assert [file.document(index).tolist() for index in range(len(documents))] == [sum(d, []) for d in documents]


@pytest.mark.parametrize("name", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_every_integer_dtype_is_read(tmp_path: Path, name: str):
    file = TokenFile(write(tmp_path / "tokens", [[[1, 2, 100]]], name))
    assert file.dtype == np.dtype(name) and file.read(0, 3).tolist() == [1, 2, 100]


def test_modes_are_found_by_the_size_of_the_file(tmp_path: Path):
    write(tmp_path / "tokens", DOCUMENTS)
    with (tmp_path / "tokens.idx").open("ab") as index:
        index.write(bytes([0, 1, 0, 2]))
    modes = TokenFile(tmp_path / "tokens").modes
    assert modes is not None and modes.tolist() == [0, 1, 0, 2]


def test_the_dtype_follows_the_vocabulary():
    assert dtype_for(65_499) == np.uint16
    assert dtype_for(65_500) == np.int32


def test_a_prefix_may_hold_a_dot(tmp_path: Path):
    write(tmp_path / "books-v1.5", DOCUMENTS)
    assert (tmp_path / "books-v1.5.bin").exists()
    assert TokenFile(tmp_path / "books-v1.5").num_tokens == 13


def truncate(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def patch(path: Path, offset: int, replacement: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(replacement)] = replacement
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("suffix", "damage", "numbers"),
    [
        ("idx", lambda path: path.unlink(), ["no such file"]),
        ("bin", lambda path: path.unlink(), ["no such file"]),
        ("idx", lambda path: truncate(path, 0), ["begins with b''"]),
        ("idx", lambda path: truncate(path, 20), ["20 bytes", "34"]),
        ("idx", lambda path: truncate(path, 100), ["100 bytes", "4 sequences", "4 document", "114 bytes"]),
        ("idx", lambda path: patch(path, 0, b"\x89PNG"), ["PNG", "MMIDIDX"]),
        ("idx", lambda path: patch(path, 9, b"\x07"), ["version 7"]),
        ("idx", lambda path: patch(path, 17, b"\x07"), ["dtype code 7"]),
        ("idx", lambda path: patch(path, 17, b"\x2a"), ["dtype code 42"]),
        ("idx", lambda path: patch(path, 106, b"\x03"), ["0 to 3", "0 to 4"]),
        ("bin", lambda path: truncate(path, 25), ["25 bytes", "26"]),
        ("bin", lambda path: truncate(path, 0), ["0 bytes", "26"]),
        ("bin", lambda path: path.write_bytes(path.read_bytes() * 2), ["52 bytes", "26"]),
    ],
)
def test_a_damaged_file_is_refused_with_its_path_and_the_numbers(
    tmp_path: Path, suffix: str, damage, numbers: list[str]
):
    path = write(tmp_path / "tokens", DOCUMENTS).with_suffix(f".{suffix}")
    damage(path)
    with pytest.raises(DataError) as caught:
        TokenFile(tmp_path / "tokens")
    for words in [str(path), "→", *numbers]:
        assert words in str(caught.value)


def test_a_folder_in_place_of_a_prefix_names_the_prefixes_in_it(tmp_path: Path):
    (tmp_path / "web").mkdir()
    write(tmp_path / "web" / "tokens", DOCUMENTS)
    with pytest.raises(DataError, match=f"web.idx: no such file\n    → {tmp_path}/web/tokens$"):
        TokenFile(tmp_path / "web")


def test_the_full_check_finds_what_sizes_do_not_show(tmp_path: Path):
    idx = write(tmp_path / "tokens", DOCUMENTS).with_suffix(".idx")
    whole = idx.read_bytes()
    patch(idx, 34, b"\x06")
    with pytest.raises(DataError, match="sequence 1 begins at byte 10 and has 3 tokens"):
        TokenFile(tmp_path / "tokens").check()
    idx.write_bytes(whole)
    patch(idx, 34 + 12 * 4 + 8, b"\x04")
    with pytest.raises(DataError, match="go backwards"):
        TokenFile(tmp_path / "tokens").check()


def test_an_error_while_writing_leaves_the_old_pair_and_nothing_else(tmp_path: Path):
    write(tmp_path / "tokens", DOCUMENTS)
    with pytest.raises(RuntimeError, match="stop"), TokenWriter(tmp_path / "tokens", np.uint16) as writer:
        writer.add([1])
        raise RuntimeError("stop")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokens.bin", "tokens.idx"]
    assert TokenFile(tmp_path / "tokens").num_tokens == 13


@pytest.mark.parametrize("wrong", [-1, 65_536])
def test_an_id_that_the_dtype_cannot_hold_is_refused(tmp_path: Path, wrong: int):
    with pytest.raises(DataError, match=f"token id {wrong} does not fit uint16"):
        write(tmp_path / "tokens", [[[1, wrong]]])
    assert list(tmp_path.iterdir()) == []
