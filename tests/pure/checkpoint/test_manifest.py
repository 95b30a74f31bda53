"""The manifest: written, read, and never believed when a bit of it has changed."""

from __future__ import annotations

import itertools
import tempfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.checksum import checksum
from phalanx.checkpoint.manifest import BLOCK_BYTES, Manifest, Stored, StoredFile, check_contents, check_files
from phalanx.errors import DamagedCheckpointError
from phalanx.plan.shards import Rectangle

DATA = bytes(range(256)) * 24
HEAD = b"header of eight bytes or more..."


def stored(offset: int = len(HEAD), shape: tuple[int, int] = (32, 48), rows: tuple[int, int] = (0, 32)) -> Stored:
    box = Rectangle(start=(rows[0], 0), stop=(rows[1], shape[1]))
    return Stored(
        kind="weight",
        name="model.norm.weight",
        shape=shape,
        dtype="F32",
        rectangle=box,
        file="weight-00000.safetensors",
        offset=offset,
        checksums=(checksum(DATA),),
    )


def manifest() -> Manifest:
    file = StoredFile(num_bytes=len(HEAD) + len(DATA), head_bytes=len(HEAD), head_crc32=zlib.crc32(HEAD))
    return Manifest(
        step=7,
        written_at="2026-01-01T00:00:00+00:00",
        extra={"num_samples": 56, "rate": 0.1},
        files={"weight-00000.safetensors": file},
        tensors=(stored(),),
    )


def test_what_is_written_is_read(tmp_path):
    manifest().write(tmp_path / "manifest.json")
    assert Manifest.read(tmp_path / "manifest.json") == manifest()


@given(st.data())
def test_no_changed_byte_is_believed(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "manifest.json"
        manifest().write(path)
        text = bytearray(path.read_bytes())
        index = data.draw(st.integers(0, len(text) - 1))
        text[index] = data.draw(st.integers(0, 255).filter(lambda byte: byte != text[index]))
        path.write_bytes(bytes(text))
        try:
            assert Manifest.read(path) == manifest(), "only white space between values may differ"
        except DamagedCheckpointError:
            return


def test_blocks_are_whole_rows_that_cover_the_rectangle():
    row_bytes = 4 * 1000
    rows = 3 * BLOCK_BYTES // row_bytes
    big = Stored(
        kind="weight",
        name="big",
        shape=(rows + 10, 1000),
        dtype="F32",
        rectangle=Rectangle(start=(10, 0), stop=(rows + 10, 1000)),
        file="f",
        offset=64,
        checksums=tuple(range(10)),
    )
    blocks = list(big.blocks())
    assert blocks[0].rectangle.start == (10, 0) and blocks[-1].rectangle.stop == (rows + 10, 1000)
    for before, after in itertools.pairwise(blocks):
        assert before.rectangle.stop[0] == after.rectangle.start[0]
        assert before.offset + before.num_bytes == after.offset
    assert sum(block.num_bytes for block in blocks) == big.num_bytes
    assert all(block.num_bytes <= BLOCK_BYTES for block in blocks)
    assert [block.checksum for block in blocks] == list(range(len(blocks)))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "weight-00000.safetensors").write_bytes(HEAD + DATA)
    return tmp_path


def check(folder: Path) -> list[str]:
    return check_contents(folder, manifest(), lambda num_bytes: None)


def test_all_is_read_and_well(folder):
    read = []
    assert check_files(folder, manifest()) == []
    assert check_contents(folder, manifest(), read.append) == []
    assert sum(read) == len(HEAD) + len(DATA)


@pytest.mark.parametrize(
    ("at", "said"), [(3, "bytes 0 to 32"), (1000, "bytes 32 to 6,176 (weight of model.norm.weight)")]
)
def test_a_flipped_bit_is_found_where_it_is(folder, at, said):
    path = folder / "weight-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))
    (problem,) = check(folder)
    assert str(path) in problem and said in problem and "checksum" in problem


def test_a_cut_file_says_where_it_ends(folder):
    path = folder / "weight-00000.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    (problem,) = check(folder)
    assert "the file ends after 2,000 bytes" in problem and "model.norm.weight" in problem
    assert check_files(folder, manifest()) == [f"{path}: has 2,000 bytes of 6,176"]


def test_a_missing_file_is_named(folder):
    (folder / "weight-00000.safetensors").unlink()
    (problem,) = check(folder)
    assert "weight-00000.safetensors: No such file" in problem
