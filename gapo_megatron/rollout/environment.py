"""Environments: they provide prompt tokens, answer each EOS, and choose the verifier's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gapo_megatron.types import Episode, Prompt


class Environment(Protocol):
    """An environment that the model acts in. `rollout.environments.one_turn` is the default.

    The model starts from `begin`'s tokens. Whenever it samples EOS, `respond` either ends the
    episode or appends tokens and lets the model continue. `judge` returns the verifier's input.

    Sampled tokens are never tokenised again, and appended tokens are kept unchanged, with
    `Episode.response_mask` False and log-prob 0. The token limit (`rollout.max_response_tokens`)
    counts both: a response that reaches it is truncated, and `respond` is not called. Tokens that
    leave no room for a further sampled token are not appended, and the response is truncated.

    `Episode.response_mask` separates the turns: None until the environment has appended tokens,
    then False at these. The EOS of each turn stays among the tokens.

    An environment keeps no state between two calls. It may depend only on the episode, so that an
    interrupted episode continues identically in another process. Its answers must not depend on
    rank, time or order: the ranks of an engine call it separately and need equal answers. Random
    numbers must come from its own generator, seeded by the episode.
    """

    def begin(self, prompt: Prompt) -> Sequence[int]:
        """Initial tokens for the model, the same for all k episodes of the prompt.

        They replace `prompt.token_ids` from here to the update, and may be equal to them.
        """

    def respond(self, episode: Episode) -> Sequence[int] | None:
        """Answer a response whose last token is EOS: the tokens to append, or None to end it.

        Called between decoding steps while the engine waits, so it must be fast. The verdict is
        not known yet: `respond` must read the response itself. Encode text without special tokens
        (`add_special_tokens=False`), otherwise some tokenizers put a BOS into the response. The
        environment must add the chat template's tokens between two turns.
        """

    def judge(self, episode: Episode) -> tuple[str, str]:
        """The pair (response, answer) that is sent to the verifier in its own process.

        Called for every finished episode, truncated ones included, as soon as it has ended; again
        for the same episode while its group is still open (dynamic sampling, partial rollouts). It
        must have no side effects and return the same pair each time.
        """
