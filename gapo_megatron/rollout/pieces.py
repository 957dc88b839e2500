"""The text of each token of a response: pieces that together are the text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
"""What tokenizers decode an incomplete character to."""
_MOST_HELD = 16
"""Tokens whose text may be found together; then the text of the last one is looked for."""
_REACH = 256
"""Characters within which it is looked for."""


class Pieces:
    """Splits texts at the ends of their tokens.

    Tokens of bytes share a character, which goes to the last of them; others have an empty piece.
    Where a tokenizer changes the text around a token, the piece of a later one takes the rest.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """`decode`: of the tokenizer, tokens to text."""
        self._decode = decode
        self._single: dict[int, str] = {}

    def split(self, token_ids: Sequence[int], text: str) -> list[str]:
        """A piece for each token; together they are `text`.

        Args:
            token_ids: at least one, unless the text is empty.
            text: the tokens' text.
        """
        begins, at, held = [0], 0, list[int]()
        for token in token_ids:
            held.append(token)
            end = self._end(held, text, at)
            if end is None and len(held) > _MOST_HELD:
                end = self._find(token, text, at)
                held = held[-_MOST_HELD:]
            if end is not None:
                at = end
                held.clear()
            begins.append(at)
        begins[-1] = len(text)
        return [text[a:b] for a, b in itertools.pairwise(begins)]

    def _end(self, held: list[int], text: str, at: int) -> int | None:
        """Where the text of these tokens ends; None: it is not at `at`, or is incomplete."""
        one = self._of(held[0]) if len(held) == 1 else self._decode(held)
        if one.endswith(_REPLACEMENT):
            return None
        # Some tokenizers drop the space before a first word.
        for found in (one, f" {one}"):
            if text.startswith(found, at):
                return at + len(found)
        return None

    def _find(self, token: int, text: str, at: int) -> int | None:
        one = self._of(token)
        place = text.find(one, at, at + _REACH) if one and not one.endswith(_REPLACEMENT) else -1
        return None if place < 0 else place + len(one)

    def _of(self, token: int) -> str:
        if token not in self._single:
            self._single[token] = self._decode([token])
        return self._single[token]
