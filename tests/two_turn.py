"""An environment for tests: at the first EOS it says something, and the model goes on."""

from __future__ import annotations

import os
from collections.abc import Sequence

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


class Changes(TwoTurn):
    """Changes its whole process wherever it is called."""

    def begin(self, prompt: Prompt) -> Sequence[int]:
        os.environ["CHANGED"] = "1"
        return super().begin(prompt)

    def respond(self, episode: Episode) -> Sequence[int] | None:
        os.chdir("/")
        return super().respond(episode)

    def judge(self, episode: Episode) -> tuple[str, str]:
        torch.set_default_dtype(torch.float64)
        return super().judge(episode)
