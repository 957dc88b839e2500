"""Judging episodes: what verifiers get of them, as soon as they have ended, and the verdicts."""

from __future__ import annotations

import json
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from gapo_megatron import user_code
from gapo_megatron.errors import printable, said, shown
from gapo_megatron.rewards.pool import Item, Pool
from gapo_megatron.rewards.results import to_verdict
from gapo_megatron.rewards.verifiers import MESSAGES, PROMPT_TOKENS, STATE, TOKENS
from gapo_megatron.types import Episode, Outcome, Prompt, Verdict

MOST_CHARACTERS = 300
"""Longest error message in the reason of a verdict."""


_NOT_TAKEN = (
    'judge: the environment returned a verdict, which only reward.kind = "environment" takes, and '
    "only for rows that name no other verifier"
)


class _AbortedError(Exception):
    pass


Judged: TypeAlias = "tuple[str, str] | tuple[str, str, Mapping[str, Any]] | Verdict | float"
Judge = Callable[[Episode], Judged]
"""What the verifier gets for an episode: (response, answer) or (response, answer, state); or its
verdict, as from `Environment.judge`."""
TurnsOf = Callable[[Episode], list[dict[str, str]]]
"""The turns of an episode as messages."""


class Judging:
    """Judges responses while others are still generated; `score` waits for the verdicts."""

    def __init__(
        self,
        pool: Pool,
        prompts: Sequence[Prompt],
        *,
        judge: Judge,
        turns: TurnsOf | None = None,
        group_size: int = 0,
        compares_truncated: bool = True,
    ) -> None:
        """Start without responses.

        Args:
            pool: workers with the verifier, for the sole use of this object until `score` returns.
            prompts: problems whose responses this rank judges.
            judge: maps an episode to what the verifier gets; called in this process.
            turns: see `ask_judge`.
            group_size: responses per prompt, for verifiers that compare them.
            compares_truncated: whether these get truncated responses; otherwise they are unknown.
        """
        self.pool = pool
        self.numbers: dict[tuple[str, int], int] = {}
        """Item number in the pool, by problem id and index of the response in its group."""
        self.given: dict[tuple[str, int], Verdict] = {}
        """Verdicts of the environment itself, and on episodes that no verifier gets, by the same
        keys."""
        self._ids = {prompt.id for prompt in prompts}
        self._ask = partial(ask_judge, judge, pool=pool, turns=turns)
        self._group_size = group_size
        self._compares_truncated = compares_truncated
        self._ended: dict[str, list[Episode]] = {}
        """Responses that wait for the others of their prompt, by problem id."""

    def add(self, ended: Sequence[Episode]) -> None:
        """Submit finished episodes, and keep the workers busy. Never waits.

        A verifier that compares gets them once all responses to the prompt have ended.

        Args:
            ended: finished episodes, possibly none. Those of other ranks' problems are skipped.

        Raises:
            RewardError: see `Pool.poll`.
        """
        for one in ended:
            if one.prompt.id not in self._ids:
                continue
            if not self.pool.shape(one.prompt.verifier).is_group:
                self._submit([one])
                continue
            assert self._group_size, "a verifier that compares needs the size of its groups"
            group = self._ended.setdefault(one.prompt.id, [])
            group.append(one)
            if len(group) == self._group_size:
                self._submit(sorted(group, key=lambda member: member.sample), compared=True)
        self.pool.poll()

    def _submit(self, episodes: Sequence[Episode], *, compared: bool = False) -> None:
        items: dict[tuple[str, int], Item] = {}
        for one in episodes:
            key = (one.prompt.id, one.sample)
            if compared and one.truncated and not self._compares_truncated:
                self.given[key] = Verdict(Outcome.UNKNOWN, "truncated")
                continue
            asked = self._ask(one)
            if isinstance(asked, Verdict):
                self.given[key] = asked
            else:
                items[key] = asked
        self.numbers |= zip(items, self.pool.submit(items.values()), strict=True)


