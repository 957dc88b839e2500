"""Values of the page of samples: responses of every run, to be read by step, c and verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from gapo_megatron.types import Outcome, Sample, Span, Timeline

MOST_STEPS = 200
"""Most steps on the page, over all runs; at least two of each run."""
_MOST_CHARACTERS = {"prompt": 6000, "response": 6000, "answer": 300, "reason": 300}
"""Characters of a text on the page; the middle of a longer one is left out."""


_LEAST_WIDTH = 0.4
"""Least width of a part of a bar, in percent of the bar, so that an instant is seen."""


@dataclass(frozen=True)
class Part:
    """A turn or a call, as a part of a horizontal bar."""

    kind: str
    """`turn`, `call` or `failed`."""
    x: float
    """Where it begins, in percent."""
    width: float
    text: str
    """What it is, from when to when, and its tokens."""


@dataclass(frozen=True)
class Bar:
    """The timeline of a sample; those of a step have one scale."""

    parts: list[Part]
    end_s: float

    @property
    def text(self) -> str:
        """All parts in words."""
        return "; ".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Step:
    """Samples of a step, by c, with texts of a length that a page can hold."""

    number: int
    samples: list[Sample]
    bars: Mapping[tuple[str, int], Bar] = field(default_factory=dict)
    """Bars by (problem, number of the sample); empty if no environment answered."""


def page_values(
    runs: Sequence[tuple[str, Sequence[Sample], Sequence[Timeline]]],
) -> dict[str, Any]:
    """Values of the template `samples.html.j2`.

    Args:
        runs: name, samples and their timelines (or none) of each run, in the order of steps.
    """
    most = max(MOST_STEPS // max(len(runs), 1), 2)
    steps = [
        (name, [_with_bars(step, timelines) for step in choose_steps(samples, most)])
        for name, samples, timelines in runs
    ]
    shown = [one for _, found in steps for step in found for one in step.samples]
    num_steps = sum(len({one.step for one in samples}) for _, samples, _ in runs)
    return {
        "runs": steps,
        "verdicts": [str(one) for one in Outcome if any(s.verdict == one for s in shown)],
        "correct_counts": sorted({one.c for one in shown}),
        "has_bars": any(step.bars for _, found in steps for step in found),
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


def _with_bars(step: Step, timelines: Sequence[Timeline]) -> Step:
    """The step with the bars of its timelines, if there are any."""
    spans = {(one.problem, one.sample): one.spans for one in timelines if one.step == step.number}
    end_s = max((part.end_s for parts in spans.values() for part in parts), default=0.0)
    bars = {key: make_bar(parts, whole_s=end_s) for key, parts in spans.items() if parts}
    return replace(step, bars=bars)


def make_bar(spans: Sequence[Span], *, whole_s: float) -> Bar:
    """A bar of the spans; `whole_s` seconds are its whole width."""
    parts, num_turns, num_calls = [], 0, 0
    percent = 100 / (whole_s or 1.0)
    for one in spans:
        num_turns, num_calls = num_turns + (not one.is_call), num_calls + one.is_call
        what = f"call {num_calls}" if one.is_call else f"turn {num_turns}"
        text = (
            f"{what}{', failed' if one.failed else ''}: {one.end_s - one.start_s:.2f} s, from "
            f"{one.start_s:.2f} to {one.end_s:.2f} s, {one.num_tokens} tokens"
        )
        kind = "failed" if one.failed else "call" if one.is_call else "turn"
        width = max(percent * (one.end_s - one.start_s), _LEAST_WIDTH)
        x = min(percent * one.start_s, 100 - width)
        parts.append(Part(kind, round(x, 3), round(width, 3), text))
    return Bar(parts, max(one.end_s for one in spans))


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
