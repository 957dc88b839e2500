"""Table and timelines of `benchmarks/tail.py`.

    python benchmarks/tail_report.py tail_light.json tail_heavy.json
    python benchmarks/tail_report.py tail_heavy.json --figure docs/tail.png --only plain partial_3

A lane of the figure is a rank: colour while its engine generates, the deeper the more requests run;
grey while it trains; white while it does nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # from a checkout, installed or not

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.tail_setting import SYNC_S
from gapo_megatron.ops.report.exhibit import DPI
from gapo_megatron.ops.report.style import COLOURS, style

PLACES = 64
"""Requests of an engine of the plain schedule."""
GENERATING, TRAINING, SYNCING = COLOURS[0], "#888888", COLOURS[1]
HEADINGS = (
    *("schedule", "step, s", "generation, s", "training, s", "step / bound", "responses/s"),
    *("tokens/s", "against plain", "mean length", "engines empty", "ranks idle", "oldest weights"),
)
Span = tuple[float, float]


@dataclass(frozen=True)
class Result:
    """One schedule's steps that count."""

    schedule: dict[str, Any]
    lanes: list[dict[str, Any]]
    first_step: int

    @property
    def staleness(self) -> int:
        """Batches that are sampled ahead."""
        return int(self.schedule["max_staleness"])

    @property
    def end(self) -> int:
        """Steps up to here count: during the last ones nothing is left to sample."""
        return len(self.lanes[0]["steps"]) - self.staleness

    @property
    def steps(self) -> list[dict[str, float]]:
        """Of the first rank, which trains."""
        return list(self.lanes[0]["steps"][self.first_step : self.end])

    @property
    def window(self) -> Span:
        """Seconds at the beginning and at the end of the steps that count."""
        ends = [step["end_s"] for step in self.lanes[0]["steps"]]
        return ends[self.first_step - 1], ends[self.end - 1]

    @property
    def step_s(self) -> float:
        """Mean."""
        begin, end = self.window
        return (end - begin) / len(self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Tokens that were learned from."""
        return self.metric("num_tokens") / self.step_s

    def metric(self, name: str) -> float:
        """Mean over the steps; 0 where there is none."""
        return mean([step.get(name, 0.0) for step in self.steps])

    @property
    def generation_s(self) -> list[float]:
        """Of the batches that are sampled in the steps that count, on the slowest engine."""
        spans = self.lanes[-1]["generations"][self.first_step + self.staleness :]
        return [end - begin for begin, end in spans]

    @property
    def training_s(self) -> list[float]:
        """Of the steps that count."""
        spans = self.lanes[0]["training"][self.first_step : self.end]
        return [end - begin for begin, end in spans]

    @property
    def bound_s(self) -> float:
        """What a step cannot undercut, on average.

        In turns both stages and the sync; ahead by k, of every k steps the longer stage, and the
        sync.
        """
        if not self.staleness:
            return mean(self.generation_s) + mean(self.training_s) + SYNC_S
        longer = [
            max(
                sum(self.generation_s[i : i + self.staleness]),
                sum(self.training_s[i:][: self.staleness]),
            )
            for i in range(0, len(self.training_s), self.staleness)
        ]
        return (sum(longer) + SYNC_S * len(longer)) / len(self.training_s)

    @property
    def idle_share(self) -> float:
        """Share of all ranks' time in which nothing runs on them."""
        begin, end = self.window
        busy_s = 0.0
        for lane in self.lanes:
            spans = [*_generating(lane), *map(tuple, lane["training"]), *map(tuple, lane["sync"])]
            busy_s += sum(
                max(0.0, min(span[1], end) - max(span[0], begin)) for span in _joined(spans)
            )
        return 1 - busy_s / (end - begin) / len(self.lanes)


def _generating(lane: dict[str, Any]) -> Iterator[Span]:
    """Spans in which requests run."""
    for (begin, count), (end, _) in itertools.pairwise(lane["running"]):
        if count:
            yield begin, end


def _joined(spans: Sequence[Span]) -> Iterator[Span]:
    """The spans in order, each second once."""
    last = 0.0
    for begin, end in sorted(spans):
        if end > last:
            yield max(begin, last), end
            last = end


def read(path: Path) -> dict[str, Result]:
    """Schedules of a file, by name."""
    found = json.loads(path.read_text())
    first_step = found["setting"]["first_step"]
    return {
        name: Result(one["schedule"], one["lanes"], first_step)
        for name, one in found["schedules"].items()
    }


def rows(results: dict[str, Result]) -> Iterator[list[str]]:
    """Lines of the table; the first schedule is what the others are compared with."""
    plain = next(iter(results.values()))
    for name, one in results.items():
        yield [
            f"`{name}`",
            f"{one.step_s:.0f}",
            f"{mean(one.generation_s):.0f}",
            f"{mean(one.training_s):.0f}",
            f"{one.step_s / one.bound_s:.3f}",
            f"{512 / one.step_s:.2f}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.tokens_per_s / plain.tokens_per_s:.2f}",
            f"{one.metric('num_tokens') / 512:,.0f}",
            f"{100 * one.metric('perf/rollout_idle_share'):.0f} %",
            f"{100 * one.idle_share:.0f} %",
            f"{_oldest(one)}",
        ]


def _oldest(one: Result) -> int:
    """Steps by which the oldest weights that sampled a token are behind."""
    gaps = [step.get("rollout/oldest_version_gap", 0.0) for step in one.steps]
    return round(max(gaps)) or one.schedule["max_staleness"]


def draw(results: dict[str, Result], *, num_steps: int) -> Figure:
    """Timelines below one another, on one scale of seconds."""
    num_lanes = len(next(iter(results.values())).lanes)
    figure = Figure(figsize=(7.0, 0.25 + 1.05 * len(results)))
    axes = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    longest = num_steps * next(iter(results.values())).step_s
    for axis, one in zip(axes, results.values(), strict=True):
        _draw_lanes(axis, one, until=longest)
        title = f"{title_of(one.schedule)}: {one.tokens_per_s:,.0f} tokens/s"
        axis.set_title(f"{title}, {100 * one.idle_share:.0f} % of the ranks' time idle", loc="left")
        axis.set_xlim(0, longest)
        axis.set_ylim(num_lanes - 0.4, -0.6)
        axis.set_yticks([0, num_lanes - 1], ["rank 0", f"{num_lanes - 1}"])
        axis.grid(visible=False)
    axes[-1].set_xlabel("modelled seconds; dashed: a step has been learned")
    shades = [Patch(color=GENERATING, alpha=alpha) for alpha in (1.0, 0.3)]
    figure.legend(
        [*shades, Patch(color=TRAINING), Patch(color=SYNCING)],
        ["64 requests or more", "a few", "training", "weights"],
        loc="outside upper right",
        ncols=4,
    )
    return figure


def title_of(schedule: dict[str, Any]) -> str:
    """In words."""
    if count := schedule["generation_ranks"]:
        title = f"{count} ranks only generate, staleness {schedule['max_staleness']}"
    else:
        title = "Partial rollouts" if schedule["partial_rollouts"] else "In turns"
    ratio = schedule["oversampling"]
    return title if ratio == 1 else f"{title}, over-sampling {ratio:g}"


def _draw_lanes(axis: Axes, one: Result, *, until: float) -> None:
    """The steps that count, from second 0."""
    start = one.window[0]
    for number, lane in enumerate(one.lanes):
        for (begin, count), (end, _) in itertools.pairwise(lane["running"]):
            if count and begin - start < until and end > start:
                _bar(axis, number, (max(begin, start) - start, end - start), GENERATING, count)
        for name, colour in (("training", TRAINING), ("sync", SYNCING)):
            for begin, end in lane[name]:
                if begin - start < until and begin > start:
                    _bar(axis, number, (begin - start, end - start), colour, PLACES)
    for step in one.steps:
        axis.axvline(step["end_s"] - start, color="black", linestyle=(0, (2, 2)), linewidth=0.6)


def _bar(axis: Axes, number: int, span: Span, colour: str, count: int) -> None:
    alpha = 0.15 + 0.85 * min(1.0, count / PLACES)
    begin, end = span
    axis.broken_barh(
        [(begin, end - begin)], (number - 0.4, 0.8), color=colour, alpha=alpha, linewidth=0
    )


def main() -> None:
    """Print the tables, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--figure", type=Path, help="PNG, of the last file")
    parser.add_argument("--only", nargs="*", help="schedules of the figure")
    parser.add_argument("--steps", type=int, default=3, help="plain steps that the figure shows")
    arguments = parser.parse_args()
    for path in arguments.files:
        results = read(path)
        print(path.stem)
        for line in (HEADINGS, ["---"] * len(HEADINGS), *rows(results)):
            print(f"| {' | '.join(line)} |")
    if arguments.figure:
        shown = {name: results[name] for name in arguments.only or results}
        with style():
            draw(shown, num_steps=arguments.steps).savefig(arguments.figure, dpi=DPI // 2)


if __name__ == "__main__":
    main()
