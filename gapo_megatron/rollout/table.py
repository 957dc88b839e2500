"""Conversion of a rank's episodes to rows of the table and tokens, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from gapo_megatron.errors import RolloutError
from gapo_megatron.objective.answers import hashes_of
from gapo_megatron.rollout.alternatives import of_text, to_text
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Episode, Outcome, Prompt, TurnSettings, Verdict


def to_rollouts(
    groups: Sequence[Sequence[Episode]],
    verdicts: Sequence[Sequence[Verdict]] | None = None,
    *,
    problems: Sequence[int] | None = None,
    policy_version: int = 0,
    holder: int = 0,
    judges_truncated: bool = True,
    graded: bool = False,
) -> Rollouts:
    """Rows and tokens of groups, group by group.

    Args:
        groups: k episodes each, judged or open.
        verdicts: verdict of each episode; None: the groups are open, their outcomes unknown.
        problems: number of each group's problem in the data; None: 0, 1, ...
        policy_version: version of the weights that sampled the tokens that are not carried.
        holder: this rank.
        judges_truncated: False: a truncated response is unknown, regardless of its verdict
            (`reward.truncated`).
        graded: keep the verifiers' numbers as rewards (`reward.graded`).

    Raises:
        RolloutError: a judged response is empty, its log-probs or its mask do not match it, or the
            model sampled none of its tokens and its verdict is known; names prompt and rollout.
    """
    episodes = [one for group in groups for one in group]
    if verdicts is None:
        outcomes = [Outcome.UNKNOWN] * len(episodes)
    else:
        for group, judged in zip(groups, verdicts, strict=True):
            _check_judged(group, judged)
        outcomes = [verdict.outcome for judged in verdicts for verdict in judged]
    no_log_probs, no_versions = np.empty(0, np.float32), np.empty(0, np.int32)
    carried = [
        no_versions if one.carried_versions is None else one.carried_versions for one in episodes
    ]
    rollouts = Rollouts.of(
        [np.asarray(one.prompt.token_ids, dtype=np.int32) for one in episodes],
        [np.asarray(one.token_ids, dtype=np.int32) for one in episodes],
        [np.asarray(one.log_probs, dtype=np.float32) for one in episodes],
        carried_log_probs=[
            no_log_probs if one.carried_log_probs is None else one.carried_log_probs
            for one in episodes
        ],
        carried_versions=carried,
        response_masks=[one.response_mask for one in episodes],
        conversations=[one.conversations for one in episodes],
        routes=[one.routes for one in episodes],
        notes=[_note(one) for one in episodes] if verdicts is None else (),
    )
    if not judges_truncated:
        outcomes = [
            Outcome.UNKNOWN if one.truncated else outcome
            for one, outcome in zip(episodes, outcomes, strict=True)
        ]
    answers = [hashes_of(verdict.answer) for judged in verdicts or () for verdict in judged]
    numbers = range(len(groups)) if problems is None else problems
    pairs = [*zip(numbers, groups, strict=True)]
    return rollouts.changed(
        problem=[number for number, group in pairs for _ in group],
        sample=[one.sample for one in episodes],
        oldest_version=[int(one[0]) if len(one) else policy_version for one in carried],
        newest_version=policy_version,
        is_truncated=[one.truncated for one in episodes],
        is_finished=[one.finished for one in episodes],
        outcome=[outcome.code for outcome in outcomes],
        grade=[
            verdict.grade if graded and verdict.grade is not None else np.inf
            for judged in verdicts or [()] * len(groups)
            for verdict in judged
        ]
        or np.inf,
        answer=[text for text, _ in answers] or 0,
        answer_form=[form for _, form in answers] or 0,
        holder=holder,
    )


def to_episodes(rollouts: Rollouts, prompts: Sequence[Prompt]) -> list[tuple[Episode, ...]]:
    """The open groups from which `to_rollouts` made rows.

    Args:
        rollouts: rows by group, with their tokens on this rank.
        prompts: each group's problem in the data; prompt tokens are taken from `rollouts`.
    """
    k = rollouts.rollouts_per_prompt
    groups = []
    for number, problem in enumerate(prompts):
        first = number * k
        prompt_ids = tuple(rollouts.prompt_ids[first].tolist())
        prompt = replace(problem, token_ids=prompt_ids)
        rows = range(first, first + k)
        groups.append(tuple(_to_episode(rollouts, row, prompt) for row in rows))
    return groups


def _note(episode: Episode) -> bytes:
    """What an environment said and asked of an episode, for the step that resumes it."""
    note: dict[str, Any] = {}
    if episode.failure:
        note["failure"] = episode.failure
    if episode.final_text is not None:
        note["final_text"] = episode.final_text
    if episode.turn != TurnSettings():
        note["turn"] = asdict(episode.turn)
    if episode.alternatives is not None:
        note["alternatives"] = to_text(episode.alternatives)
    return json.dumps(note).encode() if note else b""


def _to_episode(rollouts: Rollouts, row: int, prompt: Prompt) -> Episode:
    facts = rollouts.table[row]
    note = json.loads(rollouts.notes[row].tobytes()) if facts["num_note_bytes"] else {}
    if "turn" in note:
        note["turn"] = TurnSettings.of(note["turn"])
    if "alternatives" in note:
        note["alternatives"] = of_text(note["alternatives"])
    is_carried, is_scored = facts["num_carried_tokens"] > 0, facts["num_scored_tokens"] > 0
    return Episode(
        prompt,
        int(facts["sample"]),
        rollouts.response_ids[row],
        rollouts.rollout_log_probs[row],
        truncated=bool(facts["is_truncated"]),
        finished=bool(facts["is_finished"]),
        response_mask=rollouts.response_masks.get(row),
        conversations=rollouts.conversations.get(row),
        carried_log_probs=rollouts.carried_log_probs[row] if is_scored else None,
        carried_versions=rollouts.carried_versions[row] if is_carried else None,
        routes=rollouts.routes_of(row),
        **note,
    )


def _check_judged(group: Sequence[Episode], verdicts: Sequence[Verdict]) -> None:
    assert len(verdicts) == len(group), f"prompt {group[0].prompt.id!r}: verdicts"
    for one, verdict in zip(group, verdicts, strict=True):
        name = f"prompt {one.prompt.id!r}, rollout {one.sample}"
        assert one.finished, f"{name} is not finished"
        num_tokens, num_log_probs = len(one.token_ids), len(one.log_probs)
        if num_tokens == 0 or num_tokens != num_log_probs:
            raise RolloutError(
                f"{name}: {num_tokens} response tokens with {num_log_probs} log-probs; a response "
                "must have at least one token (EOS), and a log-prob for each token"
            )
        mask = one.response_mask
        needs_sampled = verdict.outcome is not Outcome.UNKNOWN
        if mask is not None and (len(mask) != num_tokens or (needs_sampled and not mask.any())):
            raise RolloutError(
                f"{name}: {num_tokens} response tokens with a response_mask of {len(mask)}, "
                f"{int(mask.sum())} of them sampled; the mask must have a value for each token, "
                "and a sampled token unless the verdict is unknown"
            )
