"""An episode's turns, for an agent that begins anew and is answered from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapo_megatron.rollout.agents.conversations import Place
from gapo_megatron.types import Episode

DIFFERS = "the agent did not repeat what it did when the response was sampled"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the model: tokens `start` to `end` of the response."""

    conversation: int
    """Number of its conversation."""
    before: list[int]
    """Tokens of the request that it answers: those before it that were appended."""
    start: int
    end: int

    def answers(self, place: Place) -> bool:
        """Whether it answers a request at this place."""
        return place.conversation.number == self.conversation and place.appended == self.before

    def may_answer(self, place: Place) -> bool:
        """Whether it answers such a request later on: a new conversation may get another number."""
        if not place.is_new:
            return self.answers(place)
        return self.before == list(place.tokens[self.conversation == 0 :])

    def difference(self, place: Place) -> str:
        """Why it does not answer a request at this place."""
        pairs = zip(place.appended, self.before, strict=False)
        least = min(len(place.appended), len(self.before))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), least)
        number, is_same = place.conversation.number, place.appended == self.before
        where = f", in conversation {number} instead of {self.conversation}" if is_same else ""
        return (
            f"{DIFFERS}: its request has other tokens from token "
            f"{self.start - len(self.before) + first} of the response on{where}"
        )


def turns_of(episode: Episode) -> list[Turn]:
    """The model's turns in an agent's episode, in order: each has appended tokens before it."""
    tokens, numbers = episode.token_ids, episode.conversations
    changes = np.flatnonzero(np.diff(episode.is_sampled, prepend=False, append=False)).tolist()
    turns, begin = list[Turn](), 0
    for start, end in zip(changes[::2], changes[1::2], strict=True):
        number = 0 if numbers is None else int(numbers[start])
        turns.append(Turn(number, tokens[begin:start].tolist(), start, end))
        begin = end
    return turns
