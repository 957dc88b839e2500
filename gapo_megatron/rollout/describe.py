"""From the rollouts of a rank to facts, which every rank gets, and tokens, which stay; and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gapo_megatron.errors import RolloutError
from gapo_megatron.facts import Facts, Tokens
from gapo_megatron.types import Carried, Group, OpenGroup, Outcome, Prompt, Rollout

_OUTCOMES = (Outcome.WRONG, Outcome.CORRECT, Outcome.UNKNOWN)
"""Numbers of `Facts.outcome`."""


def describe(
    groups: Sequence[Group | OpenGroup],
    *,
    problems: Sequence[int] | None = None,
    policy_version: int = 0,
    holder: int = 0,
    judges_truncated: bool = True,
) -> tuple[Facts, list[Tokens]]:
    """Facts and tokens of the rollouts of some groups, group after group.

    Args:
        groups: judged, or open: those have outcome unknown.
        problems: number of each group's problem in the data; None: 0, 1, ...
        policy_version: version of the weights that sampled what is not carried.
        holder: this rank.
        judges_truncated: False: a truncated response is unknown, whatever its verdict
            (`reward.truncated`).

    Raises:
        RolloutError: a judged response is empty, its log-probs or its mask do not match it, or the
            model sampled none of its tokens; names prompt and rollout.
    """
    tokens: list[Tokens] = []
    for group in groups:
        if isinstance(group, Group):
            _check_rollouts(group)
        prompt_ids = np.asarray(group.prompt.token_ids, dtype=np.int32)
        tokens += [_to_tokens(prompt_ids, rollout) for rollout in group.rollouts]
    facts = Facts.of(tokens)
    row = 0
    for number, group in enumerate(groups):
        outcomes = (
            [verdict.outcome for verdict in group.verdicts] if isinstance(group, Group) else []
        )
        for sample, rollout in enumerate(group.rollouts):
            is_judged = bool(outcomes) and (judges_truncated or not rollout.truncated)
            outcome = outcomes[sample] if is_judged else Outcome.UNKNOWN
            facts.problem[row] = number if problems is None else problems[number]
            facts.sample[row] = sample
            facts.oldest_version[row] = (
                rollout.carried.oldest_version if rollout.carried else policy_version
            )
            facts.is_truncated[row] = rollout.truncated
            facts.is_finished[row] = rollout.finished
            facts.outcome[row] = _OUTCOMES.index(outcome)
            row += 1
    facts.holder[:] = holder
    return facts, tokens


def to_open_group(prompt: Prompt, facts: Facts, tokens: Sequence[Tokens]) -> OpenGroup:
    """The open group that `describe` took apart.

    Args:
        prompt: the problem in the data; the tokens that the model sees are those that travelled.
        facts: of the group's k responses.
        tokens: theirs.
    """
    prompt_ids = tuple(tokens[0].prompt_ids.tolist())
    rollouts = tuple(_to_rollout(one, facts, row) for row, one in enumerate(tokens))
    return OpenGroup(Prompt(prompt.id, prompt_ids, prompt.answer, prompt.level), rollouts)


def _to_tokens(prompt_ids: np.ndarray, rollout: Rollout) -> Tokens:
    mask = rollout.response_mask
    return Tokens(
        prompt_ids,
        np.asarray(rollout.token_ids, dtype=np.int32),
        np.asarray(rollout.log_probs, dtype=np.float32),
        np.asarray(rollout.carried.old_log_probs, dtype=np.float32)
        if rollout.carried
        else np.empty(0, dtype=np.float32),
        None if mask is None or mask.all() else mask,
    )


def _to_rollout(tokens: Tokens, facts: Facts, row: int) -> Rollout:
    carried = None
    if facts.num_carried_tokens[row]:
        carried = Carried(int(facts.oldest_version[row]), tokens.carried_log_probs)
    return Rollout(
        tokens.response_ids,
        tokens.rollout_log_probs,
        truncated=bool(facts.is_truncated[row]),
        finished=bool(facts.is_finished[row]),
        carried=carried,
        response_mask=tokens.response_mask,
    )


def _check_rollouts(group: Group) -> None:
    assert len(group.verdicts) == len(group.rollouts), f"prompt {group.prompt.id!r}: verdicts"
    for number, rollout in enumerate(group.rollouts):
        assert rollout.finished, f"prompt {group.prompt.id!r}, rollout {number} is not finished"
        num_tokens, num_log_probs = len(rollout.token_ids), len(rollout.log_probs)
        if num_tokens == 0 or num_tokens != num_log_probs:
            raise RolloutError(
                f"prompt {group.prompt.id!r}, rollout {number}: {num_tokens} response tokens with "
                f"{num_log_probs} log-probs; a response has at least one token (EOS), and each "
                "token its log-prob"
            )
        mask = rollout.response_mask
        if mask is not None and (len(mask) != num_tokens or not mask.any()):
            raise RolloutError(
                f"prompt {group.prompt.id!r}, rollout {number}: {num_tokens} response tokens with "
                f"a response_mask of {len(mask)}, {int(mask.sum())} of them sampled; each token "
                "has its place in the mask, and the model sampled at least one"
            )
