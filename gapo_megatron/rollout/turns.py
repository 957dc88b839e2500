"""Where the model's turn ends: at EOS, or at a text of `environment.stop`.

Engines stop at tokens, not at texts: detokenised text has no exact place in the sampled tokens. So
the engine stops also at every token that may complete a text (`Request.stop_ids`); `Turns` decides
on the tokens so far. Where no text has ended, the model continues after the same tokens; this costs
a request, whose prefix the engine has cached. A text that is one token costs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards.final_answer import marked_text
from gapo_megatron.types import Episode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BEFORE = "a"
"""Decoded before a token: some tokenizers drop the space of a first token."""


class Turns:
    """Ends of the model's turns.

    Attributes:
        eos_token_ids: tokens that end a response (`data.end_tokens`).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        *,
        eos_token_ids: Iterable[int],
    ) -> None:
        """Find the tokens that may complete a text; decodes the whole vocabulary if there are any.

        Args:
            tokenizer: the policy's.
            stop: texts that end a turn (`environment.stop`).
            eos_token_ids: tokens that end a response.

        Raises:
            ConfigError: a text is not ASCII and no token by itself: a part of a character has no
                text that could be compared.
        """
        self.eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text.isascii())
        self._length = max(map(len, self._stop), default=0)
        encoded = {text: self._encode(text) for text in stop}
        self._whole = {tokens[0] for tokens in encoded.values() if len(tokens) == 1}
        """Texts that are a single token."""
        for text, tokens in encoded.items():
            if not text.isascii() and len(tokens) > 1:
                raise ConfigError(
                    f"environment.stop ({text!r}) must be ASCII, or a single token of the "
                    f"tokenizer; it is {len(tokens)} tokens"
                )

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens at which a request ends, ascending: EOS, and those that may complete a text."""
        found = self._whole | self.eos_token_ids
        ends = tuple(text[i:] for text in self._stop for i in range(len(text)))
        if ends:
            first = self._encode(_BEFORE)
            skipped = len(self._decode(first))
            for token in self._tokenizer.get_vocab().values():
                text = self._decode([*first, token])[skipped:]
                if text.startswith(ends) or any(one in text for one in self._stop):
                    found.add(token)
        return tuple(sorted(found))

    def is_over(self, episode: Episode) -> bool:
        """Whether the model's turn is over: its last token is EOS, or completes a text."""
        tokens = episode.token_ids
        if not len(tokens) or not episode.is_sampled[-1]:
            return False
        if int(tokens[-1]) in self.eos_token_ids | self._whole:
            return True
        if not self._stop:
            return False
        # Every token of a text has at least one character, but for parts of a character.
        turn = tokens[_start_of_turn(episode) :][-4 * self._length - 4 :].tolist()
        before, text = self._decode(turn[:-1]), self._decode(turn)
        return any(text.rfind(one) + len(one) > len(before) for one in self._stop if one in text)

    def messages(self, episode: Episode) -> list[dict[str, str]]:
        """As the function `messages`."""
        return messages(self._tokenizer, episode)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


def _start_of_turn(episode: Episode) -> int:
    """Number of tokens before the model's current turn."""
    appended = np.flatnonzero(~episode.is_sampled)
    return int(appended[-1]) + 1 if len(appended) else 0


def messages(tokenizer: PreTrainedTokenizerBase, episode: Episode) -> list[dict[str, str]]:
    """The turns of an episode as chat messages, for verifiers.

    The model's turns are the assistant's, with their thinking marked. What the environment appended
    between two of them is a user's message: its text as it is, without special tokens.
    """
    tokens, is_sampled = episode.token_ids.tolist(), episode.is_sampled
    edges = [0, *(np.flatnonzero(np.diff(is_sampled)) + 1).tolist(), len(tokens)]
    found = []
    for start, end in itertools.pairwise(edges):
        if start == end:
            continue
        before = [*episode.prompt.token_ids, *tokens[:start]]
        if is_sampled[start]:
            text = marked_text(tokenizer, tokens[start:end], before=before)
            found.append({"role": "assistant", "content": text})
        else:
            text = str(tokenizer.decode(tokens[start:end], skip_special_tokens=True))
            found.append({"role": "user", "content": text})
    return found


def last_turn(episode: Episode) -> np.ndarray:
    """[n] int32: the tokens of the model's last turn, the token that ended it included."""
    return episode.token_ids[_start_of_turn(episode) :]


def last_text(tokenizer: PreTrainedTokenizerBase, episode: Episode) -> str:
    """Text of the model's last turn for a verifier, with its thinking marked (`marked_text`)."""
    tokens = episode.token_ids.tolist()
    start = _start_of_turn(episode)
    before = [*episode.prompt.token_ids, *tokens[:start]]
    return marked_text(tokenizer, tokens[start:], before=before)
