"""Verifiers: from a response to correct, wrong or unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

from gapo_megatron.errors import ConfigError
from gapo_megatron.rewards import exact, math
from gapo_megatron.types import Prompt, Rollout, Verdict

_VERIFIERS = {"exact": exact.verify, "math": math.verify}


def check_kind(kind: Literal["math", "code", "exact"]) -> None:
    """Refuse, before any model is built, a verifier that cannot run.

    Raises:
        ConfigError: `kind` is "code", which needs a sandbox.
    """
    if kind not in _VERIFIERS:
        raise ConfigError(
            f"reward.kind ({kind!r}) needs the sandbox, which this version does not have; "
            f"available: {', '.join(_VERIFIERS)}"
        )


def score(
    kind: Literal["math", "code", "exact"],
    prompts: Sequence[Prompt],
    rollouts: Sequence[Sequence[Rollout]],
    *,
    tokenizer: PreTrainedTokenizerBase,
) -> list[tuple[Verdict, ...]]:
    """Judge every rollout by its text; a response cut off at the token limit has no other rule.

    Args:
        kind: verifier, `reward.kind` of the config.
        prompts: this rank's problems.
        rollouts: their rollouts, in the same order.
        tokenizer: of the policy; special tokens are left out of the text.

    Returns:
        One verdict per rollout, shaped as `rollouts`. Local: no collectives.

    Raises:
        ConfigError: see `check_kind`.
    """
    check_kind(kind)
    verify = _VERIFIERS[kind]

    def judge(prompt: Prompt, rollout: Rollout) -> Verdict:
        response = tokenizer.decode(rollout.token_ids.tolist(), skip_special_tokens=True)
        return verify(response, prompt.answer)

    return [
        tuple(judge(prompt, rollout) for rollout in group)
        for prompt, group in zip(prompts, rollouts, strict=True)
    ]


__all__ = ["check_kind", "score"]
