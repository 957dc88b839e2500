"""Environments: they give the prompt's tokens, answer each EOS, and choose the verifier's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gapo_megatron.types import Episode, Prompt


class Environment(Protocol):
    """An environment that the model acts in. `rollout.environments.one_turn` is the plain one.

    The model begins with `begin`'s tokens. Whenever it samples EOS, `respond` either ends the
    episode or appends tokens, after which the model goes on. `judge` says what the verifier reads.

    Tokens stay tokens: what the model sampled is never tokenised again, and what is appended is
    kept as it is, with `Episode.response_mask` False and log-prob 0. The token limit
    (`rollout.max_response_tokens`) counts both: a response that reaches it is truncated, and
    `respond` is not asked. Tokens that leave no room for one more of the model are not appended,
    and the response is truncated.

    `Episode.response_mask` tells the turns apart: None until the environment has appended tokens,
    then False at these. The EOS of each turn stays among the tokens.

    An environment keeps nothing of an episode between two calls. All it may depend on is in the
    episode, so that one that a stop has interrupted goes on, in another process, as it would have.
    Its answers must not depend on rank, time or order: the ranks of one engine ask it separately,
    and must hear the same. Random numbers come from a generator of its own, seeded by the episode.
    """

    def begin(self, prompt: Prompt) -> Sequence[int]:
        """Tokens that the model sees first, the same for all k episodes of the prompt.

        They take the place of `prompt.token_ids` from here to the update, and may be these.
        """

    def respond(self, episode: Episode) -> Sequence[int] | None:
        """Answer a response whose last token is EOS: the tokens to append, or None to end it.

        Called between decoding steps, while the engine waits: it must not take long. The verdict
        is not known yet; what `respond` needs to know of the response it must find out itself.
        Tokens made of text are encoded without special tokens (`add_special_tokens=False`), else
        some tokenizers put a BOS into the response. A chat template's marks between two turns are
        the environment's to give.
        """

    def judge(self, episode: Episode) -> tuple[str, str]:
        """The pair (response, answer) that is sent to the verifier in its own process.

        Called for every finished episode, also for a truncated one, as soon as it has ended; again
        for the same episode while its group is still open (dynamic sampling, partial rollouts). It
        has no side effect and gives the same answer each time.
        """
