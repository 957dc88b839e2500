"""Values of the page of samples: responses of every run, to be read by step, c and verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from gapo_megatron.types import Outcome, Sample

MOST_STEPS = 200
"""Most steps on the page, over all runs; at least two of each run."""
_MOST_CHARACTERS = {"prompt": 6000, "response": 6000, "answer": 300, "reason": 300}
"""Characters of a text on the page; the middle of a longer one is left out."""


@dataclass(frozen=True)
class Step:
    """Samples of a step, by c, with texts of a length that a page can hold."""

    number: int
    samples: list[Sample]


def page_values(runs: Sequence[tuple[str, Sequence[Sample]]]) -> dict[str, Any]:
    """Values of the template `samples.html.j2`.

    Args:
        runs: name and samples of each run, in the order of steps.
    """
    most = max(MOST_STEPS // max(len(runs), 1), 2)
    steps = [(name, choose_steps(samples, most)) for name, samples in runs]
    shown = [one for _, found in steps for step in found for one in step.samples]
    num_steps = sum(len({one.step for one in samples}) for _, samples in runs)
    return {
        "runs": steps,
        "verdicts": [str(one) for one in Outcome if any(s.verdict == one for s in shown)],
        "correct_counts": sorted({one.c for one in shown}),
        "num_left_out": num_steps - sum(len(found) for _, found in steps),
    }


def choose_steps(samples: Sequence[Sample], most: int) -> list[Step]:
    """At most so many steps of a run: the first, the last, and evenly between."""
    by_step = [(number, [*found]) for number, found in groupby(samples, key=lambda one: one.step)]
    count = min(len(by_step), most)
    places = np.linspace(0, len(by_step) - 1, count).round().astype(int).tolist()
    return [
        Step(number, [_shortened(one) for one in sorted(found, key=lambda one: one.c)])
        for number, found in (by_step[place] for place in places)
    ]


def _shortened(sample: Sample) -> Sample:
    texts: dict[str, Any] = {
        name: _cut(getattr(sample, name), most) for name, most in _MOST_CHARACTERS.items()
    }
    return replace(sample, **texts)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
