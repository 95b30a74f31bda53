"""Token ids → text while they come in: a character may be spread over several tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # what stands where bytes are no text


class Detokenizer:
    """Turns tokens that follow `prompt` into pieces of text that, put together, are the text of all of them."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # Some decoders treat a token by what stands before it: the last tokens told are decoded again with new ones.
        self._told, self._pending = list(prompt), list[int]()

    def add(self, token: int) -> str:
        """The text that is certain now; empty while a character is not complete."""
        self._pending.append(token)
        return self._take(at_end=False)

    def end(self) -> str:
        """What is left."""
        return self._take(at_end=True)

    def _take(self, *, at_end: bool) -> str:
        before = self._decode(self._told)
        after = self._decode(self._told + self._pending)
        if after.endswith(REPLACEMENT) and not at_end:
            return ""
        self._told, self._pending = self._pending or self._told, []
        return after[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
