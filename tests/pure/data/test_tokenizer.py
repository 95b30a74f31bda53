"""Tokenizers of all forms, held against the tools they come from; and pieces of documents against whole ones."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from phalanx.data.encode import Encoder
from phalanx.data.records import Piece
from phalanx.data.tokenizer import (
    END_OF_DOCUMENT,
    byte_tokenizer,
    end_token,
    find_tokenizer,
    load_tokenizer,
    num_ids,
    read_tokenizer,
    train_tokenizer,
)
from phalanx.errors import DataError

TEXT = """def main(arguments):
    print("hello,  world")   # greets   everyone
\treturn len(arguments) + 42

Der Kater saß auf der Matte, die Katze lag im Korb; 世界 🦆 ﬁne ①.
"""
STRANGE = [
    "",
    " ",
    "   ",
    "a",
    "  lead",
    "trail  ",
    "x\ty\u00a0z",
    "日本語 テキスト",
    "🦆 duck",
    "a\n\nb",
    "a   b    c",
]


def sentencepiece_model(path: Path, **settings) -> sentencepiece.SentencePieceProcessor:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines() * 20),
        model_writer=written,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **settings,
    )
    path.write_bytes(written.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("byte_fallback", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"},
        {"add_dummy_prefix": False},
        {"split_by_whitespace": False},
    ],
    ids=["default", "identity", "no-prefix", "phrases"],
)
def test_sentencepiece_models_give_the_tokens_of_sentencepiece(
    tmp_path: Path, kind: str, byte_fallback: bool, settings: dict
):
    path, size = tmp_path / "tokenizer.model", 400 if byte_fallback else 140
    theirs = sentencepiece_model(path, model_type=kind, byte_fallback=byte_fallback, vocab_size=size, **settings)
    ours = read_tokenizer(path)
    assert num_ids(ours) == theirs.vocab_size()
    for text in [*TEXT.splitlines(), TEXT, *STRANGE]:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text), repr(text)
        if byte_fallback:
            assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text)), repr(text)
    assert end_token(ours, path, None) == "</s>" and ours.token_to_id("</s>") == theirs.eos_id()


def test_symbols_that_cannot_be_had_exactly_are_refused(tmp_path: Path):
    sentencepiece_model(tmp_path / "a.model", vocab_size=140, user_defined_symbols=["<sep>"])
    with pytest.raises(DataError, match=r'a\.model: has symbols of its user \("<sep>"\)') as caught:
        read_tokenizer(tmp_path / "a.model")
    assert "transformers" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\x00" * 50, b"some text", bytes(range(256)), b"\x0a\xff\xff\xff\xff\x0f"])
def test_what_is_no_sentencepiece_model_is_refused(tmp_path: Path, data: bytes):
    (tmp_path / "a.model").write_bytes(data)
    with pytest.raises(DataError, match=r"a\.model: is not a SentencePiece model"):
        read_tokenizer(tmp_path / "a.model")


def test_a_cut_sentencepiece_model_is_refused(tmp_path: Path):
    path = tmp_path / "a.model"
    sentencepiece_model(path, vocab_size=140)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="is cut short"):
        read_tokenizer(path)


@pytest.fixture
def trained() -> Tokenizer:
    return train_tokenizer([TEXT * 20], 400, num_bytes=20 * len(TEXT))


def test_the_two_files_of_gpt2(tmp_path: Path, trained: Tokenizer):
    trained.model.save(str(tmp_path), "gpt2")
    path = find_tokenizer(str(tmp_path / "gpt2-vocab.json"))
    ours = read_tokenizer(path)
    for text in [TEXT, *STRANGE]:
        assert ours.encode(text).ids == trained.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == text
    assert end_token(ours, path, None) == END_OF_DOCUMENT
    assert ours.decode(ours.encode(END_OF_DOCUMENT).ids, skip_special_tokens=True) == ""
    (tmp_path / "gpt2-merges.txt").unlink()
    with pytest.raises(DataError, match=r"gpt2-merges\.txt: no such file"):
        read_tokenizer(path)


def test_bytes_are_their_own_ids():
    tokenizer = byte_tokenizer()
    for text in [TEXT, *STRANGE]:
        assert tokenizer.encode(text).ids == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.token_to_id(END_OF_DOCUMENT) == 256 and num_ids(tokenizer) == 257


def test_names_of_tokenizers(tmp_path: Path, trained: Tokenizer):
    assert find_tokenizer("bytes") is None
    trained.save(str(tmp_path / "tokenizer.json"))
    assert find_tokenizer(str(tmp_path)) == find_tokenizer(f"{tmp_path}/tokenizer.json") == tmp_path / "tokenizer.json"
    (tmp_path / "tokenizer.json").rename(tmp_path / "other")
    with pytest.raises(DataError, match="holds no tokenizer"):
        find_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match="no such tokenizer") as caught:
        find_tokenizer(str(tmp_path / "none"))
    assert "tokenizer.json" in str(caught.value) and "bytes" in str(caught.value)


def word_tokenizer(*tokens: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_the_end_of_a_document(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    tokenizer = word_tokenizer("<unk>", "a", "<stop>", "</s>")
    tokenizer.add_special_tokens(["<unk>", "<stop>", "</s>"])
    assert end_token(tokenizer, path, None) == "</s>"
    assert end_token(tokenizer, path, "<stop>") == "<stop>"
    for eos in ("<stop>", {"content": "<stop>", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert end_token(tokenizer, path, None) == "<stop>"
    with pytest.raises(DataError, match='no token "<stap>"') as caught:
        end_token(tokenizer, path, "<stap>")
    assert "did you mean <stop>?" in str(caught.value)
    with pytest.raises(DataError, match="which token ends a document is not known") as caught:
        end_token(word_tokenizer("<unk>", "a"), path.with_name("elsewhere") / "tokenizer.json", None)
    assert "--end-token" in str(caught.value)


def pieces_of(text: str, size: int) -> list[Piece]:
    """`text` cut after every `size` lines."""
    lines = text.splitlines(keepends=True)
    cut = ["".join(lines[at : at + size]) for at in range(0, len(lines), size)]
    return [Piece(each, index == 0, index == len(cut) - 1, True, 0.0) for index, each in enumerate(cut)]


@pytest.mark.parametrize("byte_fallback", [False, True])
def test_the_pieces_of_a_document_have_the_tokens_of_the_whole(tmp_path: Path, byte_fallback: bool, trained: Tokenizer):
    settings = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"} if byte_fallback else {}
    size = 400 if byte_fallback else 140
    sentencepiece_model(
        tmp_path / "a.model", model_type="bpe", byte_fallback=byte_fallback, vocab_size=size, **settings
    )
    text = "one\n  two\nthree\n\n\nfour"
    for tokenizer in (read_tokenizer(tmp_path / "a.model"), trained, byte_tokenizer()):
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        for size in (1, 2):
            found = Encoder(tokenizer, is_bytes=False).encode(pieces_of(text, size))
            assert [token for each in found for token in each] == whole or tokenizer is trained
            # Byte-level tokenizers look at several line ends at once: that may differ at a cut, and nothing else.
            assert tokenizer.decode([token for each in found for token in each]) == tokenizer.decode(whole)


def test_a_template_begins_documents_and_does_not_end_them():
    tokenizer = word_tokenizer("<unk>", "a", "<s>", "</s>")
    assert Encoder(tokenizer, is_bytes=False).begin == []
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    encoder = Encoder(tokenizer, is_bytes=False)
    assert encoder.begin == [2] and encoder.encode([Piece("a a", True, True, True, 1.0)]) == [[1, 1]]


def test_limits_of_a_models_inputs_do_not_cut_documents():
    tokenizer = word_tokenizer("<unk>", "a", "b")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    pieces = [Piece(text, True, True, True, 1.0) for text in ("a b a b", "a")]
    assert Encoder(tokenizer, is_bytes=False).encode(pieces) == [[1, 2, 1, 2], [1]]


def test_a_damaged_tokenizer_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: is not a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")