def ask_judge(
    judge: Judge, episode: Episode, *, pool: Pool, turns: TurnsOf | None = None
) -> Item | Verdict:
    """What the verifier gets for an episode; or the environment's verdict, unknown if it failed.

    It is unknown too if another verifier should judge this row: its own is no substitute.

    Args:
        judge: `Environment.judge`.
        episode: a finished one.
        pool: knows what the verifier takes.
        turns: makes messages of an episode of several turns.
    """
    if episode.failure:
        return Verdict(Outcome.UNKNOWN, printable(episode.failure))
    prompt = episode.prompt
    try:
        with user_code.contained():
            judged = judge(episode.for_user())
            if isinstance(judged, Verdict | numbers.Real):
                if not pool.takes_verdicts(prompt.verifier):
                    return Verdict(Outcome.UNKNOWN, _NOT_TAKEN)
                return to_verdict(judged, correct_above=pool.correct_above)
            response, answer, state = _check_judged(judged)
    except Exception as error:  # whatever a user's environment raises
        return Verdict(Outcome.UNKNOWN, f"judge: {said(error)}"[:MOST_CHARACTERS])
    values: dict[str, Callable[[], Any]] = {
        MESSAGES: lambda: turns(episode) if turns and episode.response_mask is not None else None,
        TOKENS: lambda: episode.token_ids.tolist(),
        PROMPT_TOKENS: lambda: list(prompt.token_ids),
        STATE: lambda: state,
    }
    extras = {name: values[name]() for name in pool.shape(prompt.verifier).extras}
    return Item(response, answer, prompt.verifier, prompt.row, extras, prompt.id)


def _check_judged(judged: Any) -> tuple[str, str, Any]:
    """What `Environment.judge` returned, if it is (response, answer) or with a third, the state."""
    parts = [*judged] if isinstance(judged, tuple | list) else []
    texts, rest = parts[:2], parts[2:]
    if [isinstance(one, str) for one in texts] != [True] * 2 or len(rest) > 1:
        raise TypeError(f"must be two strings, response and answer, not {shown(judged)}")
    if not rest or rest[0] is None:
        return texts[0], texts[1], None
    if not isinstance(rest[0], Mapping):
        raise TypeError(f"the state must be a mapping, not {shown(rest[0])}")
    return texts[0], texts[1], json.loads(json.dumps(dict(rest[0]), allow_nan=False))


def score(
    judging: Judging,
    groups: Sequence[Sequence[Episode]],
    *,
    gather: Callable[[Sequence[tuple[bool, bool]]], list[tuple[bool, bool]]] = list,
    should_abort: Callable[[float], bool] | None = None,
) -> list[tuple[Verdict, ...]] | None:
    """Wait for the verdicts on these episodes; other submitted ones are dropped.

    Args:
        judging: all of these episodes have been added to it.
        groups: finished episodes of problems that this rank judges.
        gather: all-gather over the ranks that judge at the same time, as one list. All ranks return
            together, so none waits long in a later collective.
        should_abort: called every few seconds with the seconds since the start; True aborts.

    Returns:
        One verdict per episode, shaped as `groups`; None on every rank if any rank aborted.

    Collectives: `gather`, equally often on every rank.

    Raises:
        RewardError: see `Pool.poll`.
    """
    start = time.monotonic()

    def may_end(is_done: bool) -> bool:
        wants_out = should_abort is not None and should_abort(time.monotonic() - start)
        answers = gather([(is_done, wants_out)])
        if all(is_done for is_done, _ in answers):
            return True
        if any(wants_out for _, wants_out in answers):
            raise _AbortedError
        return False

    keys = [(one.prompt.id, one.sample) for group in groups for one in group]
    sent = [key for key in keys if key not in judging.given]
    try:
        judged = judging.pool.collect([judging.numbers[key] for key in sent], may_end=may_end)
    except _AbortedError:
        return None
    found = judging.given | dict(zip(sent, judged, strict=True))
    remaining = (found[key] for key in keys)
    return [tuple(next(remaining) for _ in group) for group in groups]
