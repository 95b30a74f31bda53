"""Every form of input gives the same documents, and what is wrong is said with its file and line."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from phalanx.data import inputs, parts, records, tables
from phalanx.data.inputs import find
from phalanx.data.records import Keys, check_keys, pieces
from phalanx.errors import DataError

TEXTS = ["one\ntwo\n", "Grüße, 世界 🦆", "", "x" * 900, "a b c " * 200, "\n\n\n"]
Writer = Callable[[Path, list[dict]], Path]


def documents(files: Sequence[Path], keys: Keys = Keys()) -> list[str]:  # noqa: B008 (a frozen value)
    """The texts of all parts, put together from their pieces."""
    found, text = [], ""
    for part in parts.parts(find([str(file) for file in files])):
        for span in part.spans:
            for piece in pieces(span, keys):
                assert piece.begins == (text == "") or piece.text == text == "" or not piece.begins
                text += piece.text
                if piece.ends:
                    found.append(text)
                    text = ""
    assert text == ""
    return found


def json_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def with_gzip(path: Path, rows: list[dict]) -> Path:
    packed = path.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(json_lines(path, rows).read_bytes()))
    return packed


def with_zstd(path: Path, rows: list[dict]) -> Path:
    data, packed = json_lines(path, rows).read_bytes(), path.with_suffix(".jsonl.zst")
    codec = pyarrow.Codec("zstd")
    half = len(data) // 2  # two frames, as parallel packers write them
    packed.write_bytes(codec.compress(data[:half], asbytes=True) + codec.compress(data[half:], asbytes=True))
    return packed


def parquet(path: Path, rows: list[dict]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path.with_suffix(".parquet"), row_group_size=2)
    return path.with_suffix(".parquet")


def arrow_stream(path: Path, rows: list[dict]) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path.with_suffix(".arrow")


def arrow_file(path: Path, rows: list[dict]) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path.with_suffix(".arrow")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is cut all the time."""
    monkeypatch.setattr(parts, "PART_BYTES", 64)
    monkeypatch.setattr(records, "PIECE_CHARS", 50)
    monkeypatch.setattr(records, "BLOCK_BYTES", 70)
    monkeypatch.setattr(tables, "BATCH_ROWS", 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("write", [json_lines, with_gzip, with_zstd, parquet, arrow_stream, arrow_file])
def test_every_form_gives_the_same_documents(write: Writer, tmp_path: Path):
    rows = [{"id": index, "text": text} for index, text in enumerate(TEXTS)]
    assert documents([write(tmp_path / "a.jsonl", rows)]) == TEXTS
    assert documents([write(tmp_path / "b.jsonl", [{"id": 1, "body": "b"}])], Keys(text="body")) == ["b"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("pack", [False, True])
def test_a_text_file_is_one_document_however_it_is_cut(tmp_path: Path, pack: bool):
    draw = random.Random(5)
    for length in (0, 1, 49, 50, 51, 400, 3000):
        text = "".join(draw.choices("abcdé世🦆 \n\r", weights=[9, 9, 9, 9, 3, 3, 1, 9, 2, 1], k=length))
        data = text.encode()
        path = tmp_path / ("a.txt.gz" if pack else "a.txt")
        path.write_bytes(gzip.compress(data) if pack else data)
        assert documents([path]) == ([text] if text or pack else [])


@pytest.mark.usefixtures("small")
def test_a_long_text_is_divided_among_parts(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("0123456789\n" * 100)
    work = parts.parts(find([str(path)]))
    assert len(work) > 10 and sum(part.num_bytes for part in work) == 1100
    assert [part.spans[-1].ends for part in work] == [False] * (len(work) - 1) + [True]


def test_small_files_share_a_part(tmp_path: Path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    (part,) = parts.parts(find([f"{tmp_path}/*.txt"]))
    assert [span.file.path.name for span in part.spans] == ["a.txt", "b.txt", "c.txt"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    (tmp_path / "a.txt").write_text("\ufefftext", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "text"}\n', encoding="utf-8")
    assert documents([tmp_path / "a.txt", tmp_path / "a.jsonl"]) == ["text", "text"]


def test_a_prompt_is_not_supervised(tmp_path: Path):
    path = json_lines(tmp_path / "a.jsonl", [{"q": "why?", "a": "so"}, {"q": "", "a": "yes"}])
    found = [
        (piece.text, piece.begins, piece.ends, piece.supervised)
        for part in parts.parts(find([str(path)]))
        for piece in pieces(part.spans[0], Keys(text="a", prompt="q"))
    ]
    assert found == [("why?", True, False, False), ("so", False, True, True), ("yes", True, True, True)]


GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (GOOD * 2 + b"{no json}\n", ["a.jsonl:3", "no JSON", "one JSON object per line"]),
        (GOOD + b'\n\n{"text": "caf\xe9"}\n', ["a.jsonl:4", "0xe9", "iconv"]),
        (GOOD + b'["text"]\n', ["a.jsonl:2", "a list, not an object"]),
        (GOOD + b'{"text": null}\n', ["a.jsonl:2", '"text" is null, not a text']),
        (GOOD + b'{"text": 5}\n', ["a.jsonl:2", '"text" is a number']),
        (GOOD + b'{"txt": "a", "id": 3}\n', ["a.jsonl:2", 'no key "text"', 'did you mean "txt"', "txt, id"]),
        (GOOD + b'{"text": "\\ud83d"}\n', ["a.jsonl:2", r"\ud83d", "half of a character"]),
        (GOOD + b'{"text": "cut', ["a.jsonl:2", "no JSON"]),
        (b'[\n {"text": "a"},\n', ["a.jsonl:1", "over several lines"]),
        (GOOD + b"[" * 200_000, ["a.jsonl:2", "no JSON", "nested too deep"]),
    ],
)
@pytest.mark.parametrize("part_bytes", [1, 1 << 20])  # line numbers are those of the file, whatever the part
def test_a_wrong_line_is_named(
    tmp_path: Path, data: bytes, words: list[str], part_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(DataError) as caught:
        documents([tmp_path / "a.jsonl"])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
def test_a_wrong_byte_of_a_text_is_named(tmp_path: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthree \xff\n")
    with pytest.raises(DataError, match=r"a\.txt:3: byte 0xff is not UTF-8"):
        documents([tmp_path / "a.txt"])
    (tmp_path / "a.txt").write_bytes("one\nzwölf".encode()[:-2])
    assert documents([tmp_path / "a.txt"]) == ["one\nzwöl"[:-1]]
    (tmp_path / "a.txt").write_bytes("one\nzwö".encode()[:-1])
    with pytest.raises(DataError, match=r"a\.txt:2: byte 0xc3 is not UTF-8"):
        documents([tmp_path / "a.txt"])


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) * 9 + data[middle + 9 :]


def other(data: bytes) -> bytes:
    return b"this is something else entirely" * 3


@pytest.mark.parametrize("damage", [cut, flip, other])
@pytest.mark.parametrize("write", [with_gzip, with_zstd, parquet, arrow_stream])
def test_files_that_cannot_be_read_are_named(write: Writer, damage: Callable[[bytes], bytes], tmp_path: Path):
    draw = random.Random(1)
    rows = [{"text": "".join(draw.choices("abcdefgh ", k=300))} for _ in range(300)]
    path = write(tmp_path / "a.jsonl", rows)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        documents([path])
    assert path.name in str(caught.value) and "\n    → " in str(caught.value)
    assert f"{path.name}:0:" not in str(caught.value)


def test_a_wrong_key_is_refused_before_any_work(tmp_path: Path):
    rows = [{"content": "a", "id": 1}]
    for write in (json_lines, parquet, arrow_stream):
        path = write(tmp_path / "a.jsonl", rows)
        with pytest.raises(DataError, match='no key "contents"') as caught:
            check_keys(find([str(path)]), Keys(text="contents"))
        assert 'did you mean "content"? there are: content, id' in str(caught.value)
        check_keys(find([str(path)]), Keys(text="content"))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = with_zstd(tmp_path / "a.jsonl", [{"text": "a"}])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DataError, match="pyarrow, which is not installed") as caught:
        documents([path])
    assert "pip install 'phalanx[data]'" in str(caught.value)


def saved_to_disk(folder: Path, rows: list[dict]) -> Path:
    """As `datasets.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    arrow_stream(folder / "data-00000-of-00001.x", rows)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    return folder


def test_folders_of_data_sets(tmp_path: Path):
    saved = saved_to_disk(tmp_path / "saved", [{"text": "a"}, {"text": "b"}])
    arrow_stream(saved / "cache-1234.x", [{"text": "what some function made of it"}])
    assert documents([saved]) == ["a", "b"]
    (saved / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"state\.json: lists files that are not there"):
        find([str(saved)])
    (saved / "state.json").write_text("{}")
    with pytest.raises(DataError, match="does not list the files of a data set"):
        find([str(saved)])
    hub = tmp_path / "hub"
    (hub / "data").mkdir(parents=True)
    (hub / ".cache").mkdir()
    (hub / "README.md").write_text("about it")
    (hub / ".cache" / "x.jsonl").write_text("no data")
    parquet(hub / "data" / "train-00000-of-00002", [{"text": "c"}])
    parquet(hub / "data" / "train-00001-of-00002", [{"text": "d"}])
    assert documents([hub]) == ["c", "d"]
    parquet(hub / "data" / "test-00000-of-00001", [{"text": "e"}])
    with pytest.raises(DataError, match="the splits test, train, which are not one set") as caught:
        find([str(hub)])
    assert f'"{hub}/**/train*"' in str(caught.value)
    assert documents([Path(f"{hub}/**/train*")]) == ["c", "d"]


def test_a_set_of_splits_is_refused(tmp_path: Path):
    for split in ("train", "test"):
        saved_to_disk(tmp_path / "set" / split, [{"text": split}])
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="splits test, train") as caught:
        find([str(tmp_path / "set")])
    assert f"one of {tmp_path}/set/test, {tmp_path}/set/train" in str(caught.value)
    assert documents([tmp_path / "set" / "train"]) == ["train"]


def test_folders_that_say_too_little_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="holds no data files"):
        find([str(tmp_path)])
    json_lines(tmp_path / "a.jsonl", [])
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(DataError, match="several kinds: json lines, text"):
        find([str(tmp_path)])


def test_names_of_files_may_look_like_globs(tmp_path: Path):
    (tmp_path / "a[1].txt").write_text("brackets")
    assert documents([tmp_path / "a[1].txt"]) == ["brackets"]
    assert inputs.find([f"{tmp_path}/a[1].txt", f"{tmp_path}/*.txt"]) == inputs.find([f"{tmp_path}/*.txt"])
