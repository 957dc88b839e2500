"""Single-turn environment: the first EOS ends the episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gapo_megatron.rollout.turns import last_text
from gapo_megatron.types import Episode, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class OneTurn:
    """Uses the dataset's prompt; the response ends at EOS and is judged by its text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """`tokenizer` is the policy's; its special tokens are left out of the text."""
        self._tokenizer = tokenizer

    def begin(self, prompt: Prompt) -> Sequence[int]:
        """The prompt's own tokens."""
        return prompt.token_ids

    def respond(self, episode: Episode) -> Any:
        """The end."""

    def judge(self, episode: Episode) -> tuple[str, str]:
        """The text of the model's last turn, also if it was truncated."""
        return last_text(self._tokenizer, episode), episode.prompt.answer
