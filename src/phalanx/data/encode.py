"""Encoder: pieces of documents → token ids."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from phalanx.data.records import Piece

LINE_END = "\n"  # pieces are cut at line ends


class Encoder:
    """Turns pieces into ids such that the pieces of a long document have the tokens that it has as a whole.

    `begin` are the ids that the tokenizer's own template puts before every text (Llama's `<s>`); they begin each
    document, as in training with other tools. What the template puts behind a text is left out: there the end of the
    document comes.
    """

    def __init__(self, tokenizer: Tokenizer, *, is_bytes: bool) -> None:
        tokenizer.no_truncation()  # files from the hub often hold the limits of the model's inputs
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._is_bytes = is_bytes
        self.begin = [] if is_bytes else self._template()
        self._line_end = [] if is_bytes else self._context()

    def encode(self, pieces: Sequence[Piece]) -> list[list[int]]:
        """The ids of each piece, without `begin`."""
        if self._is_bytes:
            return [list(piece.text.encode()) for piece in pieces]
        texts = [piece.text if piece.begins or not self._line_end else LINE_END + piece.text for piece in pieces]
        found: list[list[int]] = [
            encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]
        if self._line_end:
            for index, piece in enumerate(pieces):
                if not piece.begins:
                    found[index] = self._without_line_end(found[index], piece.text)
        return found

    def _template(self) -> list[int]:
        plain, whole = self._ids("a"), self._tokenizer.encode("a", add_special_tokens=True).ids
        starts = range(len(whole) - len(plain) + 1)
        return whole[: next((at for at in starts if whole[at : at + len(plain)] == plain), 0)]

    def _context(self) -> list[int]:
        """The ids of a line end, for tokenizers that treat the beginning of a text in a way of its own (SentencePiece
        puts a space there): a later piece of a document is tokenized behind a line end, which is then taken away."""
        alone, line_end, behind = self._ids("a"), self._ids(LINE_END), self._ids(f"{LINE_END}a")
        return line_end if behind[: len(line_end)] == line_end and behind[len(line_end) :] != alone else []

    def _without_line_end(self, ids: list[int], text: str) -> list[int]:
        num_ids = len(self._line_end)
        return ids[num_ids:] if ids[:num_ids] == self._line_end else self._ids(text)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
