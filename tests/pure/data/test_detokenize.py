"""Text comes out piece by piece, and whole characters only."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from phalanx.data.detokenize import Detokenizer
from phalanx.data.tokenizer import load_tokenizer, train_tokenizer
from phalanx.errors import DataError


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_tokenizer(["def main():\n    return 'Grüße, 世界'\n" * 20], 280, num_bytes=1000)


@pytest.mark.parametrize("text", ["def main", "Grüße", "日本 and 世界 🦆!", "a\n\n  b", "ends in half a ü"])
def test_the_pieces_are_the_text(tokenizer, text):
    prompt, tokens = tokenizer.encode("return ").ids, tokenizer.encode(text).ids
    stream = Detokenizer(tokenizer, prompt)
    pieces = [stream.add(token) for token in tokens]
    assert "".join(pieces) + stream.end() == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.end() == ""


def test_half_a_character_at_the_end_is_told(tokenizer):
    stream = Detokenizer(tokenizer, [])
    tokens = tokenizer.encode("🦆").ids
    assert len(tokens) > 1
    assert [stream.add(token) for token in tokens[:-1]] == [""] * (len(tokens) - 1)
    assert stream.end() == "\ufffd"


def test_what_is_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")
