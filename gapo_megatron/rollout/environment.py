"""Environments: they provide prompt tokens, answer each turn, and choose the verifier's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gapo_megatron.types import Episode, Prompt, TurnSettings, Verdict


class Environment(Protocol):
    """An environment that the model acts in; `environments.one_turn` is the simplest.

    The model starts from `begin`'s tokens. At the end of each turn (EOS, or a text of
    `environment.stop`), `respond` either ends the episode or appends tokens and lets the model
    continue. `judge` returns the verifier's input.

    Sampled tokens are never tokenised again, and appended tokens are kept unchanged, with
    `Episode.response_mask` False and log-prob 0. The token limit (`rollout.max_response_tokens`)
    counts both: a response that reaches it is truncated, and `respond` is not called. Tokens that
    leave no room for a further sampled token are not appended, and the response is truncated.

    `Episode.response_mask` separates the turns: None until the environment has appended tokens,
    then False at these. The token that ended each turn stays among the tokens.

    What an environment must remember of an episode, it must read off the episode: an interrupted
    episode continues in another process. Random numbers must come from generators of its own.

    An environment may also have members that are optional:

    - `moves_first = True`: an episode begins with a call of `respond` on the empty response. Its
      tokens, which may differ among the k episodes, begin the response as context.
    - `may_repeat = True`: a call that a kill has interrupted is made again when the run resumes.
    - `close(episode)`, called on the first rank of each engine as soon as an episode has ended, for
      whatever reason, or its generation has; and again when a call returns after that, unless a
      later generation has begun an episode of the same problem and sample. To free what `respond`
      keeps of the episode. Must be fast.
    """

    def begin(self, prompt: Prompt) -> Sequence[int]:
        """Initial tokens for the model, the same for all k episodes of the prompt.

        They replace `prompt.token_ids` from here to the update, and may be equal to them.
        """

    def respond(
        self, episode: Episode
    ) -> Sequence[int] | tuple[Sequence[int], TurnSettings] | str | None:
        """Answer the model's last turn: the tokens to append (list or array), or None to end.

        A string also ends the episode, and becomes its `final_text`, for `judge`. A pair of tokens
        and `TurnSettings` says how the model's next turn ends, beside EOS and `environment.stop`,
        and which conversation the tokens belong to: the model reads that one alone, and all of them
        are trained with the episode's verdict.

        Called in a thread of the first rank of each engine, for up to `environment.max_concurrent`
        episodes at once, while the engine decodes. It may be slow and have side effects: no call
        is made twice, also when the run resumes (`rollout.journal`), but for `may_repeat`. If it
        raises, returns anything else, or exceeds a time limit, the verdict on the episode is
        unknown. A thread cannot be ended: code that may hang for good or crash belongs in a process
        of its own.

        The verdict is not known yet: `respond` must read the response itself. The environment must
        add the chat template's tokens between two turns: `rollout.chat.ChatTurns` does. Encode
        other text without special tokens (`add_special_tokens=False`), otherwise some tokenizers
        put a BOS into the response.
        """

    def judge(
        self, episode: Episode
    ) -> tuple[str, str] | tuple[str, str, Mapping[str, Any]] | Verdict | float:
        """The pair (response, answer) that is sent to the verifier in its own process.

        With a third value, a mapping that JSON can hold: what the environment says of the episode,
        for verifiers that name `state`. Or the verdict itself, with `reward.kind = "environment"`:
        a `Verdict`, or a number, which `reward.correct_above` turns into one.

        `turns.last_text` makes the text of the model's last turn, with its thinking between
        `<think>` and `</think>`; the verifier gets what follows (`rewards.final_answer`).

        Called for every finished episode, truncated ones included, as soon as it has ended; again
        for the same episode while its group is still open (dynamic sampling, partial rollouts). It
        must be fast, have no side effects and return the same pair each time. If it raises, the
        verdict is unknown.
        """
