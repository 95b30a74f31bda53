"""Text becomes token files once: found again as long as nothing changed, rebuilt and said so when something did."""

from __future__ import annotations

import io
import os
import sysconfig
import threading
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from phalanx.data import records
from phalanx.data.build import ensure
from phalanx.data.inputs import find
from phalanx.data.tokenize import PartWriter
from phalanx.data.tokenizer import END_OF_DOCUMENT
from phalanx.data.tokens import TokenFile, TokenWriter
from phalanx.errors import DataError
from phalanx.spec.job import PYTHON_STDLIB, DataSpec
from phalanx.spec.load import load

VOCAB = 300


class Said:
    """A console, and what was said on it."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.console = Console(file=self.stream, width=1000)

    def __str__(self) -> str:
        return self.stream.getvalue()


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("the cat sat on the mat\n" * 30)
    (folder / "b.txt").write_text("")
    (folder / "deep" / "c.txt").write_text("der Kater saß auf der Matte\r\n" * 20, encoding="utf-8", newline="")
    return folder


def built(books: Path, vocab: int = VOCAB, said: Said | None = None) -> Path:
    console = (said or Said()).console
    return ensure(DataSpec(text=f"{books}/**/*.txt"), vocab, books.parent / "data", console)


def documents(prefix: Path) -> list[str]:
    """The documents as text again; each has to end with the end-of-document token."""
    tokenizer, file = Tokenizer.from_file(str(prefix.with_name("tokenizer.json"))), TokenFile(prefix)
    file.check()
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    ids = [file.document(index).tolist() for index in range(file.num_documents)]
    assert all(document[-1] == end and document.count(end) == 1 for document in ids)
    return [tokenizer.decode(document[:-1], skip_special_tokens=False) for document in ids]


def test_every_file_with_text_is_a_document_with_nothing_lost(books: Path):
    assert documents(built(books)) == [(books / "a.txt").read_text(), "der Kater saß auf der Matte\r\n" * 20]


def test_long_documents_are_cut_into_pieces_without_loss(books: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "PIECE_CHARS", 100)
    monkeypatch.setattr(records, "BLOCK_BYTES", 250)
    prefix = built(books)
    assert TokenFile(prefix).num_sequences == 2
    assert documents(prefix) == [(books / "a.txt").read_text(), "der Kater saß auf der Matte\r\n" * 20]


def test_a_document_that_spells_the_end_token_does_not_end_there(books: Path):
    (books / "a.txt").write_text(f"before {END_OF_DOCUMENT} after")
    assert documents(built(books))[0] == f"before {END_OF_DOCUMENT} after"


def test_what_is_built_is_used_again(books: Path):
    first, again = Said(), Said()
    prefix = built(books, said=first)
    before = {path.name: path.stat().st_mtime_ns for path in prefix.parent.iterdir()}
    assert sorted(before) == ["manifest.json", "tokenizer.json", "tokens.bin", "tokens.idx"]
    assert "3 files" in str(first) and "bytes of input per token" in str(first)
    assert built(books, said=again) == prefix
    assert {path.name: path.stat().st_mtime_ns for path in prefix.parent.iterdir()} == before
    assert str(again) == ""


def test_two_builds_of_the_same_text_are_the_same_bytes(books: Path, tmp_path: Path):
    text = DataSpec(text=f"{books}/**/*.txt")
    folders = [ensure(text, VOCAB, tmp_path / name, Said().console).parent for name in ("one", "two")]
    for name in ("tokens.bin", "tokens.idx", "tokenizer.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def grow(books: Path) -> None:
    (books / "d.txt").write_text("a fourth file\n")


def rewrite(books: Path) -> None:
    text = (books / "a.txt").read_text()
    (books / "a.txt").write_text(text.replace("cat", "dog"))
    os.utime(books / "a.txt", ns=(1, 1))


@pytest.mark.parametrize(("change", "words"), [(grow, "files 3 → 4"), (rewrite, "contents or times")])
def test_changed_text_is_built_again_and_said(books: Path, change, words: str):
    prefix, said = built(books), Said()
    before = (prefix.parent / "tokens.bin").read_bytes()
    change(books)
    assert built(books, said=said) == prefix
    assert "has changed" in str(said) and words in str(said)
    assert (prefix.parent / "tokens.bin").read_bytes() != before


def test_a_glob_with_brackets_is_said_as_it_is(books: Path):
    said, text = Said(), f"{books}/[ad].txt"
    ensure(DataSpec(text=text), VOCAB, books.parent / "data", said.console)
    assert f"data: {text}, " in str(said)


def test_another_vocabulary_is_another_folder(books: Path):
    assert built(books, 300).parent != built(books, 310).parent
    assert Tokenizer.from_file(str(built(books, 310).with_name("tokenizer.json"))).get_vocab_size() <= 310


def test_a_text_too_small_for_the_vocabulary_is_said(books: Path):
    said = Said()
    built(books, 5000, said)
    assert "of 5,000 ids" in str(said) and "stay unused" in str(said)


def test_bytes_that_are_no_text_are_refused_with_their_line(books: Path):
    (books / "a.txt").write_bytes(b"coffee\ncaf\xe9 cr\xe8me\n")
    with pytest.raises(DataError, match=r"a\.txt:2: byte 0xe9 is not UTF-8") as caught:
        built(books)
    assert "iconv" in str(caught.value)


def test_a_build_that_dies_leaves_nothing_that_looks_built(books: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(PartWriter, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            built(books)
    assert not any((books.parent / "data").glob("[!.]*"))
    assert len(documents(built(books))) == 2
    assert not any((books.parent / "data").glob("*.partial"))


def test_of_two_builds_at_once_the_second_waits_and_finds_the_first(books: Path):
    said = [Said(), Said()]
    threads = [threading.Thread(target=built, args=(books, VOCAB, each)) for each in said]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum("bytes of input per token" in str(each) for each in said) == 1
    assert len(documents(built(books))) == 2


def test_the_standard_library_is_found_and_has_no_tests():
    root = Path(sysconfig.get_path("stdlib"))
    files = [file.path.relative_to(root) for file in find([PYTHON_STDLIB])]
    assert {"argparse.py", "typing.py"} <= {file.name for file in files}
    assert files == sorted(set(files), key=lambda file: file.as_posix())
    assert not any({"test", "tests", "site-packages"} & set(file.parts) for file in files)
    assert sum((root / file).stat().st_size for file in files) > 4e6


def test_a_run_file_may_name_the_standard_library(tmp_path: Path):
    run = tmp_path / "run.toml"
    run.write_text('[model]\nname = "gpt2"\n[job]\nglobal_batch = 1\nseq_len = 8\nnum_steps = 1\n[data]\n')
    assert load(run, [f"data.text={PYTHON_STDLIB}"]).job.data == DataSpec(text=PYTHON_STDLIB)


def test_links_do_not_repeat_a_text(books: Path):
    plain = find([f"{books}/**/*.txt"])
    (books / "loop").symlink_to(".")
    (books / "z.txt").symlink_to("a.txt")
    assert find([f"{books}/**/*.txt"]) == plain


def test_a_glob_without_files_is_refused(tmp_path: Path):
    with pytest.raises(DataError) as caught:
        find([f"{tmp_path}/*.txt"])
    for words in [f"{tmp_path}/*.txt", "matches no file", PYTHON_STDLIB]:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"), [(DataSpec(), "no data"), (DataSpec(path="a", text="b"), "both data.path and data.text")]
)
def test_no_data_and_two_kinds_of_data_are_refused(tmp_path: Path, data: DataSpec, words: str):
    with pytest.raises(DataError, match=words):
        ensure(data, VOCAB, tmp_path)


def test_a_vocabulary_below_one_byte_is_refused(books: Path):
    with pytest.raises(DataError, match="vocabulary of 256") as caught:
        built(books, 256)
    assert "at least 257" in str(caught.value)
    assert documents(built(books, 257))[0] == (books / "a.txt").read_text()


def test_a_vocabulary_beyond_all_memory_is_filled_as_far_as_the_text_allows(books: Path):
    said = Said()
    built(books, 2**31 - 1, said)
    assert "stay unused" in str(said)


@pytest.mark.parametrize("folder", ["file/data", "file"])
def test_a_folder_that_cannot_be_written_is_wrong_input(books: Path, tmp_path: Path, folder: str):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataError, match=r"token files cannot be built: (Not a directory|File exists)"):
        ensure(DataSpec(text=f"{books}/*.txt"), VOCAB, tmp_path / folder, Said().console)


def test_given_token_files_are_taken_as_they_are(books: Path, tmp_path: Path):
    prefix = built(books)
    assert ensure(DataSpec(path=str(prefix)), VOCAB, tmp_path, Said().console) == prefix
    with pytest.raises(DataError, match="no such file"):
        ensure(DataSpec(path=str(tmp_path / "none")), VOCAB, tmp_path)


def test_the_tokenizer_beside_the_tokens_is_held_against_the_model(books: Path, tmp_path: Path):
    # A tokenizer of more ids than the model's vocabulary would train on rows that do not exist; fewer is a note.
    prefix = built(books, 260)
    with pytest.raises(DataError) as caught:
        ensure(DataSpec(path=str(prefix)), 259, tmp_path)
    for words in ["ids up to 259", "259 ids", "model.vocab = 260", "tokenizer.json"]:
        assert words in str(caught.value)
    said = Said()
    assert ensure(DataSpec(path=str(prefix)), 512, tmp_path, said.console) == prefix
    assert "260 of the model's 512 ids" in str(said)


def test_a_damaged_tokenizer_beside_the_tokens_is_refused(books: Path, tmp_path: Path):
    prefix = built(books)
    prefix.with_name("tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json: is not a tokenizer"):
        ensure(DataSpec(path=str(prefix)), VOCAB, tmp_path)


def test_token_files_without_a_tokenizer_are_taken(tmp_path: Path):
    with TokenWriter(tmp_path / "tokens", "uint16") as writer:
        writer.add([1, 2, 3])
        writer.end_document()
    said = Said()
    assert ensure(DataSpec(path=str(tmp_path / "tokens")), 10, tmp_path, said.console) == tmp_path / "tokens"
    assert str(said) == ""
