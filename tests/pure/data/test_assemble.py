"""Builds of any input: the same bytes whoever writes them, taken up where they were cut off, whole or not at all."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer

from phalanx.cli.main import main
from phalanx.data import assemble, parts
from phalanx.data.build import build
from phalanx.data.crew import tokenize
from phalanx.data.inputs import find
from phalanx.data.manifest import Wish
from phalanx.data.merge import merge
from phalanx.data.records import Keys
from phalanx.data.tokenize import Recipe, read_counts
from phalanx.data.tokenizer import byte_tokenizer
from phalanx.data.tokens import TokenFile, TokenWriter, mask_path, paths
from phalanx.errors import DataError, RunError

QUIET = Console(quiet=True)
NAMES = ["manifest.json", "tokenizer.json", "tokens.bin", "tokens.idx"]


@pytest.fixture
def books(tmp_path: Path) -> list[dict]:
    """Records, as `a.jsonl` and a long text `b.txt` in tmp_path."""
    draw = random.Random(3)
    rows = [{"q": f"{n}?", "text": "".join(draw.choices("abcdeé \n", k=draw.randrange(300)))} for n in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.txt").write_text("".join(row["text"] for row in rows), encoding="utf-8")
    return rows


def documents(prefix: Path) -> list[bytes]:
    """The documents of a file of bytes, without their ends."""
    file = TokenFile(prefix)
    file.check()
    ids = [file.document(index) for index in range(file.num_documents)]
    assert all(document[-1] == 256 for document in ids)
    return [document[:-1].astype(np.uint8).tobytes() for document in ids]


def test_any_number_of_workers_writes_the_same(tmp_path: Path, books: list[dict], monkeypatch: pytest.MonkeyPatch):
    wish = Wish(inputs=(f"{tmp_path}/a.jsonl", f"{tmp_path}/b.txt"), vocab=300)
    folders = []
    for num_workers, part_bytes in ((1, 1 << 20), (2, 4000)):
        monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
        folders.append(build(wish, tmp_path / f"{num_workers}", QUIET, num_workers).parent)
    assert [sorted(path.name for path in folder.iterdir()) for folder in folders] == [NAMES] * 2
    assert not list(tmp_path.glob(".*.partial"))
    for name in ("tokens.bin", "tokenizer.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    one, many = (TokenFile(folder / "tokens") for folder in folders)
    ends = [np.cumsum(file.lengths, dtype=np.int64)[file.documents[1:] - 1].tolist() for file in (one, many)]
    assert ends[0] == ends[1] and one.num_sequences < many.num_sequences  # the long text has a sequence per part


def test_a_mask_supervises_what_follows_the_prompt(tmp_path: Path, books: list[dict]):
    wish = Wish(inputs=(f"{tmp_path}/a.jsonl",), tokenizer="bytes", prompt_key="q")
    prefix = build(wish, tmp_path / "out", QUIET)
    assert documents(prefix) == [(row["q"] + row["text"]).encode() for row in books]
    expected = [[0] * len(row["q"]) + [1] * (len(row["text"].encode()) + 1) for row in books]
    assert np.fromfile(mask_path(prefix), np.uint8).tolist() == [each for document in expected for each in document]


def test_documents_without_text_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": ""}\n\n{"text": "b"}\n')
    assert main(["data", "build", f"{tmp_path}/a.jsonl", "--tokenizer", "bytes", "-o", str(tmp_path / "out")]) == 0
    assert documents(tmp_path / "out" / "tokens") == [b"a", b"b"]
    assert "1 documents without text are left out" in capsys.readouterr().err


def test_merged_files_are_those_of_megatron(tmp_path: Path):
    # Documents [1..5], [10,11,12 | 20,21,22,23], [65499], of which the second is divided among two parts.
    for name, document in (
        ("0", [[1, 2, 3, 4, 5]]),
        ("1", [[10, 11, 12]]),
        ("2", [[20, 21, 22, 23]]),
        ("3", [[65499]]),
    ):
        with TokenWriter(tmp_path / name, "uint16") as writer:
            for sequence in document:
                writer.add(sequence)
            writer.end_document()
    merge([tmp_path / name for name in "0123"], [True, False, True, True], tmp_path / "all", with_mask=False)
    index = """4d4d4944494458000001000000000000000804000000000000000400000000000000 05000000030000000400000001000000
        00000000000000000a0000000000000010000000000000001800000000000000
        0000000000000000010000000000000003000000000000000400000000000000"""
    assert paths(tmp_path / "all")[1].read_bytes() == bytes.fromhex(index)
    assert np.fromfile(paths(tmp_path / "all")[0], "<u2").tolist() == [1, 2, 3, 4, 5, 10, 11, 12, 20, 21, 22, 23, 65499]


SLOW_BUILD = """
import sys
from phalanx.cli.main import main
from phalanx.data import parts
parts.PART_BYTES = 800
sys.exit(main(sys.argv[1:]))
"""


def children_of(pid: int) -> list[int]:
    """The workers among the children of a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"phalanx.data.crew" in Path(f"/proc/{child}/cmdline").read_bytes()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_build_leaves_no_worker_and_is_taken_up(tmp_path: Path, books: list[dict], monkeypatch):
    out = tmp_path / "out"
    arguments = ["data", "build", f"{tmp_path}/a.jsonl", "--tokenizer", "bytes", "--workers", "2", "-o", str(out)]
    process = subprocess.Popen([sys.executable, "-c", SLOW_BUILD, *arguments], stderr=subprocess.PIPE, text=True)
    aside = tmp_path / ".out.partial" / "parts"
    while len(list(aside.glob("*.json"))) < 3:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.001)
    workers = children_of(process.pid)
    process.kill()
    process.communicate()
    while any(alive(worker) for worker in workers):  # the time limit of the test ends this
        time.sleep(0.01)
    finished = {path: path.stat().st_mtime_ns for path in aside.glob("*.json")}
    assert not out.exists() and len(finished) >= 3

    said = Console(file=(tmp_path / "said").open("w"), width=1000)
    monkeypatch.setattr(parts, "PART_BYTES", 800)
    prefix = build(Wish(inputs=(f"{tmp_path}/a.jsonl",), tokenizer="bytes"), out, said)
    said.file.close()
    assert f"{len(finished)} of " in (tmp_path / "said").read_text()
    assert documents(prefix) == [row["text"].encode() for row in books if row["text"]]


