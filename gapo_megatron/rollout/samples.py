"""Some responses of each step as text, with verdict and reason, for people to read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from gapo_megatron.rollout.selection import informative
from gapo_megatron.rollout.timing import Timing
from gapo_megatron.rollouts import Rollouts
from gapo_megatron.types import Episode, Outcome, Prompt, Sample, Span, Timeline, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_WITHOUT_SIGNAL = 3
"""Fewest samples of a step without any advantage: a warning shows them (`run.signal_watch`)."""

_MOST_ANSWER = 2000
"""Characters of a reference answer that are kept: the tests of a program may have megabytes."""


Number = int | Literal["all"]
"""Responses to keep of a step: `metrics.samples_per_step`."""

_Taken = tuple[Sample, tuple[Span, ...]]


class Samples:
    """Takes a few responses of each step, spread over c and verdicts.

    Only the rank that judged a response knows the reason of its verdict, and it has the tokens. It
    decodes the few that are taken; which ones follows from the table, so that all ranks agree.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, num_per_step: Number) -> None:
        """Set up.

        Args:
            tokenizer: the policy's.
            num_per_step: see `kept_rows`.
        """
        self._tokenizer = tokenizer
        self._num_per_step = num_per_step
        self._verdicts: dict[tuple[str, int], Verdict] = {}
        """Verdicts of this rank in the current step, by problem id and number of the response."""
        self._spans: dict[tuple[str, int], tuple[Span, ...]] = {}
        """Spans by the same keys; empty if no environment answers."""

    def note(
        self,
        groups: Sequence[Sequence[Episode]],
        verdicts: Sequence[Sequence[Verdict]],
        timing: Timing | None = None,
    ) -> None:
        """Remember the verdicts of the groups that this rank has judged in this step.

        Also when their turns and calls took place, if an environment answers.
        """
        for group, judged in zip(groups, verdicts, strict=True):
            keys = [(one.prompt.id, one.sample) for one in group]
            self._verdicts |= zip(keys, judged, strict=True)
            if timing is not None:
                self._spans |= {key: timing.spans(*key) for key in keys}

    def take(
        self,
        rollouts: Rollouts,
        step: int,
        *,
        problems: Sequence[Prompt],
        gather: Callable[[Sequence[_Taken]], list[_Taken]],
    ) -> tuple[list[Sample], list[Timeline]]:
        """Decode the step's samples, and forget its verdicts.

        Args:
            rollouts: the step's batch, with the tokens of this rank.
            step: index of the step.
            problems: problems of the data, by the table's numbers.
            gather: all-gather over the ranks that have the tokens, as one list.

        Returns:
            Samples, ordered by c, and their timelines, if an environment answers; the same on
            every rank.

        Collectives: `gather`, if any samples are taken.
        """
        rows = kept_rows(rollouts, self._num_per_step, step=step)
        here = [
            self._describe(rollouts, row, step, problems[rollouts.table["problem"][row]])
            for row in rows
            if row in rollouts.response_ids
        ]
        taken = [(one, self._spans.get((one.problem, one.sample), ())) for one in here]
        self._verdicts.clear()
        self._spans.clear()
        gathered = gather(taken) if rows else []
        gathered = sorted(gathered, key=lambda pair: (pair[0].c, pair[0].problem, pair[0].sample))
        timelines = [
            Timeline(step, one.problem, one.sample, spans) for one, spans in gathered if spans
        ]
        return [one for one, _ in gathered], timelines

    def _describe(self, rollouts: Rollouts, row: int, step: int, prompt: Prompt) -> Sample:
        facts = rollouts.table[row]
        sample, outcome = int(facts["sample"]), Outcome.of_code(facts["outcome"])
        verdict = self._verdicts[prompt.id, sample]
        # With `reward.truncated` = "unknown" the outcome is not the verifier's.
        left_out = verdict.outcome is not outcome and facts["is_truncated"]
        group = rollouts.rows_of([row // rollouts.rollouts_per_prompt])
        outcomes = [Outcome.of_code(code) for code in rollouts.table["outcome"][group]]
        return Sample(
            step=step,
            problem=prompt.id,
            sample=sample,
            source=prompt.source,
            c=outcomes.count(Outcome.CORRECT),
            k=len(outcomes) - outcomes.count(Outcome.UNKNOWN),
            verdict=str(outcome),
            reason="truncated" if left_out else _plain(verdict.reason),
            grade=verdict.grade,
            num_tokens=int(facts["num_response_tokens"]),
            truncated=bool(facts["is_truncated"]),
            prompt=self._decode(rollouts.prompt_ids[row]),
            response=self._decode(rollouts.response_ids[row]),
            answer=_plain(prompt.answer[:_MOST_ANSWER]),
            metrics=dict(verdict.metrics),
        )

    def _decode(self, token_ids: np.ndarray) -> str:
        return _plain(str(self._tokenizer.decode(token_ids.tolist())))


def kept_rows(rollouts: Rollouts, number: Number, *, step: int) -> list[int]:
    """Rows of the responses to keep of a step: a pure function of the table.

    Args:
        rollouts: the step's batch.
        number: responses to keep; of a step without any advantage at least `NUM_WITHOUT_SIGNAL`.
        step: index of the step.
    """
    if not isinstance(number, int):
        return [*range(len(rollouts))]
    least = 0 if informative(rollouts).any() else NUM_WITHOUT_SIGNAL
    return choose_rows(rollouts, max(number, least), step=step)


def choose_rows(rollouts: Rollouts, number: int, *, step: int) -> list[int]:
    """Choose whole groups, as many as there is room for, and for the rest single responses.

    Both are of as many values of c as possible. Problems of a batch are in random order, so the
    first ones of a kind are as good as any. Of a c, groups with and without unknown verdicts take
    turns, and single responses of different verdicts; those of different problems come first.

    Args:
        rollouts: whole groups; only the table is read.
        number: responses to choose; all if there are fewer.
        step: index of the step: c and kinds are rotated by it, so that a few responses per step
            show all of them over the steps.

    Returns:
        Row numbers, ascending.
    """
    size = max(rollouts.rollouts_per_prompt, 1)
    outcomes = rollouts.table["outcome"].reshape(-1, size)
    num_correct = (outcomes == Outcome.CORRECT.code).sum(axis=1)
    has_unknown = (outcomes == Outcome.UNKNOWN.code).any(axis=1)

    groups = [(int(num_correct[i]), int(has_unknown[i]), i) for i in range(len(outcomes))]
    whole = {*_by_turns(groups, step=step, num_c=size + 1)[: number // size]}
    # Each group's first response, then each one's second, and so on.
    singles = [
        (int(num_correct[group]), int(outcomes[group, sample]), group * size + sample)
        for sample in range(size)
        for group in range(len(outcomes))
        if group not in whole
    ]
    room = number - len(whole) * size
    rows = rollouts.rows_of(sorted(whole)) + _by_turns(singles, step=step, num_c=size + 1)[:room]
    return sorted(rows)


def _by_turns(found: Sequence[tuple[int, int, int]], *, step: int, num_c: int) -> list[int]:
    """Order what has a c, a kind and a number so that every c has its first before any its second.

    At each c the kinds take turns, beginning with another one at the next c and step.
    """
    seen: Counter[tuple[int, int]] = Counter()
    by_c: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for c, kind, number in found:
        by_c[c].append((seen[c, kind], (kind + c + step) % 2, number))
        seen[c, kind] += 1
    turns = [
        (turn, (c + step) % num_c, number)
        for c, of_c in by_c.items()
        for turn, (_, _, number) in enumerate(sorted(of_c))
    ]
    return [number for *_, number in sorted(turns)]


def _plain(text: str) -> str:
    """The text without unpaired surrogates, which UTF-8 and JSON readers refuse."""
    return text.encode("utf-8", "replace").decode("utf-8")


__all__ = ["NUM_WITHOUT_SIGNAL", "Number", "Samples", "choose_rows", "kept_rows"]
