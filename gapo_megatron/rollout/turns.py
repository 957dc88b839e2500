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
from gapo_megatron.rollout.alternatives import MOST_ALTERNATIVES
from gapo_megatron.types import Episode, TurnSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_CHARACTERS = 256
_MOST_KEPT = 256
"""Texts, and sets of them, whose tokens are kept: agents may ask with texts of their own."""
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
        """Check the texts; the whole vocabulary is decoded for the first request with any.

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
        for text in stop:
            _check_text(text, tokenizer, name="environment.stop")
        self._stop = tuple(stop)
        self._found: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._encoded: dict[str, list[int]] = {}

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens at which a request ends, ascending: EOS, and those that may complete a text."""
        return self.stop_ids_of(TurnSettings())

    def stop_ids_of(self, turn: TurnSettings) -> tuple[int, ...]:
        """Tokens at which a request of a turn ends, in which the turn's own texts end it, too."""
        texts = (*self._stop, *turn.stop)
        if texts not in self._found:
            if len(self._found) >= _MOST_KEPT:
                self._found.clear()
            self._found[texts] = self._find_stop_ids(texts)
        return self._found[texts]

    def check(self, turn: TurnSettings, episode: Episode) -> None:
        """Check an environment's settings of the next turn of an episode.

        Raises:
            ConfigError: see `check_stop`; or names the setting, its value and the rule.
        """
        for text in turn.stop:
            check_stop(text, self._tokenizer)
        most = turn.max_tokens
        if most is not None and (type(most) is not int or most < 1):
            raise ConfigError(f"max_tokens ({most!r}) of a turn must be None or an integer from 1")
        number = turn.conversation
        next_one = episode.num_conversations if len(episode.token_ids) else 0
        if type(number) is not int or not 0 <= number <= next_one:
            rule = f"an integer from 0 to {next_one}, which opens another"
            if not next_one:
                rule = "0, with which a response begins"
            raise ConfigError(f"conversation ({number!r}) of a turn must be {rule}")
        count = turn.num_alternatives
        if type(count) is not int or not 0 <= count <= MOST_ALTERNATIVES:
            raise ConfigError(
                f"num_alternatives ({count!r}) of a turn must be an integer from 0 to "
                f"{MOST_ALTERNATIVES}"
            )

    def is_over(self, episode: Episode) -> bool:
        """Whether the model's turn is over: at EOS, a text's last token, or the turn's own limit.

        The turn's own texts (`Episode.turn`) count like those of the config.
        """
        tokens = episode.token_ids
        if not len(tokens) or not episode.is_sampled[-1]:
            return False
        turn, limit = last_turn(episode), episode.turn.max_tokens
        if limit is not None and len(turn) >= limit:
            return True
        stop = (*self._stop, *episode.turn.stop)
        if int(tokens[-1]) in self.eos_token_ids | self._whole(stop):
            return True
        texts = _comparable(stop)
        if not texts:
            return False
        # Every token of a text has at least one character, but for parts of a character.
        end = turn[-4 * max(map(len, texts)) - 4 :].tolist()
        before, text = self._decode(end[:-1]), self._decode(end)
        return any(text.rfind(one) + len(one) > len(before) for one in texts if one in text)

    def _find_stop_ids(self, stop: tuple[str, ...]) -> tuple[int, ...]:
        found = {*self._whole(stop), *self.eos_token_ids}
        texts = _comparable(stop)
        if ends := tuple(text[i:] for text in texts for i in range(len(text))):
            for token, text in self._vocabulary.items():
                if text.startswith(ends) or any(one in text for one in texts):
                    found.add(token)
        return tuple(sorted(found))

    @cached_property
    def _vocabulary(self) -> dict[int, str]:
        """Text of every token."""
        first = self._encode(_BEFORE)
        skipped = len(self._decode(first))
        tokens = self._tokenizer.get_vocab().values()
        return {token: self._decode([*first, token])[skipped:] for token in tokens}

    def _whole(self, stop: Iterable[str]) -> set[int]:
        """Texts that are a single token."""
        found = set()
        for text in stop:
            if (tokens := self._encoded.get(text)) is None:
                if len(self._encoded) >= _MOST_KEPT:
                    self._encoded.clear()
                tokens = self._encoded[text] = self._encode(text)
            if len(tokens) == 1:
                found.add(tokens[0])
        return found

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


def check_stop(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check a text that is to end a turn.

    Raises:
        ConfigError: it is empty or long; or see `Turns`.
    """
    if not 0 < len(text) <= _MOST_CHARACTERS:
        raise ConfigError(f"stop ({text!r:.100}) must have 1 to {_MOST_CHARACTERS} characters")
    _check_text(text, tokenizer, name="stop")


def _check_text(text: str, tokenizer: PreTrainedTokenizerBase, *, name: str) -> None:
    num_tokens = 0 if text.isascii() else len(tokenizer.encode(text, add_special_tokens=False))
    if num_tokens > 1:
        raise ConfigError(
            f"{name} ({text!r}) must be ASCII, or a single token of the tokenizer; it is "
            f"{num_tokens} tokens"
        )


def _comparable(stop: Iterable[str]) -> tuple[str, ...]:
    return tuple(text for text in stop if text.isascii())


def _start_of_turn(episode: Episode) -> int:
    """Number of tokens before the model's current turn."""
    appended = np.flatnonzero(~episode.is_sampled)
    return int(appended[-1]) + 1 if len(appended) else 0


def messages(tokenizer: PreTrainedTokenizerBase, episode: Episode) -> list[dict[str, str]]:
    """The turns of an episode as chat messages, for verifiers.

    The model's turns are the assistant's, with their thinking marked. What the environment appended
    between two of them is a user's message: its text as it is, without special tokens. Those of
    several conversations are in the order in which they came.
    """
    tokens, is_sampled = episode.token_ids.tolist(), episode.is_sampled
    edges = [0, *(np.flatnonzero(np.diff(is_sampled)) + 1).tolist(), len(tokens)]
    found = []
    for start, end in itertools.pairwise(edges):
        if start == end:
            continue
        if is_sampled[start]:
            before = episode.context(start).tolist()
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
    before = episode.context(start if start < len(tokens) else None).tolist()
    return marked_text(tokenizer, tokens[start:], before=before)