@pytest.mark.parametrize("vocab", [None, 300])
def test_after_a_repair_only_the_parts_of_that_file_are_written_anew(
    tmp_path: Path, vocab: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(parts, "PART_BYTES", 10)
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n' * 3)
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n{"text" "b"}\n')
    tokens = ["--vocab", str(vocab)] if vocab else ["--tokenizer", "bytes"]
    command = ["data", "build", f"{tmp_path}/*.jsonl", *tokens, "--workers", "1", "-o", str(tmp_path / "out")]
    assert main(command) == 2
    assert "b.jsonl:2: no JSON" in capsys.readouterr().err
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n{"text": "b"}\n')
    assert main(command) == 0
    said = capsys.readouterr().err
    if vocab:  # the tokenizer is trained on all files: with one of them it changes, and with it every part
        assert "finished before" not in said
    else:
        assert "3 of 8 parts were finished before" in said
        assert documents(tmp_path / "out" / "tokens") == [b"a"] * 3 + [b"b"] * 2 + [b"c"] * 3


def test_parts_of_another_wish_do_not_serve(tmp_path: Path, books: list[dict], monkeypatch, capsys):
    command = ["data", "build", f"{tmp_path}/a.jsonl", "--tokenizer", "bytes", "-o", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr(assemble, "merge", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(command) == 130
    assert len(list((tmp_path / ".out.partial" / "parts").glob("*.json"))) == 1
    assert main([*command, "--text-key", "q"]) == 0
    assert "starting anew" in (said := capsys.readouterr().err) and "text_key text → q" in said
    assert documents(tmp_path / "out" / "tokens") == [row["q"].encode() for row in books]


def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[parts.Part], Recipe, Path]:
    """Many small parts, and what a crew needs for them."""
    monkeypatch.setattr(parts, "PART_BYTES", 300)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    keys = Keys()
    recipe = Recipe(
        tokenizer=tmp_path / "tokenizer.json", is_bytes=True, specials_are_text=False, keys=keys, end_id=256
    )
    (tmp_path / "parts").mkdir()
    return parts.parts(find([f"{tmp_path}/a.jsonl"])), recipe, tmp_path / "parts"


def test_a_killed_worker_is_said_and_finished_parts_stay(tmp_path: Path, books: list[dict], monkeypatch):
    todo, recipe, folder = work(tmp_path, monkeypatch)

    def kill(_: float) -> None:
        for child in children_of(os.getpid()):
            os.kill(child, signal.SIGKILL)

    with pytest.raises(
        RunError, match=r"ended by signal 9, often the kernel's when memory runs out, in .*a\.jsonl; the finished parts"
    ):
        tokenize(todo, recipe, folder, 1, kill)
    assert not children_of(os.getpid())
    done = []
    left = [part for part in todo if read_counts(folder, part) is None]
    tokenize(left, recipe, folder, 2, done.append)
    assert sum(done) == pytest.approx(sum(part.num_bytes for part in left))
    assert all(read_counts(folder, part) for part in todo)


def test_what_a_worker_finds_wrong_is_raised_as_it_is(tmp_path: Path, books: list[dict], monkeypatch):
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("no json\n")
    with pytest.raises(DataError, match=r"a\.jsonl:201: no JSON") as caught:
        tokenize(*work(tmp_path, monkeypatch), 2, lambda _: None)
    assert caught.value.problems[0].instead == "one JSON object per line"
    assert not children_of(os.getpid())


def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path, books: list[dict], capsys: pytest.CaptureFixture[str]):
    command = ["data", "build", f"{tmp_path}/a.jsonl", "--tokenizer", "bytes", "-o", str(tmp_path / "out")]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        assert main(command) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert "token files cannot be built: File too large" in said and "goes on from there" in said
    assert not (tmp_path / "out").exists() and not list((tmp_path / ".out.partial" / "parts").iterdir())
    assert main(command) == 0


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
def test_nothing_but_empty_files_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]):
    for number in range(2):
        (tmp_path / f"{number}{name}").touch()
    command = ["data", "build", f"{tmp_path}/*{name}", "--tokenizer", "bytes", "-o", str(tmp_path / "out")]
    assert main(command) == 2
    assert "2 files are empty" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_records_without_text_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n')
    command = ["data", "build", f"{tmp_path}/a.jsonl", "--tokenizer", "bytes", "-o", str(tmp_path / "out")]
    assert main(command) == 2
    assert "1 file without any text" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_the_users_is_never_replaced(tmp_path: Path, books: list[dict]):
    (tmp_path / "out").mkdir()
    wish = Wish(inputs=(f"{tmp_path}/a.jsonl",), tokenizer="bytes")
    build(wish, tmp_path / "out", QUIET)  # an empty one may be filled
    with pytest.raises(DataError, match=r"built otherwise \(prompt_key None → q\)"):
        build(Wish(inputs=wish.inputs, tokenizer="bytes", prompt_key="q"), tmp_path / "out", QUIET)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="is there already"):
        build(wish, tmp_path / "mine", QUIET)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_data_of_an_older_format_is_built_again(tmp_path: Path, books: list[dict], capsys):
    command = ["data", "build", f"{tmp_path}/a.jsonl", "--tokenizer", "bytes", "-o", str(tmp_path / "out")]
    assert main(command) == 0
    (tmp_path / "out" / "manifest.json").write_text('{"format": 1, "text": "old"}')
    assert main(command) == 0
    assert "has changed since" in capsys.readouterr().err
    (tmp_path / "out" / "manifest.json").write_text("[")
    assert main(command) == 2
    assert "is not a manifest" in capsys.readouterr().err


def test_given_special_tokens_are_tokens_and_a_given_tokenizer_goes_along(tmp_path: Path):
    given = byte_tokenizer()
    given.add_special_tokens(["<|user|>"])
    given.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "a<|user|>b"}\n')
    prefix = build(Wish(inputs=(f"{tmp_path}/a.jsonl",), tokenizer=str(tmp_path)), tmp_path / "out", QUIET)
    assert TokenFile(prefix).read(0, 4).tolist() == [97, 257, 98, 256]
    assert Tokenizer.from_file(str(prefix.with_name("tokenizer.json"))).to_str() == given.to_str()


def test_logs_tell_how_far_the_work_has_come(tmp_path: Path, books: list[dict], capsys, monkeypatch):
    monkeypatch.setattr(assemble, "TELL_EVERY_S", 0.0)
    command = ["data", "build", f"{tmp_path}/a.jsonl", "--tokenizer", "bytes", "-o", str(tmp_path / "out")]
    assert main(command) == 0
    assert "0 of 0 MB" in (said := capsys.readouterr().err) and "left" in said
