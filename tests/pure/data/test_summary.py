"""`phalanx data build` and `phalanx data inspect`, and the summary behind them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.data import summary
from phalanx.data.summary import summarize
from phalanx.data.tokenizer import byte_tokenizer
from phalanx.data.tokens import TokenWriter
from phalanx.errors import DataError


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with TokenWriter(tmp_path / "tokens", "int32") as writer:
        for sequences in ([[5, 6, 7]], [], [[70_000], [1, 2]]):
            for sequence in sequences:
                writer.add(sequence)
            writer.end_document()
    return tmp_path / "tokens"


def test_a_summary_reads_everything(prefix: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(summary, "CHUNK_TOKENS", 2)
    found = summarize(prefix)
    assert (found.num_tokens, found.num_documents, found.num_sequences) == (6, 3, 3)
    assert (found.min_length, found.max_length, found.min_id, found.max_id) == (0, 3, 1, 70_000)
    assert (found.dtype, found.vocab, found.sample) == ("int32", None, None)
    assert found.num_bytes == 6 * 4 + 34 + 3 * 12 + 4 * 8


def test_a_damaged_pair_is_refused(prefix: Path):
    index = prefix.with_suffix(".idx")
    data = bytearray(index.read_bytes())
    data[34] += 1
    index.write_bytes(bytes(data))
    with pytest.raises(DataError, match="back to back"):
        summarize(prefix)


def test_build_and_inspect_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 20)
    command = ["data", "build", f"{tmp_path}/*.txt", "--vocab", "260", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    prefix = capsys.readouterr().out.strip()
    assert main(["data", "inspect", prefix]) == 0
    said = capsys.readouterr().out
    for words in ["tokens with ids", "1 documents", "tokenizer of 260 ids", "to be or not to be"]:
        assert words in said
    assert main(["data", "inspect", prefix, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vocab"] == 260


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["data"], "build|inspect"),
        (["data", "build", "*.txt"], "--tokenizer --vocab"),
        (["data", "build", "none/*.txt", "--vocab", "300"], "matches no file"),
        (["data", "build", "", "--vocab", "300"], '"" matches no file'),
        (["data", "build", "a.txt", "--vocab", "256"], "at least 257"),
        (["data", "build", "a.txt", "--tokenizer", "bytes", "-o", ""], "--out"),
        (["data", "build", "a.txt", "--tokenizer", "bytes", "--workers", "0"], "--workers"),
        (["data", "build", "a.txt", "--tokenizer", "byte"], "no such tokenizer"),
        (["data", "build", "a.txt", "--tokenizer", ""], "holds no tokenizer"),
        (["data", "build", "a.txt", "--tokenizer", "bytes", "--end-token", "</s>"], "special tokens: <|endoftext|>"),
        (["data", "build", "a.txt", "--tokenizer", "bytes", "--prompt-key", "q"], "which has no prompt"),
        (["data", "build", "a.txt", "--tokenizer", "bytes", "--prompt-key", "text"], 'both are "text"'),
        (["data", "build", "/dev/zero", "--tokenizer", "bytes"], "is no plain file"),
        (["data", "inspect", "none"], "no such file"),
        (["data", "inspect", "/"], "/: is a folder"),
    ],
)
def test_wrong_commands_exit_with_2_and_say_why(
    command: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a text")
    assert main(command) == 2
    assert words in capsys.readouterr().err


RUN = """[model]
num_layers = 1
hidden = 8
num_heads = 2
vocab = {vocab}
max_seq_len = 8
[job]
global_batch = 1
seq_len = 8
num_steps = 1
"""


def test_ids_are_held_against_the_model_of_a_run_file(prefix: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(summary, "CHUNK_TOKENS", 2)
    run, command = tmp_path / "run.toml", ["data", "inspect", str(prefix), "--config", str(tmp_path / "run.toml")]
    run.write_text(RUN.format(vocab=70_001))
    assert main(command) == 0
    assert "every id is one of the model's 70,001" in capsys.readouterr().out
    run.write_text(RUN.format(vocab=70_000))
    assert main(command) == 1
    assert "1 of 6 tokens" in (said := capsys.readouterr().err) and "id 70,000 at token 3" in said


def test_a_mask_is_counted_and_held_against_the_tokens(prefix: Path, capsys: pytest.CaptureFixture[str]):
    mask = prefix.with_name("tokens.mask.bin")
    mask.write_bytes(bytes([1, 1, 0, 0, 1, 0]))
    assert summarize(prefix).num_supervised == 3
    assert main(["data", "inspect", str(prefix)]) == 0
    assert "3 tokens are learned, the others are prompts" in capsys.readouterr().out
    mask.write_bytes(b"1")
    with pytest.raises(DataError, match="has 1 bytes for 6 tokens"):
        summarize(prefix)
    mask.write_bytes(bytes([1, 1, 0, 2, 1, 0]))
    with pytest.raises(DataError, match="byte 2 at position 3"):
        summarize(prefix)


def test_a_tokenizer_that_is_anothers_is_said(prefix: Path, capsys: pytest.CaptureFixture[str]):
    byte_tokenizer().save(str(prefix.with_name("tokenizer.json")))
    assert main(["data", "inspect", str(prefix)]) == 0
    assert "has only 257 ids: it is another's" in capsys.readouterr().out
