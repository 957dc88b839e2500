"""An environment for tests: at the first EOS it says something, and the model goes on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gapo_megatron.types import Episode, Prompt


class TwoTurn:
    """Appends `given` once; the episode ends at the second EOS.

    It reads off the mask whether it has spoken: an episode goes on wherever it was interrupted.
    """

    def __init__(self, given: Sequence[int], *, first: Sequence[int] = ()) -> None:
        """The model reads `first` before each prompt."""
        self._given = given
        self._first = first

    def begin(self, prompt: Prompt) -> Sequence[int]:
        return (*self._first, *prompt.token_ids)

    def respond(self, episode: Episode) -> Sequence[int] | None:
        return self._given if episode.response_mask is None else None

    def judge(self, episode: Episode) -> tuple[str, str]:
        """The tokens of the last turn, to be compared as numbers."""
        first = 0
        if episode.response_mask is not None:
            first = int(np.flatnonzero(~episode.response_mask)[-1]) + 1
        said = episode.token_ids[first:].tolist()
        assert len(said) <= episode.num_sampled_tokens
        return " ".join(map(str, said)), episode.prompt.answer


class Draws(TwoTurn):
    """Draws from the random generators of the process wherever it is called."""

    def begin(self, prompt: Prompt) -> Sequence[int]:
        random.random()
        return super().begin(prompt)

    def respond(self, episode: Episode) -> Sequence[int] | None:
        np.random.rand()
        return super().respond(episode)

    def judge(self, episode: Episode) -> tuple[str, str]:
        torch.rand(())
        return super().judge(episode)


def state_of_generators() -> list[Any]:
    """State of the random generators of Python, NumPy and torch."""
    numpy = np.random.get_state()[1]
    return [random.getstate(), numpy.tolist(), torch.get_rng_state().tolist()]  # type: ignore
